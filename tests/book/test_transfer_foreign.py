"""Rollouts of verl, TRL and OpenRLHF, in the layouts that their code writes: groups form, nothing of a row is lost."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbook import WireError
from rollbook.io.formats import guess, read
from tests import tiny

WORDS = tiny.words()
PROMPT, OTHER = "what is two plus three ?", "what is the number ?"


def ids(text: str) -> list[int]:
    return list(WORDS(text, add_special_tokens=False)["input_ids"])


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def rows(path: Path, format: str | None = None, **options: Any) -> list[Any]:
    return [row for batch in read(path, format, **options) for row in batch]


def groups(records: list[Any]) -> dict[str, list[int]]:
    runs: dict[str, list[int]] = {}
    for row in records:
        runs.setdefault(row.eid.tid, []).append(row.eid.run)
    return runs


# --- verl ---------------------------------------------------------------------------------------------------------


def dumped(step: int, prompt: str, output: str, score: float, **extra: Any) -> dict[str, Any]:
    return {"input": prompt, "output": output, "gts": "5", "score": score, "step": step, **extra}


def test_verl_rollout_folder(tmp_path: Path) -> None:
    for step in (2, 10):
        lines(
            tmp_path / f"{step}.jsonl",
            dumped(step, PROMPT, "the answer is five", 1.0, acc=True, pred="five", request_id="r1"),
            dumped(step, PROMPT, "six !", 0.0, acc=False, pred=None, request_id="r2"),
            dumped(step, OTHER, "six", float("nan"), acc=False, pred={"a": [1]}, request_id="r3"),
        )
    assert guess(tmp_path) == guess(tmp_path / "2.jsonl") == "verl"
    records = rows(tmp_path, tokenizer=WORDS)
    assert [row.eid.batch for row in records] == [2, 2, 2, 10, 10, 10], "steps in the order of their numbers"
    assert sorted(map(tuple, groups(records).values())) == [(0,), (0,), (0, 1), (0, 1)]
    assert records[0].eid.task == records[3].eid.task != records[2].eid.task
    first = records[0]
    assert first.tokens.tolist() == ids(PROMPT) + ids("the answer is five")
    assert first.prompt_length == len(ids(PROMPT)) and first.experience_type == "single_turn"
    assert (first.prompt_text, first.response_text, first.reward) == (PROMPT, "the answer is five", 1.0)
    assert first.metrics == {"acc": 1.0}
    assert first.info == {"source": "verl", "gts": "5", "pred": "five", "request_id": "r1", "retokenized": True}
    assert first.logprobs is None, "text has none"
    assert math.isnan(records[2].reward or 0.0) and records[2].info["pred"] == {"a": [1]}, "Python's NaN is read"
    again = rows(tmp_path, tokenizer=WORDS, batch_rows=1)
    assert [row.eid.uid for row in again] == [row.eid.uid for row in records], "the same files give the same ids"
    assert len({row.eid.uid for row in records}) == 6


def test_verl_uids_are_ids(tmp_path: Path) -> None:
    """The newer trainer writes sample, rollout, and output of the rollout."""
    path = lines(
        tmp_path / "1.jsonl",
        dumped(1, PROMPT, "yes", 1.0, uid="ab_c_0_0"),
        dumped(1, PROMPT + " yes", "no", 1.0, uid="ab_c_0_1"),
        dumped(1, PROMPT, "no", 0.0, uid="ab_c_3_0"),
        dumped(1, PROMPT, "no", 0.0, uid="odd"),
    )
    records = rows(path, tokenizer=WORDS)
    assert [(row.eid.task, row.eid.run, row.eid.step) for row in records[:3]] == [
        ("ab_c", 0, 0),
        ("ab_c", 0, 1),
        ("ab_c", 3, 0),
    ]
    assert "uid" not in records[0].info and records[3].info["uid"] == "odd" and records[3].eid.task != "ab_c"


def test_equal_rows_are_two_runs(tmp_path: Path) -> None:
    path = lines(tmp_path / "1.jsonl", *[dumped(1, PROMPT, "five", 1.0)] * 3)
    records = rows(path, tokenizer=WORDS)
    assert [row.eid.run for row in records] == [0, 1, 2] and len({row.eid.uid for row in records}) == 3


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = lines(tmp_path / "1.jsonl", dumped(1, PROMPT, "five", 1.0))
    options: dict[str, Any]
    for options in ({}, {"on_error": "skip"}):
        with pytest.raises(ValueError, match=r"tokenizer: got None, but these verl rows have text .* give tokenizer="):
            rows(path, **options)
    with pytest.raises(ValueError, match="tokenizer: got a int"):
        rows(path, tokenizer=3)
    WORDS.save_pretrained(tmp_path / "tokenizer")
    assert rows(path, tokenizer=tmp_path / "tokenizer") == rows(path, tokenizer=WORDS)


def test_verl_generation_parquet(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": PROMPT}]
    frame = pd.DataFrame(
        {
            "data_source": ["gsm8k", "gsm8k"],
            "prompt": [prompt, [{"role": "system", "content": "think first"}, {"role": "user", "content": OTHER}]],
            "reward_model": [{"ground_truth": "5", "style": "rule"}] * 2,
            "extra_info": [{"index": 0}, {"index": 1}],
            "responses": [["five", "the answer is six"], ["yes", ""]],
        }
    )
    frame.to_parquet(tmp_path / "x.parquet")
    assert guess(tmp_path / "x.parquet") == "verl"
    records = rows(tmp_path / "x.parquet", tokenizer=WORDS)
    assert list(groups(records).values()) == [[0, 1], [0, 1]]
    start = WORDS.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True)
    start = list(start["input_ids"] if not isinstance(start, list) else start)
    assert records[0].tokens.tolist() == start + ids("five") and records[0].prompt_length == len(start)
    assert records[0].messages == [*prompt, {"role": "assistant", "content": "five"}]
    assert records[0].info["reward_model"]["ground_truth"] == "5" and records[0].reward is None
    assert records[3].experience_type == "multi_turn" and len(records[3].tokens) == records[3].prompt_length, (
        "nothing was said"
    )


def test_verl_token_parquet(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "prompts": [[0, 0, 5, 6], [0, 7, 8, 9]],
        "responses": [[1, 2, 3, 0], [4, 5, 0, 0]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]],
        "response_mask": [[1, 0, 1, 0], [1, 1, 0, 0]],
        "rollout_log_probs": [[-0.5, 0.0, -0.25, 0.0], [-1.0, -2.0, 0.0, 0.0]],
        "advantages": [[1.0, 0.0, 1.0, 0.0], [-1.0, -1.0, 0.0, 0.0]],
        "token_level_scores": [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        "uid": ["a", "a"],
        "data_source": ["gsm8k"] * 2,
        "score_2": [0.5, None],
    }
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    assert guess(tmp_path / "x.parquet") == "verl"
    records = rows(tmp_path / "x.parquet")
    assert [row.tokens.tolist() for row in records] == [[5, 6, 1, 2, 3], [7, 8, 9, 4, 5]], (
        "padding is gone, no tokenizer"
    )
    assert records[0].action_mask.tolist() == [True, False, True] and records[1].experience_type == "single_turn"
    assert records[0].logprobs.tolist() == [-0.5, 0.0, -0.25] and records[1].advantages.tolist() == [-1.0, -1.0]
    assert [row.reward for row in records] == [1.0, 0.0] and groups(records) == {"/a": [0, 1]}
    assert records[0].info == {"source": "verl", "data_source": "gsm8k"} and records[0].metrics == {"score_2": 0.5}
    table["attention_mask"][0] = [1]
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    reading = read(tmp_path / "x.parquet", on_error="skip")
    assert sum(map(len, reading)) == 1 and reading.report.skipped[0].row == "x.parquet:0"


# --- TRL ----------------------------------------------------------------------------------------------------------


def completions(folder: Path, step: int, **columns: list[Any]) -> Path:
    """As the trainer's `log` writes them."""
    count = len(columns["prompt"])
    folder.mkdir(exist_ok=True)
    frame = pd.DataFrame({"step": [step] * count, **columns, "advantage": [0.5, -0.5] * (count // 2)})
    frame.to_parquet(folder / f"completions_{step:05d}.parquet")
    return folder


def test_trl_texts(tmp_path: Path) -> None:
    for step in (1, 12):
        completions(
            tmp_path / "c",
            step,
            prompt=[PROMPT] * 2 + [OTHER] * 2,
            completion=["five", "six", "yes", "no !"],
            accuracy_reward=[1.0, 0.0, float("nan"), 1.0],
            length=[1, 1, 1, 2],
        )
    assert guess(tmp_path / "c") == "trl"
    records = rows(tmp_path / "c", tokenizer=WORDS)
    assert list(groups(records).values()) == [[0, 1]] * 4 and [row.eid.batch for row in records] == [1] * 4 + [12] * 4
    assert [row.reward for row in records[:2]] == [1.0, 0.0] and math.isnan(records[2].reward or 0.0)
    assert records[3].advantages.tolist() == [-0.5, -0.5] and "advantage" not in records[3].metrics
    assert records[1].metrics == {"accuracy_reward": 0.0, "length": 1.0}


def test_trl_rewards_are_the_same_columns_in_every_row(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl",
        {"prompt": PROMPT, "completion": "five", "right": 1.0, "tidy": None},
        {"prompt": PROMPT, "completion": "six", "right": None, "tidy": None},
        {"prompt": PROMPT, "completion": "no", "right": None, "tidy": 0.5},
    )
    reading = read(path, tokenizer=WORDS, batch_rows=1)
    assert next(reading)[0].reward == 1.0 and math.isnan(next(reading)[0].reward or 0.0)
    with pytest.raises(ValueError, match="rewards: got None, but the columns right, tidy"):
        next(reading)


def test_trl_rewards_are_named_where_several_could_be(tmp_path: Path) -> None:
    folder = completions(
        tmp_path / "c", 3, prompt=[PROMPT] * 2, completion=["five", "six"], right=[1.0, 0.0], tidy=[0.5, None]
    )
    options: dict[str, Any]
    for options in ({}, {"on_error": "skip"}):
        with pytest.raises(ValueError, match="rewards: got None, but the columns right, tidy could all be rewards"):
            rows(folder, tokenizer=WORDS, **options)
    assert [row.reward for row in rows(folder, tokenizer=WORDS, rewards=["right", "tidy"])] == [1.5, 0.0]
    assert [row.reward for row in rows(folder, tokenizer=WORDS, rewards={"right": 2.0, "tidy": 1})] == [2.5, 0.0]
    assert [row.reward for row in rows(folder, tokenizer=WORDS, rewards=[])] == [None, None]
    assert rows(folder, tokenizer=WORDS, rewards=["right"])[0].metrics == {"right": 1.0, "tidy": 0.5}
    with pytest.raises(ValueError, match="rewards: the rows have no column 'wrong'"):
        rows(folder, tokenizer=WORDS, rewards=["wrong"])
    with pytest.raises(ValueError, match="rewards: got 'right'"):
        rows(folder, tokenizer=WORDS, rewards="right")


def rendered(messages: list[dict[str, str]], awaits: bool) -> list[int]:
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>" * awaits
    return ids(text)


def test_trl_conversations(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": PROMPT}]
    completion = [{"role": "assistant", "content": "five"}]
    tools = [
        {"role": "assistant", "content": "a tool"},
        {"role": "tool", "content": "five", "name": "sum"},
        {"role": "assistant", "content": "the answer is five"},
    ]
    folder = completions(tmp_path / "c", 3, prompt=[prompt] * 2, completion=[completion, tools], right=[1.0, 0.0])
    plain, called = rows(folder, tokenizer=WORDS)
    assert plain.tokens.tolist() == rendered(prompt + completion, False)
    assert plain.prompt_length == len(rendered(prompt, True)) and plain.experience_type == "single_turn"
    assert plain.messages == prompt + completion
    assert called.tokens.tolist() == rendered(prompt + tools, False)
    assert called.messages == prompt + tools, "keys that Parquet gave to every message are gone"
    trained = called.tokens[called.prompt_length :][called.action_mask].tolist()
    assert trained == [*ids("a tool<|end|>"), *ids("the answer is five<|end|>")], "the tool's words are not the model's"
    assert plain.eid.tid == called.eid.tid and [plain.eid.run, called.eid.run] == [0, 1]


def test_trl_template_that_is_not_prefix_stable(tmp_path: Path) -> None:
    changing = copy.deepcopy(tiny.words())  # others use the one that is kept
    changing.chat_template = "{% if messages | length > 1 %}yes {% else %}no {% endif %}" + tiny.TEMPLATE
    prompt, completion = [{"role": "user", "content": PROMPT}], [{"role": "assistant", "content": "five"}]
    folder = completions(
        tmp_path / "c", 3, prompt=[prompt] * 2, completion=[completion, completion * 2], right=[1.0, 0.0]
    )
    reading = read(folder, tokenizer=changing, on_error="skip")
    (row,) = [row for batch in reading for row in batch]
    assert row.tokens[row.prompt_length :].tolist() == ids("five"), "of one message, its words are enough"
    assert "differently" in reading.report.skipped[0].reason
    changing.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(WireError, match="the chat template fails"):
        rows(folder, tokenizer=changing)


def test_trl_ids_and_jsonl(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl",
        {
            "step": 1.0,
            "prompt_ids": [0, 5, 6],
            "prompt_mask": [0, 1, 1],
            "completion_ids": [7, 8, 9, 0],
            "completion_mask": [1, 1, 1, 0],
            "tool_mask": [1, 0, 1, 1],
            "sampling_per_token_logps": [-0.5, 0.0, -0.25, 0.0],
            "right": 1.0,
            "advantage": 0.25,
        },
    )
    assert guess(path) == "trl"
    (row,) = rows(path)
    assert row.tokens.tolist() == [5, 6, 7, 8, 9] and row.eid.batch == 1
    assert row.action_mask.tolist() == [True, False, True] and row.logprobs.tolist() == [-0.5, 0.0, -0.25]
    assert row.advantages.tolist() == [0.25] * 3 and "retokenized" not in row.info and row.reward == 1.0


# --- OpenRLHF -----------------------------------------------------------------------------------------------------


def test_openrlhf_batch_inference(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "out.jsonl",
        {"input": PROMPT, "output": "five", "reward": 1.5},
        {"input": PROMPT, "output": "six", "reward": -0.5},
    )
    assert guess(path) == "openrlhf"
    records = rows(path, tokenizer=WORDS)
    assert [row.reward for row in records] == [1.5, -0.5] and list(groups(records).values()) == [[0, 1]]
    assert records[0].eid.batch == "" and records[0].metrics == {}


def test_openrlhf_samples(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "out.jsonl",
        {"prompts": PROMPT, "responses": "five", "rewards": [1.0], "labels": "5", "scores": 0.5, "step": 4},
        {"prompt": PROMPT, "response": "six", "reward": 0.0, "label": "5", "extra_logs": {"length": 3}, "step": 4},
        {"prompts": OTHER, "responses": ["yes", "no"], "rewards": [1.0, 0.0], "labels": "5", "step": 4},
    )
    assert guess(path) == "openrlhf"
    records = rows(path, tokenizer=WORDS)
    assert [row.reward for row in records] == [1.0, 0.0, 1.0, 0.0] and list(groups(records).values()) == [
        [0, 1],
        [0, 1],
    ]
    assert records[0].info["labels"] == "5" and records[0].metrics == {"scores": 0.5}
    assert records[1].info["extra_logs"] == {"length": 3}
    lines(path, {"prompts": OTHER, "responses": ["yes", "no"], "rewards": [1.0]})
    with pytest.raises(WireError, match="row out.jsonl:1: rewards: got 1, expected 2, one for each answer"):
        rows(path, tokenizer=WORDS)
    assert rows(path, tokenizer=WORDS, on_error="skip") == []


def test_openrlhf_pairs(tmp_path: Path) -> None:
    row = {"prompt": PROMPT, "chosen": "five", "chosen_reward": 1.0, "rejected": "six !", "rejected_reward": -1.0}
    path = lines(tmp_path / "pairs.jsonl", row)
    assert guess(path) == "openrlhf"
    (pair,) = rows(path, tokenizer=WORDS)
    assert pair.experience_type == "dpo" and pair.tokens.tolist() == ids(PROMPT)
    assert pair.chosen.tolist() == ids("five") and pair.rejected.tolist() == ids("six !")
    assert pair.metrics == {"chosen_reward": 1.0, "rejected_reward": -1.0}


def test_openrlhf_agents(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "prompt": "p",
        "label": "5",
        "observation_tokens": [1, 2, 3, 4, 5, 6],
        "action_ranges": [[2, 4], [5, 6]],
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
        "reward": 1.0,
        "scores": 0.5,
        "extra_logs": {"turns": 2},
    }
    path = lines(tmp_path / "x.jsonl", row)
    assert guess(path) == "openrlhf"
    (read_row,) = rows(path)
    assert read_row.tokens.tolist() == [1, 2, 3, 4, 5, 6] and read_row.prompt_length == 2
    assert read_row.action_mask.tolist() == [True, True, False, True]
    assert read_row.logprobs.tolist() == [-0.5, -0.25, 0.0, -1.0] and read_row.reward == 1.0
    assert read_row.info == {"source": "openrlhf", "prompt": "p", "label": "5", "extra_logs": {"turns": 2}}
    for wrong in ([[4, 9]], [[4, 2]], [[5, 6], [2, 4]], "all", []):
        with pytest.raises(WireError, match="action_ranges"):
            rows(lines(path, row | {"action_ranges": wrong}))
    with pytest.raises(WireError, match="rollout_log_probs: got 1 entries, expected 6"):
        rows(lines(path, row | {"rollout_log_probs": [0.0]}))


# --- whatever is in a row -----------------------------------------------------------------------------------------

GOOD = dumped(1, PROMPT, "five", 1.0)


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("verl", '{"input": "a", "output"'),
        ("verl", "[1]"),
        ("verl", '{"input": "a"}'),
        ("verl", '{"input": "a", "output": null}'),
        ("verl", '{"input": {"a": 1}, "output": "b"}'),
        ("verl", '{"input": [1, 2], "output": [99999999999]}'),
        ("verl", '{"prompts": [1], "responses": [2], "attention_mask": 5}'),
        ("verl", '{"input": "a", "output": "b", "x": ' + "[" * 90 + "]" * 90 + "}"),
        ("verl", '{"input": "a", "output": "b", "x": ' + "[" * 100_000),
        ("verl", '{"input": "a", "output": "b", "x": NaN, "y": ' + "[" * 100_000),
        ("trl", '{"prompt": "a"}'),
        ("trl", '{"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1, 1]}'),
        ("trl", '{"prompt_ids": [1], "completion_ids": [2], "tool_mask": []}'),
        ("trl", '{"prompt": "a", "completion": 5}'),
        ("openrlhf", '{"prompt": "a"}'),
        ("openrlhf", '{"input": "a", "output": [[[]]]}'),
        ("openrlhf", '{"prompt": 3, "chosen": "a", "rejected": "b"}'),
        ("openrlhf", '{"observation_tokens": "a", "action_ranges": [[0, 1]]}'),
    ],
)
def test_bad_rows_are_named_or_skipped(format: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = json.dumps({**GOOD, "prompt": PROMPT, "completion": "five"}) + "\n"
    path.write_text(good + line + "\n" + good)
    options: dict[str, Any] = {"rewards": []} if format == "trl" else {}
    with pytest.raises(WireError, match=r"row x.jsonl:2: "):
        rows(path, format, tokenizer=WORDS, **options)
    reading = read(path, format, tokenizer=WORDS, on_error="skip", **options)
    assert sum(map(len, reading)) == 2
    assert [skipped.row for skipped in reading.report.skipped] == ["x.jsonl:2"]


def test_dates_decimals_and_bytes_of_parquet_are_kept(tmp_path: Path) -> None:
    import datetime
    import decimal

    table = pa.table(
        {
            "input": [[1, 2]],
            "output": [[3]],
            "score": [1.0],
            "when": [datetime.date(2026, 1, 2)],
            "cost": [decimal.Decimal("1.50")],
            "raw": [b"\xff"],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    (row,) = rows(tmp_path / "x.parquet")
    assert row.info == {"source": "verl", "when": "2026-01-02", "cost": "1.50", "raw": b"\xff"}


def test_rows_stream(tmp_path: Path) -> None:
    path = lines(tmp_path / "1.jsonl", *[dumped(i, PROMPT, "five", 1.0) for i in range(20)])
    assert [len(batch) for batch in read(path, tokenizer=WORDS, batch_rows=8)] == [8, 8, 4]
    reading = read(path, tokenizer=WORDS, batch_rows=1)
    path.write_text("")  # what was not read yet is not there any more: nothing was read ahead but a buffer
    assert len(list(reading)) in (0, 1, 20)
    with pytest.raises(WireError, match="over the limit of 20 bytes"):
        rows(lines(path, GOOD), tokenizer=WORDS, max_row_bytes=20)
