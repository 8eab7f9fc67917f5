"""What is saved: the same of batches, items and records, complete, aligned and strict; and nothing that is given is
changed."""

from __future__ import annotations

import copy
import json
import math
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook import EID, Experience, Experiences
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.compat.lightrft.replay_buffer import BufferItem, remove_padding_in_sequences, split_experience_batch
from rollbook.compat.lightrft.saver import (
    TrajectorySaver,
    _calculate_entropy_from_log_probs,
    _calculate_reflection_pattern_score,
    _check_reflection_pattern,
    create_trajectory_saver,
)
from rollbook.core.experience import restore
from rollbook.models.logprobs import entropy_from_logits, from_logits
from rollbook.rollout import ScriptedEngine
from tests.saver.making import END, TEXTS, TOKENIZER, batches, ids, read, record, rollout

ARRAYS = ("advantages", "return", "action_log_probs", "values", "base_action_log_probs", "action_entropy", "logprobs")
PLACES = (
    "experience_index", "sample_in_exp", "full_sequence", "info", "kind", "prompt_text", "response_text",
    "finish_reason",
)  # fmt: skip
"""What tells a batch from a record, or one list of them from another."""


PAD = TOKENIZER.decode([0])
PADDED = ("padded", "fresh", "padded items", "another's batches", "mixed")


def saver(folder: Path, **options: Any) -> TrajectorySaver:
    return TrajectorySaver(folder, TOKENIZER, **options)


# --- every form of experience -------------------------------------------------------------------------------------


def forms(rows: list[Experience]) -> dict[str, list[Any]]:
    """The same samples in every form that a trainer may hold them in."""
    padded = batches(rows, 4, pad_token_id=0)
    items = [item for batch in padded for item in split_experience_batch(batch)]
    foreign = [SimpleNamespace(**{**vars(batch), "origin": None}) for batch in padded]
    return {
        "records": rows,
        "columns": [Experiences(rows[:3]), Experiences(rows[3:])],
        "padded": padded,
        "fresh": batches(rows, 4, layout="prompt_left_response_right"),
        "packed": batches(rows, 4, packing_samples=True),
        "items": remove_padding_in_sequences(items),
        "padded items": items,
        "another's batches": foreign,
        "mixed": [Experiences(rows[:2]), *rows[2:4], *batches(rows[4:], 4)],
    }


@pytest.mark.parametrize("mark", [False, True])
def test_every_form_gives_the_same_records(mark: bool, tmp_path: Path) -> None:
    rows = rollout(2, 5)
    by_form = forms(rows)
    saved = {}
    for name, experiences in by_form.items():
        form_saver = saver(tmp_path / name, mark_high_entropy_tokens=mark)
        path, _ = form_saver.save_trajectories(experiences, 5, 10)
        assert not form_saver.errors, name
        for entry in read(path):
            # The row as it was given, with the padding around it.
            assert entry["full_sequence"].replace(PAD, "") == entry["text"]
            assert (entry["full_sequence"] == entry["text"]) or name in PADDED
        saved[name] = [{k: v for k, v in entry.items() if k not in PLACES} for entry in read(path)]
        assert [entry["uid"] for entry in saved[name]] == [row.eid.uid for row in rows]
    for name, records in saved.items():
        # A batch pads what one of its records lacks: all of these have everything.
        assert records == [{**entry, "policy_versions": [3] * len(entry["mask"])} for entry in saved["records"]], name


def test_a_record_is_complete(tmp_path: Path) -> None:
    row = record(
        "né?",
        "wait 😀",
        EID(3, "a/b", 2, 1, "s"),
        metrics={"format": 1.0, "accuracy": 0.0, "note": "x"},
        info={"label": "L", "reference": [1, 2], "segments": [{"kind": "prompt", "start": 0, "stop": 4}]},
        messages=[{"role": "user", "content": "né?"}],
        tools=[{"name": "calc"}],
        sampling={"temperature": 0.7},
        group_size=4,
        parent="p",
        loss_weights=[1.0] * (len(ids("wait 😀")) + 1),
    )
    (saved,) = read(saver(tmp_path).save_trajectories([row], 3)[0])
    length = len(ids("wait 😀")) + 1
    assert saved["uid"] == "3/a%2Fb/2/1/s" and saved["gid"] == "3/a%2Fb"
    assert (saved["batch"], saved["task"], saved["run"], saved["turn"]) == (3, "a/b", 2, 1)
    assert saved["reward"] == 1.0 and saved["reward_parts"] == {"format": 1.0, "accuracy": 0.0}
    assert (saved["label"], saved["reference"]) == ("L", [1, 2])
    assert saved["segments"] == row.info["segments"] and saved["kept"] == "all" and saved["kept_weight"] == 1
    assert saved["full_sequence"] == saved["text"] == "né?wait 😀<|end|>"
    assert saved["generated_text"] == saved["pure_generated_text"] == "wait 😀"
    assert saved["prompt_text"] == "né?" and saved["prompt_tokens"] == len(ids("né?"))
    assert saved["token_ids"] == row.tokens.tolist() and saved["response_token_count"] == length
    for name in (*ARRAYS, "mask", "loss_weights", "policy_versions"):
        assert len(saved[name]) == length, name
    assert saved["token_ends"][-1] == len(saved["text"]) and len(saved["token_ends"]) == len(saved["token_ids"])
    assert saved["action_log_probs"] == pytest.approx((-torch.arange(length) / 8 - 0.25).tolist())
    assert saved["logprobs"] == pytest.approx((-torch.arange(length) / 8).tolist())
    assert saved["policy_entropy"] == pytest.approx(float(row.entropy.mean()))
    for name in ("messages", "tools", "sampling", "group_size", "parent", "finish_reason"):
        assert saved[name] == getattr(row, name), name
    assert saved["kind"] == "single_turn" and saved["info"]["label"] == "L"


def test_one_token_is_a_list_too(tmp_path: Path) -> None:
    (saved,) = read(saver(tmp_path).save_trajectories([record("a", "")], 1)[0])
    assert all(len(saved[name]) == 1 for name in ARRAYS) and saved["response_token_count"] == 1
    assert saved["generated_text"] == "" and saved["reflection_pattern_details"] == {} and saved["repeat_score"] == 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=4), st.data())
def test_texts_of_tokens_are_the_text(tmp_path: Path, texts: list[str], draw: Any) -> None:
    """Several turns: what the model wrote is its text, whatever a tool wrote in between."""
    tokens, mask = [], []
    for i, text in enumerate(texts):
        part = [*ids(text), END]
        tokens += part
        mask += [i % 2 == 0] * len(part)
    entropy = draw.draw(st.lists(st.floats(0, 5, width=32), min_size=len(mask), max_size=len(mask)))
    row = Experience(tokens=[*ids("Q"), *tokens], prompt_length=1, action_mask=mask, entropy=entropy)
    text_saver = saver(tmp_path, mark_high_entropy_tokens=True, high_entropy_token_ratio=0.5)
    (saved,) = read(text_saver.save_trajectories([row], 1)[0])
    assert saved["generated_text"] == "".join(texts[::2])
    for name in ("generated", "pure_generated"):
        assert "".join(token["text"] for token in saved[f"{name}_tokens"]) == saved[f"{name}_text"]
    assert saved["full_sequence"] == "Q" + "".join(text + "<|end|>" for text in texts)
    ends = [0, *saved["token_ends"]]
    assert "".join(saved["text"][a:b] for a, b in pairwise(ends)) == saved["text"]
    assert [bool(bit) for bit in saved["mask"]] == mask and len(saved["action_entropy"]) == len(mask)
    sampled_entropy = np.array(entropy, dtype=np.float32)[np.array(mask)]
    scores = {j: token["entropy_score"] for j, token in enumerate(saved["generated_tokens"]) if token["high_entropy"]}
    assert len(scores) == max(1, len(sampled_entropy) // 2) and len(saved["generated_tokens"]) == len(sampled_entropy)
    assert all(score == pytest.approx(sampled_entropy[j]) for j, score in scores.items())
    assert min(scores.values()) >= max((e for j, e in enumerate(sampled_entropy) if j not in scores), default=-1) - 1e-6


def test_a_response_without_sampled_tokens_has_none(tmp_path: Path) -> None:
    row = record("Q", "so", experience_type="multi_turn", action_mask=[False] * 3)
    path, stats = saver(tmp_path, mark_high_entropy_tokens=True).save_trajectories([row], 1, compute_stats=True)
    (saved,) = read(path)
    assert saved["generated_text"] == saved["pure_generated_text"] == "" and saved["mask"] == [0, 0, 0]
    assert saved["response_token_count"] == stats["trajectory/response_token_count_mean"] == 0
    assert saved["text"].startswith("Qso"), "the whole response is there"


def test_a_preference_pair(tmp_path: Path) -> None:
    row = Experience(tokens=ids("Q:"), chosen=[*ids("yes"), END], rejected=[*ids("no"), END])
    (saved,) = read(saver(tmp_path).save_trajectories([row], 1)[0])
    assert saved["generated_text"] == "yes" and saved["rejected"]["text"] == "Q:no<|end|>"
    assert saved["kind"] == "dpo" and saved["prompt_tokens"] == 2


# --- alignment ----------------------------------------------------------------------------------------------------


def test_entropy_is_of_the_distribution_that_the_token_was_drawn_from(tmp_path: Path) -> None:
    """A bigram model: the entropy of token i is a number that token i - 1 alone decides, and no two are equal."""
    draw = torch.Generator().manual_seed(3)
    vocabulary = len(TOKENIZER)
    table = torch.randn(vocabulary, vocabulary, generator=draw) * torch.linspace(0.2, 4, vocabulary)[:, None]
    exact = entropy_from_logits(table)
    rows = []
    for length in (1, 4, 9):
        tokens = [*ids("ab")]
        for _ in range(length):
            tokens.append(int(torch.multinomial(table[tokens[-1]].softmax(-1), 1, generator=draw)))
        rows.append(Experience(tokens=tokens, prompt_length=2, eid=EID(0, length, suffix="s")))
    for layout in ("left", "prompt_left_response_right"):
        batch = from_experiences(rows, layout=layout)
        log_probs, entropy = from_logits(table[batch.sequences], batch.sequences.roll(-1, 1), entropy=True)
        batch.action_entropy, batch.action_log_probs = batch.at_actions(entropy), batch.at_actions(log_probs)
        given_forms = {
            "batch": [batch],
            "packed": [batch.pack()],
            "items": remove_padding_in_sequences(split_experience_batch(batch)),
        }
        for name, experiences in given_forms.items():
            entropy_saver = saver(tmp_path / layout / name, mark_high_entropy_tokens=True, high_entropy_token_ratio=1.0)
            for saved, row in zip(read(entropy_saver.save_trajectories(experiences, 0)[0]), rows, strict=True):
                before = row.tokens[1:-1]
                expected = exact[before].tolist()
                assert saved["action_entropy"] == pytest.approx(expected, abs=1e-4)
                scores = [token["entropy_score"] for token in saved["generated_tokens"]]
                assert scores == pytest.approx(expected, abs=1e-4)
                chances = table.log_softmax(-1)[before, row.tokens[2:]].tolist()
                assert saved["action_log_probs"] == pytest.approx(chances, abs=1e-4)
                assert saved["policy_entropy"] == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_a_makers_batches(tmp_path: Path) -> None:
    """What the maker gives has ids, log-probs of both sides and why a response ended: all of it is saved."""
    (two,), (three,) = ids("2"), ids("3")
    engine = ScriptedEngine({"1+1=": [[two, END], [three, END]]})
    maker = NaiveExperienceMaker(
        None, None, None, None, TOKENIZER, 16, None, reward_fn=lambda response_ids: float(response_ids[0] == two),
        config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"), engine=engine,
    )  # fmt: skip
    batches = maker.make_experience_list(["1+1="], all_labels=["math"], all_references=["2"])
    saved = read(saver(tmp_path).save_trajectories(batches, 1)[0])
    assert [entry["reward"] for entry in saved] == [1.0, 0.0] and saved[0]["gid"] == saved[1]["gid"]
    assert saved[0]["generated_text"] == "2" and saved[0]["finish_reason"] == "stop"
    assert (saved[0]["label"], saved[0]["reference"]) == ("math", "2")
    assert saved[0]["logprobs"] == saved[0]["action_log_probs"] and saved[0]["named"]


def test_an_engines_samples_and_a_processor(tmp_path: Path) -> None:
    (two,) = ids("2")
    samples = ScriptedEngine([[two, END]]).generate([ids("1+1="), ids("0+2=")])
    processor = SimpleNamespace(tokenizer=TOKENIZER, decode=lambda *_: "not asked")
    saved = read(TrajectorySaver(tmp_path, processor).save_trajectories(samples, 1)[0])
    assert [entry["text"] for entry in saved] == ["1+1=2<|end|>", "0+2=2<|end|>"]
    assert saved[0]["generated_text"] == "2" and saved[0]["uid"] == samples[0].eid.uid


def test_an_array_that_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    item = BufferItem(torch.tensor([*ids("ab"), END]), torch.zeros(2), *[None] * 4, None, torch.ones(2).bool(), {})
    item.values, item.advantages = torch.zeros(3), torch.tensor([0.25])
    array_saver = saver(tmp_path)
    with pytest.warns(UserWarning, match="values: got 3 entries, expected 2"):
        path, stats = array_saver.save_trajectories([item], 1)
    (saved,) = read(path)
    assert "values" not in saved and saved["notes"] == ["values: got 3 entries, expected 2; left out"]
    assert saved["action_log_probs"] == [0, 0] and stats == {"trajectory/save_errors": 1.0}
    assert saved["advantages"] == 0.25  # one number for all tokens is that


def test_a_mask_that_does_not_fit_counts_as_none(tmp_path: Path) -> None:
    row = restore({"tokens": ids("abc"), "action_mask": [False]}, "a payload of another framework")
    with pytest.warns(UserWarning, match="action_mask: got 1 entries, expected 2; left out"):
        (saved,) = read(saver(tmp_path).save_trajectories([row], 1)[0])
    assert (saved["response_token_count"], saved["mask"]) == (2, [1, 1])


def test_a_batch_without_axes_is_skipped(tmp_path: Path) -> None:
    scalar = ExperienceBatch(torch.tensor(5), *[None] * 8)
    with pytest.warns(UserWarning, match="sequences: got a 0-dimensional tensor"):
        path, stats = saver(tmp_path).save_trajectories([scalar, record("Q", "so")], 1)
    assert len(read(path)) == 1 and stats == {"trajectory/save_errors": 1.0}


def columns(**changed: Any) -> ExperienceBatch:
    """Two samples of two tokens each, of which some fields are changed."""
    defaults = {
        "sequences": torch.tensor([[0, *ids("abc")], [*ids("abcd")]]), "action_log_probs": -torch.ones(2, 2),
        "base_action_log_probs": None, "values": None, "returns": None, "advantages": torch.ones(2, 2),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), "action_mask": torch.ones(2, 2).bool(),
        "info": {"reward": torch.tensor([1.0, 0.0])}, "labels": ["L0", "L1"], "references": ["R0", "R1"],
    }  # fmt: skip
    return ExperienceBatch(**{**defaults, **changed})


@pytest.mark.parametrize(
    "advantages", [torch.tensor([0.5, -0.5]), torch.tensor([[0.5], [-0.5]]), torch.tensor(0.5)], ids=["B", "Bx1", "0-d"]
)
def test_one_number_for_a_sample_stays_one(advantages: torch.Tensor, tmp_path: Path) -> None:
    number_saver = saver(tmp_path)
    saved = read(number_saver.save_trajectories([columns(advantages=advantages)], 1)[0])
    assert [entry["advantages"] for entry in saved] == [0.5, 0.5 if advantages.dim() == 0 else -0.5]
    assert all(entry["action_log_probs"] == [-1, -1] for entry in saved) and not number_saver.errors
    assert [entry["label"] for entry in saved] == ["L0", "L1"]


@pytest.mark.filterwarnings("ignore:saving trajectories")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantages", torch.ones(3, 2)),
        ("advantages", "ones"),
        ("action_entropy", torch.ones(2, 3)),
        ("attention_mask", torch.ones(2, 9)),
        ("action_mask", torch.ones(2, 2, 2)),
        ("labels", ["L0"]),
        ("references", 7),
        ("raw_images", 7),
        ("info", [1, 2]),
        ("action_starts", torch.tensor([7, 7])),
        ("extras", {"loss_weights": torch.ones(1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_does_not_fit_costs_itself_alone(name: str, value: Any, tmp_path: Path) -> None:
    field_saver = saver(tmp_path)
    path, stats = field_saver.save_trajectories([columns(**{name: value})], 1)
    saved = read(path)
    assert stats == {"trajectory/save_errors": 1.0} and len(field_saver.errors) == 1
    assert any(named in field_saver.errors[0] for named in (name, "loss_weights"))
    assert [entry["generated_text"] for entry in saved] == ["bc", "cd"]
    for key, expected in (("label", "L"), ("reference", "R")):
        if name != f"{key}s":
            assert [entry[key] for entry in saved] == [f"{expected}0", f"{expected}1"]
    for field in ("advantages", "action_log_probs"):
        assert name == field or all(len(entry[field]) == 2 for entry in saved)
    assert name == "info" or [entry["reward"] for entry in saved] == [1.0, 0.0]


def test_packed_entropies_and_rows_alone(tmp_path: Path) -> None:
    """Entropies of the model's tokens end to end; a packed batch with a padded matrix of them; sequences (S,)."""
    mask = torch.tensor([[True, False], [True, True]])
    saved = read(
        saver(tmp_path / "a").save_trajectories(
            [columns(action_mask=mask, action_entropy=torch.tensor([1.0, 2.0, 3.0]))], 1
        )[0]
    )
    assert [entry["action_entropy"] for entry in saved] == [[1, 0], [2, 3]]
    assert [entry["policy_entropy"] for entry in saved] == [1, 2.5]
    lists = SimpleNamespace(
        sequences=[torch.tensor(ids("abc")), torch.tensor(ids("ab"))],
        action_mask=[torch.ones(2).bool(), torch.ones(1).bool()],
        action_entropy=torch.tensor([[1.0, 2.0], [0.0, 3.0]]),
    )
    saved = read(saver(tmp_path / "b").save_trajectories([lists], 1)[0])
    assert [entry["action_entropy"] for entry in saved] == [[1, 2], [3]]
    full_batch = columns(info={"reward": torch.tensor([1.0, 0.0]), "n": 3})
    alone = {
        name: value[0] if isinstance(value, torch.Tensor) else value[:1] if isinstance(value, list) else value
        for name, value in vars(full_batch).items()
        if name != "origin"
    }
    rows = [{**alone, "info": {"reward": torch.tensor([1.0]), "n": 3}}]
    rows.append({**rows[0], "action_mask": full_batch.action_mask[:1], "advantages": full_batch.advantages[:1]})
    for row in rows:
        row_saver = saver(tmp_path / "c")
        (saved_row,) = read(row_saver.save_trajectories([ExperienceBatch(**row)], 1)[0])
        assert not row_saver.errors and saved_row["generated_text"] == "bc" and saved_row["label"] == "L0"
        assert saved_row["info"] == {"reward": 1.0, "n": 3} and saved_row["advantages"] == [1, 1]


def test_info_is_of_the_sample_or_whole(tmp_path: Path) -> None:
    info = {
        "reward": torch.tensor([1.0, 0.0]), "bins": torch.arange(3), "array": np.arange(5), "all": torch.tensor(2.5),
        "row": torch.ones(2, 3), "reward_metrics": {"f": torch.tensor([1.0, 0.0]), "q": torch.arange(4), "s": 0.5},
        "text": "x", "none": None,
    }  # fmt: skip
    info_saver = saver(tmp_path)
    saved = read(info_saver.save_trajectories([columns(info=info), columns(info={}), columns(info=None)], 1)[0])
    assert not info_saver.errors and saved[0]["info"] == {
        "reward": 1.0, "bins": [0, 1, 2], "array": [0, 1, 2, 3, 4], "all": 2.5, "row": [1, 1, 1],
        "reward_metrics": {"f": 1.0, "q": [0, 1, 2, 3], "s": 0.5}, "text": "x", "none": None,
    }  # fmt: skip
    assert list(saved[0]["info"]) == list(info) and saved[1]["info"]["reward_metrics"]["f"] == 0.0
    assert saved[0]["reward_parts"] == {"f": 1.0, "s": 0.5}
    assert saved[2]["info"] == {} and "info" not in saved[4]


def test_marks_need_entropies(tmp_path: Path) -> None:
    marking_saver = saver(tmp_path, mark_high_entropy_tokens=True)
    with pytest.warns(UserWarning, match="no sample has entropies"):
        path, _ = marking_saver.save_trajectories([record("a", "b", entropy=None)], 1)
    (saved,) = read(path)
    assert "generated_tokens" not in saved and saved["policy_entropy"] is None and marking_saver.error_count == 0


# --- strict and harmless ------------------------------------------------------------------------------------------


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("not for you")


def test_whatever_info_holds_is_strict_json(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    info = {
        "nan": math.nan, "inf": [math.inf, -math.inf], "tensor": torch.tensor([1.0, math.nan]), "0-d": torch.tensor(2),
        "half": torch.tensor([0.5], dtype=torch.bfloat16), "array": np.arange(3), "scalar": np.float32(math.nan),
        "set": {3, 1}, "bytes": b"\xff\x00", "text": b"ok", "tuple": (1, (2,)), 7: "key", "lone": "\ud800",
        "big": 1 << 80, "odd": Odd(), "path": Path("x"), "loop": loop, "huge": torch.zeros(1 << 19), "complex": 1 + 2j,
        "none": None, "flag": np.bool_(True), "words": np.array(["a", "b"]), "dates": np.array(["2024-01-01"], "M8[D]"),
    }  # fmt: skip
    row = record("a", "b", reward=math.nan, metrics={"x": math.inf})
    row.info.update(info)
    row.advantages[0] = math.inf
    item = split_experience_batch(from_experiences([record("a", "b")]))[0]
    item.info = info | {"reward": math.nan}
    info_saver = saver(tmp_path)
    path, _ = info_saver.save_trajectories([row, item], 1)
    assert not info_saver.errors
    for entry in read(path):
        saved_info = entry["info"]
        half = [0.5] if entry["experience_index"] == 0 else 0.5  # of an item, its number
        assert saved_info["nan"] is None and saved_info["inf"] == [None, None] and saved_info["tensor"] == [1.0, None]
        assert (
            saved_info["0-d"] == 2
            and saved_info["half"] == half
            and saved_info["array"] == [0, 1, 2]
            and saved_info["scalar"] is None
        )
        assert saved_info["set"] == [1, 3] and saved_info["bytes"] == {"$bytes": "ff00"} and saved_info["text"] == "ok"
        assert saved_info["tuple"] == [1, [2]] and saved_info["7"] == "key" and saved_info["lone"] == "���"
        assert saved_info["big"] == str(1 << 80) and "Odd" in saved_info["odd"] and saved_info["path"] == "x"
        assert saved_info["huge"] == "tensor of torch.float32, shape [524288]" and saved_info["flag"] is True
        assert saved_info["words"] == ["a", "b"] and entry["reward"] is None
        assert entry["nonfinite"]["info.inf[1]"] == {"-inf": 1} and entry["nonfinite"]["reward"] == {"nan": 1}
    first = read(path)[0]
    assert first["advantages"][0] is None and first["nonfinite"]["advantages"] == {"inf": 1}
    assert first["reward_parts"] == {"x": None}


def test_nothing_that_is_given_changes(tmp_path: Path) -> None:
    rows = rollout(1, 4)
    given_ones = forms(rows)
    before = {
        name: [copy.deepcopy(record) for record in some]
        for name, some in given_ones.items()
        if name != "another's batches"
    }
    for name, some in before.items():
        saver(tmp_path / name, mark_high_entropy_tokens=True).save_trajectories(
            given_ones[name], 1, 3, compute_stats="all"
        )
        assert given_ones[name] == some
    item = split_experience_batch(from_experiences(rows))[0]
    attributes = set(item.__dict__)
    saver(tmp_path / "item").save_trajectories([item], 1)
    assert set(item.__dict__) == attributes  # not even what it was asked for stays in it


# --- files --------------------------------------------------------------------------------------------------------


def test_names_and_return_values(tmp_path: Path) -> None:
    folder_saver = saver(tmp_path / "new" / "folder")
    rows = rollout(1, 3)
    assert folder_saver.save_trajectories([], 1) == (None, None) and not list(
        (tmp_path / "new" / "folder").glob("*.json")
    )
    path, stats = folder_saver.save_trajectories(rows, 7)
    assert path == str(tmp_path / "new" / "folder" / "trajectories_step_7.json") and stats is None
    assert folder_saver.save_trajectories(rows, 7, 0, compute_stats=True) == (path, {}) and read(path) == []
    path, stats = folder_saver.save_trajectories(rows, np.int64(8), 2, "eval", compute_stats=True)
    assert Path(path or "").name == "eval_step_8.json" and len(read(path)) == 2
    assert list(stats or ()) == [
        f"trajectory/{name}_mean"
        for name in ("repeat_score", "reflection_pattern_score", "policy_entropy", "response_token_count")
    ]
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [
        "eval_step_8.json", "images", "trajectories_step_7.json"
    ]  # fmt: skip


def test_one_record_a_line(tmp_path: Path) -> None:
    path, _ = saver(tmp_path).save_trajectories(rollout(2, 3), 1)
    lines = Path(path or "").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("[", "]") and len(lines) == 8
    assert [json.loads(line.rstrip(","))["sample_in_exp"] for line in lines[1:-1]] == [0] * 6


def test_statistics_of_what_is_saved_and_of_all(tmp_path: Path) -> None:
    rows = rollout(6, 4)
    stats_saver = saver(tmp_path)
    path, some = stats_saver.save_trajectories(rows, 1, 5, compute_stats=True)
    saved = read(path)
    _, every = stats_saver.save_trajectories(rows, 2, 5, compute_stats="all")
    everything = read(stats_saver.save_trajectories(rows, 3, 100)[0])
    assert some is not None and every is not None and some != every
    for records, stats in ((saved, some), (everything, every)):
        for name in ("repeat_score", "reflection_pattern_score", "policy_entropy", "response_token_count"):
            assert stats[f"trajectory/{name}_mean"] == pytest.approx(
                sum(entry[name] for entry in records) / len(records)
            )


def test_groups_are_kept_whole_and_say_why(tmp_path: Path) -> None:
    rows = rollout(8, 4)
    saved = read(saver(tmp_path).save_trajectories(batches(rows), 1, 12)[0])
    assert len(saved) == 12 and len({entry["uid"] for entry in saved}) == 12
    groups = {entry["gid"] for entry in saved}
    assert len(groups) == 3 and all(entry["kept"] for entry in saved)
    by_lot = [entry for entry in saved if entry["kept_weight"] is not None]
    assert len(by_lot) == 4 and {entry["kept_weight"] for entry in by_lot} == {8.0}
    again = read(saver(tmp_path / "again").save_trajectories(list(reversed(rows)), 1, 12)[0])
    assert {entry["uid"] for entry in again} == {entry["uid"] for entry in saved}
    other = read(saver(tmp_path / "other").save_trajectories(rows, 2, 12)[0])
    assert {entry["uid"] for entry in other} != {entry["uid"] for entry in saved}
    first = read(saver(tmp_path / "first", keep="first").save_trajectories(rows, 1, 5)[0])
    assert [entry["uid"] for entry in first] == [row.eid.uid for row in rows[:5]] and first[0]["kept"] == "first"
    custom = saver(tmp_path / "own", keep=lambda some, count: [(some[-1], "because")])
    (last,) = read(custom.save_trajectories(rows, 1, 5)[0])
    assert last["uid"] == rows[-1].eid.uid and last["kept"] == "because"


def test_a_sample_that_comes_twice_is_saved_once(tmp_path: Path) -> None:
    rows = rollout(1, 3)
    assert len(read(saver(tmp_path).save_trajectories([*rows, *batches(rows)], 1)[0])) == 3


def test_samples_without_ids_get_one_by_content(tmp_path: Path) -> None:
    batch = from_experiences(rollout(2, 2))
    batch.ids = None
    first, second = (read(saver(tmp_path / name).save_trajectories([batch], 4)[0]) for name in "ab")
    assert [record["uid"] for record in first] == [record["uid"] for record in second]
    assert len({record["uid"] for record in first}) == 4 and len({record["gid"] for record in first}) == 2
    assert not first[0]["named"] and EID.parse(first[0]["uid"]).batch == 4


# --- errors -------------------------------------------------------------------------------------------------------


class Refuses:
    eos_token_id = END

    def decode(self, ids: Any, **options: Any) -> str:
        if len(ids) > 6:
            raise RuntimeError("too long for me")
        return TOKENIZER.decode(ids, **options)


def test_what_cannot_be_saved_is_counted_and_said_once(tmp_path: Path) -> None:
    refusing = TrajectorySaver(tmp_path, Refuses())
    rows = [record("a", "b"), record("a", "b" * 50), record("a", "c")]
    with pytest.warns(UserWarning, match="too long for me"):
        outcomes = [refusing.save_trajectories(rows, 0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcomes += [refusing.save_trajectories(rows, step) for step in (1, 2)]
    for path, stats in outcomes:
        assert [entry["generated_text"] for entry in read(path)] == ["b", "c"]
        assert stats == {"trajectory/save_errors": 1.0}
    assert refusing.error_count == 3 and "too long for me" in refusing.errors[0]


@pytest.mark.parametrize(
    "call",
    [
        {"experiences": [3]},
        {"experiences": 3},
        {"experiences": [ExperienceBatch(None, *[None] * 8)]},
        {"step": "x"},
        {"step": None},
        {"num_samples": -1},
        {"num_samples": 2.5},
        {"prefix": "../up"},
        {"prefix": ""},
        {"compute_stats": "some"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_no_call_stops_training(call: dict[str, Any], tmp_path: Path) -> None:
    failing = saver(tmp_path / "in")
    path, stats = failing.save_trajectories(**{"experiences": rollout(1, 2), "step": 1, **call})
    assert path is None and stats == {"trajectory/save_errors": 1.0} and failing.error_count == 1
    assert not list(tmp_path.rglob("*.json"))
    path, stats = failing.save_trajectories(rollout(1, 2), 1, compute_stats=True)
    assert len(read(path)) == 2 and "trajectory/save_errors" not in (stats or {})


@pytest.mark.filterwarnings("error")
def test_not_even_a_warning_that_is_an_error_stops_training(tmp_path: Path) -> None:
    assert saver(tmp_path).save_trajectories([3], 1) == (None, {"trajectory/save_errors": 1.0})


@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_one_bad_batch_costs_no_other(tmp_path: Path) -> None:
    rows = rollout(2, 2)
    bad = from_experiences(rows[:2])
    bad.sequences = bad.sequences.float()
    half = from_experiences(rows[2:])
    half.advantages = half.advantages[:1]
    batch_saver = saver(tmp_path)
    path, stats = batch_saver.save_trajectories([bad, half, rows[0]], 1)
    assert [entry["uid"] for entry in read(path)] == [rows[i].eid.uid for i in (2, 3, 0)]
    assert stats == {"trajectory/save_errors": 2.0} and "expected token ids" in batch_saver.errors[0]


@pytest.mark.filterwarnings("ignore:saving trajectories")
def test_a_folder_that_is_gone_or_full_is_an_error_of_that_save(tmp_path: Path) -> None:
    folder_saver = saver(tmp_path / "in")
    (tmp_path / "in" / "images").rmdir()
    (tmp_path / "in").rmdir()
    (tmp_path / "in").write_text("a file in its place")
    assert folder_saver.save_trajectories(rollout(1, 1), 1) == (None, {"trajectory/save_errors": 1.0})


def test_what_is_no_error_passes(tmp_path: Path) -> None:
    class Stops:
        def decode(self, ids: Any) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrajectorySaver(tmp_path, Stops()).save_trajectories(rollout(1, 1), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": 3}, "tokenizer: got int"),
        ({"max_image_size": 0}, "max_image_size: got 0"),
        ({"save_images_separately": "no"}, "save_images_separately: got 'no'"),
        ({"mark_high_entropy_tokens": 1}, "mark_high_entropy_tokens: got 1"),
        ({"high_entropy_token_ratio": "x"}, "high_entropy_token_ratio: got 'x'"),
        ({"keep": "best"}, "keep: got 'best', expected one of"),
        ({"background": None}, "background: got None"),
        ({"process_group": 3}, "process_group: got 3"),
    ],
)
def test_a_constructor_says_what_is_wrong(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        TrajectorySaver(**{"save_dir": tmp_path, "tokenizer": TOKENIZER, **options})


# --- LightRFT's names ---------------------------------------------------------------------------------------------


def test_made_from_arguments(tmp_path: Path) -> None:
    args = SimpleNamespace(save_trajectories=True, save_path=str(tmp_path))
    created = create_trajectory_saver(args, TOKENIZER)
    assert created is not None and created.save_dir == tmp_path / "trajectories" and created.max_image_size == 512
    assert (created.mark_high_entropy_tokens, created.high_entropy_token_ratio) == (False, 0.2)
    args.mark_high_entropy_tokens, args.high_entropy_token_ratio = True, 0.0
    created = create_trajectory_saver(args, TOKENIZER)
    assert created is not None and (created.mark_high_entropy_tokens, created.high_entropy_token_ratio) == (True, 0.0)
    args.high_entropy_token_ratio = None
    created = create_trajectory_saver(args, TOKENIZER)
    assert created is not None and created.high_entropy_token_ratio == 0.2
    assert create_trajectory_saver(SimpleNamespace(save_trajectories=False), TOKENIZER) is None


def test_helpers() -> None:
    assert _check_reflection_pattern(TEXTS[0])["wait"] == 1 == _calculate_reflection_pattern_score(TEXTS[0])
    assert set(_check_reflection_pattern("").values()) == {0} and _calculate_reflection_pattern_score("") == 0
    chances = torch.full((3, 8), 1 / 8).log()
    assert _calculate_entropy_from_log_probs(chances) == pytest.approx(math.log(8))
    assert _calculate_entropy_from_log_probs(torch.zeros(1)) == _calculate_entropy_from_log_probs(None) == 0.0
