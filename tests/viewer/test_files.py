"""Files of other tools open: steps, groups, rewards and texts as their writers had them; what is damaged or hostile in
them costs nobody anything else; and what they gain is seen."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import Experience
from rollbook.compat.lightrft.saver import TrajectorySaver
from rollbook.inspect import file_adapters, file_stores
from rollbook.inspect.file_source import (
    FORMATS,
    FileSource,
    UnknownFormatError,
    extract_step,
    recognize,
)
from rollbook.inspect.index import Index
from rollbook.inspect.serialization import decode, encode, json_safe
from rollbook.inspect.sources import load, open_source
from rollbook.inspect.trajectory import Trajectory
from tests import tiny
from tests.viewer import files_made as made
from tests.viewer.files_made import EVIL, MAKERS, lines

COLUMNS = "uid, gid, step, run, task, reward, scored, status, prompt, closing, evaluation, response_tokens"


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[FileSource, Index]]:
    with FileSource(path, **options) as source, Index() as index:
        load(source, index)
        yield source, index


def rows(index: Index, order: str = "n") -> list[dict[str, Any]]:
    return index.rows(f"SELECT {COLUMNS} FROM samples ORDER BY {order}")


def documents(source: FileSource, index: Index) -> list[Trajectory]:
    return source.trajectories([row["uid"] for row in rows(index)])


def check(trajectory: Trajectory) -> None:
    """What holds of every trajectory."""
    assert trajectory.uid and trajectory.gid and trajectory.step is not None and len(trajectory.prompt) == 16
    ends = [0, *trajectory.ends.tolist()]
    assert all(a <= b for a, b in pairwise(ends)) and ends[-1] == len(trajectory.text)
    assert "".join(trajectory.token(i) for i in range(len(trajectory.ends))) == trajectory.text
    at = 0
    for segment in trajectory.segments:
        assert segment.start == at < segment.stop and segment.trained == trajectory.mask[at : segment.stop].any()
        at = segment.stop
    assert at == len(trajectory.ends)
    (shown,) = decode(encode([trajectory]))
    assert shown["uid"] == trajectory.uid, "a browser can be sent it"
    if trajectory.rejected is not None:
        assert len(trajectory.rejected.ends) >= trajectory.prompt_tokens


@pytest.mark.parametrize("name", MAKERS)
def test_it_opens(name: str, tmp_path: Path) -> None:
    family, make = MAKERS[name]
    path = make(tmp_path)
    assert recognize(path) == family
    with opened(path) as (source, index):
        assert source.kind == family and source.damaged == 0, source.problems
        trajectories = documents(source, index)
        assert len(trajectories) >= 1
        for trajectory, row in zip(trajectories, rows(index), strict=True):
            check(trajectory)
            assert (trajectory.uid, trajectory.gid, trajectory.step, trajectory.run, trajectory.prompt) == tuple(
                row[key] for key in ("uid", "gid", "step", "run", "prompt")
            ), "a document says what the index says"
            content = source.record(trajectory.uid)
            json.dumps(content, allow_nan=False)
            assert content["uid"] == trajectory.uid and content["row"]
            assert source.history(trajectory.uid) is None
        with pytest.raises(KeyError, match="nobody"):
            source.trajectories(["nobody"])
        with pytest.raises(ValueError, match="rollbook import BOOK FILE"):
            source.sql("SELECT 1", seconds=1.0, rows=1)
        assert source.refresh(index) is None, "nothing changed"
        before = rows(index)
    with opened(path) as (source, index):
        assert rows(index) == before, "the same files give the same ids"


# --- each tool --------------------------------------------------------------------------------------------------------


def test_verl(tmp_path: Path) -> None:
    with opened(made.verl(tmp_path)) as (source, index):
        listed = rows(index)
        assert [row["step"] for row in listed] == [2, 2, 2, 10, 10, 10]
        assert [row["run"] for row in listed] == [0, 1, 0] * 2
        assert len({row["gid"] for row in listed}) == 4 and len({row["prompt"] for row in listed}) == 2
        assert [row["scored"] for row in listed[:3]] == [1, 1, 2], "NaN is a reward that could not be given"
        first, second, third = source.trajectories([row["uid"] for row in listed[:3]])
        assert first.text == "user\n2 + 3 ?\nassistant\nthe answer is 5" and first.tokenized == "words"
        assert first.text[first.prompt_end :] == first.response_text == "the answer is 5"
        assert first.parts == {"acc": 1.0} and first.label == "5" and not first.arrays
        assert second.response_text == f"six {EVIL}"
        assert [(s.role, s.kind) for s in third.segments][-2:] == [("assistant", "think"), ("assistant", "text")]


def test_verl_ids_keep_their_numbers(tmp_path: Path) -> None:
    path = made.verl_parquet(tmp_path)
    with opened(path) as (source, index):
        first, second = documents(source, index)
        assert first.ids is not None and first.ids.tolist() == [5, 6, 1, 2, 3], "padding is gone"
        assert first.tokenized == "ids" and first.text == "⟨5⟩⟨6⟩⟨1⟩⟨2⟩⟨3⟩"
        assert first.mask.tolist() == [False, False, True, False, True]
        np.testing.assert_allclose(first.arrays["logprob"], [np.nan, np.nan, -0.1, -0.2, -0.3], rtol=1e-6)
        np.testing.assert_allclose(first.arrays["mismatch"][2:], [0, 0, -0.1], atol=1e-6)
        assert first.reward == 1.0 and (first.step, first.task) == (3, "a") and second.task == "b"
    words = tiny.words()
    with opened(path, tokenizer=words) as (source, index):
        first = documents(source, index)[0]
        assert first.tokenized == "exact" and first.text == words.decode([5, 6, 1, 2, 3])


def test_trl_sums_its_rewards_and_says_so(tmp_path: Path) -> None:
    with opened(made.trl(tmp_path)) as (source, index):
        trajectories = documents(source, index)
        assert [trajectory.reward for trajectory in trajectories[:4]] == [1.5, 0.5, 1.0, 0.0]
        assert (
            trajectories[0].parts == {"accuracy_reward": 1.0, "format_reward": 0.5} and trajectories[0].advantage == 0.7
        )
        assert "TRL does not log the total reward" in trajectories[0].notes[0]
        assert [trajectory.step for trajectory in trajectories] == [5] * 4 + [6] * 4
        assert sorted({trajectory.gid for trajectory in trajectories}) == sorted(
            {f"{trajectory.step}/{trajectory.prompt}" for trajectory in trajectories}
        )


def test_trl_conversations(tmp_path: Path) -> None:
    with opened(made.trl_chat(tmp_path)) as (source, index):
        trajectory = documents(source, index)[0]
        assert [(s.role, s.kind) for s in trajectory.segments] == [
            ("system", "text"),
            ("user", "text"),
            ("assistant", "think"),
            ("assistant", "text"),
        ]
        assert trajectory.text == "Be brief.\n2 + 3 ?\n<think>hm</think>5" and trajectory.reward == 1.0


def test_openrlhf_pairs(tmp_path: Path) -> None:
    with opened(made.openrlhf_pairs(tmp_path)) as (source, index):
        (trajectory,) = documents(source, index)
        assert trajectory.kind == "dpo" and trajectory.response_text == "5" and trajectory.rejected is not None
        assert trajectory.rejected.response_text == f"6 {EVIL}"


def test_verifiers_results(tmp_path: Path) -> None:
    with opened(made.verifiers(tmp_path)) as (source, index):
        listed = rows(index)
        assert [(row["task"], row["run"]) for row in listed] == [
            ("sums:2", 0),
            ("sums:2", 1),
            ("sums:7", 0),
            ("sums:7", 1),
        ]
        assert [row["status"] for row in listed] == ["finished", "truncated"] * 2
        trajectory = documents(source, index)[0]
        assert [(s.role, s.kind, s.name, s.turn) for s in trajectory.segments] == [
            ("system", "text", "", 0),
            ("user", "text", "", 0),
            ("assistant", "tool_call", "add", 0),
            ("tool", "tool_result", "add", 1),
            ("assistant", "text", "", 1),
        ]
        assert (
            trajectory.parts == {"right": 1.0}
            and trajectory.tools
            and trajectory.info["token_usage"]
            and "right" not in trajectory.info
        )
        assert '"arguments": {"x": 2, "y": 3}' in trajectory.text, "arguments are JSON, not a text of it"
        assert not source.problems  # metadata.json stands beside them, and is no rollout


def test_prime_rl_rollouts(tmp_path: Path) -> None:
    with opened(made.prime_rl(tmp_path)) as (source, index):
        listed = rows(index)
        assert sorted((row["step"], row["evaluation"]) for row in listed) == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1)]
        trajectory = next(trajectory for trajectory in documents(source, index) if not trajectory.evaluation)
        assert (
            trajectory.ids is not None
            and trajectory.ids.tolist() == list(range(1, 10))
            and trajectory.prompt_tokens == 3
        )
        assert trajectory.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
        np.testing.assert_allclose(trajectory.arrays["logprob"][[3, 4, 7, 8]], [-0.1, -0.2, -0.3, -0.4], rtol=1e-6)
        assert np.isnan(trajectory.arrays["logprob"][[0, 5, 6]]).all() and trajectory.advantage == 0.5
        assert trajectory.response_text is not None and trajectory.response_text.endswith("5")
        assert any("pickle" in note for note in source.problems), "a .bin is not read, and that is said"


def test_a_turn_behind_other_tokens_is_not_marked(tmp_path: Path) -> None:
    turns = [
        {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.1]}},
        {"tokens": {"prompt_ids": [1, 9], "completion_ids": [4], "completion_logprobs": [-0.2]}},
    ]
    path = lines(tmp_path / "results.jsonl", [made.verifiers_row(1, 1.0, "x", trajectory=turns)])
    with opened(path) as (source, index):
        (trajectory,) = documents(source, index)
        assert trajectory.mask.tolist() == [False, False, True] and "1 of 2 turns" in trajectory.notes[0]
        np.testing.assert_allclose(trajectory.arrays["logprob"], [np.nan, np.nan, -0.2])


def test_traces_that_verifiers_wrote(tmp_path: Path) -> None:
    with opened(made.traces(tmp_path)) as (source, index):
        listed = rows(index)
        assert [(row["step"], row["task"], row["run"]) for row in listed] == [
            (5, "g0", 0),
            (5, "g0", 1),
            (6, "g1", 0),
            (6, "g1", 1),
        ]
        assert [row["reward"] for row in listed] == pytest.approx([1.1, 0.1, 1.1, 0.1])
        assert [row["status"] for row in listed] == ["finished", "truncated"] * 2
        trajectory = documents(source, index)[0]
        # Every id of the fixture is the character that it stands for.
        assert trajectory.ids is not None
        text = "".join(map(chr, trajectory.ids.tolist()))
        assert text.startswith("<s>Be brief.\n<u>What is 0 + 3?\n<a><think>easy</think>I will add.")
        trained = "".join(np.array(list(text))[trajectory.mask].tolist())
        assert trained == "<think>easy</think>I will add.<call>add3"
        assert (
            not np.isnan(trajectory.arrays["logprob"][trajectory.mask]).any()
            and np.isnan(trajectory.arrays["logprob"][~trajectory.mask]).all()
        )
        np.testing.assert_allclose(trajectory.arrays["mismatch"][trajectory.mask], -0.05, atol=1e-6)
        assert (
            set(trajectory.arrays) >= {"entropy", "kl", "advantage", "credit", "ratio"} and trajectory.advantage == 0.5
        )
        assert [s.role for s in trajectory.segments] == ["system", "user", "assistant", "tool", "assistant"]
        assert (
            trajectory.messages and trajectory.tools and trajectory.parts == {"right": 1.0, "format": 0.5, "turns": 2.0}
        )


def test_numbers_of_some_turns_are_left_out(tmp_path: Path) -> None:
    """They would look like NaNs of the others."""
    row = json.loads((made.DATA / "verifiers-0.4.0-traces.jsonl").read_text().splitlines()[0])
    del row["traces"][0]["nodes"][4]["entropies"]
    row["traces"][0]["nodes"][2]["logprobs"].pop()
    with opened(lines(tmp_path / "traces.jsonl", [row])) as (source, index):
        (trajectory,) = documents(source, index)
        assert (
            "entropy" not in trajectory.arrays
            and "mismatch" not in trajectory.arrays
            and "advantage" in trajectory.arrays
        )
        assert any("entropies omitted: recorded for 39 of 40" in note for note in trajectory.notes)
        assert index.query("SELECT nans FROM samples") == [(0,)]


def test_a_graph_of_messages_is_a_trajectory_a_leaf(tmp_path: Path) -> None:
    def node(parent: int | None, role: str, text: str, sampled: bool = False) -> dict[str, Any]:
        return {"parent": parent, "message": {"role": role, "content": text}, "sampled": sampled}

    trace = {
        "id": "t1",
        "task": {"type": "X", "data": {"idx": 4, "prompt": "go"}},
        "nodes": [node(None, "user", "go"), node(0, "assistant", "left", True), node(0, "assistant", "right", True)],
        "rewards": {"win": {"score": 1.0, "weight": 2.0}, "lost": None},
        "info": {"prime_rl": {"step": 8, "env_name": "maze"}},
        "is_completed": True,
        "ok": True,
    }
    path = lines(tmp_path / "train_rollouts.jsonl", [trace, {**trace, "id": "t2", "nodes": trace["nodes"][:2]}])
    with opened(path) as (source, index):
        trajectories = documents(source, index)
        assert [(trajectory.run, trajectory.turn, trajectory.response_text) for trajectory in trajectories] == [
            (0, 0, "left"),
            (0, 1, "right"),
            (1, 0, "left"),
        ]
        assert (
            {trajectory.gid for trajectory in trajectories} == {"8/maze:4"}
            and trajectories[0].reward == 2.0
            and trajectories[0].tokenized == "words"
        )
    looped = {**trace, "nodes": [node(1, "user", "go"), node(0, "assistant", "x", True)]}
    with opened(lines(tmp_path / "loop" / "traces.jsonl", [trace, looped])) as (source, index):
        assert source.damaged == 1 and "parent" in source.problems[0]


def test_messages(tmp_path: Path) -> None:
    with opened(made.messages(tmp_path)) as (source, index):
        first, second = documents(source, index)
        assert first.gid == second.gid and (first.run, second.run) == (0, 1) and first.uid.endswith("/run-a d")
        assert [(s.role, s.kind, s.name) for s in first.segments] == [
            ("system", "text", ""),
            ("user", "text", ""),
            ("user", "image", ""),
            ("user", "image", ""),
            ("assistant", "think", ""),
            ("assistant", "tool_call", "look"),
            ("tool", "tool_result", "look"),
            ("assistant", "text", ""),
        ]
        (picture,) = first.pictures
        assert (picture.mime, picture.width, picture.height) == ("image/png", 1, 1)
        assert picture.token is not None and first.token(picture.token) == "⟨image⟩"
        assert picture.sha256 == sha256(made.png()).hexdigest() and source.media(picture.sha256) == (
            made.png(),
            "image/png",
        )
        assert source.media("0" * 64) is None
        assert any("not fetched" in note for note in first.notes), "another address is never asked"
        assert '{"name": "look", "arguments": "{not json"}' in first.text
        assert (first.reward, first.parts, first.kind) == (1.0, {"quality": 0.25}, "multi_turn")
        assert first.mask.tolist() == [s.role == "assistant" for s in first.segments for _ in range(s.start, s.stop)]


@pytest.mark.parametrize("maker", [made.inspect, made.inspect_json])
def test_inspect(maker: Any, tmp_path: Path) -> None:
    with opened(maker(tmp_path)) as (source, index):
        listed = rows(index, "task, run")
        assert [(row["task"], row["run"], row["reward"]) for row in listed] == [
            ("picture", 0, 1.0),
            ("picture", 1, 0.0),
            ("sum", 0, 1.0),
            ("sum", 1, 0.0),
        ]
        right, wrong = source.trajectories([listed[0]["uid"], listed[1]["uid"]])
        assert right.parts == {"match": 1.0, "graded.right": 1.0, "graded.short": 0.5}
        assert (
            "the first score, 'match'" in right.notes[0]
            and right.label == "5"
            and right.info["model"] == "mockllm/model"
        )
        assert [(s.role, s.kind, s.name) for s in right.segments] == [
            ("system", "text", ""),
            ("user", "text", ""),
            ("user", "image", ""),
            ("assistant", "text", ""),
            ("assistant", "tool_call", "add"),
            ("tool", "tool_result", "add"),
            ("assistant", "text", ""),
        ]
        (picture,) = right.pictures
        content = source.media(picture.sha256)
        assert content is not None and content[0].startswith(b"\x89PNG"), "an attachment is put back"
        assert wrong.response_text is not None and wrong.response_text.endswith(EVIL)


def test_a_folder_of_logs_is_a_run_of_steps(tmp_path: Path) -> None:
    content = made.inspect(tmp_path).read_bytes()
    for name in ("2026-01-02_sums.eval", "2026-01-01_sums.eval"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "sums.eval").unlink()
    with opened(tmp_path) as (_, index):
        assert index.query("SELECT step, count(*) FROM samples GROUP BY step") == [(0, 4), (1, 4)]
        assert index.query("SELECT count(DISTINCT prompt) FROM samples") == [(2,)], "the same prompt in both"


def test_lightrft_entropies_are_on_their_tokens(tmp_path: Path) -> None:
    with opened(made.lightrft(tmp_path / "run")) as (source, index):
        trajectories = documents(source, index)
        assert [trajectory.step for trajectory in trajectories] == [20, 20, 100, 100] and len(
            {trajectory.gid for trajectory in trajectories}
        ) == 2
        trajectory = trajectories[0]
        assert trajectory.text == "".join(made.TOKENS), (
            "the last token is found in the whole text, padding is not shown"
        )
        shown = [trajectory.token(i) for i in range(trajectory.prompt_tokens, len(trajectory.ends))]
        assert shown == made.TOKENS[5:]
        expected = [e if e in (2.0, 1.5) else np.nan for e in made.ENTROPIES]
        np.testing.assert_allclose(trajectory.arrays["entropy"][trajectory.prompt_tokens :], expected)
        assert np.isnan(trajectory.arrays["entropy"][: trajectory.prompt_tokens]).all()
        np.testing.assert_allclose(
            trajectory.arrays["logprob"][trajectory.prompt_tokens :], [-0.1, -0.2, -0.3, -0.4, -0.5]
        )
        assert trajectory.advantage == 0.5 and "return" not in trajectory.arrays
        assert index.query("SELECT DISTINCT nans, entropy FROM samples") == [(0, None)], (
            "of some tokens there is no mean"
        )
        notes = " ".join(trajectory.notes)
        for words in ("one token early (corrected)", "return omitted: only one number", "policy_entropy omitted"):
            assert words in notes
        assert (trajectory.reward, trajectory.parts, trajectory.label) == (1.0, {"accuracy": 1.0}, "5")
        assert [source.media(picture.sha256) for picture in trajectory.pictures] == [(made.png(7), "image/png")]


@pytest.mark.parametrize(
    ("change", "note", "lenses"),
    [
        ({"generated_tokens": None, "pure_generated_tokens": None}, "advantages omitted: 5 numbers", set()),
        ({"advantages": 0.5}, "advantages omitted: only one number", {"entropy", "logprob"}),
        ({"advantages": [0.5] * 9}, "advantages omitted: 9 numbers", {"entropy", "logprob"}),
        ({"full_sequence": "something else"}, "Unknown start of the response", set()),
        ({"full_sequence": "".join(made.TOKENS[:9])}, "The last response token is not", {"entropy", "logprob"}),
        ({"pure_generated_text": "other"}, "", set()),
    ],
)
def test_lightrft_shows_only_what_is_aligned(
    change: dict[str, Any], note: str, lenses: set[str], tmp_path: Path
) -> None:
    row = {**made.lightrft_row(1, 1.0), **change}
    path = tmp_path / "trajectories_step_1.json"
    path.write_text(json.dumps([{name: value for name, value in row.items() if value is not None}]))
    with opened(path) as (source, index):
        (trajectory,) = documents(source, index)
        check(trajectory)
        assert note in " ".join(trajectory.notes) and set(trajectory.arrays) & {"entropy", "logprob"} == lenses & {
            "entropy",
            "logprob",
        }
        if "advantages" in change:
            assert "advantage" not in trajectory.arrays


def test_what_the_saver_wrote(tmp_path: Path) -> None:
    words = tiny.words()
    prompt, response = (
        words(t, add_special_tokens=False)["input_ids"] for t in ("what is two ?", "the answer is five")
    )
    count = len(response)
    records = [
        Experience(
            eid={"batch": 4, "task": f"q{i // 2}", "run": i % 2, "suffix": f"s{i}"},
            tokens=[*prompt, *response],
            prompt_length=len(prompt),
            logprobs=[-0.1] * count,
            old_logprobs=[-0.2] * count,
            entropy=[0.1 * k for k in range(count)],
            advantages=[0.5] * count,
            reward=float(i % 2) if i else math.nan,
            metrics={"acc": float(i % 2)},
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": made.data_url(3)}}]}],
        )
        for i in range(4)
    ]
    saver = TrajectorySaver(str(tmp_path), words, mark_high_entropy_tokens=True)
    assert saver.save_trajectories(records, 12)[0]
    with opened(tmp_path) as (source, index):
        assert source.kind == "rollbook-json"
        trajectories = documents(source, index)
        assert [trajectory.uid for trajectory in trajectories] == [row.eid.uid for row in records] and {
            trajectory.step for trajectory in trajectories
        } == {12}
        assert [trajectory.gid for trajectory in trajectories] == ["4/q0", "4/q0", "4/q1", "4/q1"]
        trajectory = trajectories[1]
        assert (
            trajectory.tokenized == "exact"
            and trajectory.ids is not None
            and trajectory.ids.tolist() == [*prompt, *response]
        )
        assert trajectory.text == words.decode([*prompt, *response]) and trajectory.prompt_tokens == len(prompt)
        np.testing.assert_allclose(
            trajectory.arrays["entropy"][len(prompt) :], [0.1 * k for k in range(count)], rtol=1e-5
        )
        np.testing.assert_allclose(trajectory.arrays["mismatch"][len(prompt) :], -0.1, rtol=1e-5)
        assert trajectory.reward == 1.0 and trajectory.parts == {"acc": 1.0} and trajectory.kept
        assert trajectory.pictures and source.media(trajectory.pictures[0].sha256) is not None
        # Saved again: what was there is replaced.
        saver.save_trajectories(records[2:], 12)
        assert source.refresh(index) == {12}
        assert [row["uid"] for row in rows(index)] == [row.eid.uid for row in records[2:]]
        assert len(documents(source, index)) == 2


@pytest.mark.parametrize("name", ["parquet", "jsonl", "frames", "hf", "trxp"])
def test_own_exports_keep_every_number(name: str, tmp_path: Path) -> None:
    records = made.records()
    with opened(MAKERS[name][1](tmp_path)) as (source, index):
        trajectories = documents(source, index)
        assert [trajectory.uid for trajectory in trajectories] == [row.eid.uid for row in records]
        for trajectory, row in zip(trajectories, records, strict=True):
            assert trajectory.ids is not None and trajectory.ids.tolist() == row.tokens.tolist()
            assert (trajectory.reward, trajectory.prompt_text, trajectory.response_text) == (
                row.reward,
                row.prompt_text,
                row.response_text,
            )
            assert row.logprobs is not None and trajectory.versions is not None
            np.testing.assert_array_equal(trajectory.arrays["logprob"][2:], row.logprobs.numpy())
            np.testing.assert_allclose(trajectory.arrays["mismatch"][2:], [0, -0.05, 0], atol=1e-6)
            assert trajectory.versions.tolist() == [-1, -1, 3, 3, 3] and trajectory.parts == {"acc": row.reward}
        assert trajectories[1].info["note"] == EVIL and json_safe(trajectories[1].info["odd"]) == [1, [0, 1, 2]]


def test_trinity_databases(tmp_path: Path) -> None:
    with opened(made.trinity(tmp_path)) as (_, index):
        listed = rows(index)
        assert [(row["gid"], row["run"], row["reward"]) for row in listed[:3]] == [
            ("3/0", 0, 0.0),
            ("3/0", 1, 1.0),
            ("3/1", 0, None),
        ]
    old = tmp_path / "old.db"
    old.write_bytes(gzip.decompress((made.TRINITY / "trinity_0.5.1.db.gz").read_bytes()))
    with pytest.raises(UnknownFormatError, match="pickled records of an older Trinity .* `rollbook import BOOK FILE`"):
        FileSource(old)


def test_looking_imports_no_torch(tmp_path: Path) -> None:
    paths = []
    for name, (_, make) in MAKERS.items():
        (tmp_path / name).mkdir()
        paths.append(str(make(tmp_path / name / "x") if name == "lightrft" else make(tmp_path / name)))
    script = (
        "import sys\n"
        "from rollbook.inspect.file_source import FileSource\n"
        "from rollbook.inspect.index import Index\n"
        "for path in sys.argv[1:]:\n"
        "    with FileSource(path) as source, Index() as index:\n"
        "        source.refresh(index)\n"
        "        source.trajectories([uid for (uid,) in index.query('SELECT uid FROM samples')])\n"
        "        assert 'torch' not in sys.modules, path\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# --- live -------------------------------------------------------------------------------------------------------------


def test_lines_that_are_appended(tmp_path: Path) -> None:
    row = {"input": "2 + 3 ?", "output": "5", "score": 1.0, "step": 1}
    path = lines(tmp_path / "1.jsonl", [row])
    with opened(tmp_path) as (source, index):
        more = json.dumps({**row, "output": "six", "score": 0.0}).encode()
        with path.open("ab") as file:
            file.write(more[:20])
        assert source.refresh(index) is None and source.damaged == 0, "half a line waits"
        with path.open("ab") as file:
            file.write(more[20:] + b"\n" + more)
        assert source.refresh(index) == {1}
        assert [(r["run"], r["closing"]) for r in rows(index)] == [(0, "5"), (1, "six"), (2, "six")]
        lines(tmp_path / "2.jsonl", [{**row, "step": 2}])
        assert 2 in (source.refresh(index) or ())
        assert len({r["uid"] for r in rows(index)}) == 4 and documents(source, index)[3].step == 2
        (tmp_path / "3.jsonl").touch()
        assert source.refresh(index) is None, "an empty file is one that is being begun"
        lines(tmp_path / "3.jsonl", [{**row, "step": 3}])
        assert 3 in (source.refresh(index) or ())


def test_a_large_file_is_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages need not wait for the last row, and what is read of a file is not read again."""
    monkeypatch.setattr("rollbook.inspect.file_source._REFRESH_SECONDS", 0.0)
    made.verl(tmp_path)
    source = open_source(tmp_path)
    assert isinstance(source, FileSource)
    with source, Index() as index:
        seen = []
        while source.refresh(index):
            seen.append(len(rows(index)))
            assert len(documents(source, index)) == seen[-1]
        assert seen == [1, 2, 3, 4, 5, 6]


def test_a_file_that_is_written_anew(tmp_path: Path) -> None:
    row = {"input": "2 + 3 ?", "output": "5", "score": 1.0, "step": 1}
    path = lines(tmp_path / "1.jsonl", [row, {**row, "output": "6"}])
    with opened(path) as (source, index):
        old = documents(source, index)
        lines(path, [{**row, "output": "seven, and more than there was before", "score": 0.5}])
        assert source.refresh(index) == {1}
        assert [(r["run"], r["reward"]) for r in rows(index)] == [(0, 0.5)]
        with pytest.raises(KeyError):
            source.trajectories([old[1].uid])
        with Index() as other:
            assert source.refresh(other) == {1}, "another index is filled from the beginning"
            assert len(rows(other)) == 1


@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=6),
    st.lists(st.integers(1, 400), max_size=8),
)
@settings(max_examples=15)
def test_however_a_file_grows_it_is_read_once(texts: list[str], cuts: list[int]) -> None:
    import tempfile

    rows_ = [{"input": f"{i} {text}", "output": text, "score": float(i), "step": i} for i, text in enumerate(texts)]
    content = b"".join(json.dumps(row, ensure_ascii=i % 2 == 0).encode() + b"\n" for i, row in enumerate(rows_))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_bytes(content)
        with opened(path) as (source, index):
            expected = rows(index)
        first = content.index(b"\n") + 1
        path.write_bytes(content[:first])
        with opened(path) as (source, index):
            at = first
            for size in [*cuts, len(content)]:
                with path.open("ab") as file:
                    file.write(content[at : at + size])
                at = min(at + size, len(content))
                source.refresh(index)
                assert source.damaged == 0
            assert rows(index) == expected


# --- hostile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_files_that_are_cut_short(name: str, tmp_path: Path) -> None:
    """Whatever is missing, the rest is shown or the file is refused with a reason."""
    path = MAKERS[name][1](tmp_path)
    files = sorted(candidate for candidate in path.rglob("*") if candidate.is_file()) if path.is_dir() else [path]
    file = next(
        candidate
        for candidate in files
        if candidate.suffix not in (".png", ".bin") and candidate.name != "metadata.json"
    )
    content = file.read_bytes()
    for share in (0.02, 0.3, 0.6, 0.9, 0.999):
        file.write_bytes(content[: int(len(content) * share)])
        try:
            with opened(path) as (source, index):
                for trajectory in documents(source, index):
                    check(trajectory)
        except (UnknownFormatError, ValueError) as error:
            assert str(error)


OTHERS = ("metadata.json", "metrics.jsonl")
STRANGE: list[Any] = [
    *(
        None,
        True,
        -3,
        2**70,
        float("nan"),
        float("inf"),
        "",
        EVIL,
        "\ud800",
        [],
        {},
        [None],
        [[1, "a"]],
        {"a": {"b": []}},
    ),
    *([{"role": 3}], [{"role": "user", "content": [3, None, {"type": "image"}]}], [{}], {"url": "file:///etc/passwd"}),
]


@pytest.mark.parametrize(
    "name", ["verl", "trl-chat", "openrlhf", "verifiers", "prime-rl", "traces", "messages", "lightrft"]
)
def test_values_of_other_types(name: str, tmp_path: Path) -> None:
    """A row that holds what it cannot is shown or counted; the rows around it are whole."""
    folder = tmp_path / "as"
    if name != "lightrft":
        folder.mkdir()
    path = MAKERS[name][1](folder)
    file = (
        next(candidate for candidate in sorted(path.rglob("*.json*")) if candidate.name not in OTHERS)
        if path.is_dir()
        else path
    )
    text = file.read_text()
    good = json.loads(text)[0] if text.startswith("[") else json.loads(text.splitlines()[0])
    changed = [{**good, key: value} for key in good for value in STRANGE]
    inner = next((key for key in ("traces", "messages", "completion") if isinstance(good.get(key), list)), None)
    if inner:
        first = good[inner][0]
        changed += [{**good, inner: [{**first, key: value}]} for key in first for value in STRANGE]
        if "nodes" in first:
            node = first["nodes"][2]
            changed += [
                {**good, inner: [{**first, "nodes": [*first["nodes"][:2], {**node, key: value}]}]}
                for key in node
                for value in STRANGE
            ]
    target = tmp_path / "out" / "trajectories_step_3.json"
    target.parent.mkdir()
    all_rows = [good, *changed, good]
    if name == "lightrft":
        target.write_text(json.dumps(all_rows))
    else:
        target = lines(target.with_name("3.jsonl"), [])
        target.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in all_rows))
    with opened(target) as (source, index):
        trajectories = documents(source, index)
        for trajectory in trajectories:
            check(trajectory)
        assert len(trajectories) + source.damaged >= len(all_rows) and len(trajectories) > len(all_rows) // 4
        assert trajectories[0].text == trajectories[-1].text


def test_damage_is_counted_and_said(tmp_path: Path) -> None:
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    deep = '{"input": "a", "output": "b", "score": 1, "x": ' + "[" * 5000 + "]" * 5000 + "}"
    path = tmp_path / "1.jsonl"
    path.write_text("\n".join([json.dumps(row), "{broken", "[1, 2]", deep, '"text"', '{"input": 1}', json.dumps(row)]))
    with opened(path) as (source, index):
        assert len(rows(index)) == 2 and source.damaged == 5
        assert source.problems[0].startswith("1.jsonl: 5 unreadable rows; the first: the row is not JSON")


def test_limits_of_lines_and_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    path = lines(tmp_path / "1.jsonl", [row, {**row, "output": "x" * 500}, row])
    monkeypatch.setattr(file_stores, "MAX_ROW", 200)
    with opened(path) as (source, index):
        assert len(rows(index)) == 2 and "over the limit of 200 bytes" in source.problems[0]
    array = tmp_path / "trajectories_step_1.json"
    array.write_text(json.dumps([made.lightrft_row(1, 1.0)]))
    monkeypatch.setattr(file_stores, "MAX_JSON", 100)
    with pytest.raises(UnknownFormatError, match="over the limit of 100"):
        FileSource(array)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_lines(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(data: bytes) -> bytes:
        return gzip.compress(data) if suffix == "gz" else pa.compress(data, codec="zstd", asbytes=True)

    text = b"".join(
        json.dumps({"input": "a", "output": f"b{i}", "score": i, "step": 4}).encode() + b"\n" for i in range(5)
    )
    path = tmp_path / f"4.jsonl.{suffix}"
    path.write_bytes(packed(text[:60]) + packed(text[60:]))
    with opened(path) as (source, index):
        assert [row["closing"] for row in rows(index)] == [f"b{i}" for i in range(5)], (
            "several parts, one after the other"
        )
        assert documents(source, index)[3].step == 4
        spools = source._spools
        assert spools is not None and os.path.isdir(spools)
    assert not os.path.exists(spools), "what was unpacked is removed"
    compressed = packed(text * 100)
    path.write_bytes(compressed[: len(compressed) - 5])
    try:
        with opened(path) as (source, index):
            assert len(rows(index)) <= 500
    except UnknownFormatError:
        pass
    monkeypatch.setattr(file_stores, "FREE_BYTES", 1 << 16)
    path.write_bytes(packed(bytes(1 << 24)))
    with pytest.raises(UnknownFormatError, match="over the limit"):
        FileSource(path)


def test_archives_that_are_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stores, "FREE_BYTES", 1 << 16)
    path = tmp_path / "x.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", '{"eval": {}}')
        archive.writestr("samples/bomb.json", '{"x": "' + "0" * (1 << 25) + '"}')
        archive.writestr("samples/../../evil.json", "{}")
        archive.writestr("samples/good.json", json.dumps({"id": 1, "epoch": 1, "input": "hi", "target": "x"}))
    with opened(path) as (source, index):
        assert len(rows(index)) == 1 and source.damaged == 1 and "over the limit" in source.problems[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.eval"], "nothing is unpacked to the disk"


def test_a_member_that_lies_about_its_size(tmp_path: Path) -> None:
    path = made.inspect(tmp_path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = next(member for member in archive.infolist() if member.filename.startswith("samples/"))
    at = info.header_offset + 30 + len(info.filename) + len(info.extra)
    content[at + 200 : at + 220] = bytes(20)
    path.write_bytes(content)
    with opened(path) as (source, index):
        assert len(rows(index)) == 3 and source.damaged == 1


def test_pickles_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    for name, data in (("x.pkl", pickle.dumps(Evil())), ("x.pt", buffer.getvalue()), ("y.pt", b"anything")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UnknownFormatError, match="pickle"):
            FileSource(path)
    assert not (tmp_path / "pwned").exists()


def test_links_and_names_that_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(made.png(9))
    run = tmp_path / "run"
    names = [
        "../secret.png",
        str(tmp_path / "secret.png"),
        "images/../../secret.png",
        "images/link.png",
        "file:///x.png",
    ]
    (run / "images").mkdir(parents=True)
    (run / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    row = made.lightrft_row(1, 1.0, image_paths=names)
    (run / "trajectories_step_1.json").write_text(json.dumps([row]))
    with opened(run) as (source, index):
        (trajectory,) = documents(source, index)
        assert not trajectory.pictures and source.media(sha256(made.png(9)).hexdigest()) is None
    lines(tmp_path / "2.jsonl", [{"input": "a", "output": "b", "score": 1.0}])
    (run / "2.jsonl").symlink_to(tmp_path / "2.jsonl")
    with opened(run) as (source, index):
        assert len(rows(index)) == 1
        assert "2.jsonl: not read: link to a place outside the folder" in source.problems


def test_pictures_that_are_something_else(tmp_path: Path) -> None:
    def url(kind: str, data: bytes) -> str:
        import base64

        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    urls = [
        url("image/svg+xml", b"<svg onload=alert(1)>"),
        url("image/png", b"<html>"),
        "data:image/png,%89PNG",
        "data:image/png;base64,!!!",
        "//example.com/x.png",
        "ftp://example.com/x.png",
        "x" * 300,
    ]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    path = lines(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": content}]}])
    with opened(path) as (source, index):
        (trajectory,) = documents(source, index)
        assert not trajectory.pictures and len(trajectory.notes) == len(urls)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", b'{"a": 1}', "keys a"),
        ("x.json", b"[1, 2, 3]", "without objects"),
        ("x.json", b'[{"a": ', "incomplete"),
        ("x.jsonl", b'{"loss": 0.1, "step": 3}\n', "keys loss, step"),
        ("x.txt", b"hello", "starting with b'hello'"),
        ("x.parquet", b"PAR1xxxx", "Parquet"),
        ("x.eval", b"PK\x03\x04 no zip", "zip archive"),
        ("x.jsonl", b"", "all files are empty"),
        ("x.jsonl.gz", b"\x1f\x8b\x08 broken", "damaged"),
        (f"{EVIL.replace('/', '')}.jsonl", b"\xff\xfe\x00", "starting with"),
    ],
)
def test_what_is_unknown_is_refused_with_what_was_found(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for place in (path, tmp_path):
        if path.suffix == ".txt" and place is tmp_path:
            continue
        with pytest.raises(UnknownFormatError) as error:
            recognize(place)
        assert words in str(error.value) and all(family in str(error.value) for family in FORMATS)


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        FileSource("/nowhere/at/all")


# --- parts ------------------------------------------------------------------------------------------------------------


@given(st.text(alphabet=st.characters(exclude_categories=())))
@settings(max_examples=60)
def test_words_joined_are_the_text(text: str) -> None:
    ends = file_adapters.split_words(text).tolist()
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == text and all(pieces)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1]), st.booleans(), st.text(" \n", max_size=3))
@settings(max_examples=60)
def test_elements_are_where_they_are(values: list[Any], indent: int | None, ascii_: bool, before: str) -> None:
    text = (before + json.dumps(values, indent=indent, ensure_ascii=ascii_)).encode("utf-8", "surrogatepass")
    if b"\xed" in text:
        return
    spans = list(file_stores.find_elements(text, len(before)))
    assert [json.loads(text[a:b]) for a, b in spans] == [
        element for element in values if isinstance(element, (list, dict))
    ]


def test_steps_in_names() -> None:
    assert [
        extract_step(name)
        for name in (
            "trajectories_step_20.json",
            "rollouts/step_3/train_rollouts.jsonl",
            "global_step_7.parquet",
            "completions_00012.parquet",
            "17.jsonl.gz",
            "a5.jsonl",
            "iter-4.jsonl",
            "footstep12.jsonl",
        )
    ] == [20, 3, 7, 12, 17, None, 4, None]


def test_numbers() -> None:
    assert (
        file_stores.parse_number(2**70) is None
        and file_stores.parse_int(float("nan")) is None
        and file_stores.parse_int("12") == 12
    )
