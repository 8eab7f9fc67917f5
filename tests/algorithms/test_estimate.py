"""`estimate`: the same numbers from records, from a batch and from plain inputs; groups by id; one process or many."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from rollbook import Experience, Experiences
from rollbook.algorithms import ESTIMATORS, estimate
from rollbook.algorithms.inputs import group_id, group_numbers, read_inputs, run_id
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.wire import decode, encode

TEXT = st.sampled_from(["", "a", "b/c", "50%", "1"])
EIDS = st.fixed_dictionaries(
    {
        "batch": st.one_of(TEXT, st.integers(-1, 2)),
        "task": st.one_of(TEXT, st.integers(0, 2)),
        "run": st.integers(-1, 2),
    }
)


def record(eid: dict[str, Any], reward: float | None, mask: list[bool], step: int = 0, **more: Any) -> Experience:
    count = len(mask)
    return Experience(
        eid={**eid, "step": step},
        tokens=list(range(count + 2)),
        prompt_length=2,
        reward=reward,
        action_mask=mask,
        logprobs=[-0.5 - 0.1 * i for i in range(count)],
        teacher_logprobs=[-0.4 - 0.2 * i for i in range(count)],
        info={"env_state_hash": f"s{step % 2}", "step_reward": reward, "reward_baseline": 0.25},
        **more,
    )


RECORDS = st.lists(
    st.tuples(
        EIDS, st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.5])), st.lists(st.booleans(), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=10,
)


@given(rows=RECORDS)
def test_numbers_tell_groups_and_runs_apart_as_ids_do(rows: list[Any]) -> None:
    experiences = Experiences([record(*row) for row in rows])
    groups, runs = group_numbers(experiences)
    runs = np.arange(len(experiences)) if runs is None else runs
    for numbers, ids in ((groups, map(group_id, experiences.eids())), (runs, map(run_id, experiences.eids()))):
        names = list(ids)
        assert all((numbers[i] == numbers[j]) == (a == b) for i, a in enumerate(names) for j, b in enumerate(names))


def test_a_record_that_was_never_given_a_task_is_a_group_of_its_own() -> None:
    records = [Experience(tokens=[1, 2], reward=float(i)) for i in range(3)]
    estimated = estimate("grpo", records)
    assert estimated.scores.tolist() == [0, 0, 0]
    assert estimated.report.which("singleton group") == [row.eid.uid for row in records]


NAMES = ["grpo", "rloo", "dr_grpo", "opmd", "asymre", "rec", "cpgd", "reinforce", "reinforce++", "reinforce_baseline"]


@pytest.mark.parametrize("name", NAMES)
@given(rows=RECORDS, seed=st.integers(0, 99))
def test_records_batches_and_plain_inputs_agree_in_any_order(name: str, rows: list[Any], seed: int) -> None:
    experiences = Experiences([record(*row) for row in rows])
    estimated = estimate(name, experiences)
    padded = estimate(name, from_experiences(experiences))
    packed = estimate(name, from_experiences(experiences, packing_samples=True))
    inputs = read_inputs(experiences)
    columns = {key: inputs[key] for key in ("rewards", "groups", "runs", "mask")}
    plain = estimate(name, columns)
    order = list(range(len(experiences)))
    random.Random(seed).shuffle(order)
    shuffled = estimate(name, experiences.take(order))
    for i, row in enumerate(estimated.advantages):
        close = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(plain.advantages[i], row, **close)
        torch.testing.assert_close(packed.advantages[i], row, **close)
        width = padded.advantages.shape[1]
        torch.testing.assert_close(padded.advantages[i, width - len(row) :], row, **close)
        torch.testing.assert_close(shuffled.advantages[order.index(i)], row, **close)
    assert estimated.report.ids is not None and list(estimated.report.ids) == [eid.uid for eid in experiences.eids()]


def test_every_estimator_takes_records_or_a_batch() -> None:
    rows = [
        record({"task": t, "run": r}, float(r == t), [True, True, False, True], s)
        for t in (0, 1)
        for r in (0, 1)
        for s in (0, 1)
    ]
    experiences = Experiences(rows)
    batch = from_experiences(experiences)
    batch.values = torch.full(batch.action_mask.shape, 0.5)
    batch.action_entropy = torch.rand(batch.action_mask.shape)
    for name in ESTIMATORS.names():
        needs = ESTIMATORS[name].inputs
        needed = (
            {need: value for need, value in read_inputs(batch).items() if need in needs} if name == "clip_v" else {}
        )
        data = {**needed, "necs": batch.action_entropy} if name == "clip_v" else batch
        estimated = estimate(name, data)
        assert estimated.advantages.shape == batch.action_mask.shape, name
        assert not estimated.advantages[~batch.action_mask].any(), name
        assert torch.isfinite(estimated.advantages).all(), name
        if "values" not in ESTIMATORS[name].inputs and "entropy" not in ESTIMATORS[name].inputs:
            from_records = estimate(name, experiences)
            for i, row in enumerate(from_records.advantages):
                torch.testing.assert_close(batch_row(estimated.advantages, i, len(row)), row, rtol=1e-5, atol=1e-6)


def batch_row(matrix: torch.Tensor, i: int, length: int) -> torch.Tensor:
    return matrix[i, matrix.shape[1] - length :]


def test_token_level_rewards_without_a_reward_and_beside_one_that_could_not_be_computed() -> None:
    """Their sum is the reward where there is none (`None`); a reward of NaN is missing all the same."""
    common = {"tokens": [1, 2, 3, 4], "prompt_length": 1, "token_level_reward": [0.25, 0.25, 0.5]}
    rewards = (None, 3.0, float("nan"))
    rows = [Experience(eid={"task": 0, "run": run}, reward=reward, **common) for run, reward in enumerate(rewards)]
    for data in (rows, from_experiences(Experiences(rows)), from_experiences(Experiences(rows), packing_samples=True)):
        estimated = estimate("dr_grpo", data)
        assert [torch.as_tensor(row).tolist() for row in estimated.advantages] == [[-1.0] * 3, [1.0] * 3, [0.0] * 3]
        estimated = estimate("reinforce", data)
        assert [torch.as_tensor(row).tolist() for row in estimated.advantages] == [[1.0, 0.75, 0.5]] * 2 + [[0.0] * 3]
        assert estimated.report.count("missing reward") == 1


def test_a_record_without_a_mask_beside_one_with_a_mask() -> None:
    """Every token of it counts, as in a batch; but no model predicts the first token of one without a prompt."""
    common: dict[str, Any] = {"reward": 1.0, "experience_type": "multi_turn"}
    rows = [Experience(tokens=[1, 2, 3], prompt_length=length, **common) for length in (0, 1)]
    rows.append(Experience(tokens=[1, 2, 3], action_mask=[True, False], **common))
    advantages = [row.tolist() for row in estimate("reinforce", rows).advantages]
    assert advantages == [[0, 1, 1], [1, 1], [1, 0]]
    assert advantages == [
        row.tolist()
        for row in estimate("reinforce", from_experiences(Experiences(rows), packing_samples=True)).advantages
    ]


def test_token_level_rewards_win_over_the_reward() -> None:
    row = Experience(tokens=[1, 2, 3, 4], prompt_length=1, reward=9.0, token_level_reward=[0.25, 0.25, 0.5])
    assert estimate("reinforce", [row]).advantages[0].tolist() == [1.0, 0.75, 0.5]
    plain = Experience(tokens=[1, 2, 3, 4], prompt_length=1, reward=9.0)
    assert estimate("reinforce", [plain], gamma=0.5).advantages[0].tolist() == [2.25, 4.5, 9.0]


def test_results_go_back_into_records_and_batches() -> None:
    experiences = Experiences([record({"task": 0, "run": r}, float(r), [True, False, True]) for r in (0, 1)])
    estimated = estimate("dr_grpo", experiences)
    more = experiences.assign(advantages=estimated.advantages, returns=estimated.returns)
    assert more[1].advantages.tolist() == [0.5, 0.0, 0.5]
    assert experiences[1].advantages is None
    assert decode(encode(more)) == more
    more[1].advantages[0] = 7.0
    assert more[1].returns[0].item() == 0.5
    batch = from_experiences(experiences, packing_samples=True)
    batch.advantages = estimate("dr_grpo", batch).advantages
    assert batch.pad().advantages.tolist() == [[-0.5, 0.0, -0.5], [0.5, 0.0, 0.5]]


def test_assign_refuses_what_does_not_fit() -> None:
    experiences = Experiences([record({"task": 0}, 1.0, [True, True])])
    with pytest.raises(ValueError, match="assign: 'advantage' is not a field"):
        experiences.assign(advantage=[[1.0, 1.0]])
    with pytest.raises(ValueError, match="assign: 'reward' has 2 rows, expected 1"):
        experiences.assign(reward=[1.0, 2.0])
    with pytest.raises(ValueError, match="advantages: got length 3, expected 2|advantages.*expected 2"):
        experiences.assign(advantages=[[1.0, 1.0, 1.0]])
    assert experiences.assign(reward=[None])[0].reward is None
    assert experiences.assign(reward=np.array([2.5]))[0].reward == 2.5


def test_a_batch_without_ids_says_so() -> None:
    batch = from_experiences(Experiences([record({"task": 0}, 1.0, [True])]))
    batch.ids = None
    with pytest.raises(ValueError, match="batch: got rows without ids"):
        estimate("grpo", batch)


def test_an_option_or_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'eps'"):
        estimate("grpo", {"rewards": [1.0], "groups": ["a"]}, epz=1)
    with pytest.raises(ValueError, match="advantage estimator: unknown name 'grop'.*did you mean 'grpo'"):
        estimate("grop", {})
    with pytest.raises(ValueError, match="values: got None, expected the critic's value"):
        estimate("gae", Experiences([record({"task": 0}, 1.0, [True])]))


REWARDS = [0.1, 0.9, 0.4, None, 0.7, 0.7, 0.2, 0.3, 1.0]
GROUPS = ["a", "b", "a", "a", "c", "c", "b", "a", "d"]
ACROSS = {
    "grpo": {},
    "grpo_batch": {"level": "batch"},
    "rloo": {},
    "opmd": {"baseline": "logavgexp"},
    "rec": {"drop": "balance"},
    "cpgd": {"weight": "clip_filter_like"},
    "pass_at_k": {"k": 2, "correct": 0.5},
    "step_wise_grpo": {},
    "gigpo": {},
    "reinforce_baseline": {},
}


def across(rows: list[int], ranks: Any) -> dict[str, list[float]]:
    """Every estimator's scores for some of the rows."""
    data = {
        "rewards": [REWARDS[i] for i in rows],
        "step_rewards": [REWARDS[i] for i in rows],
        "groups": [GROUPS[i] for i in rows],
        "runs": rows,
        "steps": [0] * len(rows),
        "states": [f"s{i % 2}" for i in rows],
        "ids": [f"id{i}" for i in rows],
    }
    return {
        name: ESTIMATORS.call(name.removesuffix("_batch"), data, process_group=ranks, **options).advantages.tolist()
        for name, options in ACROSS.items()
    }


def worker(rank: int, parts: list[list[int]], folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(parts))
    try:
        torch.save(across(parts[rank], ProcessGroup()), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_groups_that_lie_across_processes_are_still_groups(tmp_path: Path) -> None:
    # The second of three processes has no rows at all.
    parts = [[0, 1, 2, 4, 8], [], [3, 5, 6, 7]]
    mp.start_processes(worker, args=(parts, str(tmp_path)), nprocs=3, start_method="fork")
    together = across(list(range(9)), SINGLE_PROCESS)
    for name, expected in together.items():
        for rank, rows in enumerate(parts):
            advantages = torch.load(tmp_path / f"{rank}.pt")[name]
            assert advantages == pytest.approx([expected[i] for i in rows], abs=1e-6), name


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"process_group: torch.distributed is not initialized"):
        ProcessGroup()


def partial(run: int, **more: Any) -> Experience:
    return Experience(
        eid={"batch": 0, "task": 0, "run": run}, tokens=[1, 2, 3, 4], prompt_length=1, logprobs=[-0.1] * 3, **more
    )


def sources_of(experiences: Experiences) -> list[Any]:
    return [experiences, from_experiences(experiences), from_experiences(experiences, packing_samples=True)]


def rows_of(estimated: Any, experiences: Experiences) -> list[list[float]]:
    tokens = estimated.advantages
    if isinstance(tokens, torch.Tensor):
        return [batch_row(tokens, i, len(m)).tolist() for i, m in enumerate(experiences.values("action_mask"))]
    return [row.tolist() for row in tokens]


def test_a_record_without_token_rewards_keeps_its_reward() -> None:
    experiences = Experiences(
        [partial(0, reward=9.0, token_level_reward=[0, 0, 1.0]), partial(1, reward=2.0), partial(2)]
    )
    for source in sources_of(experiences):
        estimated = estimate("reinforce", source)
        assert rows_of(estimated, experiences) == [[1, 1, 1], [2, 2, 2], [0, 0, 0]]
        assert estimated.report.which("missing reward") == [experiences[2].eid.uid]


def test_a_record_without_a_teacher_is_not_taught_by_padding() -> None:
    experiences = Experiences([partial(0, teacher_logprobs=[-0.2] * 3), partial(1)])
    for source in sources_of(experiences):
        with pytest.raises(ValueError, match=r"teacher_logprobs: missing in (row|record) 1.*expected it in every"):
            estimate("on_policy_distill", source)


@pytest.mark.parametrize("observations", ["skip", "through", "zeroed"])
@pytest.mark.parametrize("carry", ["drop", "carry"])
def test_tool_tokens_at_the_end_count_alike_in_every_layout(observations: str, carry: str) -> None:
    rows = [([1, 0, 1, 0, 0], [0, 0, 1.0, 0, 0.5]), ([1, 1, 1, 1], [0.0, 0.25, 0, 0]), ([0, 1, 0], [0.0, 0, 2])]
    experiences = Experiences(
        Experience(
            eid={"batch": 0, "task": 0, "run": i},
            tokens=list(range(len(m) + 1)),
            prompt_length=1,
            action_mask=m,
            logprobs=[-0.1] * len(m),
            token_level_reward=t,
        )
        for i, (m, t) in enumerate(rows)
    )
    options = {"observations": observations, "off_action_rewards": carry, "gamma": 0.9}
    sources = [*sources_of(experiences), from_experiences(experiences, layout="prompt_left_response_right")]
    first = estimate("reinforce", sources[0], **options)
    for source in sources[1:3]:
        estimated = estimate("reinforce", source, **options)
        assert rows_of(estimated, experiences) == [pytest.approx(row) for row in rows_of(first, experiences)]
        assert estimated.report.reasons == first.report.reasons
        assert estimated.report.metrics == pytest.approx(first.report.metrics)
    right = estimate("reinforce", sources[3], **options).advantages
    trained_tokens = [right[i, : len(m)].tolist() for i, (m, _) in enumerate(rows)]
    assert trained_tokens == [pytest.approx(row) for row in rows_of(first, experiences)]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ESTIMATORS.names()
        if "values" not in ESTIMATORS[name].inputs and "entropy" not in ESTIMATORS[name].inputs
    ],
)
def test_no_records_have_no_advantages(name: str) -> None:
    if name in ("gigpo", "remax"):
        with pytest.raises(ValueError, match="missing input|baselines: got None"):
            estimate(name, Experiences([]))
        return
    estimated = estimate(name, Experiences([]))
    assert len(estimated.advantages) == 0 and estimated.report.rows == 0


def test_what_needs_no_ids_does_without() -> None:
    batch = from_experiences(Experiences([record({"task": 0, "run": i}, 1.0, [True]) for i in (0, 1)]))
    batch.ids = [batch.ids[0], None]
    assert estimate("reinforce", batch).advantages.tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="batch: got rows without ids"):
        estimate("grpo", batch)


def test_names_among_the_data_that_nobody_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown input 'masks'; did you mean 'mask'"):
        estimate("grpo", {"rewards": [1.0], "groups": ["a"], "masks": [[1]]})
    with pytest.raises(ValueError, match="gae: got 'gamma' as an input, expected it as an option"):
        estimate("gae", {"token_rewards": [[1.0]], "values": [[0.0]], "gamma": 0.5})


def test_what_an_estimator_of_ones_own_gives_back_is_checked() -> None:
    from rollbook.algorithms.results import Advantages

    experiences = Experiences([record({"task": 0, "run": i}, 1.0, [True]) for i in (0, 1)])
    ESTIMATORS.register("own", source="a test")(lambda rewards, groups, mask=None: torch.zeros(2))
    ESTIMATORS.register("plain", source="a test")(lambda rewards: Advantages(torch.zeros(2)))
    try:
        with pytest.raises(ValueError, match="own: returned Tensor, expected Advantages"):
            estimate("own", experiences)
        assert estimate("plain", experiences).report.rows == 2
    finally:
        ESTIMATORS.unregister("own")
        ESTIMATORS.unregister("plain")


def test_values_of_records_may_stand_in_their_info() -> None:
    rows = [record({"task": 0, "run": 0}, 1.0, [True, True])]
    rows[0].info["critic"] = [0.5, 0.25]
    assert estimate("gae", rows, info_keys={"values": "critic"}).advantages[0].tolist() == [0.5, 0.75]
    with pytest.raises(ValueError, match="info_keys: got 'valuess', expected one of"):
        estimate("gae", rows, info_keys={"valuess": "critic"})


def test_what_is_shown_is_short() -> None:
    estimated = estimate("grpo", Experiences([record({"task": 0, "run": i}, 1.0, [True]) for i in range(50)]))
    assert len(repr(estimated)) < 300 and "constant group 50" in repr(estimated)
    assert "Ragged(50 rows" in repr(estimated.advantages) and "groups 1" in str(estimated.report)
    assert repr(SINGLE_PROCESS) == "SINGLE_PROCESS" and "grpo" in repr(ESTIMATORS)
