"""Sections of what a run is given: models, data, rewards, environments, engines, and what of it is taken.

Invariant: as in `rollbook.train.config.schema`: the string under a field is all that is said about it anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.sections import checked, key

if TYPE_CHECKING:
    from rollbook.train.replay_config import Intake as Taken
    from rollbook.train.sft_warmup import WarmUp

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
    """The critic, of algorithms that have one: by default a copy of the actor's trunk."""

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

    def warm_up(self) -> WarmUp:
        """The same as `rollbook.train.sft_warmup.warm_up` takes it."""
        from rollbook.train.optimizer import Optimizing
        from rollbook.train.sft_warmup import WarmUp

        return WarmUp(
            steps=self.steps,
            until=self.until,
            every=self.every,
            rows=self.rows,
            checked=self.checked,
            optimizer=Optimizing(lr=self.lr, warmup=self.rise, grad_clip=self.grad_clip),
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
class Intake:
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
        from rollbook.train.replay_config import Intake as Taken

        given = {name: value for name, value in vars(self).items() if name not in ("expert", "sampler")}
        return Taken(sampler=None if self.sampler is None else SAMPLERS[self.sampler], **given)
