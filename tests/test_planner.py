"""The planner: each promise of its docstring by name, then all of them at once, bad input, costs and the report."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollbook import Experience, Experiences
from rollbook.batch import plan as planner
from rollbook.batch.plan import Cost, MicroBatch, Plan, PlanError, plan

Request = dict[str, Any]
USUAL = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- what is asked ----------------------------------------------------------------------------------------------

COSTS = st.one_of(
    st.none(),
    st.builds(Cost, linear=st.integers(0, 20), quadratic=st.integers(1, 5), constant=st.integers(0, 9)),
    st.builds(Cost, linear=st.floats(0.1, 3), windows=st.just(((7, 0.3), (2, 1.7)))),
)


@st.composite
def requests(draw: st.DrawFn, **fixed: Any) -> Request:
    """Any request whose arguments make sense, feasible or not."""
    count = draw(st.integers(0, 24))
    sizes = {"min_size": count, "max_size": count}
    lengths = draw(st.lists(st.integers(0, 60), **sizes))
    arguments: Request = {
        "lengths": lengths,
        "ranks": draw(st.integers(1, 5)),
        "micro_batches": draw(st.none() | st.integers(1, 4)),
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "oversize": draw(st.sampled_from(["error", "alone"])),
        "empty": draw(st.sampled_from(["error", "allow"])),
        "cost": draw(COSTS | st.lists(st.floats(0, 50), **sizes)),
        "loss_tokens": draw(st.none() | st.just([length // 2 for length in lengths])),
        "equal_counts": draw(st.booleans()),
    }
    if not arguments["equal_counts"]:
        arguments["token_cap"] = draw(st.none() | st.integers(20, 200))
    if draw(st.booleans()):
        arguments["groups"] = draw(st.lists(st.sampled_from(["a", "b", "c", ("d", 1), 5]), **sizes))
        arguments["keep_groups"] = draw(st.sampled_from(["none", "micro_batch", "rank"]))
    if draw(st.booleans()):
        arguments["modality"] = draw(st.lists(st.sampled_from(["text", "image", "video"]), **sizes))
        arguments["uniform_modality"] = draw(st.booleans())
    if draw(st.booleans()):
        arguments["images"] = draw(st.lists(st.integers(0, 3), **sizes))
        if not arguments["equal_counts"] and draw(st.booleans()):
            arguments["image_cap"] = draw(st.integers(1, 8))
    arguments.update(fixed)
    return arguments


@st.composite
def ties(draw: st.DrawFn) -> Request:
    """Requests in which much is equal: few lengths and costs, so that groups and micro-batches cost the same."""
    count = draw(st.integers(4, 16))
    sizes = {"min_size": count, "max_size": count}
    keep = draw(st.sampled_from(["none", "micro_batch", "rank"]))
    labels = draw(st.lists(st.sampled_from(["text", "image"]), **sizes))
    keys = draw(st.lists(st.integers(0, 5), **sizes))
    uniform = draw(st.booleans())
    if uniform and keep == "micro_batch":
        labels = ["text" if key % 2 else "image" for key in keys]
    return {
        "lengths": draw(st.lists(st.integers(3, 6), **sizes)),
        "ranks": draw(st.integers(1, 3)),
        "micro_batches": draw(st.none() | st.integers(2, 4)),
        "token_cap": draw(st.none() | st.integers(18, 40)),
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "cost": draw(st.none() | st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.6, 0.7]), **sizes)),
        "loss_tokens": draw(st.none() | st.lists(st.integers(0, 3), **sizes)),
        "images": draw(st.lists(st.integers(0, 1), **sizes)),
        "groups": keys,
        "keep_groups": keep,
        "modality": labels,
        "uniform_modality": uniform,
        "oversize": "alone",
        "empty": "allow",
    }


def plan_of(arguments: Request) -> Plan:
    """The plan; what cannot be met is left out (`test_promise_named` looks at it)."""
    try:
        return plan(**arguments)
    except PlanError:
        assume(False)
        raise


def lengths_of(arguments: Request, batch: MicroBatch) -> list[int]:
    return [arguments["lengths"][i] for i in batch.indices]


def costs_of(arguments: Request) -> list[float]:
    cost = arguments["cost"]
    if cost is None:
        return [float(length) for length in arguments["lengths"]]
    return cost(arguments["lengths"]).tolist() if isinstance(cost, Cost) else cost


def contents(arguments: Request, planned: Plan, rows: Sequence[int]) -> list[list[list[Any]]]:
    """[rank][step] All that is known of each sample but its group, sorted; `rows` says which samples the plan's are."""
    columns = [arguments["lengths"], costs_of(arguments)]
    columns += [arguments[name] for name in ("images", "loss_tokens", "modality") if arguments.get(name) is not None]
    rows_of_columns = list(zip(*columns, strict=True))
    return [[sorted(rows_of_columns[rows[i]] for i in batch.indices) for batch in rank] for rank in planned]


def split(layout: Plan) -> list[list[list[int]]]:
    return [[batch.indices.tolist() for batch in rank] for rank in layout]


# --- the promises, one test each --------------------------------------------------------------------------------


def check_once(arguments: Request, planned: Plan) -> None:
    placed = Counter(chain.from_iterable(batch.indices.tolist() for batch in planned.micro_batches))
    assert placed == Counter(range(len(arguments["lengths"])))


def check_whole(arguments: Request, planned: Plan) -> None:
    for batch in planned.micro_batches:
        assert batch.tokens == sum(lengths_of(arguments, batch))
        assert batch.images == (sum(arguments["images"][i] for i in batch.indices) if "images" in arguments else 0)
        assert batch.indices.tolist() == sorted(batch.indices.tolist())
        longest = max(lengths_of(arguments, batch), default=0)
        assert batch.size == (len(batch) * longest if arguments["layout"] == "padded" else batch.tokens)
        costs = [costs_of(arguments)[i] for i in batch.indices]
        padded = arguments["layout"] == "padded"
        assert batch.cost == pytest.approx(len(batch) * max(costs, default=0) if padded else sum(costs))


def check_cap(arguments: Request, planned: Plan) -> None:
    cap, image_cap = arguments.get("token_cap"), arguments.get("image_cap")
    images = arguments.get("images", [0] * len(arguments["lengths"]))
    pairs = list(zip(arguments["lengths"], images, strict=True))
    over = {i for i, (n, m) in enumerate(pairs) if (cap and n > cap) or (image_cap and m > image_cap)}
    assert planned.oversize == tuple(sorted(over))
    assert arguments["oversize"] == "alone" or not over
    for batch in planned.micro_batches:
        lone = len(batch) == 1 and batch.indices[0] in over
        assert batch.oversize == lone
        assert lone or cap is None or batch.size <= cap
        assert lone or image_cap is None or batch.images <= image_cap


def check_steps(arguments: Request, planned: Plan) -> None:
    assert planned.ranks == len(planned) == arguments["ranks"]
    assert {len(rank) for rank in planned} == {planned.steps}
    assert arguments["micro_batches"] in (None, planned.steps)
    assert len(planned.micro_batches) == planned.ranks * planned.steps
    for rank in range(planned.ranks):
        for step in range(planned.steps):
            assert planned[rank][step] is planned.step(step)[rank]
            assert (planned[rank][step].rank, planned[rank][step].step) == (rank, step)


def check_groups(arguments: Request, planned: Plan) -> None:
    keep = arguments.get("keep_groups", "none")
    places = defaultdict(set)
    for batch in planned.micro_batches:
        for i in batch.indices:
            place = batch.rank if keep == "rank" else (batch.rank, batch.step)
            places[arguments["groups"][i] if "groups" in arguments else i].add(place)
    if keep != "none":
        assert all(len(group_places) == 1 for group_places in places.values())
        assert planned.split_groups == 0


def check_modality(arguments: Request, planned: Plan) -> None:
    labels = arguments.get("modality")
    for step in range(planned.steps):
        at_once = planned.step(step)
        if labels is not None and arguments["uniform_modality"]:
            kinds = {labels[i] for batch in at_once for i in batch.indices}
            assert len(kinds) <= 1
            if kinds:  # empty micro-batches say so too
                assert {batch.modality for batch in at_once} == kinds
        for batch in at_once:
            kinds = {labels[i] for i in batch.indices} if labels is not None else set()
            if kinds:
                assert batch.modality == (kinds.pop() if len(kinds) == 1 else None)


def check_empty(arguments: Request, planned: Plan) -> None:
    for batch in planned.micro_batches:
        if not len(batch):
            assert arguments["empty"] == "allow"
            assert (batch.token_weight, batch.sequence_weight, batch.cost) == (0, 0, 0)
            assert (batch.tokens, batch.size, batch.loss_tokens, batch.sequences, batch.images) == (0, 0, 0, 0, 0)


def check_counts(arguments: Request, planned: Plan) -> None:
    if arguments["equal_counts"]:
        for step in range(planned.steps):
            assert len({len(batch) for batch in planned.step(step)}) == 1


def check_balance(arguments: Request, planned: Plan) -> None:
    if (
        arguments.get("token_cap") is not None
        or arguments.get("image_cap") is not None
        or arguments["layout"] == "padded"
    ):
        return
    keep, costs = arguments.get("keep_groups", "none"), costs_of(arguments)

    def costliest(indices: Any, grouped: bool) -> float:
        atoms: defaultdict[Any, float] = defaultdict(float)
        for i in indices:
            atoms[arguments["groups"][i] if grouped else i] += costs[i]
        return max(atoms.values(), default=0.0)

    def at_most_one_above_the_mean(parts: list[float], costliest_atom: float) -> None:
        assert max(parts) <= (sum(parts) / len(parts) + costliest_atom) * (1 + 1e-9)

    # Samples may go to any micro-batch; of their modality, if steps are uniform; on their rank, if groups stay there.
    among: defaultdict[Any, list[MicroBatch]] = defaultdict(list)
    for batch in planned.micro_batches:
        modality = batch.modality if arguments.get("uniform_modality") else None
        among[modality, batch.rank if keep == "rank" else None].append(batch)
    for batches in among.values():
        indices = [i for batch in batches for i in batch.indices.tolist()]
        at_most_one_above_the_mean([batch.cost for batch in batches], costliest(indices, keep == "micro_batch"))
    if keep == "rank":
        costliest_atom = costliest(range(len(costs)), True)
        at_most_one_above_the_mean([sum(batch.cost for batch in rank) for rank in planned], costliest_atom)


def check_loss(arguments: Request, planned: Plan) -> None:
    counted = arguments["loss_tokens"] if arguments["loss_tokens"] is not None else arguments["lengths"]
    rng = np.random.default_rng(len(counted))
    losses = [rng.normal(size=n) for n in counted]
    sequences = [values.mean() for values in losses if len(values)]
    assert planned.denominators.tokens == sum(counted)
    assert planned.denominators.sequences == len(sequences)
    assert planned.denominators.samples == len(counted)
    if not sequences:
        assert {(batch.token_weight, batch.sequence_weight) for batch in planned.micro_batches} == {(0, 0)}
        return
    by_token, by_sequence, by_sum = [], [], []
    for rank in planned:
        token = sequence = total = 0.0
        for batch in rank:
            trained_losses = [losses[i] for i in batch.indices if counted[i]]
            assert (batch.loss_tokens, batch.sequences) == (sum(map(len, trained_losses)), len(trained_losses))
            if trained_losses:
                token += batch.token_weight * np.concatenate(trained_losses).mean()
                sequence += batch.sequence_weight * np.mean([values.mean() for values in trained_losses])
                total += np.concatenate(trained_losses).sum() / planned.denominators.tokens
        # What a rank computes under DDP, which takes the mean over ranks.
        by_token.append(token * planned.ranks)
        by_sequence.append(sequence * planned.ranks)
        by_sum.append(total * planned.ranks)
    assert np.mean(by_token) == pytest.approx(np.concatenate(losses).mean(), abs=1e-12)
    assert np.mean(by_sum) == pytest.approx(np.concatenate(losses).mean(), abs=1e-12)
    assert np.mean(by_sequence) == pytest.approx(np.mean(sequences), abs=1e-12)


def check_order(arguments: Request, planned: Plan) -> None:
    x = np.array(arguments["lengths"])
    assert x[planned.order][planned.inverse].tolist() == x.tolist()
    joined = [i for rank in planned for batch in rank for i in batch.indices.tolist()]
    assert planned.order.tolist() == joined
    assert not planned.order.flags.writeable and not planned.inverse.flags.writeable
    assert not any(batch.indices.flags.writeable for batch in planned.micro_batches)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@USUAL
@given(requests())
def test_promise_once(arguments: Request) -> None:
    check_once(arguments, plan_of(arguments))


@USUAL
@given(requests())
def test_promise_whole(arguments: Request) -> None:
    check_whole(arguments, plan_of(arguments))


@USUAL
@given(requests(equal_counts=False, micro_batches=None))
def test_promise_cap(arguments: Request) -> None:
    check_cap(arguments, plan_of(arguments))


@USUAL
@given(requests())
def test_promise_steps(arguments: Request) -> None:
    check_steps(arguments, plan_of(arguments))


@USUAL
@given(requests(empty="allow", micro_batches=None), st.sampled_from(["micro_batch", "rank"]), st.data())
def test_promise_groups(arguments: Request, keep: str, data: st.DataObject) -> None:
    keys = st.lists(st.sampled_from("abcdefg"), min_size=len(arguments["lengths"]), max_size=len(arguments["lengths"]))
    arguments |= {"groups": data.draw(keys), "keep_groups": keep}
    check_groups(arguments, plan_of(arguments))


@USUAL
@given(requests(empty="allow", uniform_modality=True, equal_counts=False, micro_batches=None), st.data())
def test_promise_modality(arguments: Request, data: st.DataObject) -> None:
    labels = st.lists(
        st.sampled_from(["text", "image"]), min_size=len(arguments["lengths"]), max_size=len(arguments["lengths"])
    )
    arguments["modality"] = data.draw(labels)
    check_modality(arguments, plan_of(arguments))


@USUAL
@given(requests(equal_counts=False))
def test_promise_empty(arguments: Request) -> None:
    check_empty(arguments, plan_of(arguments))


@USUAL
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["packed", "padded"]), st.data())
def test_promise_counts(ranks: int, steps: int, batch_size: int, layout: str, data: st.DataObject) -> None:
    total = ranks * steps * batch_size
    arguments = {
        "lengths": data.draw(st.lists(st.integers(0, 99), min_size=total, max_size=total)),
        "ranks": ranks,
        "micro_batches": steps,
        "layout": layout,
        "equal_counts": True,
        "empty": "error",
    }
    planned = plan(**arguments)
    check_counts(arguments, planned)
    assert {len(batch) for batch in planned.micro_batches} == {batch_size}


@USUAL
@given(requests(layout="packed", token_cap=None, image_cap=None))
def test_promise_balance(arguments: Request) -> None:
    check_balance(arguments, plan_of(arguments))


@USUAL
@given(requests())
def test_promise_loss(arguments: Request) -> None:
    check_loss(arguments, plan_of(arguments))


@USUAL
@given(requests())
def test_promise_order(arguments: Request) -> None:
    check_order(arguments, plan_of(arguments))


@USUAL
@given(requests() | ties(), st.randoms(use_true_random=False))
def test_promise_same(arguments: Request, shuffler: Any) -> None:
    planned = plan_of(arguments)
    assert split(planned) == split(plan(**copy.deepcopy(arguments)))
    order = list(range(len(arguments["lengths"])))
    shuffler.shuffle(order)
    columns = [name for name, value in arguments.items() if isinstance(value, list)]
    other = plan(**(arguments | {name: [arguments[name][i] for i in order] for name in columns}))
    assert contents(arguments, other, order) == contents(arguments, planned, range(len(order)))
    assert (other.steps, other.needed, other.lower_bound) == (planned.steps, planned.needed, planned.lower_bound)


@pytest.mark.parametrize(
    ("arguments", "constraint", "sample", "message"),
    [
        ({"lengths": [3, 9], "token_cap": 8}, "token_cap", 1, "sample 1 takes 9 tokens, over the cap of 8"),
        (
            {"lengths": [1, 1], "images": [0, 5], "image_cap": 4},
            "image_cap",
            1,
            "sample 1 takes 5 images, over the cap of 4",
        ),
        (
            {"lengths": [1, 5, 4], "token_cap": 8, "groups": ["x", "y", "y"], "keep_groups": "micro_batch"},
            "token_cap",
            1,
            "group 'y' (samples 1, 2) takes 9 tokens, over the cap of 8; keep_groups='micro_batch' does not let",
        ),
        (  # one sample of the group is over the cap; it could go alone, the group cannot
            {"lengths": [9, 1], "token_cap": 8, "groups": "gg", "keep_groups": "micro_batch", "oversize": "alone"},
            "token_cap",
            0,
            "group 'g' (samples 0, 1) takes 10 tokens, over the cap of 8",
        ),
        (
            {"lengths": [1, 5], "token_cap": 8, "groups": "gg", "keep_groups": "micro_batch", "layout": "padded"},
            "token_cap",
            0,
            "group 'g' (samples 0, 1) takes 10 tokens, over the cap of 8",
        ),
        (
            {"lengths": [4, 5], "ranks": 3},
            "ranks",
            0,
            "2 samples (sample 0, sample 1) cannot fill 3 micro-batches (1 on each of 3 ranks)",
        ),
        (
            {"lengths": [5, 6, 7], "ranks": 2, "token_cap": 7},
            "token_cap",
            0,
            "3 samples (sample 0, sample 1, sample 2) cannot fill 4 micro-batches (2 on each of 2 ranks)",
        ),
        (
            {"lengths": [4, 5, 6], "ranks": 2, "micro_batches": 2},
            "micro_batches",
            0,
            "3 samples (sample 0, sample 1, sample 2) cannot fill 4 micro-batches",
        ),
        (
            {"lengths": [4, 5, 6], "groups": "aab", "keep_groups": "rank", "ranks": 3},
            "ranks",
            0,
            "2 groups (the first is 'a', of sample 0), each on one rank, leave some of 3 ranks with nothing",
        ),
        (
            {"lengths": [4, 5, 6], "groups": "aab", "keep_groups": "rank", "ranks": 2, "token_cap": 6},
            "token_cap",
            2,
            "1 samples on rank 1 (sample 2) cannot fill 2 micro-batches (2 on each of 1 ranks)",
        ),
        (
            {"lengths": [4, 5, 6], "groups": "aab", "keep_groups": "micro_batch", "ranks": 3},
            "ranks",
            0,
            "2 groups (group 'a' (samples 0, 1), group 'b' (samples 2)) cannot fill 3 micro-batches",
        ),
        (
            {"lengths": [4, 5, 6], "modality": ["text", "text", "image"], "uniform_modality": True, "ranks": 2},
            "ranks",
            2,
            "1 samples of modality 'image' (sample 2) cannot fill 2 micro-batches",
        ),
        (
            {
                "lengths": [4, 5],
                "modality": ["text", "image"],
                "uniform_modality": True,
                "groups": "gg",
                "keep_groups": "micro_batch",
            },
            "uniform_modality",
            0,
            "sample 0 is 'text', but group 'g' (samples 0, 1) also has 'image'",
        ),
        (
            {"lengths": [4, 5, 6, 7], "token_cap": 11, "micro_batches": 1},
            "micro_batches",
            None,
            "got 1 on each of 1 ranks, 1 in all, but with token_cap=11 4 samples with 22 tokens were packed into no "
            "fewer than 2 (at least 2), which takes 2 on each",
        ),
        ({"lengths": [1, 2, 3], "ranks": 2, "equal_counts": True}, "equal_counts", 0, "3 samples are no multiple of 2"),
        (
            {"lengths": [1, 2, 3], "groups": "aab", "keep_groups": "micro_batch", "ranks": 2, "equal_counts": True},
            "equal_counts",
            2,
            "group 'b' (samples 2) has 1 samples, group 'a' (samples 0, 1) 2",
        ),
        (
            {"lengths": [1, 2, 3], "groups": "aab", "keep_groups": "rank", "ranks": 2, "equal_counts": True},
            "equal_counts",
            2,
            "group 'b' (sample 2) has 1 samples and group 'a' 2",
        ),
        (
            {"lengths": [1, 2, 3], "groups": "abc", "keep_groups": "rank", "ranks": 2, "equal_counts": True},
            "equal_counts",
            0,
            "3 groups are no multiple of 2 ranks",
        ),
        (
            {
                "lengths": [5, 5, 4, 4],
                "groups": "aabb",
                "keep_groups": "rank",
                "ranks": 2,
                "equal_counts": True,
                "modality": ["image", "image", "image", "text"],
                "uniform_modality": True,
            },
            "equal_counts",
            2,
            "1 samples of modality 'image' on rank 1, but 2 on rank 0",
        ),
        ({"lengths": []}, "lengths", None, "there are no samples"),
    ],
)
def test_promise_named(arguments: Request, constraint: str, sample: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        plan(**arguments)
    error = caught.value
    assert (error.constraint, error.sample) == (constraint, sample)
    assert str(error).startswith(f"{constraint}: ")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.constraint, again.sample) == (str(error), constraint, sample)


def test_promise_pure() -> None:
    script = """
import sys
import numpy as np
from rollbook.batch.plan import Cost, plan
lengths = np.arange(1, 40)
groups = list("abc") * 13
lengths.flags.writeable = False
made = plan(lengths, token_cap=200, ranks=2, groups=groups, keep_groups="rank", cost=Cost(1, 1))
made.report()
assert groups == list("abc") * 13
heavy = ("torch", "transformers", "pyarrow", "pandas", "rollbook.core.experience")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_promise_has_one_test() -> None:
    promises = re.findall(r"^- (\w+): ", planner.__doc__ or "", flags=re.MULTILINE)
    tests = [name.removeprefix("test_promise_") for name in globals() if name.startswith("test_promise_")]
    assert promises == tests
    assert len(promises) == 14


# --- all at once ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_all_promises_at_once(arguments: Request) -> None:
    before = copy.deepcopy(arguments)
    planned = plan_of(arguments)
    for check in CHECKS.values():
        check(arguments, planned)
    assert arguments == before
    assert str(planned.report()) and repr(planned)


@given(requests(empty="allow", oversize="alone", micro_batches=None, equal_counts=False))
def test_what_can_be_met_is_met(arguments: Request) -> None:
    # With nothing that could stand in the way, there is always a plan.
    if arguments.get("keep_groups") == "micro_batch":
        arguments["keep_groups"] = "rank"
    planned = plan(**arguments)
    for check in CHECKS.values():
        check(arguments, planned)


@given(requests())
def test_what_an_error_suggests_helps(arguments: Request) -> None:
    try:
        plan(**arguments)
        return
    except PlanError as error:
        hints = dict(re.findall(r"(empty|oversize)='(allow|alone)'", error.message))
    try:
        planned = plan(**(arguments | hints))
    except PlanError as error:
        assert not hints.items() & dict(re.findall(r"(empty|oversize)='(allow|alone)'", error.message)).items()
    else:
        for check in CHECKS.values():
            check(arguments | hints, planned)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from(["packed", "padded"]), st.booleans())
def test_all_promises_of_larger_plans(seed: int, ranks: int, layout: str, grouped: bool) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(100, 600))
    lengths = np.clip(rng.lognormal(6, 1, size=count).astype(np.int64), 1, 4000)
    arguments: Request = {
        "lengths": lengths.tolist(),
        "token_cap": 70_000 if grouped else 8192,
        "ranks": ranks,
        "micro_batches": None,
        "layout": layout,
        "oversize": "error",
        "empty": "allow",
        "cost": Cost(linear=100, quadratic=0.5),
        "loss_tokens": None,
        "equal_counts": False,
        "modality": ["image" if image else "text" for image in rng.random(count) < 0.3],
        "uniform_modality": not grouped,
        "images": rng.integers(0, 3, size=count).tolist(),
        "image_cap": 200,
    }
    if grouped:
        arguments |= {"groups": (np.arange(count) // 8).tolist(), "keep_groups": "micro_batch"}
    planned = plan(**arguments)
    for check in CHECKS.values():
        check(arguments, planned)


# --- how good the plans are -------------------------------------------------------------------------------------


def workload(count: int, seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    responses = np.clip(np.rint(rng.lognormal(np.log(800), 1.02, size=count)), 1, 8192)
    return rng.integers(64, 1024, size=count, endpoint=True) + responses.astype(np.int64)


@pytest.mark.parametrize("seed", range(8))
def test_capped_plans_are_as_small_as_can_be(seed: int) -> None:
    planned = plan(workload(1024, seed), token_cap=16_384)
    assert planned.needed is not None and planned.lower_bound is not None
    assert planned.needed <= planned.lower_bound * 1.005


def fewest_by_trying(lengths: list[int], cap: int, padded: bool) -> int:
    """The smallest number of micro-batches there is, by looking at every way to put a few samples together."""
    best = len(lengths)

    def place(at: int, bins: list[list[int]]) -> None:
        nonlocal best
        if len(bins) >= best and at < len(lengths):
            return
        if at == len(lengths):
            best = min(best, len(bins))
            return
        for members in [*bins, []]:
            members.append(lengths[at])
            if (len(members) * max(members) if padded else sum(members)) <= cap:
                place(at + 1, bins if len(members) > 1 else [*bins, members])
            members.pop()

    place(0, [])
    return best


@USUAL
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(30, 60), st.booleans())
def test_needed_and_lower_bound_enclose_the_best(lengths: list[int], cap: int, padded: bool) -> None:
    planned = plan(lengths, token_cap=cap, layout="padded" if padded else "packed")
    best = fewest_by_trying(lengths, cap, padded)
    assert planned.needed is not None and planned.lower_bound is not None
    assert planned.lower_bound <= best <= planned.needed <= best + (0 if padded else 1)
    if padded:
        assert planned.lower_bound == best


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_equal_counts_are_level(ranks: int) -> None:
    lengths = workload(4096, 1)
    for cost in (None, Cost(linear=24_576, quadratic=1)):
        report = plan(lengths, ranks=ranks, equal_counts=True, cost=cost).report()
        assert set(report.rank_samples) == {4096 // ranks}
        assert report.rank_imbalance <= 1.001


def test_ranks_are_level_under_a_cap() -> None:
    report = plan(workload(1024, 3), token_cap=16_384, ranks=8, cost=Cost(linear=24_576, quadratic=1)).report()
    assert report.rank_imbalance < 1.01
    assert report.waiting < 0.03
    assert report.filled is not None and report.filled > 0.9


def test_padding_is_small_where_lengths_are_sorted() -> None:
    report = plan(workload(1024, 3), token_cap=16_384, ranks=4, layout="padded").report()
    assert 0 < report.padding < 0.03
    assert report.needed == report.lower_bound


def test_groups_need_not_be_contiguous() -> None:
    planned = plan([5, 6, 5, 6, 5, 6], token_cap=18, groups=[1, 2, 1, 2, 1, 2], keep_groups="micro_batch")
    assert sorted(batch.indices.tolist() for batch in planned.micro_batches) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("lengths", "groups", "keep"), [([3, 3, 2, 4, 5, 1], "aabbcc", "micro_batch"), ([3, 3, 2, 4, 6], "aabbc", "rank")]
)
def test_groups_of_equal_size_are_told_apart_by_what_is_in_them(lengths: list[int], groups: str, keep: Any) -> None:
    arguments = {"lengths": lengths, "groups": list(groups), "keep_groups": keep, "ranks": 2, "cost": None}
    expected = contents(arguments, plan(**arguments), range(len(lengths)))
    for order in permutations(range(len(lengths))):
        reordered = {name: [arguments[name][i] for i in order] for name in ("lengths", "groups")}
        assert contents(arguments, plan(**(arguments | reordered)), order) == expected


def test_samples_of_equal_length_are_told_apart_by_cost() -> None:
    # Best fit takes 10 micro-batches; the pairs that fill better take 9, and they too must tell equal lengths apart.
    lengths = [31, 20, 44, 16, 24, 48, 22, 22, 48, 46, 16, 31, 16, 20, 39, 49, 46, 20, 44, 31, 31, 37, 46, 39, 49, 48]
    cost = [6, 2, 5, 4, 5, 1, 6, 3, 5, 4, 5, 1, 3, 6, 7, 4, 1, 6, 5, 6, 2, 4, 8, 7, 3, 6]
    arguments = {"lengths": lengths, "cost": cost, "token_cap": 100}
    planned = plan(**arguments)
    assert planned.needed == planned.lower_bound == 9
    rng = np.random.default_rng(0)
    for order in (rng.permutation(len(lengths)).tolist() for _ in range(20)):
        reordered = {name: [arguments[name][i] for i in order] for name in ("lengths", "cost")}
        assert contents(arguments, plan(**(arguments | reordered)), order) == contents(
            arguments, planned, range(len(lengths))
        )


def test_balance_is_within_a_modality() -> None:
    planned = plan([10] * 100 + [1], modality=["a"] * 100 + ["b"], uniform_modality=True)
    assert [batch.cost for batch in planned.micro_batches] == [1000, 1]  # one step each: nothing could be moved


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cap", [2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30])
def test_caps_may_be_huge(cap: int, ranks: int, layout: Any) -> None:
    arguments = {"lengths": [3, 4, 5, 6, 9], "images": [1, 0, 2, 0, 1], "ranks": ranks, "layout": layout}
    large = plan(**arguments, micro_batches=2, token_cap=1000, image_cap=1000)
    for caps in ({"token_cap": cap}, {"image_cap": cap}, {"token_cap": cap, "image_cap": cap}):
        planned = plan(**arguments, micro_batches=2, **caps)
        assert split(planned) == split(large)
        assert (planned.token_cap, planned.image_cap) == (caps.get("token_cap"), caps.get("image_cap"))
        assert (planned.needed, planned.lower_bound, planned.oversize) == (1, 1, ())
        assert "5 samples" in str(planned.report())
    with pytest.raises(PlanError, match=f"token_cap={cap} and image_cap=2 "):
        plan(**(arguments | {"ranks": 1}), micro_batches=1, token_cap=cap, image_cap=2)
    assert split(plan([0, 0], token_cap=cap, images=[0, 0], image_cap=cap, layout=layout)) == [[[0, 1]]]
    assert split(plan([], token_cap=cap, layout=layout, empty="allow")) == [[[]]]


def test_two_caps_are_packed_by_the_one_that_binds() -> None:
    # Longest first, the two with images come last and do not fit beside each other.
    planned = plan([2, 3, 6, 4], token_cap=10, images=[2, 3, 0, 0], image_cap=4, micro_batches=2)
    assert sorted(sorted(batch.indices.tolist()) for batch in planned.micro_batches) == [[0, 3], [1, 2]]


def test_a_cap_on_images_takes_no_longer_than_one_on_tokens() -> None:
    # Bins without room for images were looked at again for each sample: a hundred times as long.
    counts = np.ones(30_000, dtype=np.int64)
    counts[::3] = 0
    times = []
    for arguments in ({"lengths": counts, "token_cap": 2}, {"lengths": counts * 0, "images": counts, "image_cap": 2}):
        start = time.perf_counter()
        planned = plan(arguments.pop("lengths"), ranks=8, **arguments)
        times.append(time.perf_counter() - start)
        assert planned.needed == planned.lower_bound == 10_000
    assert times[1] < 20 * times[0]


def test_far_too_many_micro_batches_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match="2 samples .* cannot fill 4194304 micro-batches"):
        plan([3, 4], micro_batches=2**22)


def test_steps_left_over_go_to_the_costlier_modality() -> None:
    planned = plan(
        [10, 10, 10, 10, 1, 1], modality=["a"] * 4 + ["b"] * 2, uniform_modality=True, micro_batches=3, ranks=2
    )
    assert [planned.step(k)[0].modality for k in range(3)] == ["a", "a", "b"]


@pytest.mark.parametrize("cost", [5e-324, 1e-310, 1e199])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_costs_at_the_ends_of_the_range(cost: float, layout: Any) -> None:
    planned = plan([3] * 6, ranks=2, cost=[cost] * 6, layout=layout, token_cap=9)
    assert [len(batch) for batch in planned.micro_batches] == [3, 3]
    assert planned.report().rank_imbalance == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("token_cap", [None, 9])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_samples_that_cost_nothing_are_placed_like_others(token_cap: int | None, layout: Any) -> None:
    planned = plan([0] * 6, ranks=3, token_cap=token_cap, layout=layout)
    assert all(len(batch) for batch in planned.micro_batches)
    assert [len(batch) for batch in plan([0, 7, 0], ranks=3, layout=layout).micro_batches] == [1, 1, 1]


def test_micro_batches_fall_in_cost() -> None:
    planned = plan(workload(256, 5), token_cap=16_384, ranks=4, cost=Cost(1, 1))
    for rank in planned:
        costs = [batch.cost for batch in rank]
        assert costs == sorted(costs, reverse=True)


# --- what can be given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 8, 3],
        (5, 8, 3),
        np.array([5, 8, 3], dtype=np.uint16),
        torch.tensor([5, 8, 3], dtype=torch.int32),
        range(5, 8),
        [np.int64(5), np.int32(8), 3],
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_lengths(lengths: Any) -> None:
    planned = plan(lengths, token_cap=8)
    assert planned.denominators.tokens == sum(int(length) for length in lengths)


@pytest.mark.parametrize(
    "keys",
    [
        torch.tensor([0, 1, 0, 1]),
        np.array([0, 1, 0, 1], dtype=np.int8),
        [torch.tensor(0), torch.tensor(1), torch.tensor(0), torch.tensor(1)],
        [np.int64(0), np.float32(1), 0, np.array(1)],
        [("a", torch.tensor(0)), ("a", torch.tensor(1)), ("a", 0), ("a", np.int32(1))],
        [("a", None), ("b", None), ("a", None), ("b", None)],
        [np.str_("x"), "y", "x", np.str_("y")],
        np.str_("xyxy"),
        np.array(["x", "y", "x", "y"]),
        np.array([(0,), "y", (0,), "y"], dtype=object),
    ],
    ids=str,
)
def test_kinds_of_keys(keys: Any) -> None:
    planned = plan([3, 4, 3, 4], token_cap=8, groups=keys, keep_groups="micro_batch")
    assert planned.groups == 2
    assert split(planned) == [[[1, 3], [0, 2]]]
    planned = plan([3, 4, 3, 4], modality=keys, uniform_modality=True)
    assert [len(batch) for batch in planned.micro_batches] == [2, 2]
    for label in planned.modalities:
        assert type(label) in (int, float, str, tuple)


def test_experiences_are_lengths_and_their_masks_are_loss_tokens() -> None:
    experiences = Experiences(
        [
            Experience(tokens=[1, 2, 3, 4, 5], prompt_length=2),
            Experience(tokens=[1, 2, 3, 4], prompt_length=1, action_mask=[1, 0, 1]),
            Experience(tokens=[1, 2], prompt_length=1, action_mask=[0]),
        ]
    )
    planned = plan(experiences, token_cap=6, groups=[eid.tid for eid in experiences.eids()], keep_groups="rank")
    assert sorted(batch.tokens for batch in planned.micro_batches) == [5, 6]
    assert (planned.denominators.tokens, planned.denominators.sequences, planned.denominators.samples) == (5, 2, 3)
    assert plan(experiences, loss_tokens=[1, 1, 1]).denominators.tokens == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": [3, -1]}, "lengths[1]: got -1, expected an integer in [0, 2**40)"),
        ({"lengths": [3, 1.5]}, "lengths[1]: got 1.5, expected an integer"),
        ({"lengths": np.array([3.0, 4.0])}, "lengths[0]: got"),
        ({"lengths": [3, True]}, "lengths[1]: got True"),
        ({"lengths": [3, None]}, "lengths[1]: got None"),
        ({"lengths": [3, 2**70]}, f"lengths[1]: got {2**70}"),
        ({"lengths": np.ones((2, 2), dtype=int)}, "lengths: got shape [2, 2], expected one dimension"),
        ({"lengths": torch.ones((2, 2), dtype=torch.int64)}, "lengths: got shape [2, 2], expected one dimension"),
        ({"lengths": torch.tensor(3)}, "lengths: got shape [], expected one dimension"),
        ({"lengths": np.array(3)}, "lengths: got shape [], expected one dimension"),
        ({"lengths": np.int64(3)}, "lengths: got int64, expected a value for each sample"),
        ({"lengths": "34"}, "lengths[0]: got '3', expected an integer"),
        ({"lengths": 7}, "lengths: got int, expected a value for each sample"),
        ({"lengths": {"a": 1}}, "lengths: got dict"),
        ({"token_cap": 0}, "token_cap: got 0, expected an integer >= 1"),
        ({"token_cap": 8.0}, "token_cap: got 8.0"),
        ({"ranks": 0}, "ranks: got 0"),
        ({"ranks": True}, "ranks: got True"),
        ({"ranks": 2**63}, f"ranks: got {2**63}, expected an integer from 1 to {2**22:,}"),
        ({"micro_batches": -1}, "micro_batches: got -1"),
        (
            {"micro_batches": 2**63, "empty": "allow"},
            f"micro_batches: got {2**63}, expected an",
        ),
        (
            {"micro_batches": 2**21 + 1, "ranks": 2},
            f"micro_batches: got {2**21 + 1}, expected an",
        ),
        ({"images": [1, 1], "image_cap": 0}, "image_cap: got 0"),
        ({"images": [1]}, "images: got 1 values, expected 2, one for each sample"),
        ({"images": [1, -2]}, "images[1]: got -2"),
        ({"image_cap": 3}, "images: got None with image_cap=3"),
        ({"groups": ["a"]}, "groups: got 1 values, expected 2"),
        ({"groups": ["a", None]}, "groups[1]: got None, expected a key"),
        ({"groups": ["a", ["b"]]}, "groups[1]: got ['b'], expected a key"),
        ({"groups": torch.tensor(0)}, "groups: got shape [], expected one dimension"),
        ({"groups": torch.zeros((2, 2))}, "groups: got shape [2, 2], expected one dimension"),
        ({"groups": [torch.tensor([0]), torch.tensor([0])]}, "groups[0]: got tensor([0]), expected a key"),
        ({"groups": [("a", 0), ("a", torch.tensor([0]))]}, "groups[1]: got ('a', tensor([0])), expected a key"),
        ({"groups": [0.5, float("nan")]}, "groups[1]: got nan, expected a key"),
        ({"groups": np.array([np.nan, 0.5])}, "groups[0]: got nan, expected a key"),
        ({"keep_groups": "rank"}, "groups: got None with keep_groups='rank'"),
        ({"keep_groups": "bin"}, "keep_groups: got 'bin', expected one of 'none', 'micro_batch', 'rank'"),
        ({"modality": [torch.ones(2), "text"]}, "modality[0]: got tensor([1., 1.]), expected a key"),
        ({"modality": ["text"]}, "modality: got 1 values, expected 2"),
        ({"uniform_modality": True}, "modality: got None with uniform_modality=True"),
        ({"uniform_modality": "yes"}, "uniform_modality: got 'yes', expected True or False"),
        ({"layout": "ragged"}, "layout: got 'ragged', expected one of 'packed', 'padded'"),
        ({"oversize": "drop"}, "oversize: got 'drop', expected one of 'error', 'alone'"),
        ({"empty": None}, "empty: got None, expected one of 'error', 'allow'"),
        ({"equal_counts": 1}, "equal_counts: got 1, expected True or False"),
        ({"equal_counts": True, "token_cap": 9}, "equal_counts: got True with token_cap or image_cap"),
        ({"loss_tokens": [1, 2, 3]}, "loss_tokens: got 3 values, expected 2"),
        ({"loss_tokens": [3, 5]}, "loss_tokens[1]: got 5, expected at most 4, the sample's length"),
        ({"cost": [1.0]}, "cost: got 1 values, expected 2"),
        ({"cost": [1.0, float("nan")]}, "cost[1]: got nan, expected a number in [0, 1e200)"),
        ({"cost": [1.0, -1.0]}, "cost[1]: got -1.0"),
        ({"cost": [1.0, 1e300]}, "cost[1]: got 1e+300"),
        ({"cost": ["a", "b"]}, "cost: got ['a', 'b'], expected a Cost or a number for each sample"),
        ({"cost": 3}, "cost: got int"),
    ],
)
def test_bad_input(changed: Request, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        plan(**({"lengths": [3, 4]} | changed))
    assert not isinstance(caught.value, PlanError)


def test_places_that_are_not_there() -> None:
    planned = plan([1, 2, 3, 4], ranks=2, micro_batches=2)
    assert planned[-1] == planned[1] and planned.step(-1) == planned.step(1)
    for look in (lambda: planned[2], lambda: planned[-3], lambda: planned.step(2), lambda: planned.step(-3)):
        with pytest.raises(IndexError, match="the plan has 2"):
            look()


def test_no_samples() -> None:
    planned = plan([], ranks=2, micro_batches=3, empty="allow", token_cap=8)
    assert split(planned) == [[[], [], []], [[], [], []]]
    assert (planned.needed, planned.lower_bound, planned.longest, planned.denominators.tokens) == (0, 0, None, 0)
    assert planned.report().waiting == 0


def test_plans_travel() -> None:
    planned = plan([5, 8, 3, 2], token_cap=8, ranks=2, empty="allow")
    again = pickle.loads(pickle.dumps(planned))
    assert split(again) == split(planned)
    assert str(again.report()) == str(planned.report())


# --- the report -------------------------------------------------------------------------------------------------


def test_report_numbers() -> None:
    planned = plan(
        [8, 4, 4, 2, 9],
        token_cap=8,
        ranks=2,
        oversize="alone",
        empty="allow",
        groups=["x", "x", "y", "y", "z"],
        modality=["text", "text", "image", "text", "text"],
        images=[0, 0, 2, 0, 0],
        loss_tokens=[4, 2, 2, 0, 0],
    )
    # 9 alone and 8 first; then 4 + 2 for the rank that had the 8, and 4 for the other.
    report = planned.report()
    assert (report.samples, report.tokens, report.loss_tokens, report.images) == (5, 27, 8, 2)
    assert (report.ranks, report.steps, report.micro_batches, report.empty) == (2, 2, 4, 0)
    assert (report.needed, report.lower_bound, report.oversize) == (4, 4, (4,))
    assert (report.largest, report.longest, report.longest_tokens, report.most_images) == (9, 4, 9, 2)
    assert report.filled == pytest.approx(27 / 32)
    assert report.padding == 0
    assert report.rank_tokens == (13, 14)
    assert report.rank_imbalance == pytest.approx(14 / 13.5)
    assert report.step_imbalance == pytest.approx((9 / 8.5, 6 / 5))
    assert report.waiting == pytest.approx(1 - 27 / (2 * (9 + 6)))
    assert report.modalities == {"image": (1, 4), "text": (4, 23)}
    assert report.groups == 3
    spread_over = {g: {b.rank for b in planned.micro_batches for i in b.indices if "xxyyz"[i] == g} for g in "xyz"}
    assert report.split_groups == sum(len(ranks) > 1 for ranks in spread_over.values())


def test_report_of_padding() -> None:
    report = plan([4, 3, 2, 1], layout="padded", micro_batches=2).report()
    # 4 | 3 2 1 has ceiling 9, 4 3 | 2 1 has 8: 12 occupied for 10.
    assert report.largest == 8
    assert report.padding == pytest.approx(1 - 10 / 12)
    assert report.filled is None and report.needed is None


def test_report_can_be_read() -> None:
    planned = plan(
        [8, 4, 4, 2, 9],
        token_cap=8,
        ranks=20,
        oversize="alone",
        empty="allow",
        groups="xxyyz",
        modality=["text", "text", "image", "text", "text"],
        images=[0, 0, 2, 0, 0],
    )
    shown = str(planned.report())
    for words in (
        "5 samples, 27 tokens (27 in the loss), packed, on 20 ranks x 1 micro-batches",
        "15 empty, 1 over the cap",
        "lower bound 4",
        "over the cap   samples 4",
        "longest sample 4 with 9 tokens",
        "images         2, at most 2 in a micro-batch",
        "groups         3, 2 of them on several ranks",
        "modality       image: 1 samples, 4 tokens",
        "... 4 more ranks",
    ):
        assert words in shown
    assert "of the cap" not in str(plan([1, 2]).report())
    assert "the cap on images takes 2" in str(plan([1, 2], images=[1, 1], image_cap=1).report())


# --- what a sample costs ----------------------------------------------------------------------------------------

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
MIXTRAL = LLAMA_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GEMMA = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


def test_cost_of_a_dense_model() -> None:
    # Per layer: four projections of 4096 x 4096 and three matrices of 4096 x 11008.
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert layer == 202_375_168
    cost = Cost.from_config(LLAMA_7B)
    assert cost == Cost(linear=2.0 * (32 * layer + 4096 * 32000), quadratic=2.0 * 32 * 4096)
    assert cost.linear == 13_214_154_752.0  # two for each of 6.6 billion weights
    assert cost([1000]).tolist() == [13_214_154_752.0 * 1000 + 262_144.0 * 1000 * 1000]
    assert Cost.from_config(SimpleNamespace(**LLAMA_7B)) == cost
    assert Cost.from_config({"text_config": LLAMA_7B, "vision_config": {}, "vocab_size": 1}) == cost
    assert Cost.from_config(SimpleNamespace(text_config=SimpleNamespace(**LLAMA_7B))) == cost
    ungated = Cost.from_config(LLAMA_7B, gated=False)
    assert cost.linear - ungated.linear == 2 * 32 * 4096 * 11008


def test_cost_of_mixtral() -> None:
    # Keys and values have 8 heads of 128; two of eight experts and the router's 4096 x 8.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 4096 * 8
    cost = Cost.from_config(MIXTRAL)
    assert cost == Cost(linear=2.0 * (32 * layer + 4096 * 32000), quadratic=2.0 * 32 * 4096)
    assert 12.7e9 < cost.linear / 2 < 12.8e9  # 12.9 billion active weights, less the embedding
    dense = Cost.from_config({key: value for key, value in MIXTRAL.items() if "expert" not in key})
    assert dense.linear < cost.linear < 2 * dense.linear


def test_cost_of_qwen3_moe() -> None:
    # Queries 2048 x 4096 and back, keys and values 2048 x 512 each; eight experts of 768, router 2048 x 128.
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 8 * 3 * 2048 * 768 + 2048 * 128
    cost = Cost.from_config(QWEN3_MOE)
    assert cost == Cost(linear=2.0 * (48 * layer + 2048 * 151936), quadratic=2.0 * 48 * 4096)
    # Layer 0 dense, then every second one sparse: layers 1, 3, ... of 48, that is 24.
    mixed = Cost.from_config(QWEN3_MOE | {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2})
    sparse, dense = 8 * 3 * 2048 * 768 + 2048 * 128, 3 * 2048 * 6144
    assert mixed.linear - cost.linear == 2.0 * 25 * (dense - sparse)
    shared = Cost.from_config(QWEN3_MOE | {"shared_expert_intermediate_size": 512})
    assert shared.linear - cost.linear == 2.0 * 48 * 3 * 2048 * 512


def test_cost_of_latent_attention() -> None:
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    sparse, dense = 7168 * 256 + 9 * 3 * 7168 * 2048, 3 * 7168 * 18432
    cost = Cost.from_config(DEEPSEEK_V3)
    assert cost.linear == 2.0 * (61 * attention + 58 * sparse + 3 * dense + 7168 * 129280)
    assert cost.quadratic == 61 * 128 * (192 + 128)
    direct = Cost.from_config({key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"})
    assert direct.linear - cost.linear == 2.0 * 61 * (7168 * 128 * 192 - 7168 * 1536 - 1536 * 128 * 192)
    sparser = Cost.from_config(DEEPSEEK_V3 | {"moe_layer_freq": 2})  # layers 4, 6, ... 60
    assert cost.linear - sparser.linear == 2.0 * (58 - 29) * (sparse - dense)


def test_cost_of_sliding_windows() -> None:
    cost = Cost.from_config(GEMMA)
    assert (cost.quadratic, cost.windows) == (16.0, ((10, 48.0),))
    # Up to the window every layer is quadratic; beyond, three of four see ten tokens back.
    linear = 2.0 * (4 * (192 + 384) + 256)
    assert cost([10]).tolist() == [linear * 10 + 64 * 100]
    assert cost([15]).tolist() == [linear * 15 + 16 * 225 + 48 * (2 * 10 * 15 - 100)]
    growth = np.diff(cost(range(20, 40)) - Cost(linear=linear, quadratic=16)(range(20, 40)))
    assert growth == pytest.approx(48 * 20)
    plain = {key: value for key, value in GEMMA.items() if key != "layer_types"}
    assert Cost.from_config(plain).windows == ((10, 64.0),)
    assert Cost.from_config(plain | {"sliding_window_pattern": 4}) == cost
    assert Cost.from_config(plain | {"use_sliding_window": False}).windows == ()
    assert Cost.from_config(plain | {"use_sliding_window": True, "max_window_layers": 3}).windows == ((10, 16.0),)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({k: v for k, v in LLAMA_7B.items() if k != key}, f"config: {key!r} is missing, expected an integer")
            for key in LLAMA_7B
            if key != "num_key_value_heads"
        ),
        ({k: v for k, v in MIXTRAL.items() if k != "num_experts_per_tok"}, "config: 'num_experts_per_tok' is missing"),
        ({k: v for k, v in DEEPSEEK_V3.items() if k != "v_head_dim"}, "config: 'v_head_dim' is missing"),
        (LLAMA_7B | {"hidden_size": "4096"}, "config: 'hidden_size': got '4096', expected an integer >= 1"),
        (LLAMA_7B | {"num_attention_heads": 0}, "config: 'num_attention_heads': got 0"),
        (
            LLAMA_7B | {"num_attention_heads": 48},
            "config: 'hidden_size' 4096 is no multiple of 'num_attention_heads' 48",
        ),
        (LLAMA_7B | {"moe_num_experts": 64}, "config: 'moe_num_experts': got 64, which is not supported"),
        (LLAMA_7B | {"interleave_moe_layer_step": 1}, "config: 'interleave_moe_layer_step': got 1"),
        (GEMMA | {"layer_types": ["linear_attention"] * 4}, "config: 'layer_types': got 'linear_attention', expected"),
        (GEMMA | {"layer_types": ["full_attention"]}, "config: 'layer_types': got 1 entries, expected 4"),
        (GEMMA | {"sliding_window": None}, "config: 'sliding_window' is missing"),
        ({"text_config": {}}, "config: 'hidden_size' is missing"),
        (None, "config: got NoneType, expected a dict or a transformers config"),
        ("llama", "config: got str"),
    ],
)
def test_configs_that_are_not_understood(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Cost.from_config(config)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"linear": -1}, "linear: got -1, expected a number in [0, 1e100)"),
        ({"quadratic": float("inf")}, "quadratic: got inf"),
        ({"quadratic": float("nan")}, "quadratic: got nan"),
        ({"constant": "1"}, "constant: got '1'"),
        ({"linear": True}, "linear: got True"),
        ({"windows": ((0, 1.0),)}, "windows[0][0]: got 0, expected an integer >= 1"),
        ({"windows": ((4, -1.0),)}, "windows[0][1]: got -1.0"),
        ({"linear": 0}, "linear, quadratic, constant, windows: got 0 in all of them"),
    ],
)
def test_bad_costs(coefficients: Request, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Cost(**coefficients)
