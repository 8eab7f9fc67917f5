"""Prompts from files with a cursor, the names of a user's functions, and records of given answers."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.compat.trinity import split_dpo_experience_to_single_turn
from rollbook.core.metrics import StepMetrics
from rollbook.rollout import Prompt, ScriptedEngine, TransformersEngine
from rollbook.rollout.transformers import PromptPreparer
from rollbook.train.prompts import Prompts, Reader, hash_value, permutation
from rollbook.train.supervised import records_from_answers
from rollbook.train.user_code import resolve
from tests.tiny import bytes_, llama, llava, picture, words

ROWS = [{"prompt": f"{i}+1=", "reference": i + 1} for i in range(10)]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- the cursor -------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 12),
    sizes=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=8),
    stop=st.integers(0, 8),
    seed=st.integers(0, 2**70),
    shuffle=st.booleans(),
)
def test_cursor(count: int, sizes: list[tuple[int, bool]], stop: int, seed: int, shuffle: bool) -> None:
    """Every row once in each epoch; no id twice in a step; going on from any state gives the same."""
    rows = [{"prompt": f"p{i}", "reference": i} for i in range(count)]
    prompts = Prompts(rows, seed=seed, shuffle=shuffle)
    given_out: list[Prompt] = []
    calls: list[tuple[int, int]] = []
    state = None
    step = 1
    for i, (n, another) in enumerate(sizes):
        step += another
        calls.append((n, step))
        if i == stop:
            state = json.loads(json.dumps(prompts.state_dict()))
            before = len(given_out)
        given_out += prompts.take(n, step)
    order = [prompt.reference for prompt in given_out]
    for epoch in range(len(order) // count + 1):
        part = order[epoch * count : (epoch + 1) * count]
        assert len(set(part)) == len(part)
        assert part == prompts.order(epoch)[: len(part)].tolist()
    assert len({prompt.eid.tid for prompt in given_out}) == len(given_out)
    assert all(str(prompt.eid.task).partition(".")[0] == str(prompt.reference) for prompt in given_out)
    if state is not None:
        again = Prompts(rows, seed=seed, shuffle=shuffle)
        again.load_state_dict(state)
        rest = [prompt for n, step in calls[stop:] for prompt in again.take(n, step)]
        assert [(prompt.eid.tid, prompt.reference) for prompt in rest] == [
            (prompt.eid.tid, prompt.reference) for prompt in given_out[before:]
        ]
        assert again.state_dict() == prompts.state_dict()


@given(count=st.integers(0, 300), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_permutation(count: int, seed: int, epoch: int) -> None:
    order = permutation(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(count, seed, epoch).tolist()
    if count > 30:
        assert order.tolist() != permutation(count, seed, epoch + 1).tolist()
        assert order.tolist() != permutation(count, seed + 1, epoch).tolist()


def test_permutation_is_even() -> None:
    """Each row comes first about equally often: a chi-square of 7 degrees that chance exceeds once in 10,000 times."""
    firsts = Counter(int(permutation(8, 3, epoch)[0]) for epoch in range(4000))
    assert sum((firsts[i] - 500) ** 2 / 500 for i in range(8)) < 29.9


def test_order_never_changes() -> None:
    """Checkpoints outlive versions of this library, of numpy and of Python: the order is that of SplitMix64's numbers,
    here by integers alone, begun with a digest of seed and epoch."""

    def numbers(state: int, count: int) -> list[int]:
        drawn = []
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            drawn.append(z ^ (z >> 31))
        return drawn

    assert numbers(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # published vectors
    for seed, epoch in ((0, 0), (7, 3), (2**70, 10**6)):
        state = int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "big")
        keys = numbers(state, 50)
        assert permutation(50, seed, epoch).tolist() == sorted(range(50), key=keys.__getitem__)


def test_without_shuffle_and_epochs() -> None:
    prompts = Prompts(ROWS, shuffle=False)
    assert [prompt.eid.task for prompt in prompts.take(12, 1)] == [*range(10), "0.1", "1.1"]
    assert prompts.epoch == 1.2 and "10 rows" in repr(prompts)
    assert [prompt.eid.task for prompt in prompts.take(3, 1)] == ["2.1", "3.1", "4.1"]
    assert [prompt.eid.task for prompt in prompts.take(3, 2)] == [5, 6, 7]
    assert [prompt.eid.tid for prompt in prompts.every("eval-40")][:2] == ["eval-40/0", "eval-40/1"]
    assert prompts.cursor == 18
    with pytest.raises(ValueError, match="n: got -1"):
        prompts.take(-1, 3)


def test_engine_takes_batches_larger_than_the_data() -> None:
    engine = ScriptedEngine([[7]])
    samples = engine.generate(Prompts(ROWS[:3]).take(8, 4), n=2, seed=1)
    assert len({sample.eid.uid for sample in samples}) == 16


def test_info_is_not_shared_between_epochs() -> None:
    prompts = Prompts([{"prompt": "a", "level": 1}])
    prompts.take(1, 1)[0].info["level"] = 2  # type: ignore[index]
    assert prompts.take(1, 2)[0].info == {"level": 1}


def test_other_data_is_refused() -> None:
    state = Prompts(ROWS, seed=3).state_dict()
    Prompts(ROWS, seed=3).load_state_dict(state)
    for rows in (ROWS[:-1], ROWS[::-1], [*ROWS[:-1], {"prompt": "9+1=", "reference": 11}]):
        with pytest.raises(ValueError, match=r"data: got \d+ rows .* of 'x', expected the 10 rows .* began with"):
            Prompts(rows, seed=3, name="x").load_state_dict(state)
    with pytest.raises(ValueError, match="seed: got 4, expected 3"):
        Prompts(ROWS, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle: got False, expected True"):
        Prompts(ROWS, seed=3, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="'since' is not there"):
        Prompts(ROWS, seed=3).load_state_dict({name: value for name, value in state.items() if name != "since"})
    with pytest.raises(ValueError, match="cursor.*got -1"):
        Prompts(ROWS, seed=3).load_state_dict({**state, "cursor": -1})


@given(values=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30), seed=st.integers(0, 5), data=st.data())
def test_split_is_disjoint_by_content(values: list[str], seed: int, data: st.DataObject) -> None:
    prompts = Prompts([{"prompt": value, "reference": i} for i, value in enumerate(values)])
    size = data.draw(st.integers(1, len(values)))
    try:
        rest, held_out = prompts.split(size, seed)
    except ValueError as error:
        fewest = min(Counter(values).values())
        assert "expected some on both sides" in str(error) and (fewest > size or size == len(values))
        return
    assert not {prompt.text for prompt in rest.every()} & {prompt.text for prompt in held_out.every()}
    assert len(held_out) <= size and len(rest) + len(held_out) == len(values)
    tasks = [prompt.eid.task for prompt in [*rest.every(), *held_out.every()] if prompt.eid is not None]
    assert sorted(tasks) == list(range(len(values)))
    # Another order of the rows holds the same prompts out, where all are different.
    if len(set(values)) == len(values):
        _, other = Prompts([{"prompt": value} for value in reversed(values)]).split(size, seed)
        assert {prompt.text for prompt in other.every()} == {prompt.text for prompt in held_out.every()}


def test_split_by_share() -> None:
    rest, held_out = Prompts(ROWS).split(0.3)
    assert (len(rest), len(held_out)) == (7, 3)
    assert Prompts(ROWS, seed=9).split(0.3)[1].fingerprint == held_out.fingerprint != rest.fingerprint
    for size in (0.0, 1.0, 10, 1.5, 0, True):
        with pytest.raises(ValueError, match="size"):
            Prompts(ROWS).split(size)


# --- files ------------------------------------------------------------------------------------------------------------


def forms(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows in every kind of file."""
    lines = written(folder / "task.jsonl", rows)
    (folder / "list.json").write_text(json.dumps(rows, indent=1))
    (folder / "lines.json").write_bytes(b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\r\n\r\n"))
    (folder / "task.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), folder / "task.parquet")
    (folder / "parts").mkdir()
    for i in (0, 1):
        half = rows[:2] if i == 0 else rows[2:]
        pq.write_table(pa.Table.from_pylist(half), folder / "parts" / f"part-{i}.parquet")
    names = ("task.jsonl", "list.json", "lines.json", "task.jsonl.gz", "task.parquet", "parts")
    return [folder / name for name in names]


def test_every_kind_of_file_gives_the_same(tmp_path: Path) -> None:
    import datasets

    rows = [
        {
            "question": [{"role": "user", "content": f"grüße {i}"}],
            "reward_model": {"ground_truth": str(i)},
            "level": i,
            "unused": "x" * 10,
        }
        for i in range(5)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "dict"))
    options: Any = {
        "columns": {"prompt": "question", "reference": "reward_model.ground_truth"},
        "keep": ["level"],
        "limit": 4,
    }
    sources = [
        Prompts.from_file(path, **options) for path in [*forms(tmp_path, rows), tmp_path / "one", tmp_path / "dict"]
    ]
    assert len({source.fingerprint for source in sources}) == 1
    for prompts in sources:
        first = prompts.every()[1]
        assert first.messages == ({"role": "user", "content": "grüße 1"},)
        assert first.reference == "1" and first.info == {"level": 1} and len(prompts) == 4


def test_texts_are_prompts() -> None:
    expected = [prompt.text for prompt in Prompts([{"prompt": "a"}, {"prompt": "b"}]).every()]
    assert [prompt.text for prompt in Prompts(["a", "b"]).every()] == expected
    assert Prompts(["a"], columns={"prompt": "question"}).every()[0].text == "a"
    with pytest.raises(ValueError, match="row 1: prompt: got ''"):
        Prompts(["a", ""])


def test_lines_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"task.jsonl, line 3: Expecting value"):
        Prompts.from_file(file)
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*utf-8"):
        Prompts.from_file(file)
    file.write_text('{"prompt": "a"}\n"b"\n')
    with pytest.raises(ValueError, match=r"line 2: got str, expected a mapping"):
        Prompts.from_file(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="got no rows"):
        Prompts.from_file(file)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match="bad.parquet: "):
        Prompts.from_file(tmp_path / "bad.parquet")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-12])
    with pytest.raises(ValueError, match="bad.jsonl.gz: "):
        Prompts.from_file(tmp_path / "bad.jsonl.gz")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gone.jsonl', but there is no such file"):
        Prompts.from_file(tmp_path / "gone.jsonl")
    (tmp_path / "task.csv").write_text("prompt\na\n")
    with pytest.raises(ValueError, match=r"expected a file that ends in .jsonl"):
        Prompts.from_file(tmp_path / "task.csv")
    with pytest.raises(ValueError, match="files of one kind in it; there are: none"):
        Prompts.from_file(tmp_path)
    with pytest.raises(ValueError, match="split: got 'test', expected None"):
        Prompts.from_file(written(tmp_path / "task.jsonl", ROWS), split="test")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # as where it is not installed
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for path in (tmp_path / "saved", "somebody/some-dataset"):
        with pytest.raises(ImportError, match="extra 'hf' of Rollbook"):
            Prompts.from_file(path)


def test_splits_of_a_dataset(tmp_path: Path) -> None:
    import datasets

    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    assert Prompts.from_file(tmp_path, split="test").every()[0].text == "test"
    for split in (None, "valid"):
        with pytest.raises(ValueError, match="expected one that .* has: train, test"):
            Prompts.from_file(tmp_path, split=split)


# --- rows -------------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": 7}, r"row 1: prompt: got int, expected text, chat messages or token ids"),
        ({"prompt": ""}, r"row 1: prompt: got ''"),
        ({"prompt": []}, r"row 1: prompt: got an empty list"),
        ({"prompt": None}, r"row 1: prompt: missing, .* the row has prompt"),
        ({"prompt": [1, -1]}, r"row 1: prompt.token_ids\[1\]: got -1"),
        ({"text": "a"}, r"row 1: prompt: missing.*the row has .*text"),
        ({"prompt": "a", "messages": MESSAGES}, r"row 1: got prompt and messages, expected one"),
        ({"messages": "hi"}, r"row 1: messages: got str, expected a list"),
        ({"messages": [{"from": "human", "value": "hi"}]}, r"messages\[0\]: got keys \['from', 'value'\].*'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content: got int, expected text"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: got NoneType"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"got an answer alone"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "a"}], "response": "b"}, r"message and response"),
        ({"prompt": "a", "reference": object()}, r"row 1: reference: got object, which is not JSON"),
        ({"prompt": "a", "response": ""}, r"row 1: response: got ''"),
        ({"prompt": "a", "response": 3}, r"row 1: response: got int"),
        ({"prompt": "a", "response": {"role": "user", "content": "x"}}, r"response: got a message of 'user'"),
        ({"prompt": "a", "chosen": "b"}, r"row 1: rejected: missing"),
        ({"messages": MESSAGES, "response": [*MESSAGES, *MESSAGES]}, r"row 1: response: got a message of 'user'"),
        ({"prompt": "a", "info": [1]}, r"row 1: info: got list"),
        ({"prompt": "a", "info": {"b": 1}, "b": 2}, r"row 1: b: got a column and an entry"),
        ({"prompt": "a", "tools": "no json"}, r"row 1: tools: "),
        ({"prompt": "a", "tools": [{"name": "t"}]}, r"row 1: prompt.tools: got tools without messages"),
        ({"prompt": "a", "images": [3]}, r"row 1: images\[0\]: got int, expected a path, bytes or a picture"),
        ({"prompt": "a", "images": ["gone.png"]}, r"row 1: images: got 'gone.png', but there is no file"),
        (17, r"row 1: got int, expected a mapping"),
    ],
)
def test_rows_that_are_wrong(row: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Prompts([{"prompt": "fine"}, row])


def test_columns_that_are_wrong() -> None:
    rows = [{"question": "a", "answer": 1}]
    with pytest.raises(ValueError, match=r"columns: unknown column 'promt'; did you mean 'prompt'"):
        Prompts(rows, columns={"promt": "question"})
    with pytest.raises(ValueError, match=r"columns\['reference'\]: no row has a column 'anser'; did you mean 'answer'"):
        Prompts(rows, columns={"prompt": "question", "reference": "anser"})
    with pytest.raises(ValueError, match=r"question \(prompt\): got int"):
        Prompts([{"question": 1}], columns={"prompt": "question"})
    with pytest.raises(ValueError, match="keep: got 'level'"):
        Prompts(rows, keep="level")
    with pytest.raises(ValueError, match="rows: got dict, expected a list of rows"):
        Prompts(rows[0])  # type: ignore[arg-type]


def test_what_goes_to_info(caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "a", "n": 10**30, "f": float("nan"), "none": None, "raw": b"x", "error": "e", "info": {"k": (1,)}}
    with caplog.at_level(logging.WARNING, "rollbook.train"):
        info = Prompts([row, row]).every()[0].info
    assert info.keys() == {"n", "f", "k"} and info["n"] == 10**30 and info["k"] == [1]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "'raw' is not kept: bytes, which is not JSON (first in row 0)" in messages[0]
    assert "'error' is not kept" in messages[1]


def test_one_column_under_two_names_and_none() -> None:
    rows = [{"q": "a", "answer": "b", "messages": MESSAGES}]
    prompts = Prompts(rows, columns={"prompt": "q", "reference": "answer", "response": "answer", "messages": None})
    prompt = prompts.every()[0]
    assert (prompt.text, prompt.reference, prompt.info) == ("a", "b", {"response": "b"})


def test_chats_with_their_answers() -> None:
    """A model is not shown what it is to say; pairs may hold their prompt, and repeat it beside them."""
    answer = {"role": "assistant", "content": "yes"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    pair = {"chosen": [*MESSAGES, answer], "rejected": [*MESSAGES, {**answer, "content": "no"}]}
    rows = [
        {"messages": [*MESSAGES, answer]},
        {"prompt": [*MESSAGES, {**call, "content": None, "name": None}]},
        pair,
        {"prompt": "hi", **pair},
        {"prompt": MESSAGES, "chosen": [answer], "rejected": "no"},
    ]
    prompts = Prompts(rows).every()
    assert all(prompt.messages == tuple(MESSAGES) for prompt in prompts)
    assert [prompt.info for prompt in prompts[2:]] == [{"chosen": "yes", "rejected": "no"}] * 3
    assert prompts[0].info == {"response": "yes"} and prompts[1].info == {"response": call}
    # They ask the same: all of them stay on one side.
    with pytest.raises(ValueError, match="1 different prompts"):
        Prompts(rows).split(2)


def test_pictures(tmp_path: Path) -> None:
    """Paths are relative to the file, wherever that lies; bytes and pictures count by what they show."""
    from PIL import Image

    for folder in ("here", "there"):
        (tmp_path / folder / "images").mkdir(parents=True)
        picture().save(tmp_path / folder / "images" / "a.png")
    part = {"type": "image", "path": "images/a.png"}
    rows = [
        {"prompt": "<image>", "images": ["images/a.png"]},
        {"prompt": "<image>", "images": "images/a.png"},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]},
        {"prompt": "<image>", "images": [{"path": "images/a.png"}]},
    ]
    sources = [Prompts.from_file(written(tmp_path / folder / "t.jsonl", rows)) for folder in ("here", "there")]
    assert sources[0].fingerprint == sources[1].fingerprint
    prompts = sources[1].every()
    assert prompts[0].images == prompts[1].images == (str(tmp_path / "there" / "images" / "a.png"),)
    assert prompts[2].messages is not None
    assert prompts[2].messages[0]["content"][0]["path"] == str(tmp_path / "there" / "images" / "a.png")
    raw = (tmp_path / "here" / "images" / "a.png").read_bytes()
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "<image>", "image": {"bytes": raw, "path": "gone.png"}}]),
        tmp_path / "t.parquet",
    )
    prompt = Prompts.from_file(tmp_path / "t.parquet", columns={"images": "image"}).every()[0]
    assert prompt.images[0]["bytes"] == raw
    colours = [Prompts([{"prompt": "a", "images": [picture(c)]}]) for c in ((255, 0, 0), (255, 0, 0), (0, 255, 0))]
    assert colours[0].fingerprint == colours[1].fingerprint != colours[2].fingerprint
    assert isinstance(colours[0].every()[0].images[0], Image.Image)


@pytest.mark.parametrize("form", ["../out.png", "ABSOLUTE", "file://ABSOLUTE", "link.png", "folder/out.png"])
def test_paths_stay_in_the_folder_of_the_data(tmp_path: Path, form: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    picture().save(tmp_path / "out.png")
    picture().save(data / "in.png")
    (data / "link.png").symlink_to(tmp_path / "out.png")
    (data / "folder").symlink_to(tmp_path)
    (data / "inner.png").symlink_to("in.png")
    path = form.replace("ABSOLUTE", str(tmp_path / "out.png"))
    part = {"type": "image", "image": {"url": path}}
    for row in (
        {"prompt": "<image>", "images": [{"bytes": None, "path": path}]},
        {"prompt": "<image>", "videos": path},
        {"messages": [{"role": "user", "content": [part]}]},
        {"prompt": "a", "response": {"role": "assistant", "content": [part], "name": "b"}},
    ):
        with pytest.raises(ValueError, match="line 1: .*expected a path in the data's folder"):
            Prompts.from_file(written(data / "t.jsonl", [row]))
    rows = [{"prompt": "<image>", "images": ["in.png", "inner.png", str(data / "in.png")]}]
    assert len(Prompts.from_file(written(data / "t.jsonl", rows)).every()[0].images) == 3
    with pytest.raises(ValueError, match="expected the image itself"):  # a dataset of the hub has no folder
        Reader("hub", confined=True).row("row 0", {"prompt": "<image>", "images": [path]})


def test_pictures_of_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    dataset = datasets.Dataset.from_list([{"prompt": "<image>", "images": [picture()]}], features=features)
    dataset.save_to_disk(str(tmp_path))
    prompt = Prompts.from_file(tmp_path).every()[0]
    prepared = PromptPreparer(llava()[1]).prepare(prompt)
    assert prepared.media is not None and list(prepared.media["pixel_values"].shape) == [1, 3, 16, 16]


def test_prompts_of_prompts() -> None:
    originals = [Prompt(text="a", reference={1: 2}, info={"x": (1,)}), Prompt(token_ids=[1, 2])]
    prompts = Prompts(originals).take(2, 1)
    assert {prompt.eid.task for prompt in prompts if prompt.eid is not None} == {0, 1}
    assert Prompts(originals).fingerprint != Prompts(originals[::-1]).fingerprint
    with pytest.raises(ValueError, match="row 0: got object"):
        Prompts([Prompt(text="a", info={"x": object()})])


def test_require() -> None:
    prompts = Prompts([{"prompt": "a", "response": "b"}])
    prompts.require("response")
    for name in ("reference", "images", "chosen"):
        with pytest.raises(ValueError, match=f"row 0 has no '{name}'"):
            prompts.require(name)
    with pytest.raises(ValueError, match="require: got 'answer'"):
        prompts.require("answer")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(left=json_values, right=json_values)
def test_digest(left: Any, right: Any) -> None:
    assert hash_value(left) == hash_value(json.loads(json.dumps(left)))
    if json.dumps(left, sort_keys=True) != json.dumps(right, sort_keys=True):
        assert hash_value(left) != hash_value(right)


# --- functions --------------------------------------------------------------------------------------------------------


def test_rows_of_a_function_are_read_on_first_use() -> None:
    calls: list[int] = []

    def rows() -> list[dict[str, str]]:
        calls.append(5)
        return [{"prompt": f"{i}:5"} for i in range(3)]

    prompts = Prompts(rows, seed=1)
    assert calls == []  # called when the rows are needed
    assert sorted(prompt.text or "" for prompt in prompts.take(3, 1)) == ["0:5", "1:5", "2:5"]
    assert len(prompts) == 3 and calls == [5] and prompts.seed == 1
    with pytest.raises(ValueError, match="got int, expected a list of rows"):
        len(Prompts(lambda: 3))  # type: ignore[arg-type, return-value]


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import sys\nclass Task:\n    @staticmethod\n    def rows(): return 1\n")
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    assert resolve("mine.py:Task.rows", folder=tmp_path)() == 1
    assert resolve("mine.py:Task", folder=tmp_path) is resolve(f"{tmp_path / 'mine.py'}:Task")
    with pytest.raises(ValueError, match=r"mine.py has no 'Tasks'; did you mean 'Task'\?$"):
        resolve("mine.py:Tasks", folder=tmp_path)
    with pytest.raises(ValueError, match=r"there is no module 'mine'; the file is there: mine.py:Task"):
        resolve("mine:Task", folder=tmp_path)
    with pytest.raises(ValueError, match="there is no file .*gone.py"):
        resolve("gone.py:f", folder=tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        resolve("broken.py:f", folder=tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        resolve("broken:f")
    for target in ("math", ":f", "math:", "a b:c", "math:1", None):
        with pytest.raises(ValueError, match="option: got"):
            resolve(target, name="option")  # type: ignore[arg-type]


# --- records of given answers -----------------------------------------------------------------------------------------

SFT = [
    {"prompt": "what two plus three is", "response": "five", "level": 1, "reference": "five"},
    {"messages": [{"role": "user", "content": "the quick fox"}], "response": "yes or no"},
    {"prompt": [8, 9, 10], "response": "five"},
]


def test_sft_records_have_the_prompt_of_a_rollout() -> None:
    tokenizer = words()
    prompts = Prompts(SFT)
    taken = prompts.take(3, 5)
    metrics = StepMetrics()
    records = records_from_answers(taken, tokenizer, metrics=metrics)
    samples = TransformersEngine(llama(len(tokenizer)), tokenizer).generate(taken, max_tokens=1, seed=0)
    for record, sample, prompt in zip(records, samples, taken, strict=True):
        assert prompt.eid is not None and record.eid.uid == f"{prompt.eid.rid}/0/sft"
        assert record.tokens[: record.prompt_length].tolist() == list(sample.prompt_ids)
        response = record.tokens[record.prompt_length :].tolist()
        assert response == [*tokenizer(prompt.info["response"])["input_ids"], tokenizer.eos_token_id]
        assert record.action_mask is not None and record.action_mask.all() and len(record.action_mask) == len(response)
        assert record.response_text == prompt.info["response"] and "response" not in record.info
        assert (record.finish_reason, record.truncate_status, record.group_size) == ("stop", None, 1)
    by_row = {record.eid.task: record for record in records}
    assert by_row[0].info == {"level": 1, "reference": "five"}
    assert by_row[1].messages == [*SFT[1]["messages"], {"role": "assistant", "content": "yes or no"}]
    assert metrics.values()["supervised/records"] == 3


def test_answers_are_cut_and_prompts_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "abc", "response": "12345"}, {"prompt": "abcdefgh", "response": "1"}]
    metrics = StepMetrics()
    with caplog.at_level(logging.WARNING, "rollbook.train"):
        records = records_from_answers(Prompts(rows).every("b"), bytes_(), max_tokens=6, metrics=metrics)
    assert [bytes_().decode(row.tokens.tolist()) for row in records] == ["abc123"]
    assert (records[0].truncate_status, records[0].finish_reason) == ("response_truncated", "length")
    assert records[0].info == {"response_truncated_from": 6}
    assert "1 of 2 prompts leave no room for an answer in 6 tokens" in caplog.text and "b/1" in caplog.text
    assert metrics.values()["supervised/dropped"] == metrics.values()["supervised/cut"] == 1
    with pytest.raises(ValueError, match="b/1: prompt: got 8 tokens, expected fewer than 6"):
        records_from_answers(Prompts(rows).every("b"), bytes_(), max_tokens=6, long_prompts="error")
    with pytest.raises(ValueError, match="all of them too long"):
        records_from_answers(Prompts(rows).every(), bytes_(), max_tokens=2)
    exact = records_from_answers(Prompts(rows[:1]).every(), bytes_(), max_tokens=9)[0]
    assert exact.truncate_status is None and exact.tokens[-1] == bytes_().eos_token_id and len(exact.tokens) == 9


def test_dpo_records() -> None:
    rows = [
        {"prompt": "abc", "chosen": "12", "rejected": "34567"},
        {"messages": MESSAGES, "chosen": [{"role": "assistant", "content": "x"}], "rejected": "y"},
    ]
    tokenizer, end = bytes_(), bytes_().eos_token_id
    records = records_from_answers(rows, tokenizer, "pairs", max_tokens=7)
    first, second = records
    assert first.experience_type == second.experience_type == "dpo" and first.eid.uid == "0/0/0/0/dpo"
    assert tokenizer.decode(first.tokens.tolist()) == "abc"
    assert first.chosen is not None and first.rejected is not None
    assert first.chosen.tolist() == [*tokenizer("12")["input_ids"], end]
    assert tokenizer.decode(first.rejected.tolist()) == "3456" and first.info == {"rejected_truncated_from": 6}
    assert first.truncate_status == "response_truncated"
    assert second.chosen_messages == [*MESSAGES, {"role": "assistant", "content": "x"}]
    assert tokenizer.decode(second.tokens.tolist()) == "<|user|>hi<|end|><|assistant|>"
    halves = split_dpo_experience_to_single_turn(records)
    assert [half.prompt_length for half in halves] == [3, 3, 5, 5]
    assert halves[2].tokens.tolist() == [*second.tokens.tolist(), *tokenizer("x")["input_ids"], end]


def test_ids_of_records() -> None:
    rows = Prompts(SFT)
    assert [row.eid.uid for row in records_from_answers(rows, words(), batch="expert")] == [
        f"expert/{i}/0/0/sft" for i in range(3)
    ]
    taken = rows.take(2, 9)
    assert [row.eid.tid for row in records_from_answers(taken, words())] == [
        record.eid.tid for record in taken if record.eid
    ]
    bare = [record.replace(eid=None) for record in taken]
    assert len({row.eid.uid for row in records_from_answers(bare, words())}) == 2


def test_a_tool_call_is_written_by_the_template() -> None:
    tokenizer = bytes_()
    template = tokenizer.chat_template
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"messages": [*MESSAGES, call]}
    writes = "{% if message.tool_calls %}[{{ message.tool_calls[0].function.name }}]{% endif %}<|end|>\n{% endfor %}"
    try:
        tokenizer.chat_template = template.replace("<|end|>{% endfor %}", writes)
        record = records_from_answers([row], tokenizer)[0]
        ids = record.tokens.tolist()
        assert tokenizer.decode(ids[record.prompt_length :]) == "[f]<|end|>"
        assert tokenizer.decode(ids[: record.prompt_length]) == "<|user|>hi<|end|>\n<|assistant|>"
        tokenizer.chat_template = "{{ messages | length }}" + template
        with pytest.raises(ValueError, match="response: the chat template renders the prompt differently"):
            records_from_answers([row], tokenizer)
    finally:
        tokenizer.chat_template = template


def test_records_with_pictures() -> None:
    model, processor = llava()
    row = {"prompt": "<image>what?", "images": [picture()], "response": "red"}
    prompt = Prompts([row]).take(1, 1)
    sample = TransformersEngine(model, processor=processor).generate(prompt, max_tokens=1)[0]
    record = records_from_answers(prompt, processor)[0]
    assert record.tokens[: record.prompt_length].tolist() == list(sample.prompt_ids)
    assert record.multi_modal_inputs is not None and sample.media is not None
    assert (record.multi_modal_inputs["pixel_values"] == sample.media["pixel_values"]).all()
    with pytest.raises(ValueError, match="expected none: no processor"):
        records_from_answers(prompt, processor.tokenizer)
    with pytest.raises(ValueError, match="response: got a placeholder of media"):
        records_from_answers([{**row, "response": "an <image>"}], processor)


def test_answers_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="data: got 'rl'"):
        records_from_answers(SFT, words(), "rl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer: missing"):
        records_from_answers(SFT, None)
    with pytest.raises(ValueError, match="1/0: chosen: missing, .* the row has response"):
        records_from_answers(Prompts(SFT[:1]).take(1, 1), words(), "pairs")
    with pytest.raises(ValueError, match="prompts: missing"):
        records_from_answers([], words())
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ValueError, match="expected text: the prompt is not a chat"):
        records_from_answers([{"prompt": "a", "response": call}], words())


def test_a_word_begins_without_a_space_after_a_prompt() -> None:
    """A tokenizer that puts a space before a text's first word does not put one into an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<end>", "▁", *"0123456789+="])}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    assert len(tokenizer("4")["input_ids"]) == 2
    record = records_from_answers([{"prompt": "2+2=", "response": "4"}], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(record.tokens[record.prompt_length :].tolist()) == ["4", "<end>"]
