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

from rollbook.book.sampler import SAMPLERS
from rollbook.train.config.values import (
    ConfigError,
    check_fields,
    check_secrets,
    find_section,
    flatten,
    get_section,
    key,
    to_plain,
    unknown_key_error,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rollbook.train.algorithm import AlgorithmConfig
    from rollbook.train.learner import MinibatchConfig
    from rollbook.train.optimizer import OptimizerConfig
    from rollbook.train.replay_config import ReplayConfig
    from rollbook.train.supervised import WarmupConfig


FUNCTION: dict[str, Any] = {
    "pattern": r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|.+\.py:[A-Za-z_]\w*",
    "description": "'module:function' or 'file.py:function'",
    "path": True,
}
_SOURCE_KEYS = ("function", "recipe", "remote", "model", "name", "options")
DATA_COLUMNS = (
    *("prompt", "messages", "reference", "label", "images", "videos", "tools"),
    *("response", "chosen", "rejected"),
)
"""Columns of the data."""


def check_at_most_one(section: DataclassInstance, *names: str) -> None:
    """Raise `ConfigError` if more than one of the keys is set."""
    present = [name for name in names if getattr(section, name) is not None]
    if len(present) > 1:
        raise ConfigError(present[1], f"got it together with {present[0]}, expected one of {', '.join(names)}")


def check_required(section: DataclassInstance, name: str, other: str) -> None:
    """Raise `ConfigError` if a key is set without another one that it requires."""
    if getattr(section, name) and getattr(section, other) is None:
        raise ConfigError(name, f"got {getattr(section, name)!r}, which requires {other}")


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ModelSource:
    """Base class of the sections of models."""

    SHORT: ClassVar[str] = "path"

    path: str | None = None
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        sources = ("path", "config", "builder") if hasattr(self, "builder") else ("path", "config")
        check_at_most_one(self, *sources)
        if "builder" in sources:
            check_required(self, "options", "builder")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ConfigError("config.model_type", "missing, expected a model type of transformers, such as llama")

    @property
    def is_set(self) -> bool:
        """Whether the section names a model."""
        return any(getattr(self, name, None) is not None for name in ("path", "config", "builder"))


@dataclass(frozen=True, kw_only=True)
class ModelSection(_ModelSource):
    """The policy: weights from `path`, random weights from `config`, or the result of `builder`."""

    path: str | None = key(None, path=True, resets=("config", "builder", "options", "tokenizer", "processor"))
    """Folder that transformers can load, or a model name on the Hugging Face Hub."""
    config: Mapping[str, Any] | None = key(None, complete_with="model_type", resets=("path", "builder", "options"))
    """Transformers configuration with its `model_type`, for random weights; without it, changes to that of the base."""
    builder: str | None = key(None, resets=("path", "config", "options", "tokenizer", "processor"), **FUNCTION)
    """Function that returns an `Actor`, or a model and its tokenizer; called with `options`."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `builder`."""
    tokenizer: str | None = key(None, path=True)
    """Folder or hub name of the tokenizer; null: that of the model."""
    processor: str | None = key(None, path=True)
    """Folder or hub name of the image processor; null: that of the model."""
    precision: Literal["float32", "bfloat16", "autocast"] = key("float32")
    """`float32`, `bfloat16` (bfloat16 weights, float32 copies in the optimizer) or `autocast` (float32 weights, model
    passes in bfloat16)."""
    attention: str | None = key(None, changeable=True)
    """Attention implementation of transformers (eager, sdpa, flash_attention_2, flex_attention, varlen, ...); null: the
    default of transformers."""
    gradient_checkpointing: bool = key(False, changeable=True)
    """Recompute activations in the backward pass to save memory."""
    lora: Mapping[str, Any] | None = key(None)
    """Options of `peft.LoraConfig` (`r`, `lora_alpha`, `target_modules`, ...) to train adapters; null: train all
    weights."""
    suppress: tuple[int, ...] = key((), low=0)
    """Token ids that are never sampled and have probability 0 in training."""


@dataclass(frozen=True, kw_only=True)
class CriticSection(_ModelSource):
    """The critic of algorithms that have one; by default it begins with the weights of the policy."""

    path: str | None = key(None, path=True, resets=("config",))
    """Folder or hub name of the initial model; null: the weights of the policy."""
    config: Mapping[str, Any] | None = key(None, complete_with="model_type", resets=("path",))
    """Transformers configuration with its `model_type`, for random weights."""
    value_head: Literal["zeros", "normal"] = key("zeros")
    """Initialization of the value head: zeros, or random."""


@dataclass(frozen=True, kw_only=True)
class TeacherSection(_ModelSource):
    """The teacher of algorithms that have one."""

    path: str | None = key(None, path=True, resets=("config", "builder", "options"))
    """Folder that transformers can load, or a model name on the Hugging Face Hub."""
    config: Mapping[str, Any] | None = key(None, complete_with="model_type", resets=("path", "builder", "options"))
    """Transformers configuration with its `model_type`, for random weights."""
    builder: str | None = key(None, resets=("path", "config", "options"), **FUNCTION)
    """Function that returns the teacher; called with `options`."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `builder`."""


# --- data and rewards ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Training prompts (and answers, for `sft` and `dpo`) from a file, a dataset or a function."""

    SHORT: ClassVar[str] = "path"

    path: str | None = key(None, path=True, resets=("function", "options", "split", "subset", "columns", "keep"))
    """JSONL, JSON or Parquet file, folder of such files, or folder or name of a Hugging Face dataset."""
    function: str | None = key(None, resets=("path", "options", "split", "subset", "columns", "keep"), **FUNCTION)
    """Function that returns the rows, instead of a file; called with `options`."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `function`."""
    split: str | None = key(None)
    """Split of the dataset; null: its only split."""
    subset: str | None = key(None)
    """Subset of the dataset; null: its only subset."""
    columns: Mapping[str, str | None] = key({}, names=DATA_COLUMNS)
    """Column names in the data, such as {prompt: question, reference: answer}; null: the data has no such column."""
    keep: tuple[str, ...] | None = key(None)
    """Other columns to pass to rewards and records in `info`; null: all."""
    shuffle: bool = key(True)
    """Shuffle the rows in each epoch, by the seed."""
    limit: int | None = key(None, low=1)
    """Use only the first N rows; null: all."""
    held_out: float = key(0, low=0, whole_from=1)
    """Rows to hold out for evaluation, as a share or a count. They are never trained on."""
    max_prompt_tokens: int | None = key(None, low=1)
    """Maximum prompt length in tokens; null: the limit of the model."""
    overflow: Literal["error", "left", "right"] = key("error")
    """Handling of longer prompts: record an `error` for the prompt, or truncate it on the `left` or the `right`."""
    chat: bool = key(False)
    """Convert a plain text prompt to a chat with one user message."""
    system: str | None = key(None)
    """System message to prepend to chats that have none; null: none."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_most_one(self, "path", "function")
        check_required(self, "options", "function")
        for name in ("split", "subset"):
            check_required(self, name, "path")
        if self.overflow != "error" and self.max_prompt_tokens is None:
            raise ConfigError("overflow", f"got {self.overflow!r}, which requires max_prompt_tokens")

    @property
    def is_set(self) -> bool:
        """Whether the section names data."""
        return (self.path, self.function) != (None, None)


@dataclass(frozen=True, kw_only=True)
class WarmupSection:
    """Supervised fine-tuning on the rows' `response` before the training; off if `steps` is 0."""

    steps: int = key(0, low=0, high=10**6)
    """Maximum number of supervised steps; 0: no warm-up."""
    target_accuracy: float | None = key(None, above=0, high=1)
    """Stop when the share of successful sampled responses to held-out rows reaches this value; null: after `steps`."""
    eval_interval: int = key(5, low=1)
    """Steps between measurements of that share."""
    batch_size: int = key(128, low=1, high=10**5)
    """Rows per step."""
    eval_prompts: int = key(256, low=1, high=10**6)
    """Held-out prompts sampled in each measurement."""
    lr: float = key(3e-3, above=0, high=10)
    """Peak learning rate."""
    lr_warmup_steps: int = key(30, low=0)
    """Number of steps over which the learning rate increases to `lr`."""
    max_grad_norm: float = key(1.0, low=0)
    """Gradient norm above which gradients are clipped; 0 disables clipping."""

    def __post_init__(self) -> None:
        check_fields(self)

    def warmup_config(self) -> WarmupConfig:
        """Return the settings for `rollbook.train.supervised.warm_up`."""
        from rollbook.train.optimizer import OptimizerConfig
        from rollbook.train.supervised import WarmupConfig

        return WarmupConfig(
            steps=self.steps,
            target_accuracy=self.target_accuracy,
            eval_interval=self.eval_interval,
            batch_size=self.batch_size,
            eval_prompts=self.eval_prompts,
            optimizer=OptimizerConfig(lr=self.lr, warmup_steps=self.lr_warmup_steps, max_grad_norm=self.max_grad_norm),
        )


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """A reward source. The rewards of several sources are added, multiplied by their weights."""

    SHORT: ClassVar[str] = "function"

    function: str | None = key(None, path=True, resets=_SOURCE_KEYS)
    """Built-in function (`exact_match`, `numeric_match`, `gsm8k`, ...), `module:function` or `file.py:function`."""
    recipe: Mapping[str, Any] | None = key(None, resets=_SOURCE_KEYS)
    """Reward components by the label of a row: {label: [[type, key, weight], ...]}."""
    remote: tuple[str, ...] | None = key(
        None, resets=_SOURCE_KEYS, pattern=r"https?://\S+", description="an http:// or https:// URL"
    )
    """URL of a reward server, or URLs of its replicas."""
    model: str | None = key(None, path=True, resets=_SOURCE_KEYS)
    """Folder or hub name of a sequence classifier."""
    weight: float = key(1.0)
    """Factor of this source in the sum of rewards."""
    name: str | None = key(None, pattern=r"[\w.+-]+", description="letters, digits and any of . _ + -")
    """Name in metrics; null: the name of the function or model."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `rollbook.rewards.as_reward` (`time_limit`, `on_error`, `pool`) and of the function."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_most_one(self, "function", "recipe", "remote", "model")
        if (self.function, self.recipe, self.remote, self.model) == (None, None, None, None):
            raise ConfigError("function", "missing, expected one of function, recipe, remote, model")
        for label, lines in (self.recipe or {}).items():
            if not isinstance(lines, (list, tuple)) or not all(isinstance(line, (list, tuple)) for line in lines):
                raise ConfigError(f"recipe.{label}", f"got {lines!r}, expected [[type, key, weight], ...]")
        if self.function is not None and not re.fullmatch(rf"{FUNCTION['pattern']}|[\w.-]+\.py|\w+", self.function):
            raise ConfigError(
                "function",
                f"got {self.function!r}, expected the name of a built-in function, {FUNCTION['description']}",
            )


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """Multi-turn episodes with an environment, such as a tool or a game; off unless `function` is set."""

    SHORT: ClassVar[str] = "function"

    function: str | None = key(None, resets=("options",), **FUNCTION)
    """Function that returns the environment of an episode, called with the prompt and `options`; null: single-turn."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `function`."""
    max_turns: int = key(8, low=1, high=10**4)
    """Maximum number of model turns in an episode."""
    rewards: Literal["sum", "last"] = key("sum")
    """Reward of an episode: the `sum` of the rewards of its turns, or the `last` one."""
    context_limit: int | None = key(None, low=1)
    """Maximum number of tokens in an episode; null: the context length of the model."""
    on_truncation: Literal["end", "respond"] = key("end")
    """Handling of a turn truncated by a limit: `end` the episode, or let the environment `respond`."""
    workers: int = key(1, low=1, high=1024)
    """Number of environments that respond concurrently."""
    episode: Mapping[str, Any] = key({}, names=("on_realign", "on_fork", "template_options"))
    """Options of `rollbook.rollout.Episode`."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_required(self, "options", "function")


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The engine that samples responses: transformers or vLLM in this process, or servers."""

    kind: Literal["transformers", "vllm", "openai"] = key(
        "transformers",
        resets=("url", "model", "api_key_env", "options", "sync_every", "sync_tolerance", "sleep"),
    )
    """`transformers`: the weights that are trained; `vllm`: vLLM in this process or at `url`, which receives them;
    `openai`: a server with its own weights at `url`. `algorithm.correction` corrects for the difference."""
    url: tuple[str, ...] | None = key(
        None, changeable=True, pattern=r"https?://\S+", description="an http:// or https:// URL"
    )
    """URL of the server; with `vllm` also several, of replicas."""
    model: str | None = key(None)
    """Model name on the server; null: its only model."""
    api_key_env: str | None = key(None, changeable=True, pattern=r"[A-Za-z_]\w*", description="the name of a variable")
    """Environment variable with the API key of the server."""
    timeout: float = key(1800.0, changeable=True, above=0, high=1e6)
    """Timeout of a request to the server in seconds."""
    concurrency: int = key(64, changeable=True, low=1, high=10**5)
    """Maximum number of concurrent requests to the server."""
    max_batch_rows: int = key(256, changeable=True, low=1, high=10**6)
    """Maximum number of responses that transformers samples in a batch."""
    max_batch_tokens: int = key(262_144, changeable=True, low=1, high=10**9)
    """Maximum number of tokens in such a batch."""
    sync_every: int = key(1, low=1, high=10**6)
    """Send the weights to vLLM before the rollout of every N-th step."""
    sync_tolerance: float | None = key(None, changeable=True, above=0, high=100)
    """Largest mean difference between vLLM's log-probs of a probe and the trainer's after a sync; null: by the dtype
    of the weights (float32: 0.001, float16: 0.02, bfloat16: 0.05)."""
    sleep: bool = key(False, changeable=True)
    """Free the memory of vLLM between rollouts, for vLLM on the device of the trainer."""
    options: Mapping[str, Any] = key({})
    """Further keyword arguments of the engine class (`server`, `logprobs_kind`, `transfer`, `engine_args`, ...)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "openai" and (self.url is None or len(self.url) != 1):
            problem = "missing" if self.url is None else f"got {len(self.url)} URLs"
            raise ConfigError("url", f"{problem}, expected the URL of the server for kind openai")
        for name in ("url", "model", "api_key_env"):
            value = getattr(self, name)
            if self.kind == "transformers" and value is not None:
                text = value if isinstance(value, str) else ", ".join(value)
                raise ConfigError(name, f"got {text!r} for kind transformers, expected it for vllm or openai")
        for name, default in (("sync_every", 1), ("sync_tolerance", None), ("sleep", False)):
            if self.kind != "vllm" and getattr(self, name) != default:
                raise ConfigError(name, f"got {getattr(self, name)!r} for kind {self.kind}, expected it for vllm")


_ACTOR_OPTIONS = (
    *("num_cpus", "num_gpus", "memory", "object_store_memory", "resources", "accelerator_type", "label_selector"),
    *("scheduling_strategy", "runtime_env"),
)
"""Options of a Ray actor that a configuration may set. The others are Rollbook's."""


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Where rollouts are generated: in the trainer's process, or by rollout workers while it trains."""

    SHORT: ClassVar[str] = "mode"

    mode: Literal["sync", "one_step_off", "async"] = key("sync")
    """`sync`: a step waits for its rollouts; `one_step_off`: workers generate the rollouts of the next step meanwhile;
    `async`: they generate continuously, within `replay.max_staleness`, and get new weights mid-response."""
    workers: int = key(0, changeable=True, low=0, high=10**4)
    """Number of rollout workers to start: processes on this machine or, with `--ray`, Ray actors. 0: with mode `sync`
    the trainer generates; with others, workers are started by `rollbook rollout`."""
    prompts_per_claim: int | None = key(None, changeable=True, low=1, high=10**6)
    """Prompts that a worker generates together; null: the prompts of a step divided by the workers, at most 32."""
    claim_seconds: float = key(60.0, changeable=True, low=1, high=1e6)
    """Seconds without a heartbeat after which the prompts of a worker are given to others."""
    late_seconds: float = key(600.0, changeable=True, low=0, high=1e6)
    """Seconds that a step waits for prompts that would become stale; after that they are dropped when they arrive."""
    worker_resources: Mapping[str, Any] = key({}, changeable=True, names=_ACTOR_OPTIONS)
    """With `--ray`, resources of a worker, such as {num_cpus: 2, num_gpus: 1}."""
    trainer_resources: Mapping[str, Any] = key({}, changeable=True, names=_ACTOR_OPTIONS)
    """With `--ray`, resources of each rank of the trainer."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def uses_workers(self) -> bool:
        """Whether rollout workers generate, instead of the trainer."""
        return self.workers > 0 or self.mode != "sync"


@dataclass(frozen=True, kw_only=True)
class SamplingSection:
    """Sampling options in training. The number of responses per prompt is `algorithm.group_size`."""

    max_tokens: int = key(1024, low=1, high=10**7)
    """Maximum response length in tokens (of each turn, with an environment)."""
    min_tokens: int = key(0, low=0, high=10**7)
    """Minimum response length in tokens."""
    temperature: float = key(1.0, above=0, high=1e4)
    """Temperature, in sampling and in training."""
    top_p: float = key(1.0, above=0, high=1)
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    top_k: int = key(-1, low=-1)
    """Sample from the N most likely tokens; -1: all."""
    min_p: float = key(0.0, low=0, high=1)
    """Exclude tokens less likely than this fraction of the most likely one."""
    first_temperature: float | None = key(None, above=0, high=1e4)
    """Temperature of the first token (FIRE); null: `temperature`."""
    stop: tuple[str, ...] = key(())
    """Stop strings."""
    stop_token_ids: tuple[int, ...] = key((), low=0)
    """Stop token ids, in addition to those of the model."""
    ignore_eos: bool = key(False)
    """Continue after the model's end token."""
    extra: Mapping[str, Any] = key({})
    """Server-specific options, passed on unchanged."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_tokens > self.max_tokens:
            raise ConfigError("min_tokens", f"got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        if "" in self.stop:
            raise ConfigError("stop", "got an empty text, expected texts with at least one character")


@dataclass(frozen=True, kw_only=True)
class ReplaySection:
    """Which records a training step takes from the book."""

    kind: Literal["on_policy", "replay"] = key(
        "on_policy", resets=("sampler", "sampler_options", "reuse", "rollout_interval")
    )
    """`on_policy`: the groups that the step generated; `replay`: groups that the sampler selects from the book."""
    sampler: str | None = key(None, resets=("sampler_options",), choices=tuple(SAMPLERS))
    """Sampler of the book for `replay`; null: `uniform`."""
    sampler_options: Mapping[str, Any] = key({})
    """Keyword arguments of the sampler."""
    reuse: int | None = key(1, low=1)
    """Maximum number of times a record is trained on; null: no limit."""
    max_staleness: int | None = key(None, low=0)
    """Maximum age of a record in policy versions; null: no limit."""
    rollout_interval: int = key(1, low=1, high=10**4)
    """Generate new rollouts every N steps; the steps in between replay existing records."""
    timeout: float = key(0.0, changeable=True, low=0)
    """Seconds to wait for records that other processes append."""
    lease_seconds: float = key(3600.0, changeable=True, low=1, high=1e9)
    """Lease duration in seconds. Must exceed the longest training step."""
    expert: str | None = key(None, path=True)
    """Book of expert records to mix in; null: none."""
    expert_share: float = key(0.0, low=0, high=1)
    """Share of expert records among the records of a step."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expert_share > 0 and self.expert is None:
            raise ConfigError("expert_share", f"got {self.expert_share:g}, which requires expert")
        if self.kind == "on_policy":
            for name, least in {"reuse": 1, "rollout_interval": 1, "sampler": None}.items():
                if getattr(self, name) != least:
                    raise ConfigError(name, f"got {getattr(self, name)!r} for kind on_policy, expected it for replay")
        check_required(self, "sampler_options", "sampler")

    def replay_config(self) -> ReplayConfig:
        """Return the settings for a `Trainer`, without `expert`."""
        from rollbook.train.replay_config import ReplayConfig

        return ReplayConfig(**{name: value for name, value in vars(self).items() if name != "expert"})


_CHANGEABLE = {"changeable": True}

# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """Size of a step, and its split into minibatches and micro-batches."""

    prompts_per_step: int = key(64, low=1, high=10**6)
    """Prompts per step, each with `algorithm.group_size` responses; for `sft` and `dpo`, rows per step."""
    minibatches: int = key(1, low=1, high=10**4)
    """Number of updates in each pass over the records of a step."""
    epochs: int = key(1, low=1, high=10**4)
    """Number of passes over the records of a step."""
    token_budget: int = key(16384, changeable=True, low=1, high=10**9)
    """Maximum number of tokens in one forward and backward pass. A smaller budget needs less memory and changes results
    by rounding only."""
    packed: bool | None = key(None, changeable=True)
    """Pack sequences instead of padding them; null: if the attention implementation makes packing cheap."""
    shuffle: bool = key(True)
    """Assign records to minibatches in a random order, by the seed."""
    keep_groups: bool = key(False)
    """Keep all responses to a prompt in one minibatch."""
    drop_zero_advantages: bool = key(False)
    """Leave out records whose advantages are all 0."""

    def __post_init__(self) -> None:
        check_fields(self)

    def minibatch_config(self) -> MinibatchConfig:
        """Return the settings for a `Learner`, without `prompts_per_step`."""
        from rollbook.train.learner import MinibatchConfig

        names = [spec.name for spec in dataclasses.fields(MinibatchConfig)]
        return MinibatchConfig(**{name: getattr(self, name) for name in names})


# --- checkpoints, evaluation, tracking --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints: weights, optimizer states, random states, position in the data, and a checkpoint of the book."""

    interval: int = key(50, low=0)
    """Steps between checkpoints; 0: none during training. A killed run repeats at most this many steps."""
    keep_last: int | None = key(2, low=1)
    """Number of recent checkpoints to keep, in addition to that of step 0; null: all."""
    save_final: bool = key(True)
    """Save a checkpoint after the last step."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation on prompts that are never trained on."""

    data: str | None = key(None, path=True, resets=("function", "options"))
    """File or dataset of prompts, with the columns of `data`; null: the rows of `data.held_out`."""
    split: str | None = key(None)
    """Split of that dataset or, without one, of `data.path`; null: its only split."""
    function: str | None = key(None, resets=("data", "options"), **FUNCTION)
    """Function that returns the rows, instead of a file; called with `options`."""
    options: Mapping[str, Any] = key({})
    """Keyword arguments of `function`."""
    before: bool = key(True)
    """Evaluate before the first step."""
    after: bool = key(True)
    """Evaluate after the last step."""
    interval: int = key(0, low=0)
    """Steps between evaluations; 0: none during training."""
    prompts: int | None = key(None, low=1)
    """Maximum number of prompts, the same in each evaluation; null: all."""
    k: int = key(1, low=1, high=10**4)
    """Number of samples per prompt."""
    greedy: bool = key(False)
    """Greedy decoding instead of sampling; requires `k` 1."""
    temperature: float | None = key(None, above=0, high=1e4)
    """Temperature; null: as in training."""
    top_p: float | None = key(None, above=0, high=1)
    """Nucleus sampling probability; null: as in training."""
    max_tokens: int | None = key(None, low=1, high=10**7)
    """Maximum response length in tokens; null: as in training."""
    rewards: tuple[RewardSection, ...] = key(())
    """Reward sources of the evaluation, as in `rewards`; empty: those of the training."""
    success: float | str = key(1.0)
    """Minimum reward of a success, or the name of a reward part that must be at least 1."""
    confidence: float = key(0.95, above=0, below=1)
    """Confidence level of the intervals."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_most_one(self, "data", "function")
        check_at_most_one(self, "split", "function")
        check_required(self, "options", "function")
        if self.greedy and self.k > 1:
            raise ConfigError("k", f"got {self.k} with greedy, expected 1: greedy samples are all equal")
        if self.greedy and self.temperature is not None:
            raise ConfigError("temperature", f"got {self.temperature:g} with greedy, expected one of the two")


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """Trackers of metrics, in addition to the book."""

    display: bool = key(True)
    """Show progress: a live table on a terminal, plain lines otherwise."""
    jsonl: bool = key(True)
    """Write metrics to metrics.jsonl in the run's folder."""
    tensorboard: bool = key(False)
    """Write metrics for TensorBoard to the run's folder."""
    wandb: Mapping[str, str] | None = key(None, names=("project",))
    """Log metrics to Weights & Biases: {project: NAME} or {}. Its environment variables (WANDB_MODE, ...) apply; null:
    off."""
    trackers: tuple[str, ...] = key((), pattern=FUNCTION["pattern"], description="'module:Class' or 'file.py:Class'")
    """Custom trackers with `log(step, metrics)` and `close()`; the class is called with those of `folder`, `steps`,
    `after` and `config` that its parameters name."""

    def __post_init__(self) -> None:
        check_fields(self)


# --- the configuration ------------------------------------------------------------------------------------------------


def _default_algorithm() -> AlgorithmConfig:
    from rollbook.train.algorithm import AlgorithmConfig

    return AlgorithmConfig.preset("grpo")


def _default_optimizer() -> OptimizerConfig:
    from rollbook.train.optimizer import OptimizerConfig

    return OptimizerConfig()


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training run.

    Sections may be mappings. The string below a key is its description, also on the reference page.

    Attributes:
        folder: The folder of the run.

    >>> config = Config(model="some/folder", data={"path": "train.jsonl"}, algorithm="dapo", optimizer={"lr": 1e-5})
    >>> config.algorithm.loss_options, config.optimizer.lr, str(config.folder)
    ({'clip_high': 0.28}, 1e-05, 'runs/run')
    >>> Config(optimizer={"lrr": 1e-5})
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: optimizer.lrr: unknown key; did you mean 'lr'? (name, lr, betas, eps,
    weight_decay, max_grad_norm, warmup_steps, schedule, min_lr_ratio, steps)
    """

    name: str = key(
        "run", changeable=True, pattern=r"[\w.+-]*\w[\w.+-]*", description="letters, digits and any of . _ + -"
    )
    """Name of the run."""
    out: str | None = key(None, changeable=True)
    """Folder of the run; null: runs/NAME."""
    seed: int = key(0, low=0, high=2**32 - 1)
    """Seed of every random choice of the run."""
    steps: int = key(100, changeable=True, low=0, high=10**9, resets=("epochs",))
    """Number of training steps, those before a resume included. Setting it replaces the `epochs` of a base."""
    epochs: float | None = key(None, changeable=True, above=0, high=10**6)
    """Passes over the training data. Sets `steps` from the number of rows and `batch.prompts_per_step`."""
    device: str = key(
        "auto", changeable=True, pattern=r"auto|cpu|mps|cuda(:\d+)?", description="auto, cpu, cuda, cuda:1 or mps"
    )
    """Device of the models; `auto`: a GPU if there is one."""
    book: str | None = key(None)
    """Address of the book, such as postgresql://user@host/database?schema=NAME; null: `book` in the folder of the run.
    The password comes from PGPASSWORD or ~/.pgpass."""
    distributed: str = key("none", changeable=True, choices=("none", "ddp", "fsdp"))
    """How models are spread over several ranks: `ddp` replicates them, `fsdp` shards them; `none`: one process."""
    threads: int | None = key(None, changeable=True, low=1, high=1024)
    """Number of CPU threads of torch; 1 is fastest for models of a few million parameters. null: torch's default."""
    deterministic: bool = key(False, changeable=True)
    """Use only deterministic operations of torch, also on a GPU."""
    resume: bool = key(True, changeable=True)
    """Continue a run in the folder from its last checkpoint; if false, such a folder is an error."""
    overwrite: bool = key(False, changeable=True)
    """Delete a run in the folder first, regardless of `resume`. Folders without a run are never deleted."""
    nonfinite_limit: int = key(3, changeable=True, low=1)
    """Number of consecutive updates with a non-finite loss or gradient after which the run stops."""
    model: ModelSection = field(default_factory=ModelSection)
    critic: CriticSection = field(default_factory=CriticSection)
    reference: str | None = key(None, path=True)
    """Folder or hub name of the reference model; null: the policy before step 1."""
    teacher: TeacherSection = field(default_factory=TeacherSection)
    data: DataSection = field(default_factory=DataSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    rewards: tuple[RewardSection, ...] = key(())
    """Reward sources: one, or a list of which the weighted sum is the reward."""
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    engine: EngineSection = field(default_factory=EngineSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmConfig = field(default_factory=_default_algorithm)
    """The preset and changes to it; with `preset: null`, all settings are given."""
    replay: ReplaySection = field(default_factory=ReplaySection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerConfig = field(default_factory=_default_optimizer)
    critic_optimizer: OptimizerConfig | None = field(default=None)
    """Optimizer of the critic, with the keys of `optimizer`; null: that of the policy."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection, metadata=_CHANGEABLE)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection, metadata=_CHANGEABLE)
    tracking: TrackingSection = field(default_factory=TrackingSection, metadata=_CHANGEABLE)

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ConfigError as error:
            raise _suggest_section(error) from None
        check_secrets(to_plain(self))
        names = [source.name for source in self.rewards if source.name is not None]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ConfigError("rewards", f"got the name {duplicate!r} twice, expected distinct names")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a configuration from a mapping, such as `to_dict` returns.

        Args:
            values: Keys and sections.

        Returns:
            The configuration, complete with defaults.

        Raises:
            ConfigError: A key or a value is not valid.
        """
        try:
            config: Config = get_section(Config).read(values)
        except ConfigError as error:
            raise _suggest_section(error) from None
        return config

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.out) if self.out is not None else Path("runs") / self.name

    def to_dict(self) -> dict[str, Any]:
        """Return all keys, defaults included, as plain values: text, numbers, lists, mappings."""
        values: dict[str, Any] = to_plain(self)
        return values

    def require(self) -> None:
        """Raise `ConfigError` if a model, data, or something that the algorithm needs is missing."""
        if not self.model.is_set:
            raise ConfigError("model", "missing, expected one of path, config, builder")
        if not self.data.is_set:
            raise ConfigError("data", "missing, expected one of path, function")
        algorithm = self.algorithm
        if algorithm.needs_rollouts and not (
            algorithm.needs_teacher or self.rewards or self.environment.function is not None
        ):
            raise ConfigError("rewards", f"missing, required by {algorithm.name} unless an environment gives them")
        if algorithm.needs_teacher and not self.teacher.is_set:
            raise ConfigError(
                "teacher", f"missing, required by {algorithm.name}, expected one of path, config, builder"
            )
        if algorithm.mixed and self.replay.expert is None:
            raise ConfigError("replay.expert", f"missing, required by {algorithm.name}, expected the path of a book")
        if algorithm.group_size == 1 and algorithm.needs_groups:
            raise ConfigError(
                "algorithm.group_size",
                f"got 1, and {algorithm.name} ({algorithm.estimator}) compares the responses to a prompt, expected at "
                "least 2",
            )
        if self.environment.function is not None:
            for location, value in (
                ("data.max_prompt_tokens", self.data.max_prompt_tokens),
                ("evaluation.rewards", self.evaluation.rewards or None),
            ):
                if value is not None:
                    instead = "environment.context_limit" if location.startswith("data") else "rewards"
                    raise ConfigError(location, f"cannot be set with an environment, expected {instead}")
        if self.rollout.uses_workers:
            self._require_workers()
        sources = (
            *(self.data.held_out or None, self.evaluation.data, self.evaluation.split, self.evaluation.function),
        )
        if self.evaluation.interval and set(sources) == {None}:
            raise ConfigError("data.held_out", "got 0, expected rows to evaluate on, or evaluation.data or function")

    def _require_workers(self) -> None:
        """Raise `ConfigError` if rollout workers cannot be used with the other settings."""
        mode, staleness = self.rollout.mode, self.replay.max_staleness
        if not self.algorithm.needs_rollouts:
            raise ConfigError("rollout", f"got workers, but {self.algorithm.name} trains on given answers")
        if self.replay.kind != "on_policy":
            raise ConfigError("replay.kind", f"got {self.replay.kind!r} with rollout workers, expected on_policy")
        if mode == "async" and staleness is None:
            raise ConfigError("replay.max_staleness", "missing, required by rollout.mode async, such as 2")
        if mode != "async" and staleness is not None:
            raise ConfigError(
                "replay.max_staleness",
                f"got {staleness} with rollout.mode {mode}; remove it, or set rollout.mode=async",
            )
        if self.engine.kind == "openai":
            raise ConfigError(
                "engine.kind",
                "got 'openai' with rollout workers, whose weights would not follow the trainer's, "
                "expected transformers or vllm",
            )
        if self.book == "memory:":
            raise ConfigError(
                "book", "got 'memory:' with rollout workers, expected a book that other processes can open"
            )

    def fingerprint(self) -> str:
        """Return a hash of all keys that must not change when a run is resumed."""
        fixed = {path: value for path, value, changeable in flatten(self) if not changeable}
        text = json.dumps(fixed, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Difference(NamedTuple):
    """A key whose value differs between two configurations.

    Args:
        path: Path of the key.
        before: Plain value in the first configuration.
        after: Plain value in the second one.
        changeable: Whether a run may be resumed with the new value.

    >>> str(Difference("optimizer.lr", 0.1, 0.2, False))
    'optimizer.lr: 0.2, was 0.1'
    """

    path: str
    before: Any
    after: Any
    changeable: bool

    def __str__(self) -> str:
        return f"{self.path}: {json.dumps(self.after)}, was {json.dumps(self.before)}"


def compare_configs(earlier: Config, later: Config) -> list[Difference]:
    """Return the keys whose values differ, in the order of the sections.

    Args:
        earlier: A configuration.
        later: Another one.

    Returns:
        The differences.

    >>> [str(difference) for difference in compare_configs(Config(), Config(optimizer={"lr": 1e-3}, steps=7))]
    ['steps: 7, was 100', 'optimizer.lr: 0.001, was 1e-06']
    >>> both = (Config(), Config(optimizer={"lr": 1e-3}, steps=7))
    >>> [difference.path for difference in compare_configs(*both) if not difference.changeable]
    ['optimizer.lr']
    """
    old, new = (
        {path: (value, changeable) for path, value, changeable in flatten(config)} for config in (earlier, later)
    )
    order = list(get_section(Config).keys)
    changes = []
    for path in sorted({**old, **new}, key=lambda key_path: order.index(key_path.partition(".")[0])):
        # If a mapping is empty on one side only, its entries on the other side are the differences.
        if any(path not in values and any(other.startswith(f"{path}.") for other in values) for values in (old, new)):
            continue
        (was, changeable), (now, also_changeable) = old.get(path, (None, False)), new.get(path, (None, False))
        if was != now:
            changes.append(Difference(path, was, now, changeable or also_changeable))
    return changes


_SYNONYMS = {"n": "group_size"}
"""Keys by their names in other projects."""


def _suggest_section(error: ConfigError) -> ConfigError:
    """Suggest the section of an unknown key: `optimizer.lr` for `lr`.

    A key of the same section that begins with the name comes first: `batch.prompts_per_step` for `batch.prompts`.
    """
    section, _, name = error.path.rpartition(".")
    if not error.message.startswith("unknown key"):
        return error
    top = get_section(Config)
    own_section = find_section(top.keys[section].kind) if section in top.keys else None
    if own_section and any(own_key.startswith(f"{name}_") for own_key in own_section.keys):
        return error
    name = _SYNONYMS.get(name, name)
    places = [
        f"{section_name}.{name}"
        for section_name, spec in top.keys.items()
        if (inner := find_section(spec.kind)) and name in inner.keys
    ]
    places = [*([name] if name in top.keys else []), *places]
    return ConfigError(error.path, unknown_key_error(name, (), places).message) if places else error


__all__ = ["Config", "ConfigError", "Difference", "compare_configs"]
