"""Every key of `rollbook train`: sections as dataclasses, each key with its type, default, bounds and one sentence.

Invariant: a `Config` that exists is checked as a whole; what its keys are called, hold and mean stands here, in `parts`
and (`algorithm`, `optimizer`, `critic_optimizer`) in `AlgorithmConfig` and `Optimizing`, and nowhere else. The string
under a field is what the reference page and `--show-config` say of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.train.config.kinds import ConfigError, section_in, unknown
from rollbook.train.config.parts import (
    FUNCTION,
    Critic,
    Data,
    Engine,
    Environment,
    Intake,
    Model,
    Reward,
    Sampling,
    Teacher,
    Warmup,
    needs,
    one_of,
)
from rollbook.train.config.secrets import check_secrets
from rollbook.train.config.sections import checked, key, leaves, plain, section_of

if TYPE_CHECKING:
    from rollbook.train.algorithm import AlgorithmConfig
    from rollbook.train.learner import Batching
    from rollbook.train.optimizer import Optimizing

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

    def batching(self) -> Batching:
        """All but `prompts`, as a `Learner` takes it."""
        from rollbook.train.learner import Batching

        names = [one.name for one in dataclasses.fields(Batching)]
        return Batching(**{name: getattr(self, name) for name in names})


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


def _optimizing() -> Optimizing:
    from rollbook.train.optimizer import Optimizing

    return Optimizing()


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
    rollbook.train.config.kinds.ConfigError: optimizer.lrr: is no key here; did you mean 'lr'? (name, lr, betas, eps,
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
    intake: Intake = field(default_factory=Intake)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizing = field(default_factory=_optimizing)
    critic_optimizer: Optimizing | None = field(default=None)
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
    if not error.said.startswith("is no key here"):
        return error
    top = section_of(Config)
    found = [
        f"{one}.{name}" for one, each in top.keys.items() if (inner := section_in(each.kind)) and name in inner.keys
    ]
    found = [*([name] if name in top.keys else []), *found]
    return ConfigError(error.path, unknown(name, (), found).said) if found else error


__all__ = [
    *(
        "Batch",
        "Config",
        "ConfigError",
        "Critic",
        "Data",
        "Difference",
        "Engine",
        "Environment",
        "Evaluation",
        "Intake",
    ),
    *("Model", "Reward", "Sampling", "Saving", "Teacher", "Tracking", "Warmup", "differences", "section_of"),
]
