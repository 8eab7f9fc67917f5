"""The configuration: what is read is what was meant, what is wrong is named, and what is shown can be read again."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from rollbook.algorithms import ESTIMATORS, KL, LOSSES
from rollbook.book.sampler import SAMPLERS
from rollbook.cli.parser import main
from rollbook.train.algorithm import PRESET_NAMES, AlgorithmConfig
from rollbook.train.builders import build_reward
from rollbook.train.config import Config, ConfigError, compare_configs, dump_config, files, load_config
from rollbook.train.config.files import format_value, parse_argument, parse_scalar, parse_yaml
from rollbook.train.config.values import (
    Boolean,
    Either,
    Kind,
    ListOf,
    MappingOf,
    Nullable,
    Number,
    PlainValue,
    Section,
    Text,
    find_section,
    get_section,
)
from rollbook.train.learner import MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.replay_config import ReplayConfig
from rollbook.train.supervised import WarmupConfig

TOP = get_section(Config)
SECTIONS = {name: inner for name, key in TOP.keys.items() if (inner := find_section(key.kind)) is not None}


def every_key() -> list[tuple[str, str]]:
    """(section, key) of all there are; the section of those at the top is empty."""
    inner = [(name, key) for name, section in SECTIONS.items() for key in section.keys]
    return [("", name) for name in TOP.keys if name not in SECTIONS] + inner


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def refused(file: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


# --- any configuration ------------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = {
    "estimator": st.none() | st.sampled_from(sorted(ESTIMATORS)),
    "loss": st.sampled_from(sorted(LOSSES)),
    "kl_estimator": st.sampled_from(sorted(KL)),
    "kl_in": st.sampled_from(["loss", "reward"]),
    "schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "model_type": st.text(min_size=1),
}


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Anything that a key of this kind takes."""
    match kind:
        case Boolean():
            return st.booleans()
        case Number():
            low = kind.low if kind.low is not None else kind.above
            high = kind.high if kind.high is not None else kind.below
            if kind.integer:
                return st.integers(None if low is None else int(low), None if high is None else int(high))
            drawn = st.floats(low, high, allow_nan=False, allow_infinity=False)
            return drawn.filter(lambda x: x not in (kind.above, kind.below)).map(
                lambda x: float(int(x)) if kind.whole_from is not None and x >= kind.whole_from else x
            )
        case Text():
            if kind.choices:
                return st.sampled_from(kind.choices)
            return st.from_regex(kind.pattern, fullmatch=True) if kind.pattern else st.text()
        case Nullable():
            return st.none() | values(kind.inner)
        case Either():
            return st.one_of([values(part) for part in kind.kinds])
        case ListOf():
            return st.lists(values(kind.item), min_size=kind.length or 0, max_size=kind.length or 3)
        case PlainValue():
            return plain
        case MappingOf():
            names = st.sampled_from(kind.names) if kind.names else st.text()
            return st.dictionaries(names, values(kind.item), max_size=3)
        case Section():
            some = st.lists(st.sampled_from(sorted(kind.keys)), max_size=3, unique=True)
            return some.flatmap(
                lambda chosen: st.fixed_dictionaries(
                    {name: NAMES.get(name, values(kind.keys[name].kind)) for name in chosen}
                )
            )
    raise TypeError(kind)


STRATEGIES = {name: values(key.kind) for name, key in TOP.keys.items()}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any configuration: of some sections whatever they take, where its keys agree with each other."""
    settings: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(STRATEGIES)), max_size=4, unique=True)):
        value = draw(STRATEGIES[name])
        try:
            Config.from_dict({name: value})
        except ConfigError:
            continue
        settings[name] = value
    try:
        return Config.from_dict(settings)
    except ConfigError:  # the names of two rewards
        assume(False)
        raise


@given(configs())
def test_what_is_shown_reads_back_to_the_same(config: Config) -> None:
    text = dump_config(config)
    read, _ = parse_yaml(text, "shown")
    assert Config.from_dict(read) == config
    assert read == config.to_dict()
    assert yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) == read, "another reader of YAML"
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (
        not compare_configs(Config.from_dict(read), config)
        and Config.from_dict(read).fingerprint() == config.fingerprint()
    )


@given(plain)
def test_any_plain_value_survives_one_line(value: Any) -> None:
    assert parse_yaml(format_value(value), "line")[0] == value


@pytest.mark.parametrize(
    "text", ["\ud800", "\x85\u2028\ufeff\x7f\x00", "a: b # c", "- x", "\U0001f600", "...", " x ", "0x1", "=", "<<"]
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    formatted = format_value({text: [text]})
    assert parse_yaml(formatted, "line")[0] == {text: [text]}
    assert yaml.safe_load(formatted) == {text: [text]}


@given(
    st.sampled_from(every_key()), st.integers(0, 30), st.sampled_from(["drop", "double", "swap", "x", "_", "9", "é"])
)
def test_any_misspelt_key_is_refused_by_its_full_name(key: tuple[str, str], place: int, misspelling: str) -> None:
    section, name = key
    at = place % len(name)
    changed = {
        "drop": name[:at] + name[at + 1 :],
        "double": name[:at] + name[at] + name[at:],
        "swap": name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :],
    }.get(misspelling, name[:at] + misspelling + name[at:])
    assume(changed not in (SECTIONS[section].keys if section else TOP.keys))
    inner: Any = {changed: 1}
    if section == "rewards":
        inner = [inner]
    changed = changed or "''"
    path = f"{section}.0.{changed}" if section == "rewards" else f"{section}.{changed}" if section else changed
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({section: inner} if section else inner)
    assert str(caught.value).startswith(f"{path}: unknown key")
    assert caught.value.path == path


# --- the schema -------------------------------------------------------------------------------------------------------


def test_every_key_has_one_sentence_and_a_default() -> None:
    for section, name in every_key():
        key = (SECTIONS[section] if section else TOP).keys[name]
        assert key.doc.endswith(".") and key.doc.count(". ") <= 1 and len(key.doc) < 240, (section, name, key.doc)
        assert key.kind.expected, name
    for name, section in SECTIONS.items():
        assert TOP.keys[name].doc or section.cls.__doc__, name
    assert (
        Config() == Config.from_dict({})
        and Config().to_dict()
        == Config.from_dict({name: {} for name in SECTIONS if name not in ("rewards", "critic_optimizer")}).to_dict()
    )


def test_sections_have_the_fields_and_defaults_of_what_they_are_handed_to() -> None:
    assert Config().batch.minibatch_config() == MinibatchConfig()
    assert Config().replay.replay_config() == ReplayConfig(sampler_options={})
    assert Config(warmup={"steps": 100}).warmup.warmup_config() == WarmupConfig()
    named = {field.name for field in dataclasses.fields(ReplayConfig)} - {"consumer"}
    assert {*SECTIONS["replay"].keys} == named | {"expert"}
    assert {*SECTIONS["batch"].keys} == {field.name for field in dataclasses.fields(MinibatchConfig)} | {
        "prompts_per_step"
    }
    assert [*SECTIONS["algorithm"].keys] == ["preset", *(field.name for field in dataclasses.fields(AlgorithmConfig))]
    assert [*SECTIONS["optimizer"].keys] == [field.name for field in dataclasses.fields(OptimizerConfig)]
    assert all(Config(replay={"kind": "replay", "sampler": name}).replay.sampler == name for name in SAMPLERS)


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_an_algorithm_is_its_preset_with_changes(preset: str) -> None:
    config = Config(algorithm=preset)
    assert config.algorithm == AlgorithmConfig.preset(preset)
    assert Config.from_dict(config.to_dict()) == config
    changed = Config(algorithm={"preset": preset, "entropy_coef": 0.5})
    assert changed.algorithm == AlgorithmConfig.preset(preset, entropy_coef=0.5)
    assert [str(change) for change in compare_configs(config, changed)] == ["algorithm.entropy_coef: 0.5, was 0.0"]


def test_an_algorithm_of_ones_own() -> None:
    config = Config(algorithm={"preset": None, "name": "mine", "estimator": "rloo", "loss": "cispo"})
    assert config.algorithm == AlgorithmConfig(name="mine", estimator="rloo", loss="cispo")
    assert Config.from_dict(config.to_dict()) == config


BAD = {
    "optimizer.lr: got -1.0, expected a number from 0 to 10": {"optimizer": {"lr": -1}},
    "optimizer.lr: got 'fast', expected a number": {"optimizer": {"lr": "fast"}},
    "optimizer.betas: got [0.9], expected a list of 2": {"optimizer": {"betas": [0.9]}},
    "critic_optimizer.betas[1]: got 2.0, expected a number from 0 to 1": {"critic_optimizer": {"betas": [0, 2]}},
    "steps: got 1.5, expected an integer from 0 to 1,000,000,000": {"steps": 1.5},
    "steps: got 1e+18, expected an integer from 0 to 1,000,000,000": {"steps": 1e18},
    "algorithm.group_size: got 1000000, expected an integer from 1 to 10,000": {"algorithm": {"group_size": 10**6}},
    "steps: got true, expected an integer from 0 to 1,000,000,000": {"steps": True},
    "steps: got null, expected an integer": {"steps": None},
    "name: got 7, expected letters, digits": {"name": 7},
    "data.system: got 7, expected a string (in quotes it would be: \"7\")": {"data": {"system": 7}},
    "checkpoint.save_final: got 'yes', expected true or false": {"checkpoint": {"save_final": "yes"}},
    "device: got 'gpu', expected auto, cpu, cuda, cuda:1 or mps": {"device": "gpu"},
    "sampling.top_p: got 1.5, expected a number in (0, 1]": {"sampling": {"top_p": 1.5}},
    "sampling.stop.1: got 5, expected a string": {"sampling": {"stop": ["a", 5]}},
    "sampling.temperature: got inf, expected a number in (0, 10000]": {"sampling": {"temperature": float("inf")}},
    "sampling.n: unknown key; did you mean 'algorithm.group_size'?": {"sampling": {"n": 8}},
    "learning_rate: unknown key": {"learning_rate": 1},
    "batch.prompts: unknown key; did you mean 'prompts_per_step'?": {"batch": {"prompts": 8}},
    "optimizer.grad_clip: unknown key; did you mean 'max_grad_norm'?": {"optimizer": {"grad_clip": 1.0}},
    "model.precision: got 'bf16', expected one of float32, bfloat16, autocast": {"model": {"precision": "bf16"}},
    "model.builder: got it together with path, expected one of path, config, builder":
        {"model": {"path": "a", "builder": "b:c"}},
    "algorithm.kl_coef: got 5, expected 0: the loss 'dpo' compares pairs":
        {"algorithm": {"preset": "dpo", "kl_coef": 5}},
    "algorithm.kl_in: got 'reward', expected 'loss'; no estimator":
        {"algorithm": {"preset": "sft", "kl_coef": 0.5, "kl_in": "reward"}},
    "model.config.model_type: missing, expected a model type": {"model": {"config": {"hidden_size": 8}}},
    "model.options: got {'x': 1}, which requires builder": {"model": {"path": "a", "options": {"x": 1}}},
    "model: got 3, expected a mapping of its keys, or its path": {"model": 3},
    "model.options.x.y: got nan, expected a string, a number":
        {"model": {"builder": "b:c", "options": {"x": {"y": float("nan")}}}},
    "data.held_out: got 1.5, expected a number >= 0 (< 1: a fraction; >= 1: a count)":
        {"data": {"held_out": 1.5}},
    "data.columns.promt: unknown key; did you mean 'prompt'?": {"data": {"columns": {"promt": "q"}}},
    "data.overflow: got 'left', which requires max_prompt_tokens": {"data": {"overflow": "left"}},
    "rewards.1.function: missing, expected one of function, recipe, remote, model":
        {"rewards": ["gsm8k", {"weight": 2}]},
    "rewards.0.recipe.a: got 'os:system', expected [[type, key, weight], ...]":
        {"rewards": {"recipe": {"a": "os:system"}}},
    "rewards.0.recipe.a: got ['os:system'], expected [[type, key, weight], ...]":
        {"rewards": {"recipe": {"a": ["os:system"]}}},
    "rewards.0.remote.0: got 'ftp://x', expected an http:// or https:// URL": {"rewards": {"remote": "ftp://x"}},
    "rewards: got the name 'a' twice": {"rewards": [{"function": "gsm8k", "name": "a"}, {"model": "m", "name": "a"}]},
    "algorithm.preset: got 'gprpo', expected one of ppo, grpo": {"algorithm": "gprpo"},
    "algorithm.loss_options: unknown option 'clip_hihg' of ppo; did you mean 'clip_high'?":
        {"algorithm": {"loss_options": {"clip_hihg": 1}}},
    "algorithm.gamma: got 2.0, expected a number from 0 to 1": {"algorithm": {"gamma": 2}},
    "replay.reuse: got 2 for kind on_policy, expected it for replay": {"replay": {"reuse": 2}},
    "replay.expert_share: got 0.5, which requires expert": {"replay": {"expert_share": 0.5}},
    "replay.sampler: got 'unifrom', expected one of first": {"replay": {"kind": "replay", "sampler": "unifrom"}},
    "engine.url: missing": {"engine": {"kind": "openai"}},
    "engine.url: got 'http://x' for kind transformers": {"engine": {"url": "http://x"}},
    "engine.url: got 2 URLs, expected the URL": {"engine": {"kind": "openai", "url": ["http://x", "http://y"]}},
    "engine.sync_every: got 2 for kind openai": {"engine": {"kind": "openai", "url": "http://x", "sync_every": 2}},
    "engine.sleep: got True for kind transformers": {"engine": {"sleep": True}},
    "evaluation.k: got 2 with greedy": {"evaluation": {"greedy": True, "k": 2}},
    "evaluation.success: got true, expected a number or a string": {"evaluation": {"success": True}},
    "tracking.wandb.projct: unknown key; did you mean 'project'?": {"tracking": {"wandb": {"projct": "x"}}},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_named(message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(BAD[message])
    assert str(caught.value).startswith(message)


def test_a_bad_value_of_a_dataclass_is_named_too() -> None:
    with pytest.raises(ConfigError, match="optimizer.lrr: unknown key; did you mean 'lr'?"):
        Config(optimizer={"lrr": 1})
    with pytest.raises(ConfigError, match="^batch.prompts_per_step: got 0, expected an integer from 1 to 1,000,000"):
        Config(batch={"prompts_per_step": 0})


def test_a_config_shares_nothing_with_what_it_was_made_from() -> None:
    options = {"deep": [1]}
    config = Config(model={"builder": "a:b", "options": options})
    options["deep"].append(2)
    assert config.model.options == {"deep": [1]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


def test_what_cannot_be_run_is_refused_before_it_is() -> None:
    parts: dict[str, Any] = {"model": "m", "data": "d.jsonl", "rewards": "gsm8k"}
    Config(**parts).require()
    for name in parts:
        with pytest.raises(ConfigError, match=f"^{name}: missing"):
            Config(**{key: value for key, value in parts.items() if key != name}).require()
    Config(model="m", data="d.jsonl", algorithm="sft").require()
    for algorithm, needs in (("on_policy_distill", "teacher"), ("mix", "replay.expert")):
        with pytest.raises(ConfigError, match=f"^{needs}: missing, required by {algorithm}"):
            Config(**parts, algorithm=algorithm).require()
    with pytest.raises(ConfigError, match="^data.held_out: got 0"):
        Config(**parts, evaluation={"interval": 5}).require()


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resume_may_change_how_long_and_how_fast_but_not_what_is_learned() -> None:
    old = Config(model="m", rewards=["gsm8k"])
    longer = Config(
        model={"path": "m", "gradient_checkpointing": True},
        rewards=["gsm8k"],
        steps=500,
        batch={"token_budget": 4096},
        checkpoint={"interval": 5},
        tracking={"wandb": {"project": "x"}},
        evaluation={"interval": 7},
    )
    assert longer.fingerprint() == old.fingerprint() and longer != old
    assert all(change.changeable for change in compare_configs(old, longer)) and len(compare_configs(old, longer)) == 6
    other = Config(model="m", rewards=[{"function": "gsm8k", "weight": 2, "options": {"x": 1}}], optimizer={"lr": 1e-3})
    assert other.fingerprint() != old.fingerprint()
    assert [str(change) for change in compare_configs(old, other) if not change.changeable] == [
        "rewards.0.weight: 2.0, was 1.0",
        "rewards.0.options.x: 1, was null",
        "optimizer.lr: 0.001, was 1e-06",
    ]
    none, some = (Config(model="m", tracking={"wandb": settings}) for settings in (None, {}))
    assert [str(change) for change in compare_configs(none, some)] == ["tracking.wandb: {}, was null"]
    assert [str(change) for change in compare_configs(other, old)][1] == "rewards.0.options.x: null, was 1"


# --- files ------------------------------------------------------------------------------------------------------------


def test_words_are_read_as_yaml_1_2_has_them() -> None:
    words = [
        "1e-5",
        "1E5",
        "-.5",
        "+3",
        "0x1F",
        "0o17",
        "no",
        "on",
        "1_000",
        "12:30:45",
        "2026-11-16",
        "~",
        "1e",
        "NaN",
    ]
    parsed: list[Any] = [1e-5, 1e5, -0.5, 3, 31, 15, *words[6:11], None, "1e", "NaN"]
    assert [parse_scalar(word) for word in words] == parsed
    assert parse_yaml(json.dumps(words), "list")[0] == words, "in quotes all of it is text"
    assert parse_yaml("[!!str 5, !!str x]", "list")[0] == ["5", "x"]


REFUSED = {
    "a: 1\nb: {c: 1, c: 2}": "b.c: duplicate key (x, line 2)",
    "a: !!python/object/apply:os.system [ls]": "a: got the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
    "a: !include other": "a: got the tag '!include', expected plain values (x, line 1)",
    "a: &a [*a]": "a.0: got a value that contains itself",
    "a: &a {b: *a}": "a.b: got a value that contains itself",
    "1: 2": "x: got '1' as a key, expected a string (in quotes: '1') (x, line 1)",
    "[a]: 2": "x: got a list or a mapping as a key",
    "a: [": "x, line 1: invalid YAML",
    "a: b: c": "x, line 1: invalid YAML: mapping values are not allowed here",
    "a: 1\n---\nb: 2": "x, line 2: invalid YAML",
    "a: " + "9" * 5000: "a: got a number of 5000 digits",
    "a: \x07": "x: invalid YAML",
    "a: " + "[" * 1200 + "]" * 1200: "x: got more than 100 levels of nesting",
    "a: " + "[" * 200 + "]" * 200: "a",
    "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "\n".join(f"{y}: &{y} [{','.join(['*' + x] * 9)}]" for x, y in zip("abcdefgh", "bcdefghi", strict=True)): "",
}  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_document_is_plain_and_ends(case: int) -> None:
    text, message = list(REFUSED.items())[case]
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "x")
    assert str(caught.value).startswith(message)
    assert message or "got more than 100000 values" in str(caught.value)


def test_errors_name_the_file_and_the_line(tmp_path: Path) -> None:
    file = write(tmp_path, "my.yaml", "steps: 3\noptimizer:\n  schedule: linear\n  lr: -1\n")
    assert refused(file) == f"optimizer.lr: got -1.0, expected a number from 0 to 10 ({file}, line 4)"
    assert refused(file, "optimizer.lr=fast") == "optimizer.lr: got 'fast', expected a number (the command line)"
    child = write(tmp_path, "child.yaml", "base: my.yaml\nsteps: 5\n")
    assert refused(child).endswith(f"({file}, line 4)")
    toml = write(tmp_path, "my.toml", "[optimizer]\nlr = -1\n")
    assert refused(toml) == f"optimizer.lr: got -1.0, expected a number from 0 to 10 ({toml})"
    bad = write(tmp_path, "bad.yaml", "rewards:\n- gsm8k\n- function: gsm8k\n  wieght: 2\n")
    assert refused(bad).startswith("rewards.1.wieght: unknown key; did you mean 'weight'?")
    assert refused(bad).endswith(f"({bad}, line 4)")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{}", "expected .yaml, .yml or .toml"),
        ("a.yaml", "- 1", "got a list, expected sections and keys"),
        ("a.toml", "a = ", "invalid TOML"),
        ("a.toml", "steps = 2026-11-16", "steps: got datetime.date(2026, 11, 16), expected an integer"),
        ("a.yaml", "base: 3", "base: got 3, expected a file"),
        ("a.yaml", "base: no_such.yaml", "no such file"),
        ("a.yaml", "base: no_such", "no such file or recipe"),
        ("a.yaml", "base: a.yaml", "base: files form a cycle: a.yaml <- a.yaml"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in refused(write(tmp_path, name, text))


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: \xff")
    assert "invalid UTF-8" in refused(tmp_path / "a.yaml")
    assert "no such file" in refused(tmp_path / "b.yaml")


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml_file = write(tmp_path, "a.yaml", "name: x\nsampling: {stop: [END]}\noptimizer:\n  lr: 1e-5\n")
    toml_file = write(tmp_path, "a.toml", 'name = "x"\nsampling.stop = ["END"]\n[optimizer]\nlr = 1e-5\n')
    assert (
        load_config(yaml_file)
        == load_config(toml_file)
        == Config(name="x", sampling={"stop": "END"}, optimizer={"lr": 1e-5})
    )
    assert load_config(write(tmp_path, "empty.yaml", "# nothing\n")) == Config()
    assert load_config(write(tmp_path, "null.yaml", "checkpoint:\nmodel:\n")) == Config()


# --- layers -----------------------------------------------------------------------------------------------------------

BASE = """
name: base
model: {builder: "some.module:model", options: {hidden: 8}, tokenizer: t}
data: {function: "some.module:rows", options: {count: 4}, held_out: 20}
rewards: [{function: "some.module:reward", weight: 0.5, options: {x: 1}}, gsm8k]
algorithm: {preset: grpo, group_size: 4, loss_options: {clip_high: 0.28}}
replay: {kind: replay, reuse: 4, sampler: proportional, sampler_options: {alpha: 0.5}}
optimizer: {lr: 5e-4, warmup_steps: 5}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, "base.yaml", BASE)


def over(base: Path, text: str) -> Config:
    return load_config(write(base.parent, "child.yaml", f"base: base.yaml\n{text}"))


def test_a_file_changes_its_base_key_by_key(base: Path) -> None:
    plain = load_config(base)
    assert over(base, "") == plain
    child = over(
        base, "optimizer: {lr: 1e-3}\nmodel: {options: {layers: 2}}\nalgorithm: {loss_options: {clip_low: 0.1}}"
    )
    assert child.optimizer == OptimizerConfig(lr=1e-3, warmup_steps=5)
    assert child.model.options == {"hidden": 8, "layers": 2}
    assert child.algorithm == AlgorithmConfig.preset(
        "grpo", group_size=4, loss_options={"clip_high": 0.28, "clip_low": 0.1}
    )
    write(base.parent, "sub.toml", 'base = "base.yaml"\nname = "middle"\nseed = 3')
    grandchild = load_config(write(base.parent, "deep.yaml", "base: sub.toml\nname: deep\n"))
    assert (grandchild.name, grandchild.seed, grandchild.optimizer.warmup_steps) == ("deep", 3, 5)
    assert over(base, "rewards: numeric_match").rewards == Config(rewards="numeric_match").rewards, "lists are whole"
    assert not over(base, "model: null").model.is_set, "null is as by default"


def test_another_source_drops_what_was_said_of_the_old_one(base: Path) -> None:
    assert over(base, "model: {path: m}").model == Config(model="m").model
    data = over(base, "data: {columns: {prompt: q}, path: d.jsonl}").data
    assert (data.path, data.function, data.options, data.columns, data.held_out) == (
        "d.jsonl",
        None,
        {},
        {"prompt": "q"},
        20,
    )
    options = over(base, "model: {options: {z: 1}, builder: 'other:model'}").model.options
    assert options == {"z": 1}, "in whatever order they are written"
    assert over(base, "model: {builder: 'some.module:model'}").model.options == {"hidden": 8}, "the same one again"
    assert over(base, "algorithm: ppo").algorithm == AlgorithmConfig.preset("ppo")
    assert over(base, "algorithm: {loss: gspo}").algorithm == AlgorithmConfig.preset("grpo", group_size=4, loss="gspo")
    assert over(base, "replay: {kind: on_policy}").replay == Config().replay
    with pytest.raises(ConfigError, match="got it together with path"):
        over(base, "model: {path: m, builder: 'a:b'}")


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    write(folder, "train.jsonl", "{}")
    write(folder, "score.py", "def score(response): return 1.0")
    text = "model: model\ndata: {path: train.jsonl}\nrewards: [exact_match, 'score.py:score']\nreference: org/hub-name"
    write(folder, "my.yaml", text)
    monkeypatch.chdir(tmp_path)
    config = load_config("conf/my.yaml", ["evaluation.data=train.jsonl"])
    assert (config.model.path, config.data.path) == ("conf/model", "conf/train.jsonl")
    assert [reward.function for reward in config.rewards] == ["exact_match", "conf/score.py:score"]
    assert config.reference == "org/hub-name" and config.evaluation.data == "train.jsonl", "as on the command line"
    monkeypatch.chdir(folder)
    assert load_config("my.yaml").data.path == "train.jsonl"


def test_another_file_as_an_argument_has_the_same_columns(tmp_path: Path) -> None:
    file = write(tmp_path, "my.yaml", "data: {path: a.jsonl, split: x, columns: {prompt: q}, keep: [level]}")
    data = load_config(file, ["data.path=b.jsonl"]).data
    assert (data.path, data.split, data.columns, data.keep) == ("b.jsonl", None, {"prompt": "q"}, ("level",))
    assert load_config(file, ["data.function=m:f"]).data.columns == {}, "rows of a function are something else"


def test_a_models_configuration_is_changed_or_replaced(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", "model: {config: {model_type: llama, hidden_size: 8, layers: 1}}")
    assert over(base, "model: {config: {layers: 2}}").model.config == {
        "model_type": "llama",
        "hidden_size": 8,
        "layers": 2,
    }
    assert over(base, "model: {config: {model_type: qwen3}}").model.config == {"model_type": "qwen3"}
    assert over(base, "model: m").model.config is None


def test_steps_of_a_later_layer_drop_epochs(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("base: letters\nepochs: 2\n")
    assert load_config(file).epochs == 2
    assert load_config(file, ["epochs=3"]).epochs == 3
    config = load_config(file, ["steps=5"])
    assert (config.steps, config.epochs) == (5, None)


def test_recipes_are_bases_and_files_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RECIPE_FOLDER", tmp_path / "recipes")
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", "letters.yaml", "name: letters\nsteps: 7\n")
    write(tmp_path / "recipes", "letters_ppo.yaml", "base: letters\nalgorithm: ppo\n")
    assert load_config(None, []).steps == load_config("letters").steps == 7
    assert load_config("letters_ppo").algorithm.name == "ppo" and load_config("letters_ppo").steps == 7
    assert load_config(write(tmp_path, "mine.yaml", "base: letters_ppo\nseed: 4")).steps == 7
    assert refused("lettres").startswith("lettres: no such file or recipe; did you mean 'letters'?")
    write(tmp_path / "recipes", "bad.yaml", "\nsteps: x")
    assert refused("bad").endswith("(recipe bad, line 2)")


def test_arguments_change_any_key(base: Path) -> None:
    config = load_config(
        base,
        [
            "optimizer.lr=1e-5",
            "name=2026",
            "seed=3",
            "seed=4",
            "device=cuda:1",
            "data.system=a: [b",
            "sampling.stop=5",
            "rewards.0.weight=2",
            "rewards.1.options.x={a: [1, null]}",
            "rewards.2=numeric_match",
            "model.options.hidden=16",
            "optimizer.betas=[0.9, 0.95]",
            "critic_optimizer.lr=1e-3",
            "evaluation.success=right",
            "model.tokenizer=null",
            "checkpoint.interval=1e1",
            "out='null'",
            "replay.expert=",
        ],
    )
    assert (config.optimizer.lr, config.name, config.seed, config.device) == (1e-5, "2026", 4, "cuda:1")
    assert (config.data.system, config.sampling.stop, config.out) == ("a: [b", ("5",), "null")
    assert [reward.weight for reward in config.rewards] == [2.0, 1.0, 1.0] and config.rewards[0].options == {"x": 1}
    assert config.rewards[1].options == {"x": {"a": [1, None]}} and config.rewards[2].function == "numeric_match"
    assert config.model.options == {"hidden": 16} and config.model.tokenizer is None
    assert config.optimizer.betas == (0.9, 0.95) and config.critic_optimizer == OptimizerConfig(lr=1e-3)
    assert (config.evaluation.success, config.checkpoint.interval, config.replay.expert) == ("right", 10, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "steps: expected section.key=value"),
        ("=3", "=3: expected section.key=value"),
        ("base=letters", "base: cannot be changed on the command line"),
        ("a..b=3", "a..b=3: expected section.key=value"),
        ("stepz=3", "stepz: unknown key; did you mean 'steps'?"),
        ("lr=3", "lr: unknown key; did you mean 'warmup.lr' or 'optimizer.lr'"),
        ("steps=soon", "steps: got 'soon', expected an integer from 0 to 1,000,000,000"),
        ("optimizer.lr.x=3", "optimizer.lr: got {'x': 3}, expected a number"),
        ("optimizer=3", "optimizer: got 3, expected a mapping of its keys"),
        ("rewards.7.weight=3", "rewards.7: got item 7 of a list of 2, expected at most 2"),
        ("model.options={a: 1, a: 2}", "model.options: duplicate key"),
        ('model.options={"a": 1, "a": 2}', "model.options: duplicate key"),
        ("model.options={a", "model.options: invalid YAML"),
        ("model.options=!!python/name:os.system", "model.options: got '!!python/name:os.system', expected a mapping"),
        ("model.options=[!!python/name:os.system ]", "model.options: got the tag"),
    ],
)
def test_an_argument_that_is_wrong_says_so(base: Path, change: str, message: str) -> None:
    refusal = refused(base, change)
    assert refusal.startswith(message) and refusal.endswith("(the command line)")


# --- surroundings -----------------------------------------------------------------------------------------------------


def test_toml_and_arguments_need_no_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    toml = write(tmp_path, "a.toml", "seed = 3")
    assert load_config(toml, ['sampling.stop=["a"]', "optimizer.lr=1e-5", "name=x"]).sampling.stop == ("a",)
    assert "name: x" in dump_config(load_config(toml, ["name=x"]))
    with pytest.raises(ImportError, match="install the extra 'train' of Rollbook"):
        load_config(write(tmp_path, "a.yaml", "seed: 3"))
    assert parse_argument("[1, 2]") == [1, 2]


def test_importing_the_configuration_loads_no_torch() -> None:
    code = (
        "import sys, rollbook.train.config.files, rollbook.train.config.files, rollbook.train.config as c;"
        "c.ConfigError, c.load_config, c.list_recipes();"
        "print(*(m for m in ('torch', 'yaml', 'transformers') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


SECRETS: dict[str, list[str]] = {
    "engine.url.0": ["engine.kind=openai", "engine.url=https://ana:hunter2@host"],
    "engine.options.headers.Authorization": ["engine.options={headers: {Authorization: 'Bearer hunter2'}}"],
    "engine.options.api_key": ["engine.options.api_key=hunter2"],
    "rewards.0.remote.0": ["rewards={remote: 'https://hunter2@host/score'}"],
    "rewards.0.remote.1": ["rewards={remote: ['https://host/', 'https://host/?token=hunter2']}"],
    "rewards.0.options.headers.X-Auth-Token": [
        "rewards={remote: 'https://host/', options: {headers: {X-Auth-Token: 'hunter2'}}}"
    ],
    "evaluation.rewards.0.remote.0": ["evaluation.rewards={remote: 'http://ana:hunter2@host'}"],
    "replay.expert": ["replay.expert=postgresql://ana@host/runs?password=hunter2"],
    "environment.options.search.api_key": [
        "environment.function=a.py:b",
        "environment.options={search: {api_key: 'hunter2'}}",
    ],
    "rewards.0.options.headers.Authorization.0": [
        "rewards={remote: 'https://host/', options: {headers: {Authorization: ['hunter2']}}}"
    ],
    "rewards.0.options.headers.Ocp-Subscription-Key": [
        "rewards={remote: 'https://host/', options: {headers: {Ocp-Subscription-Key: 'hunter2'}}}"
    ],
    "model.options.hf_token": ["model.options={hf_token: 'hunter2'}"],
    "model.options.place": ["model.options={place: 'host=db password=hunter2'}"],
}


@pytest.mark.parametrize("path", SECRETS)
def test_a_secret_is_refused_and_a_variable_taken(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SECRETS[path], "--show-config"]) == 2
    printed = capsys.readouterr().err
    assert f"{path}: got a secret as text" in printed and "${NAME}" in printed and "hunter2" not in printed
    assert (
        main(["train", *(argument.replace("hunter2", "${WORD}") for argument in SECRETS[path]), "--show-config"]) == 0
    )
    assert "${WORD}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("engine.options.headers.Authorization", "Bearer hunter2${WORD}"),
        ("engine.options.headers.Authorization", "Bearer ${WORD}hunter2"),
        ("engine.options.headers.Authorization", "hunter2 ${WORD}"),
        ("engine.options.headers.Authorization", "Bearer hunter ${WORD}"),
        ("engine.options.headers.Cookie", "session=hunter2; id=${WORD}"),
        ("engine.options.headers.x-api-key", "123456"),
        ("engine.options.headers.My_Password", "hunter2"),
        ("engine.options.api_key", "hunter2${WORD}"),
        ("engine.options.api_key", "hunter ${WORD}"),
        ("engine.options.place", "https://ana:hunter2${WORD}@host"),
        ("engine.options.place", "https://host/?token=hunter2${WORD}"),
    ],
)
def test_a_variable_beside_a_secret_does_not_excuse_it(key: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "engine.kind=openai", "engine.url=http://host", f"{key}={text}", "--show-config"]) == 2
    printed = capsys.readouterr().err
    assert f"{key}: got a secret as text" in printed and "hunter2" not in printed and "123456" not in printed


def test_other_headers_are_shown_and_may_have_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = "headers: {X-Run: 7, X-Team: 'vision', X-Weird: '${WORD} of ${WORD}'}"
    assert main(["train", f"rewards={{remote: 'https://host/', options: {{{headers}}}}}", "--show-config"]) == 0
    assert "X-Team: vision" in (printed := capsys.readouterr().out).replace('"', "") and "${WORD} of ${WORD}" in printed
    monkeypatch.setenv("WORD", "p4ss")
    settings = {"remote": "https://host/", "options": {"headers": {"X-Weird": "${WORD}"}}}
    assert build_reward(Config(rewards=[settings]).rewards)._headers == {"X-Weird": "p4ss"}


def test_variables_are_read_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "p@ss/w rd")
    settings = {"remote": "https://ana:${WORD}@host/", "options": {"headers": {"Authorization": "Bearer ${WORD}"}}}
    reward = build_reward(Config(rewards=[settings]).rewards)
    assert (reward.urls, reward._users) == (["https://host/"], [("ana", "p@ss/w rd")])
    assert reward._headers == {"Authorization": "Bearer p@ss/w rd"}
    monkeypatch.delenv("WORD")
    with pytest.raises(ConfigError, match=r"rewards\.0\.remote\.0: got \$\{WORD\}, and WORD is not set"):
        build_reward(Config(rewards=[settings]).rewards)


def test_the_page_has_every_key_and_is_up_to_date() -> None:
    folder = Path(__file__).parents[2] / "docs"
    text = runpy.run_path(str(folder / "config_page.py"))["page"]()
    for section, name in every_key():
        if section != "critic_optimizer":
            written = f"{section}.N.{name}" if section == "rewards" else f"{section}.{name}" if section else name
            assert f"| `{written}`" in text, written
    assert (folder / "configuration.md").read_text(encoding="utf-8") == text, (
        "make it again: python docs/config_page.py"
    )
