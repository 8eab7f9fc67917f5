"""Every key of a configuration does what its sentence says: real runs of one or two steps of a tiny model, by
`run(effective(...))` and by the command; and what a new user does wrong first is one line that names the key."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

import rollbook
from rollbook import Experience
from rollbook.book import trained_steps
from rollbook.book.rollouts import open_rollouts
from rollbook.book.sampler import SAMPLERS
from rollbook.cli import main
from rollbook.models import Actor
from rollbook.rollout.environment import Reply
from rollbook.train import checkpoint
from rollbook.train.algorithm import PRESET_NAMES
from rollbook.train.builders import build_rollouts, load_prompts
from rollbook.train.config import ConfigError, dump_config, load_config
from rollbook.train.evaluation import compare_evaluations
from rollbook.train.learner import NonFiniteLossError
from rollbook.train.recipes import letters
from rollbook.train.run import RunResult, run
from rollbook.train.trainer import AllSamplesFailedError
from tests import tiny
from tests.rewards.server import serve as serve_rewards
from tests.rollout.server import serve as serve_samples

ME = "tests.train.test_building"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SIZE: dict[str, Any] = {"hidden": 32, "heads": 1, "layers": 1}
LLAMA = "{model_type: llama, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1, "
"""A configuration but for its `vocab_size`."""


# --- what users bring -----------------------------------------------------------------------------------------------


def early(response_ids: Sequence[int]) -> float:
    """A reward that differs within groups."""
    return sum(token < 20 for token in response_ids) / 10


def huge(response_ids: Sequence[int]) -> float:
    """Finite, and too much for float32 as soon as it is squared."""
    return 1e38 * (response_ids[0] % 7)


def broken(response: str) -> float:
    raise KeyError("answer")


def an_actor(seed: int = 0) -> Actor:
    model, words = letters.model(seed, **SIZE)
    return Actor(model, tokenizer=words)


def a_model_alone() -> Any:
    return letters.model(**SIZE)[0]


def a_seer(seed: int = 0) -> tuple[Any, Any]:
    return tiny.llava(seed=seed)


def forwarding(seed: int = 0, **options: Any) -> tuple[Any, Any]:
    return letters.model(seed, **options)


def nothing() -> None:
    return None


class Game:
    """Over after `turns` turns, each worth a tenth of its length."""

    def __init__(self, prompt: Any, turns: int = 2) -> None:
        self.left = turns

    def begin(self) -> str | None:
        return None

    def respond(self, text: str) -> Reply:
        self.left -= 1
        return Reply("go on", reward=len(text) / 10, done=self.left == 0)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, data of every kind, rewards and a configuration of all that."""
    folder = tmp_path_factory.mktemp("house")
    model, words = letters.model(**SIZE)
    words.chat_template = TEMPLATE
    for part in (model, words):
        part.save_pretrained(folder / "model")
    words.save_pretrained(folder / "words")
    torch.manual_seed(1)
    judge = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(judge).save_pretrained(folder / "judge")
    words.save_pretrained(folder / "judge")
    rows = [{**row, "label": "ab"[i % 2], "source": i} for i, row in enumerate(letters.rows(24))]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": row["prompt"][:-1]} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    (folder / "rewards.py").write_text("def early(response_ids):\n    return sum(t < 20 for t in response_ids) / 10\n")
    letters.write_expert_book(folder / "expert", count=8)
    (folder / "base.yaml").write_text(
        f"""
        steps: 1
        threads: 1
        device: cpu
        model: {folder}/model
        data: {folder}/rows.jsonl
        rewards: {ME}:early
        sampling: {{max_tokens: 6}}
        algorithm: {{preset: grpo, group_size: 4}}
        batch: {{prompts_per_step: 3}}
        optimizer: {{lr: 0.01}}
        tracking: {{display: false}}
        """
    )
    return folder


class Ran:
    """A run that is over, with what its book has."""

    def __init__(self, outcome: RunResult) -> None:
        self.outcome, self.folder, self.reports = outcome, outcome.folder, outcome.reports
        self.last = outcome.reports[-1] if outcome.reports else None
        with rollbook.open(outcome.book) as book:
            self.records: list[Experience] = list(book.where(evaluation=0))
            self.evaluated: list[Experience] = list(book.where(evaluation=1))
            self.counts, self.trained, self.metrics = book.counts(), trained_steps(book), book.metrics()

    def moved(self) -> float:
        """How far the weights are from where they began."""
        first, last = (load_weights(self.folder, step) for step in (0, self.outcome.steps))
        return sum(float((last[name].float() - first[name].float()).abs().sum()) for name in first)


def load_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted((folder / "checkpoints" / checkpoint.checkpoint_name(step) / "model").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


Go = Any


@pytest.fixture
def go(house: Path, tmp_path: Path) -> Go:
    """`go("key=value", ...)` runs it; the folder is `run` unless `out` says otherwise."""

    def start(*changes: str, out: str = "run", base: str | Path | None = None) -> Ran:
        config = load_config(base or house / "base.yaml", [f"out={tmp_path / out}", *changes])
        return Ran(run(config, stream=io.StringIO()))

    return start


def refused(go: Go, key: str, *changes: str, **options: Any) -> str:
    """What is said of a key that is refused."""
    with pytest.raises(ValueError) as caught:
        go(*changes, **options)
    message = str(caught.value)
    assert message.startswith(f"{key}: "), message
    return message


# --- model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run of the file as it is."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return Ran(run(load_config(house / "base.yaml", [f"out={folder}"]), stream=io.StringIO()))


def numbers(ran: Ran) -> dict[str, float]:
    assert ran.last is not None
    return {name: ran.last[name] for name in ("loss", "reward", "grad_norm", "length", "entropy")}


def test_a_model_by_path(plain: Ran) -> None:
    assert plain.last is not None and plain.last["records"] == 12 and plain.last["grad_norm"] > 0
    assert plain.moved() > 0 and plain.counts.trained == 12
    row = plain.records[0]
    assert row.logprobs is not None and row.old_logprobs is not None and row.info["source"] == row.eid.task
    assert str(load_config(plain.folder / "config.yaml").folder) == str(plain.folder)


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer", "critic.path", "rewards.0.model"])
def test_a_path_of_something_else_than_a_folder_is_said_at_once(go: Go, key: str, tmp_path: Path) -> None:
    """The hub is not asked for a model of this name, also not of the form that it allows (no slash)."""
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.touch()
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nothing")
    for path, kind in ((file, "a file"), (pipe, "neither a folder nor a file"), (link, "neither a folder nor a file")):
        change = f"rewards=[{{model: {path}}}]" if key.startswith("rewards") else f"{key}={path}"
        assert f"got '{path}', which is {kind}, expected a folder" in refused(go, key, change, out=f"run-{path.name}")
    with pytest.raises(ValueError, match="model: got .*, which is a file, expected a folder or a name on the hub"):
        Actor(file)


def test_a_model_by_config_and_its_tokenizer(go: Go, house: Path) -> None:
    size = LLAMA + "vocab_size: 57}"
    ran = go(f"model.config={size}", f"model.tokenizer={house}/words", "checkpoint.save_final=false")
    again = go(f"model.config={size}", f"model.tokenizer={house}/words", "checkpoint.save_final=false", out="again")
    other = go(
        f"model.config={size}", f"model.tokenizer={house}/words", "checkpoint.save_final=false", "seed=1", out="other"
    )
    assert numbers(ran) == numbers(again) != numbers(other)
    assert "the prompts are texts" in refused(go, "model.tokenizer", f"model.config={size}", out="none")
    refused(go, "model.config", "model.config={model_type: lama}", f"model.tokenizer={house}/words", out="lama")


def test_a_model_by_builder(go: Go, plain: Ran) -> None:
    both = go("model.builder=rollbook.train.recipes.letters:model", f"model.options={json.dumps(SIZE)}")
    assert numbers(both) == numbers(plain)
    actor = go(f"model.builder={ME}:an_actor", "sampling.temperature=0.5", "seed=3", out="actor")
    assert actor.last is not None and actor.last["entropy"] < both.last["entropy"]
    assert "Actor" in refused(go, "model.suppress", f"model.builder={ME}:an_actor", "model.suppress=[5]", out="no")
    refused(go, "model.builder", f"model.builder={ME}:nothing", out="nothing")
    refused(go, "model.tokenizer", f"model.builder={ME}:a_model_alone", out="alone")
    refused(go, "model.options.sead", f"model.builder={ME}:an_actor", "model.options={sead: 1}", out="option")


def test_adapters_alone_are_trained_saved_and_gone_on_with(go: Go) -> None:
    lora = ["model.lora={r: 2, target_modules: [q_proj, v_proj]}", "algorithm.kl_coef=0.1"]
    uninterrupted = go(*lora, "steps=2", out="whole")
    first = go(*lora)
    assert {name.rpartition(".lora_")[1] for name in load_weights(first.folder, 1)} == {".lora_"}
    base = [load_file(file) for file in sorted(first.folder.glob("checkpoints/*/model/base/*.safetensors"))]
    assert all(torch.equal(value, base[0][name]) for state in base for name, value in state.items())
    assert first.moved() > 0
    second = go(*lora, "steps=2")
    assert numbers(second) == numbers(uninterrupted) and len(second.reports) == 1
    assert second.last is not None and second.last["kl"] == uninterrupted.last["kl"] > 0
    refused(go, "model.lora", "model.lora={rank: 2}", out="rank")
    refused(go, "model.lora.target_modules", "model.lora={r: 2, target_modules: [nope]}", out="target")


def test_checkpointing_attention_and_packing_change_no_number(go: Go, plain: Ran) -> None:
    ways = [
        ["model.gradient_checkpointing=true", "model.attention=sdpa"],
        ["model.attention=eager", "batch.packed=true"],
        ["model.attention=varlen", "batch.packed=true", "batch.token_budget=20"],
    ]
    for i, way in enumerate(ways):
        ran = go(*way, out=f"way{i}")
        assert numbers(ran) == pytest.approx(numbers(plain), abs=1e-4), way
    refused(go, "model.attention", "model.attention=nonsense", out="nonsense")


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_precision(precision: str, go: Go) -> None:
    ran = go(f"model.precision={precision}")
    kinds = {tensor.dtype for tensor in load_weights(ran.folder, 1).values()}
    assert kinds == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
    assert ran.moved() > 0


def test_suppressed_tokens_may_be_in_prompts_and_are_never_sampled(go: Go, plain: Ran) -> None:
    assert {4, 5, 6} & {token for row in plain.records for token in row.tokens[row.prompt_length :].tolist()}
    ran = go("model.suppress=[4, 5, 6]")
    sampled = {token for row in ran.records for token in row.tokens[row.prompt_length :].tolist()}
    prompted = {token for row in ran.records for token in row.tokens[: row.prompt_length].tolist()}
    assert not {4, 5, 6} & sampled and {4, 5, 6} & prompted
    assert all(row.finish_reason in ("stop", "length") for row in ran.records)
    refused(go, "model.suppress", "model.suppress=[4000]", out="beyond")


def test_images_go_through_the_processor(go: Go, tmp_path: Path) -> None:
    rows = []
    for i, colour in enumerate([(255, 0, 0), (0, 0, 255), (0, 255, 0), (9, 9, 9)]):
        tiny.picture(colour).save(tmp_path / f"{i}.png")
        rows.append({"question": f"<image>what is {i}?", "picture": f"{i}.png", "answer": "red"})
    (tmp_path / "seen.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ran = go(
        f"model.builder={ME}:a_seer",
        f"data={tmp_path}/seen.jsonl",
        "data.columns={prompt: question, images: picture, reference: answer}",
        "batch.prompts_per_step=2",
        "algorithm.group_size=2",
        "data.held_out=1",
        "sampling.max_tokens=3",
    )
    assert ran.moved() > 0 and len(ran.evaluated) == 2
    assert all(row.multi_modal_inputs is not None for row in ran.records)
    assert ran.records[0].info["reference"] == "red"


# --- data -----------------------------------------------------------------------------------------------------------


def test_data_of_every_kind_are_the_same_rows(go: Go, house: Path, plain: Ran, tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (house / "rows.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    parts = {"train": datasets.Dataset.from_list(rows[:20]), "test": datasets.Dataset.from_list(rows[20:])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert numbers(go(f"data={tmp_path}/rows.parquet", out="parquet")) == numbers(plain)
    ran = go(f"data={tmp_path}/saved", "data.split=train", "data.limit=20", "evaluation.split=test", out="dataset")
    assert {row.prompt_text for row in ran.evaluated} == {row["prompt"] for row in rows[20:]}
    assert {row.prompt_text for row in ran.records} <= {row["prompt"] for row in rows[:20]}
    refused(go, "split", f"data={tmp_path}/saved", "data.split=dev", out="dev")
    from_function = go("data.function=rollbook.train.recipes.letters:rows", "data.options={count: 24}", out="function")
    assert numbers(from_function) == numbers(plain)


def test_columns_and_what_is_kept_of_the_others(go: Go, house: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (house / "rows.jsonl").read_text().splitlines()]
    renamed = [{"q": row["prompt"], "a": row["reference"], "more": 1, "rest": 2} for row in rows]
    (tmp_path / "renamed.json").write_text(json.dumps(renamed))
    source = f"data={tmp_path}/renamed.json"
    ran = go(source, "data.columns={prompt: q, reference: a}", "data.keep=[more]", "data.shuffle=false")
    assert [row.eid.task for row in ran.records[::4]] == [0, 1, 2]
    assert ran.records[0].info["reference"] == rows[0]["reference"]
    assert "more" in ran.records[0].info and "rest" not in ran.records[0].info
    assert "the row has q, a, more, rest" in refused(go, f"{tmp_path}/renamed.json, row 0", source, out="no")


def test_chats_with_a_system_message(go: Go) -> None:
    ran = go("data.chat=true", "data.system=be good")
    row = ran.records[0]
    assert row.messages is not None and row.messages[0] == {"role": "system", "content": "be good"}
    assert str(row.prompt_text).startswith("[system]be good[user]") and str(row.prompt_text).endswith("[assistant]")
    size = f"model.options={json.dumps(SIZE)}"
    builder = "model.builder=rollbook.train.recipes.letters:model"
    assert "template" in refused(go, "model.tokenizer", "data.chat=true", builder, size, out="none")


def test_prompts_that_are_too_long(go: Go, house: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "abc>", "response": "abc"}, {"prompt": "a" * 99 + ">", "response": "a"}]
    (tmp_path / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = [f"data={tmp_path}/long.jsonl", "batch.prompts_per_step=2"]
    alone = go(*source, out="alone")  # longer than the model's 64 positions
    assert [row.finish_reason == "error" for row in alone.records] == [row.eid.task == 1 for row in alone.records]
    truncated = go(*source, "data.max_prompt_tokens=3", "data.overflow=left", out="cut")
    assert {row.prompt_text for row in truncated.records} == {"bc>", "aa>"}
    shown_ = go(*source, "algorithm=sft", "data.max_prompt_tokens=3", "data.overflow=right", out="sft")
    assert {row.prompt_text for row in shown_.records} == {"abc", "aaa"}
    dropped = go(*source, "algorithm=sft", "data.max_prompt_tokens=4", out="dropped")
    assert {row.prompt_text for row in dropped.records} == {"abc>"}
    with pytest.raises(
        AllSamplesFailedError, match=r"step 1: all 8 samples failed.*expected at most 2 \(max_prompt_tokens\)"
    ):
        go(*source, "data.max_prompt_tokens=2", out="all")
    refused(
        go, "data.max_prompt_tokens", *source, "data.max_prompt_tokens=9", f"environment={ME}:Game", out="environment"
    )


@pytest.mark.parametrize(("held_out", "limit", "count"), [("0.25", 16, 4), ("5", 24, 5)])
def test_rows_are_held_out_by_share_or_count(held_out: str, limit: int, count: int, go: Go) -> None:
    ran = go(f"data.held_out={held_out}", f"data.limit={limit}", "steps=8", "checkpoint.interval=0", "optimizer.lr=0")
    tasks = {row.eid.task for row in ran.evaluated}
    assert len(tasks) == count and len(ran.evaluated) == 2 * count
    assert max(tasks) < limit and not tasks & {row.eid.task for row in ran.records}


# --- rewards --------------------------------------------------------------------------------------------------------


def test_rewards_of_every_kind_with_weights_and_names(go: Go, house: Path) -> None:
    with serve_rewards() as server:
        rewards = [
            {"function": "exact_match", "weight": 0.5, "name": "right"},
            {"function": f"{house}/rewards.py:early", "weight": 2},
            {"function": "length", "options": {"target": 3, "per_unit": 1.0}, "weight": 0.1},
            {"recipe": {"a": [["rule", "exact_match", 1.0]], "b": [["rule", "length", 0.5]]}, "weight": 0},
            {"remote": [server.url, server.url], "name": "far", "weight": 0.01, "options": {"headers": {"x-run": "k"}}},
            {"model": f"{house}/judge", "weight": 3},
        ]
        ran = go(f"rewards={json.dumps(rewards)}", "data.held_out=2", "evaluation.success=right")
    assert server.requests and all(headers["x-run"] == "k" for headers in server.headers)
    for row in ran.records:
        parts = row.metrics
        assert {"right", "early", "length", "recipe", "far", "judge"} <= parts.keys()
        total = 0.5 * parts["right"] + 2 * parts["early"] + 0.1 * parts["length"]
        assert row.reward == pytest.approx(total + 0.01 * parts["far"] + 3 * parts["judge"], abs=1e-5)
    judge, row = LlamaForSequenceClassification.from_pretrained(house / "judge"), ran.records[0]
    assert row.metrics["judge"] == pytest.approx(
        float(judge(torch.as_tensor(row.tokens)[None].long()).logits.detach()), abs=1e-5
    )
    message = refused(go, "rewards.0.function", "rewards=exact_mach", out="near")
    assert "did you mean 'exact_match'" in message
    refused(go, "rewards.0.function", f"rewards={house}/rewards.py:late", out="late")
    refused(go, "rewards.0.model", "rewards=[{model: /no/judge}]", out="judge")
    refused(go, "rewards.0.options", "rewards=[{function: exact_match, options: {timelimit: 1}}]", out="options")
    refused(go, "success", f"rewards={json.dumps(rewards[:2])}", "data.held_out=2", "evaluation.success=wrong", out="s")


def test_an_edited_reward_is_said_and_not_compared(go: Go, house: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "def score(response_ids):\n    return {} + sum(t < 20 for t in response_ids) / 10\n"
    display = io.StringIO()

    def trained(steps: int, text: str) -> RunResult:
        file.write_text(text)
        for name in [name for name in sys.modules if name.startswith("_rollbook_file_")]:
            del sys.modules[name]  # as in another process
        changes = [f"out={tmp_path / 'run'}", f"rewards={file}:score", f"steps={steps}", "data.held_out=2"]
        display.truncate(display.seek(0))
        return run(load_config(house / "base.yaml", [*changes, "tracking.display=true"]), stream=display)

    trained(1, text.format(0))
    assert "the same prompts compared" in display.getvalue()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(2, f"# a comment\n{text.format(0)}")
    with pytest.warns(UserWarning, match="rewards: the code of the reward was edited since the run began"):
        outcome = trained(3, text.format(1))
    assert "not compared: the code of the reward was edited" in display.getvalue()
    assert outcome.before is not None and outcome.after is not None
    with pytest.raises(ValueError, match="the reward's code was edited in between"):
        compare_evaluations(outcome.before, outcome.after)


def test_what_would_fail_later_is_said_before_a_model_is_loaded(
    go: Go, house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("rollbook.train.builders.build_actor", load)
    (tmp_path / "mine.py").write_text("def score(respons): return 1.0\n")
    assert "did you mean 'response'?" in refused(go, "rewards.0.function", f"rewards={tmp_path}/mine.py:score", out="a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    message = refused(go, "engine.url", "engine.kind=openai", f"engine.url={url}", out="b")
    assert "cannot connect to " in message
    refused(go, "tracking.trackers.0", f"tracking.trackers=[{ME}:Nobody]", out="c")
    with monkeypatch.context() as missing:
        for name in ("math_verify", "wandb", "torch.utils.tensorboard"):
            missing.setitem(sys.modules, name, None)
        assert "extra 'math'" in refused(go, "rewards.0.function", "rewards=math_match", out="d")
        recipe = "rewards=[{recipe: {a: [[rule, math_match, 1.0]]}}]"
        assert "extra 'math'" in refused(go, "rewards.0.recipe", recipe, out="e")
        assert "pip install wandb" in refused(go, "tracking.wandb", "tracking.wandb={}", out="f")
        assert "pip install tensorboard" in refused(go, "tracking.tensorboard", "tracking.tensorboard=true", out="g")
        missing.setitem(sys.modules, "httpx", None)
        assert "rollbook[remote]" in refused(go, "engine.kind", "engine.kind=vllm", f"engine.url={url}", out="l")
        missing.setitem(sys.modules, "vllm", None)
        assert "rollbook[vllm]" in refused(go, "engine.kind", "engine.kind=vllm", out="m")
        assert "rollbook[remote]" in refused(go, "engine.kind", "engine.kind=openai", f"engine.url={url}", out="h")
        assert "extra 'remote'" in refused(go, "rewards.0.remote", "rewards=[{remote: [http://localhost:1]}]", out="i")
    small = f"model={{config: {LLAMA}vocab_size: 8, eos_token_id: 5}}, tokenizer: {house}/words}}"
    assert "expected at most the 8 of the model" in refused(go, "model.tokenizer", small, out="j")
    with pytest.warns(UserWarning, match="model.tokenizer: its end token is"), pytest.raises(AssertionError):
        go(small.replace("vocab_size: 8", "vocab_size: 99"), out="k")


def test_a_book_that_cannot_be_used_is_said_before_a_model_is_loaded(
    go: Go, plain: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("rollbook.train.builders.build_actor", load)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    message = refused(go, "book", f"book=postgresql://ana@127.0.0.1:{port}/runs", out="a")
    assert str(port) in message and "\n" not in message
    assert "has training records, expected a new one" in refused(go, "book", f"book={plain.outcome.book}", out="b")
    (tmp_path / "file").write_text("")
    assert "got a file" in refused(go, "book", f"book={tmp_path}/file", out="c")
    pytest.importorskip("ray")
    monkeypatch.setattr("rollbook.book.ray.connect_cluster", lambda _: None)
    monkeypatch.setattr("rollbook.book.ray.find_actor", lambda _: None)
    assert "no actor of this name serves a book" in refused(go, "book", "book=ray://nobody", out="d")


@pytest.mark.parametrize("builder", ["rollbook.train.recipes.letters:model", f"{ME}:forwarding"])
def test_an_unknown_option_of_a_function_is_one_line(
    builder: str, house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={{builder: {builder}, options: {{hiden: 3}}}}"
    assert main(["train", str(house / "base.yaml"), model, f"--out={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("rollbook train: model.options.hiden: unknown option of ") and printed.count("\n") == 1
    assert "did you mean 'hidden'?" in printed or builder.endswith("forwarding")


def test_a_reward_that_never_works_stops_the_run(go: Go) -> None:
    with pytest.raises(
        AllSamplesFailedError, match=r"step 1: all 12 samples failed, or have no reward; the first: broken: KeyErr"
    ):
        go(f"rewards={ME}:broken")


# --- environments and engines ---------------------------------------------------------------------------------------


def test_an_environment_in_training_and_evaluation(go: Go) -> None:
    ran = go(f"environment={ME}:Game", "environment.options={turns: 3}", "environment.on_truncation=respond",
             "rewards=[]", "environment.max_turns=2", "data.chat=true", "data.held_out=2",
             "evaluation.k=2")  # fmt: skip
    assert {row.metrics["turns"] for row in ran.records} == {2} and len(ran.evaluated) == 8
    assert ran.moved() > 0 and all(row.reward > 0 for row in ran.records if row.reward is not None)
    with pytest.raises(AllSamplesFailedError, match="nope"):
        go(f"environment={ME}:Game", "environment.options={nope: 3}", "rewards=[]", out="nope")
    refused(go, "environment.function", f"environment={ME}:Gme", out="name")
    refused(go, "evaluation.rewards", f"environment={ME}:Game", "evaluation.rewards=exact_match", out="rewards")


def test_a_server_samples_with_its_own_weights_and_that_is_said(
    go: Go, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = letters.model(**SIZE)
    monkeypatch.setenv("KEY_OF_THE_SERVER", "secret")
    with serve_samples("vllm", model=model, tokenizer=words) as server:
        engine = ["engine.kind=openai", f"engine.url={server.url}"]
        with pytest.warns(UserWarning, match="keeps its own weights.*algorithm.correction corrects"):
            ran = go(
                *engine, "engine.api_key_env=KEY_OF_THE_SERVER", "engine.concurrency=2", "steps=2", "data.held_out=2",
                "model.suppress=[9]", "checkpoint.interval=1", "checkpoint.keep_last=null",
            )  # fmt: skip
        assert len(server.seen) == 6  # of the training alone: evaluations are of the weights that are trained
        assert set(server.keys) == {"Bearer secret"} and server.max_open <= 2
        assert all(body["logit_bias"] == {"9": -100} for body in server.seen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            weighed = go(*engine, "algorithm.correction={}", "checkpoint.save_final=false", out="weighed")
            assert "nope" in refused(go, "engine.options", *engine, "engine.options={nope: 1}", out="options")
    assert {int(version) for row in ran.records for version in row.policy_versions} == {0}
    assert ran.last is not None and ran.last["staleness"] == 1
    assert all(row.logprobs is not None and row.old_logprobs is not None for row in ran.records)
    assert {int(version) for row in ran.evaluated for version in row.policy_versions} == {0, 2}
    assert weighed.last is not None and weighed.last["grad_norm"] > 0
    assert "NO_SUCH_KEY" in refused(go, "engine.api_key_env", *engine, "engine.api_key_env=NO_SUCH_KEY", out="key")


# --- algorithms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_every_preset_takes_a_step(preset: str, go: Go, house: Path) -> None:
    changes = {
        "ppo": [f"critic={house}/model", "critic_optimizer.lr=0.01", "critic.value_head=normal"],
        "dpo": [f"data={house}/pairs.jsonl"],
        "on_policy_distill": ["rewards=[]", "teacher.builder=rollbook.train.recipes.letters:model",
                              f"teacher.options={json.dumps({**SIZE, 'seed': 5})}"],
        "mix": [f"replay.expert={house}/expert", "replay.expert_share=0.25"],
    }  # fmt: skip
    more = changes.get(preset, [])
    n = "" if preset in ("ppo", "sft", "dpo", "on_policy_distill") else "algorithm.group_size=4"
    ran = go(f"algorithm={preset}", *([n] if n else []), *more)
    assert ran.last is not None and ran.last["grad_norm"] > 0 and ran.moved() > 0
    assert ran.counts.trained == ran.last["records"] == (3 if not n else 12)
    if preset == "ppo":
        assert (ran.folder / "checkpoints/step-000001/critic").is_dir() and ran.last["critic/grad_norm"] > 0
    if preset == "on_policy_distill":
        assert {row.reward for row in ran.records} == {None}
        assert all(row.advantages is not None and row.advantages.abs().sum() > 0 for row in ran.records)


def test_what_algorithms_need(go: Go, house: Path) -> None:
    size = LLAMA + "vocab_size: 20}"
    refused(go, "algorithm.group_size", "algorithm.group_size=1")
    go(
        "algorithm.group_size=1",
        "algorithm.estimator_options={singleton: raw}",
        "checkpoint.save_final=false",
        out="raw",
    )
    refused(go, "critic.config", "algorithm=ppo", f"critic.config={size}", out="critic")
    refused(go, "teacher", "algorithm=on_policy_distill", out="teacher")
    refused(go, "teacher.path", "algorithm=on_policy_distill", "teacher=/no/teacher", out="folder")
    refused(go, "replay.expert", "algorithm=mix", out="expert")
    refused(go, "replay.expert", "algorithm=mix", "replay.expert=/no/book", out="book")
    refused(go, f"{house}/rows.jsonl", "algorithm=dpo", out="dpo")
    with pytest.raises(ConfigError, match="rewards: missing"):
        go("rewards=[]", out="rewards")


def test_ones_own_algorithm_from_parts_with_a_reference(go: Go, house: Path) -> None:
    custom = "{preset: null, name: mine, estimator: rloo, loss: gspo, kl_coef: 0.1, kl_in: reward, group_size: 3}"
    ran = go(f"algorithm={custom}", f"reference={house}/model", "batch.epochs=2", "batch.minibatches=50")
    assert ran.last is not None and ran.last["records"] == 9
    assert all(row.ref_logprobs is not None for row in ran.records)
    assert ran.last["updates"] == 18  # each record a minibatch of its own, in two passes
    assert load_config(ran.folder / "config.yaml").algorithm.name == "mine"
    refused(go, "reference", f"algorithm={custom}", "reference=/no/reference", out="no")


# --- replay, batches, schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_replay_by_every_sampler(sampler: str, go: Go) -> None:
    ran = go("replay.kind=replay", f"replay.sampler={sampler}", "replay.reuse=2", "replay.rollout_interval=2",
             "steps=2", "checkpoint.save_final=false")  # fmt: skip
    assert [report["records"] for report in ran.reports] == [12, 12] and len(ran.records) == 12
    assert list(ran.trained.values()) == [[1, 2]] * 12


def test_staleness_and_options_of_a_sampler(go: Go) -> None:
    replay = ["replay.kind=replay", "replay.reuse=null", "replay.rollout_interval=2", "steps=3"]
    with pytest.warns(UserWarning, match="step 2: no records to train on: no records are waiting"):
        ran = go(*replay, "replay.max_staleness=0")
    assert [report["records"] for report in ran.reports] == [12, 0, 12]
    assert ran.outcome.steps == 3 and [step for step, _ in ran.metrics] == [1, 2, 3]
    refused(go, "replay.sampler_options", *replay, "replay.sampler=priority", "replay.sampler_options={a: 1}", out="o")


def test_minibatches_keep_groups_together(go: Go) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ran = go(
            "batch.keep_groups=true",
            "batch.minibatches=20",
            "batch.drop_zero_advantages=true",
            "checkpoint.save_final=false",
        )
    assert ran.last is not None and ran.last["grad_norm"] > 0


@pytest.mark.parametrize(("schedule", "expected"), [("linear", 0.0055), ("cosine", 0.0055), ("constant", 0.01)])
def test_schedules_end_with_the_run(schedule: str, expected: float, go: Go) -> None:
    ran = go(f"optimizer.schedule={schedule}", "optimizer.warmup_steps=2", "optimizer.min_lr_ratio=0.1", "steps=4")
    rates = [report["lr"] for report in ran.reports]
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[2] == pytest.approx(expected)
    assert rates[3] == pytest.approx(0.01 if schedule == "constant" else 0.001)


def test_updates_that_are_not_finite_change_nothing_and_stop_the_run(go: Go) -> None:
    with pytest.raises(NonFiniteLossError, match=r"step 2.*2 times in a row"):
        go(f"rewards={ME}:huge", "algorithm=dr_grpo", "algorithm.group_size=4", "nonfinite_limit=2", "steps=4")


# --- saving, evaluating, tracking -----------------------------------------------------------------------------------


def checkpoints(ran: Ran) -> list[int]:
    return [saved.step for saved in checkpoint.list_checkpoints(ran.folder)]


def test_saving_every_so_many_steps_and_keeping_so_many(go: Go) -> None:
    assert checkpoints(go("steps=3", "checkpoint.interval=1", "checkpoint.keep_last=1")) == [0, 3]
    ran = go("steps=3", "checkpoint.interval=2", "checkpoint.save_final=false", "tracking.display=true", out="last")
    assert checkpoints(ran) == [0, 2]


def test_evaluation_by_its_keys(go: Go, house: Path) -> None:
    with pytest.warns(UserWarning, match="evaluation: 3 of 3 prompts are also trained on"):
        ran = go(f"evaluation.data={house}/rows.jsonl", "evaluation.prompts=3", "evaluation.k=2",
                 "evaluation.interval=1", "evaluation.before=false", "evaluation.rewards=exact_match",
                 "evaluation.max_tokens=2", "steps=2", "evaluation.temperature=0.5",
                 "evaluation.confidence=0.5")  # fmt: skip
    assert [row.eid.batch for row in ran.evaluated[::6]] == ["eval-1", "eval-2"] and len(ran.evaluated) == 12
    assert {row.reward for row in ran.evaluated} == {0.0} and ran.outcome.before is None
    assert max(len(row.tokens) - row.prompt_length for row in ran.evaluated) <= 2
    assert "eval/pass@2" in dict(ran.metrics)[2] and ran.outcome.after is not None
    assert ran.outcome.after.confidence == 0.5
    rows = ["evaluation.function=rollbook.train.recipes.letters:rows", "evaluation.options={count: 3, skip: 30}"]
    greedy = go(*rows, "evaluation.greedy=true", "optimizer.lr=0", "evaluation.success=0.1", out="greedy")
    before, after = greedy.outcome.before, greedy.outcome.after
    assert before is not None and after is not None
    assert [row.response_text for row in before.records] == [row.response_text for row in after.records]
    assert before.success == sum(row.reward >= 0.1 for row in before.records) / 3


def test_tracking(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[tuple[str, int], float] = {}

    class SummaryWriter:  # of a package that may not be here
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name, step] = value

        def flush(self) -> None: ...

        def close(self) -> None:
            written["closed", 0] = 1.0

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    ran = go("tracking.tensorboard=true")
    assert ran.last is not None and written["loss", 1] == ran.last["loss"] and ("closed", 0) in written
    (line,) = (ran.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"]["loss"] == ran.last["loss"] == dict(ran.metrics)[1]["loss"]
    assert not (go("tracking.jsonl=false", out="none").folder / "metrics.jsonl").exists()


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


def test_threads_determinism_and_device(go: Go, plain: Ran, as_before: None) -> None:
    ran = go("threads=2", "deterministic=true", "device=cpu")
    assert torch.get_num_threads() == 2 and torch.are_deterministic_algorithms_enabled()
    assert numbers(ran) == pytest.approx(numbers(plain), abs=1e-5)
    if not torch.cuda.is_available():
        refused(go, "device", "device=cuda:1", out="cuda")


def test_a_folder_that_has_a_run(go: Go, tmp_path: Path) -> None:
    first = go()
    refused(go, "resume", "resume=false")
    assert "optimizer.lr: 0.5, was 0.01" in refused(go, "resume", "optimizer.lr=0.5")
    more = go("steps=2")
    assert [report.step for report in more.reports] == [2] and go("steps=2").reports == []
    again = go("overwrite=true", "optimizer.lr=0.5")
    assert numbers(again) == numbers(first) and checkpoints(again) == [0, 1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    refused(go, "out", out="mine")
    refused(go, "overwrite", "overwrite=true", out="mine")
    assert (tmp_path / "mine" / "thesis.txt").is_file()


def test_a_mistake_can_be_mended_in_the_same_folder(go: Go) -> None:
    refused(go, "model.path", "model=/no/model")
    with pytest.raises(ValueError, match="part of the reward"):
        go("data.held_out=2", "rewards=[exact_match, length]", "evaluation.success=wrong")
    assert go().counts.trained == 12


def test_no_steps_are_an_evaluation(go: Go) -> None:
    ran = go("steps=0", "data.held_out=3", "tracking.display=true")
    assert ran.outcome.before is not None and ran.outcome.before.prompts == 3 and ran.reports == []


def test_samples_without_a_reward_are_shown_as_such(go: Go) -> None:
    rewards = json.dumps([f"{ME}:early", f"{ME}:broken"])
    ran = go("data.held_out=2", f"evaluation.rewards={rewards}", "tracking.display=true")
    assert ran.outcome.after is not None and ran.outcome.after.unscored == 2


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(house / "base.yaml")
    assert main(["train", file, "data.held_out=3", "data.limit=9", f"data={house}/rows.jsonl", "--show-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "whole.yaml").write_text(text)
    config = load_config(tmp_path / "whole.yaml")
    assert dump_config(config) == text and (config.data.held_out, config.data.limit) == (3, 9)
    out = f"--out={tmp_path / 'run'}"
    assert main(["train", str(tmp_path / "whole.yaml"), "tracking.display=true", "--json", out]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["steps"] == 1 and summary["after"]["eval/prompts"] == 3 and "step-000001/model" in printed.err


def test_a_trainer_that_another_one_replaces_ends_in_one_line(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OtherTrainer:
        """Uses the same book as soon as this run waits for its workers."""

        def __init__(self, book: str, *_: Any) -> None:
            self.book = book

        def start(self) -> None:
            with rollbook.open(self.book) as book:
                open_rollouts(book, {"trainer": "another"}, next=0)

        def poll(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr("rollbook.train.run.LocalWorkers", OtherTrainer)
    words = [str(house / "base.yaml"), "rollout.workers=1", "rollout.mode=one_step_off"]
    assert main(["train", *words, f"book={tmp_path / 'book'}", f"--out={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert printed == f"rollbook train: {tmp_path / 'book'}: another trainer is now using this book\n"


def test_a_worker_trusts_the_command_line_and_not_the_settings_of_the_book(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: Any) -> Any:
        raise ValueError("the worker is built")

    def answer(book: Path, *words: str) -> str:
        assert main(["rollout", "--book", str(book), *words]) == 2
        return capsys.readouterr().err

    def stored(name: str, *changes: str) -> Path:
        config = load_config(house / "base.yaml", ["rollout.workers=1", "rewards=exact_match", *changes])
        settings = build_rollouts(config, load_prompts(config)[0]).settings
        with rollbook.open(tmp_path / name) as book:
            open_rollouts(book, settings, next=0)
        return tmp_path / name

    monkeypatch.setattr("rollbook.train.builders.build_worker", build)
    plain, own_url, stored_url = stored("plain"), "http://127.0.0.1:1", "http://127.0.0.1:2"
    assert "the worker is built" in answer(plain, "--engine", own_url)
    assert "the worker is built" in answer(plain, f"engine={{kind: vllm, url: [{own_url}]}}")
    assert "the worker is built" in answer(plain, "model={builder: os:system}")
    served = stored("served", "engine.kind=vllm", f"engine.url=[{stored_url}, {stored_url}]")
    assert f"engine.url: {stored_url}" in answer(served)
    assert f"engine.url: {stored_url}" in answer(served, "--engine", "vllm")
    assert f"engine.url: {own_url}, {stored_url}" in answer(served, f"engine.url.0={own_url}")
    assert "the worker is built" in answer(served, "--engine", own_url)
    loads = stored("loads", "engine={kind: vllm, options: {engine_args: {model: evil/model}}}")
    refused = answer(loads, "--engine", own_url)
    assert "engine.options.engine_args.model: evil/model" in refused and own_url not in refused
    assert "the worker is built" in answer(loads, "engine.options.engine_args.model=my/model")


def test_a_reward_that_always_fails_ends_the_warm_up(go: Go) -> None:
    with pytest.raises(AllSamplesFailedError, match="warm-up, step 5: no sample has a reward; the first: .*answer"):
        go("warmup.steps=20", "warmup.target_accuracy=0.5", f"rewards={ME}:broken")


def test_epochs_set_the_steps(go: Go) -> None:
    ran = go("algorithm=sft", "epochs=1.5", "data.limit=8", "batch.prompts_per_step=4")
    assert ran.outcome.steps == 3 and all(len(steps) >= 1 for steps in ran.trained.values()) and len(ran.trained) == 12
    assert go("algorithm=sft", "epochs=2", "data.limit=8", "batch.prompts_per_step=4").outcome.steps == 4  # goes on


def test_eval_scores_a_model_without_training(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(house / "base.yaml", [f"out={tmp_path / 'run'}", "data.held_out=4", "evaluation.k=2"])
    outcome = run(config, stream=io.StringIO())
    assert outcome.before is not None and outcome.after is not None
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert f"rewards.0.function: {ME}:early" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "run"), "--trust", "--json"]) == 0  # the last checkpoint
    assert json.loads(capsys.readouterr().out) == outcome.after.metrics()
    lora = [f"out={tmp_path / 'lora'}", "data.held_out=4", "model.lora={r: 2, target_modules: [q_proj]}"]
    adapted = run(load_config(house / "base.yaml", lora), stream=io.StringIO())
    assert adapted.after is not None
    assert main(["eval", str(tmp_path / "lora"), "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == adapted.after.metrics()
    settings = [str(house / "base.yaml"), "data.held_out=4", "evaluation.k=2"]
    assert main(["eval", *settings, "--model", str(tmp_path / "run" / "checkpoints" / "step-000000" / "model")]) == 0
    assert "avg@2" in capsys.readouterr().out
    assert main(["eval", str(house / "base.yaml")]) == 2
    assert "data.held_out: got 0, expected rows to evaluate on" in capsys.readouterr().err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "a file that is not there": (["FILE", "data=/no/such.jsonl"], "data: got '/no/such.jsonl'"),
    "a configuration that is not there": (["/no/such.yaml"], "/no/such.yaml: no such file"),
    "a misspelt key": (["FILE", "optimiser.lr=1"], "optimiser: unknown key; did you mean 'optimizer'"),
    "a wrong type": (
        ["FILE", "batch.prompts_per_step=many"],
        "batch.prompts_per_step: got 'many', expected an integer from 1 to 1,000,000",
    ),
    "a model that is not there": (
        ["FILE", "model=/no/model"],
        "model.path: got '/no/model', expected a folder or a name on the hub",
    ),
    "a reward that raises": (["FILE", f"rewards={ME}:broken"], "step 1: all 12 samples failed, or have no reward; the"),
    "a reward's module": (
        ["FILE", "rewards=my_rewards:right"],
        "rewards.0.function: got 'my_rewards:right', but there",
    ),
    "a column": (["FILE", "data.columns={prompt: question}"], "question (prompt): missing, expected text in a col"),
    "prompts that are too long": (["FILE", "data.max_prompt_tokens=3"], "got 7 tokens, expected at most 3 (max_promp"),
    "one response for grpo": (
        ["FILE", "algorithm.group_size=1"],
        "algorithm.group_size: got 1, and grpo (grpo) compares the responses",
    ),
    "a folder with other things": (["FILE", "--out=FOLDER"], "which has files but no config.yaml, expected another"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_first_mistakes_are_one_line(
    mistake: str, house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = MISTAKES[mistake]
    names = {"FILE": str(house / "base.yaml"), "--out=FOLDER": f"--out={house}"}
    words = [names.get(argument, argument) for argument in arguments]
    words += [] if "--out=FOLDER" in arguments else [f"--out={tmp_path / 'run'}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert main(["train", *words]) == 2
    printed = capsys.readouterr()
    (line,) = [printed_line for printed_line in printed.err.splitlines() if printed_line.startswith("rollbook train: ")]
    assert expected in line and printed.out == "" and "Traceback" not in printed.err
    assert printed.err.splitlines()[-1] == line
