"""Every key of `rollbook train`: sections as dataclasses, each key with its type, default, bounds and one sentence.

Invariant: keys are declared here and, for `algorithm`, `optimizer` and `critic_optimizer`, in `AlgorithmConfig` and
`OptimizerConfig`. The string under a field is its description on the reference page and in `--show-config`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rollbook.train.config.values import (
    ConfigError,
    check_secrets,
    checked,
    key,
    leaves,
    plain,
    section_in,
    section_of,
    unknown,
)

if TYPE_CHECKING:
    from rollbook.train.algorithm import AlgorithmConfig
    from rollbook.train.learner import MinibatchConfig
    from rollbook.train.optimizer import OptimizerConfig
    from rollbook.train.replay_config import ReplayConfig as Taken
    from rollbook.train.sft_warmup import WarmupConfig


FUNCTION: dict[str, Any] = {
    "pattern": r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|.+\.py:[A-Za-z_]\w*",
    "what": "'module:function' or 'file.py:function'",
    "path": True,
}
SAMPLERS = {
    "first": "First",
    "last": "Last",
    "newest_policy": "NewestPolicy",
    "uniform": "Uniform",
    "proportional": "Proportional",
    "priority": "Priority",
    "easy_to_hard": "EasyToHard",
    "balanced": "Balanced",
}
"""Names of the book's samplers, and their classes."""
_SOURCES = ("function", "recipe", "remote", "model", "name", "options")
COLUMNS = (
    *("prompt", "messages", "reference", "label", "images", "videos", "tools"),
    *("response", "chosen", "rejected"),
)
"""What a row of the data can have."""


def one_of(self: Any, *names: str) -> None:
    """Refuse two keys that say the same thing in different ways."""
    given = [name for name in names if getattr(self, name) is not None]
    if len(given) > 1:
        raise ConfigError(given[1], f"got it beside {given[0]}, expected one of {', '.join(names)}")


def needs(self: Any, name: str, other: str) -> None:
    """Refuse a key that does nothing without another one."""
    if getattr(self, name) and getattr(self, other) is None:
        raise ConfigError(name, f"got {getattr(self, name)!r} without {other}, which it is for")


def _check_config(self: Any) -> None:
    if self.config is not None and not isinstance(self.config.get("model_type"), str):
        raise ConfigError("config.model_type", "is missing, expected transformers' name of a kind of model, as llama")


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Model:
    """The policy: weights from `path`, random ones from `config`, or what `builder` returns."""

    SHORT: ClassVar[str] = "path"

    path: str | None = key(None, path=True, anew=("config", "builder", "options", "tokenizer", "processor"))
    """A folder that transformers can load, or a name on the hub."""
    config: Mapping[str, Any] | None = key(None, whole="model_type", anew=("path", "builder", "options"))
    """A transformers configuration with its `model_type`, for random weights; without one, changes to the base's."""
    builder: str | None = key(None, anew=("path", "config", "options", "tokenizer", "processor"), **FUNCTION)
    """A function that returns an `Actor`, or a model and its tokenizer; it is called with `options`."""
    options: Mapping[str, Any] = key({})
    """Arguments of `builder`, by name."""
    tokenizer: str | None = key(None, path=True)
    """The folder or hub name of the tokenizer; null: the model's own."""
    processor: str | None = key(None, path=True)
    """The folder or hub name of the processor of images; null: the model's own."""
    precision: Literal["float32", "bfloat16", "autocast"] = key("float32")
    """`float32`, `bfloat16` (short weights, float32 copies in the optimizer) or `autocast` (float32 weights, passes in
    bfloat16)."""
    attention: str | None = key(None, free=True)
    """transformers' `attn_implementation` (eager, sdpa, flash_attention_2, flex_attention, varlen, ...); null: its
    choice."""
    gradient_checkpointing: bool = key(False, free=True)
    """Whether activations are computed again in the backward pass, for less memory."""
    lora: Mapping[str, Any] | None = key(None)
    """Options of `peft.LoraConfig` (`r`, `lora_alpha`, `target_modules`, ...), to train adapters alone; null: all
    weights."""
    suppress: tuple[int, ...] = key((), low=0)
    """Ids of tokens that are never sampled and have no probability in training."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "path", "config", "builder")
        needs(self, "options", "builder")
        _check_config(self)

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return (self.path, self.config, self.builder) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class Critic:
    """The critic, of algorithms that have one: by default a copy of the actor's backbone."""

    SHORT: ClassVar[str] = "path"

    path: str | None = key(None, path=True, anew=("config",))
    """The folder or hub name of a model to begin from; null: the actor's weights."""
    config: Mapping[str, Any] | None = key(None, whole="model_type", anew=("path",))
    """A transformers configuration with its `model_type`, for a critic of random weights."""
    value_head: Literal["zeros", "normal"] = key("zeros")
    """How the value head begins: at 0 everywhere, or at random."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "path", "config")
        _check_config(self)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The teacher, of algorithms that have one."""

    SHORT: ClassVar[str] = "path"

    path: str | None = key(None, path=True, anew=("config", "builder", "options"))
    """A folder that transformers can load, or a name on the hub."""
    config: Mapping[str, Any] | None = key(None, whole="model_type", anew=("path", "builder", "options"))
    """A transformers configuration with its `model_type`, for random weights."""
    builder: str | None = key(None, anew=("path", "config", "options"), **FUNCTION)
    """A function that returns the teacher; it is called with `options`."""
    options: Mapping[str, Any] = key({})
    """Arguments of `builder`, by name."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "path", "config", "builder")
        needs(self, "options", "builder")
        _check_config(self)

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return (self.path, self.config, self.builder) != (None, None, None)


# --- what it learns from ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts (and, for `sft` and `dpo`, answers): from a file, a dataset or a function."""

    SHORT: ClassVar[str] = "path"

    path: str | None = key(None, path=True, anew=("function", "options", "split", "subset", "columns", "keep"))
    """A JSONL, JSON or Parquet file, a folder of such files, or a folder or name of a Hugging Face dataset."""
    function: str | None = key(None, anew=("path", "options", "split", "subset", "columns", "keep"), **FUNCTION)
    """A function that returns the rows, in place of a file; it is called with `options`."""
    options: Mapping[str, Any] = key({})
    """Arguments of `function`, by name."""
    split: str | None = key(None)
    """The split of a dataset; null: its only one."""
    subset: str | None = key(None)
    """The subset of a dataset; null: its only one."""
    columns: Mapping[str, str | None] = key({}, names=COLUMNS)
    """What a row's parts are called in the data, as {prompt: question, reference: answer}; null: it has none."""
    keep: tuple[str, ...] | None = key(None)
    """Which other columns go along to rewards and records, in `info`; null: all."""
    shuffle: bool = key(True)
    """Whether each epoch goes through the rows in an order of its own, made from the seed."""
    limit: int | None = key(None, low=1)
    """At most so many rows, the first ones; null: all."""
    held_out: float = key(0, low=0, whole_from=1)
    """Rows that are set aside for evaluation and never trained on: a share or a count."""
    max_prompt_tokens: int | None = key(None, low=1)
    """Tokens of a prompt, at most; null: as many as the model takes."""
    overflow: Literal["error", "left", "right"] = key("error")
    """What becomes of a longer prompt: an `error` for it alone, or it is cut on the `left` or the `right`."""
    chat: bool = key(False)
    """Whether a prompt of plain text becomes a chat with one message of the user."""
    system: str | None = key(None)
    """A system message, put before every chat that has none; null: none."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "path", "function")
        needs(self, "options", "function")
        for name in ("split", "subset"):
            needs(self, name, "path")
        if self.overflow != "error" and self.max_prompt_tokens is None:
            raise ConfigError("overflow", f"got {self.overflow!r} without max_prompt_tokens, which it is for")

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return (self.path, self.function) != (None, None)


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Supervised steps on the rows' `response` before the training; off unless `steps` is above 0."""

    steps: int = key(0, low=0, high=10**6)
    """At most so many steps; 0: no warm-up."""
    until: float | None = key(None, above=0, high=1)
    """Stop when this share of sampled responses succeeds, to rows that it does not learn from; null: after `steps`."""
    every: int = key(5, low=1)
    """Steps between looks at that share."""
    rows: int = key(128, low=1, high=10**5)
    """Rows of each step."""
    checked: int = key(256, low=1, high=10**6)
    """Rows that are sampled at each look."""
    lr: float = key(3e-3, above=0, high=10)
    """The learning rate at its highest."""
    rise: int = key(30, low=0)
    """Steps over which the rate rises."""
    grad_clip: float = key(1.0, low=0)
    """The longest gradient; 0: any."""

    def __post_init__(self) -> None:
        checked(self)

    def warm_up(self) -> WarmupConfig:
        """The same as `rollbook.train.sft_warmup.warm_up` takes it."""
        from rollbook.train.optimizer import OptimizerConfig
        from rollbook.train.sft_warmup import WarmupConfig

        return WarmupConfig(
            steps=self.steps,
            until=self.until,
            every=self.every,
            rows=self.rows,
            checked=self.checked,
            optimizer=OptimizerConfig(lr=self.lr, warmup=self.rise, grad_clip=self.grad_clip),
        )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One source of reward; several are added up by weight."""

    SHORT: ClassVar[str] = "function"

    function: str | None = key(None, path=True, anew=_SOURCES)
    """A ready function (`exact_match`, `numeric_match`, `gsm8k`, ...), `module:function` or `file.py:function`."""
    recipe: Mapping[str, Any] | None = key(None, anew=_SOURCES)
    """Components by the rows' label: {label: [[type, key, weight], ...]}."""
    remote: tuple[str, ...] | None = key(
        None, anew=_SOURCES, pattern=r"https?://\S+", what="an http:// or https:// URL"
    )
    """The URL of a reward server, or of several that are replicas."""
    model: str | None = key(None, path=True, anew=_SOURCES)
    """The folder or hub name of a sequence classifier."""
    weight: float = key(1.0)
    """What its scores are multiplied by in the sum."""
    name: str | None = key(None, pattern=r"[\w.+-]+", what="letters, digits and any of . _ + -")
    """What it is called in metrics; null: the function's or the model's own name."""
    options: Mapping[str, Any] = key({})
    """What `rollbook.rewards.as_reward` takes beside it: `time_limit`, `on_error`, `pool`, and the function's own
    arguments."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "function", "recipe", "remote", "model")
        if (self.function, self.recipe, self.remote, self.model) == (None, None, None, None):
            raise ConfigError("function", "is missing, expected one of function, recipe, remote, model")
        for label, lines in (self.recipe or {}).items():
            if not isinstance(lines, (list, tuple)) or not all(isinstance(line, (list, tuple)) for line in lines):
                raise ConfigError(f"recipe.{label}", f"got {lines!r}, expected [[type, key, weight], ...]")
        if self.function is not None and not re.fullmatch(rf"{FUNCTION['pattern']}|[\w.-]+\.py|\w+", self.function):
            raise ConfigError(
                "function", f"got {self.function!r}, expected a ready function's name, {FUNCTION['what']}"
            )


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Conversations of several turns, with a tool or a game; off unless `function` is given."""

    SHORT: ClassVar[str] = "function"

    function: str | None = key(None, anew=("options",), **FUNCTION)
    """Called with a prompt and `options`, it returns the environment of one conversation; null: one response and no
    more."""
    options: Mapping[str, Any] = key({})
    """Arguments of `function`, by name."""
    max_turns: int = key(8, low=1, high=10**4)
    """Turns of the model in a conversation, at most."""
    rewards: Literal["sum", "last"] = key("sum")
    """What a conversation is worth, of what the environment gave its turns."""
    context_limit: int | None = key(None, low=1)
    """Tokens of a whole conversation, at most; null: the model's positions."""
    on_cut: Literal["end", "respond"] = key("end")
    """What becomes of a turn that a limit cut: it is the `end`, or the environment shall `respond` to it."""
    workers: int = key(1, low=1, high=1024)
    """Environments that respond at the same time."""
    episode: Mapping[str, Any] = key({}, names=("on_realign", "on_fork", "template_options"))
    """Options of `rollbook.rollout.Episode`."""

    def __post_init__(self) -> None:
        checked(self)
        needs(self, "options", "function")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Who samples: the model itself through transformers, or a server."""

    kind: Literal["transformers", "openai"] = key("transformers", anew=("url", "model", "api_key_env", "options"))
    """`transformers`: this process, with the weights that are trained; `openai`: a server at `url`, such as vLLM's,
    which keeps its own weights, whatever is trained: `algorithm.correction` weighs what it samples."""
    url: str | None = key(None, free=True, pattern=r"https?://\S+", what="an http:// or https:// URL")
    """Where the server is."""
    model: str | None = key(None)
    """What the server calls the model; null: its only one."""
    api_key_env: str | None = key(None, free=True, pattern=r"[A-Za-z_]\w*", what="the name of a variable")
    """The environment variable that holds the server's key; keys themselves do not belong in a file."""
    timeout: float = key(1800.0, free=True, above=0, high=1e6)
    """Seconds that a request to the server may take."""
    concurrency: int = key(64, free=True, low=1, high=10**5)
    """Requests to the server that are under way at a time."""
    max_batch_rows: int = key(256, free=True, low=1, high=10**6)
    """Responses that transformers samples at a time."""
    max_batch_tokens: int = key(262_144, free=True, low=1, high=10**9)
    """Tokens that it holds at a time."""
    options: Mapping[str, Any] = key({})
    """What the engine's class takes beside these (`dialect`, `logprobs_kind`, `add_special_tokens`, ...)."""

    def __post_init__(self) -> None:
        checked(self)
        if self.kind == "openai" and self.url is None:
            raise ConfigError("url", "is missing, expected the server's URL for kind openai")
        for name in ("url", "model", "api_key_env"):
            if self.kind == "transformers" and getattr(self, name) is not None:
                raise ConfigError(name, f"got {getattr(self, name)!r} for kind transformers, expected it for openai")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are sampled, in training; how many of each prompt is `algorithm.n`."""

    max_tokens: int = key(1024, low=1, high=10**7)
    """Tokens of a response, at most (of each turn, with an environment)."""
    min_tokens: int = key(0, low=0, high=10**7)
    """Tokens before which nothing ends a response."""
    temperature: float = key(1.0, above=0, high=1e4)
    """What logits are divided by, in sampling and in training."""
    top_p: float = key(1.0, above=0, high=1)
    """Sample among the likeliest tokens that make up this share."""
    top_k: int = key(-1, low=-1)
    """Sample among so many of the likeliest tokens; -1: all."""
    min_p: float = key(0.0, low=0, high=1)
    """Leave out tokens that are less likely than this share of the likeliest."""
    first_temperature: float | None = key(None, above=0, high=1e4)
    """The temperature of the first token alone (FIRE); null: as the others."""
    stop: tuple[str, ...] = key(())
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = key((), low=0)
    """Ids of tokens that end a response, beside the model's own."""
    ignore_eos: bool = key(False)
    """Whether a response goes on past the model's own end."""
    extra: Mapping[str, Any] = key({})
    """Options of one kind of server, passed on as they are."""

    def __post_init__(self) -> None:
        checked(self)
        if self.min_tokens > self.max_tokens:
            raise ConfigError("min_tokens", f"got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        if "" in self.stop:
            raise ConfigError("stop", "got an empty text, expected texts that are not")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Which records a step learns from."""

    kind: Literal["on_policy", "replay"] = key("on_policy", anew=("sampler", "sampler_options", "reuse", "make_every"))
    """`on_policy`: those that the step made; `replay`: those that the sampler picks from the book."""
    sampler: str | None = key(None, anew=("sampler_options",), choices=tuple(SAMPLERS))
    """Who picks in a replay, of the book's samplers; null: `uniform`."""
    sampler_options: Mapping[str, Any] = key({})
    """Options of the sampler, by name."""
    reuse: int | None = key(1, low=1)
    """How often a record may be learned from; null: for ever."""
    max_staleness: int | None = key(None, low=0)
    """How many versions old a record's policy may be; null: any."""
    make_every: int = key(1, low=1, high=10**4)
    """New records are made in every so many-th step; in between, a replay learns from what there is."""
    timeout: float = key(0.0, free=True, low=0)
    """Seconds to wait for records that others bring."""
    lease_seconds: float = key(3600.0, free=True, low=1, high=1e9)
    """How long a step's records are this trainer's without a sign of life: longer than a step takes."""
    expert: str | None = key(None, path=True)
    """A book of an expert's records to learn from as well; null: none."""
    expert_share: float = key(0.0, low=0, high=1)
    """The share of a step's records that are the expert's."""

    def __post_init__(self) -> None:
        checked(self)
        if self.expert_share > 0 and self.expert is None:
            raise ConfigError("expert_share", f"got {self.expert_share:g} without expert, which it is for")
        if self.kind == "on_policy":
            for name, least in {"reuse": 1, "make_every": 1, "sampler": None}.items():
                if getattr(self, name) != least:
                    raise ConfigError(name, f"got {getattr(self, name)!r} for kind on_policy, expected it for replay")
        needs(self, "sampler_options", "sampler")

    def intake(self) -> Taken:
        """All but `expert`, as a `Trainer` takes it."""
        from rollbook.train.replay_config import ReplayConfig as Taken

        given = {name: value for name, value in vars(self).items() if name not in ("expert", "sampler")}
        return Taken(sampler=None if self.sampler is None else SAMPLERS[self.sampler], **given)


_FREE = {"free": True}

# --- how it learns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step is made of, and how it is cut."""

    prompts: int = key(64, low=1, high=10**6)
    """Prompts of a step; each has `algorithm.n` responses. Of `sft` and `dpo`: rows."""
    minibatches: int = key(1, low=1, high=10**4)
    """Updates of the weights in each pass over a step's records."""
    epochs: int = key(1, low=1, high=10**4)
    """Passes over a step's records."""
    token_budget: int = key(16384, free=True, low=1, high=10**9)
    """Tokens of one forward and backward pass, at most: less needs less memory, and changes no number but by
    rounding."""
    packed: bool | None = key(None, free=True)
    """Whether sequences lie end to end, without padding; null: where the attention makes that cheaper."""
    shuffle: bool = key(True)
    """Whether minibatches are drawn by chance, made from the seed."""
    keep_groups: bool = key(False)
    """Whether the responses to a prompt stay in one minibatch."""
    drop_zero: bool = key(False)
    """Whether records whose advantages are all 0 are left out of the passes."""

    def __post_init__(self) -> None:
        checked(self)

    def batching(self) -> MinibatchConfig:
        """All but `prompts`, as a `Learner` takes it."""
        from rollbook.train.learner import MinibatchConfig

        names = [one.name for one in dataclasses.fields(MinibatchConfig)]
        return MinibatchConfig(**{name: getattr(self, name) for name in names})


# --- what is kept and shown -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Checkpoints: weights, optimizers, random states, the data's cursor and the book's checkpoint of the same name."""

    every: int = key(50, low=0)
    """Steps between checkpoints, which is what a run that is killed loses at most; 0: none in between."""
    keep: int | None = key(2, low=1)
    """How many of the latest are kept, beside step 0; null: all."""
    final: bool = key(True)
    """Whether there is one after the last step."""

    def __post_init__(self) -> None:
        checked(self)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Sampled success on prompts that are never trained on."""

    data: str | None = key(None, path=True, anew=("function", "options"))
    """A file or dataset of prompts, with the columns of `data`; null: those that `data.held_out` set aside."""
    split: str | None = key(None)
    """The split of that dataset, or, without one, of `data.path`; null: its only one."""
    function: str | None = key(None, anew=("data", "options"), **FUNCTION)
    """A function that returns the prompts' rows, in place of a file; it is called with `options`."""
    options: Mapping[str, Any] = key({})
    """Arguments of `function`, by name."""
    before: bool = key(True)
    """Whether there is one before the first step."""
    after: bool = key(True)
    """Whether there is one after the last step."""
    every: int = key(0, low=0)
    """Steps between evaluations; 0: none in between."""
    prompts: int | None = key(None, low=1)
    """At most so many prompts, the same ones each time; null: all."""
    k: int = key(1, low=1, high=10**4)
    """Samples of each prompt."""
    greedy: bool = key(False)
    """Whether the likeliest token is taken each time, in place of sampling; needs `k` 1."""
    temperature: float | None = key(None, above=0, high=1e4)
    """What logits are divided by; null: as in training."""
    top_p: float | None = key(None, above=0, high=1)
    """Sample among the likeliest tokens that make up this share; null: as in training."""
    max_tokens: int | None = key(None, low=1, high=10**7)
    """Tokens of a response, at most; null: as in training."""
    rewards: tuple[Reward, ...] = key(())
    """What counts there, as `rewards` has it; none: the same as in training."""
    success: float | str = key(1.0)
    """The least reward that counts as a success, or the name of the part of it that must be at least 1."""
    confidence: float = key(0.95, above=0, below=1)
    """How sure the intervals are."""

    def __post_init__(self) -> None:
        checked(self)
        one_of(self, "data", "function")
        one_of(self, "split", "function")
        needs(self, "options", "function")
        if self.greedy and self.k > 1:
            raise ConfigError("k", f"got {self.k} with greedy, which gives the same each time, expected 1")
        if self.greedy and self.temperature is not None:
            raise ConfigError("temperature", f"got {self.temperature:g} with greedy, expected one of the two")


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where metrics go beside the book, which always has them."""

    display: bool = key(True)
    """Whether progress is shown: a live table on a terminal, plain lines elsewhere."""
    jsonl: bool = key(True)
    """Whether metrics are written to metrics.jsonl in the run's folder."""
    tensorboard: bool = key(False)
    """Whether metrics are written for TensorBoard, in the run's folder."""
    wandb: Mapping[str, str] | None = key(None, names=("project",))
    """{project: NAME} or {}: metrics go to Weights & Biases, whose own settings (WANDB_MODE, ...) say whether they are
    uploaded; null: not."""
    trackers: tuple[str, ...] = key((), pattern=FUNCTION["pattern"], what="'module:Class' or 'file.py:Class'")
    """Trackers of one's own, each with `log(step, metrics)` and `close()`; called with those of `folder`, `steps`,
    `after` and `config` that its parameters name."""

    def __post_init__(self) -> None:
        checked(self)


# --- all of it --------------------------------------------------------------------------------------------------------


def _algorithm() -> AlgorithmConfig:
    from rollbook.train.algorithm import AlgorithmConfig

    return AlgorithmConfig.preset("grpo")


def _optimizing() -> OptimizerConfig:
    from rollbook.train.optimizer import OptimizerConfig

    return OptimizerConfig()


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run, as a whole.

    Sections are given as mappings or as the dataclasses of this module.

    >>> config = Config(model="some/folder", data={"path": "train.jsonl"}, algorithm="dapo", optimizer={"lr": 1e-5})
    >>> config.algorithm.loss_options, config.optimizer.lr, str(config.folder)
    ({'clip_high': 0.28}, 1e-05, 'runs/run')
    >>> Config(optimizer={"lrr": 1e-5})
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: optimizer.lrr: unknown key; did you mean 'lr'? (name, lr, betas, eps,
    weight_decay, grad_clip, warmup, schedule, floor, steps)
    """

    name: str = key("run", free=True, pattern=r"[\w.+-]*\w[\w.+-]*", what="letters, digits and any of . _ + -")
    """What the run is called."""
    out: str | None = key(None, free=True)
    """The run's folder; null: runs/NAME."""
    seed: int = key(0, low=0, high=2**32 - 1)
    """What every random choice of the run is made from."""
    steps: int = key(100, free=True, low=0, high=10**9, anew=("epochs",))
    """Steps of training, all in all, those before a resume included. A change of them drops a file's `epochs`."""
    epochs: float | None = key(None, free=True, above=0, high=10**6)
    """Passes over the training data, in place of `steps`: it sets them by the number of rows and `batch.prompts`."""
    device: str = key("auto", free=True, pattern=r"auto|cpu|mps|cuda(:\d+)?", what="auto, cpu, cuda, cuda:1 or mps")
    """Where models are; `auto`: on a GPU if there is one."""
    threads: int | None = key(None, free=True, low=1, high=1024)
    """torch's threads on the CPU, 1 being fastest for models of a few million weights; null: torch's choice."""
    deterministic: bool = key(False, free=True)
    """Whether torch may use only operations that give the same each time, on a GPU too."""
    resume: bool = key(True, free=True)
    """Whether a run that is in the folder goes on from its last checkpoint; if not, such a folder is refused."""
    overwrite: bool = key(False, free=True)
    """Whether a run that is in the folder is removed first, whatever `resume` says; no other folder is emptied."""
    nonfinite_limit: int = key(3, free=True, low=1)
    """Updates in a row that may be skipped because a loss or gradient is not finite, before the run stops."""
    model: Model = field(default_factory=Model)
    critic: Critic = field(default_factory=Critic)
    reference: str | None = key(None, path=True)
    """The folder or hub name of the model that the KL divergence is from; null: the policy as it was before step 1."""
    teacher: Teacher = field(default_factory=Teacher)
    data: Data = field(default_factory=Data)
    warmup: Warmup = field(default_factory=Warmup)
    rewards: tuple[Reward, ...] = key(())
    """Where rewards come from: one of these, or a list whose weighted sum counts."""
    environment: Environment = field(default_factory=Environment)
    engine: Engine = field(default_factory=Engine)
    sampling: Sampling = field(default_factory=Sampling)
    algorithm: AlgorithmConfig = field(default_factory=_algorithm)
    """The preset, and what is different from it; null as the preset: one's own, from its parts."""
    intake: ReplayConfig = field(default_factory=ReplayConfig)
    batch: Batch = field(default_factory=Batch)
    optimizer: OptimizerConfig = field(default_factory=_optimizing)
    critic_optimizer: OptimizerConfig | None = field(default=None)
    """The critic's, with the keys of `optimizer`; null: the same as the actor's."""
    saving: Saving = field(default_factory=Saving, metadata=_FREE)
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=_FREE)
    tracking: Tracking = field(default_factory=Tracking, metadata=_FREE)

    def __post_init__(self) -> None:
        try:
            checked(self)
        except ConfigError as error:
            raise _placed(error) from None
        check_secrets(plain(self))
        names = [one.name for one in self.rewards if one.name is not None]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError("rewards", f"got the name {twice!r} twice, expected names that differ")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Config:
        """From a mapping such as `to_dict` gives."""
        try:
            made: Config = section_of(cls).read(given)
        except ConfigError as error:
            raise _placed(error) from None
        return made

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) if self.out is not None else Path("runs") / self.name

    def to_dict(self) -> dict[str, Any]:
        """All of it, defaults included, as plain values: text, numbers, lists, mappings."""
        made: dict[str, Any] = plain(self)
        return made

    def require(self) -> None:
        """Refuse what cannot be run: a configuration without a model, data, or what its algorithm needs."""
        if not self.model.given:
            raise ConfigError("model", "got none, expected one of path, config, builder")
        if not self.data.given:
            raise ConfigError("data", "got none, expected one of path, function")
        own = self.algorithm
        if own.needs_rollouts and not (own.needs_teacher or self.rewards or self.environment.function is not None):
            raise ConfigError("rewards", f"got none, which {own.name} needs; an environment can give them too")
        if own.needs_teacher and not self.teacher.given:
            raise ConfigError("teacher", f"got none, which {own.name} needs; expected one of path, config, builder")
        if own.mixed and self.intake.expert is None:
            raise ConfigError("intake.expert", f"got none, which {own.name} needs; expected the path of a book")
        entry = own.estimator_entry
        lone = own.estimator_options.get("singleton", "zero")
        if own.n == 1 and entry is not None and entry.compares_runs and lone == "zero":
            raise ConfigError(
                "algorithm.n",
                f"got 1, and {own.name} ({own.estimator}) compares the responses to a prompt, expected at least 2",
            )
        if self.environment.function is not None:
            for place, value in (
                ("data.max_prompt_tokens", self.data.max_prompt_tokens),
                ("evaluation.rewards", self.evaluation.rewards or None),
            ):
                if value is not None:
                    instead = "environment.context_limit" if place.startswith("data") else "rewards"
                    raise ConfigError(place, f"got it with an environment, for which {instead} says it")
        given = (*(self.data.held_out or None, self.evaluation.data, self.evaluation.split, self.evaluation.function),)
        if self.evaluation.every and set(given) == {None}:
            raise ConfigError("data.held_out", "got 0, expected rows to evaluate on, or evaluation.data or function")

    def fingerprint(self) -> str:
        """A number, as text, of all keys that must not change when an interrupted run goes on."""
        fixed = {path: value for path, value, free in leaves(self) if not free}
        text = json.dumps(fixed, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Difference(NamedTuple):
    """A key that two configurations disagree on."""

    path: str
    before: Any
    after: Any
    free: bool
    """Whether an interrupted run may go on with the new value."""

    def __str__(self) -> str:
        return f"{self.path}: {json.dumps(self.after)}, was {json.dumps(self.before)}"


def differences(before: Config, after: Config) -> list[Difference]:
    """The keys whose values differ, in order.

    >>> [str(one) for one in differences(Config(), Config(optimizer={"lr": 1e-3}, steps=7))]
    ['steps: 7, was 100', 'optimizer.lr: 0.001, was 1e-06']
    >>> [one.path for one in differences(Config(), Config(optimizer={"lr": 1e-3}, steps=7)) if not one.free]
    ['optimizer.lr']
    """
    old, new = ({path: (value, free) for path, value, free in leaves(one)} for one in (before, after))
    order = list(section_of(Config).keys)
    found = []
    for path in sorted({**old, **new}, key=lambda each: order.index(each.partition(".")[0])):
        # A mapping that is empty here and has names there differs in those names.
        if any(path not in one and any(each.startswith(f"{path}.") for each in one) for one in (old, new)):
            continue
        (was, free), (now, also) = old.get(path, (None, False)), new.get(path, (None, False))
        if was != now:
            found.append(Difference(path, was, now, free or also))
    return found


def _placed(error: ConfigError) -> ConfigError:
    """A key that is in another section says so: `lr` at the top is `optimizer.lr`."""
    name = error.path.rpartition(".")[2]
    if not error.said.startswith("unknown key"):
        return error
    top = section_of(Config)
    found = [
        f"{one}.{name}" for one, each in top.keys.items() if (inner := section_in(each.kind)) and name in inner.keys
    ]
    found = [*([name] if name in top.keys else []), *found]
    return ConfigError(error.path, unknown(name, (), found).said) if found else error


__all__ = [
    "Batch",
    "Config",
    "ConfigError",
    "Critic",
    "Data",
    "Difference",
    "Engine",
    "Environment",
    "Evaluation",
    "Model",
    "ReplayConfig",
    "Reward",
    "Sampling",
    "Saving",
    "Teacher",
    "Tracking",
    "Warmup",
    "differences",
    "section_of",
]
