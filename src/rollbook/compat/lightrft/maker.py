"""LightRFT's `experience_maker`: from prompts to finished experience, on the stages of `rollbook.train.pipeline`.

`Experience` is the batch, as in LightRFT.

Invariant: the numbers of a rollout do not depend on its division into batches, rows are grouped by id, and tokens are
those of the engine. The order of computation is

    reward -> overlong penalty -> running norm -> score of the row -> clip
           -> on the last action, minus the KL of each token -> return or GAE -> normalize -> clip

and `info["reward"]` remains the unshaped reward. Options are read once and never change.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from reprlib import repr as shortened
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import explain_missing

try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None

from rollbook.algorithms.advantages import (
    ESTIMATORS,
    cumulative_returns,
    dr_grpo,
    gae,
    grpo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rollbook.algorithms.advantages.temporal import place_rewards
from rollbook.algorithms.filters import clip_filter_like_weight_func, zero_variance
from rollbook.algorithms.groups import block_sums, whiten
from rollbook.algorithms.inputs import INFO_KEYS
from rollbook.algorithms.kl import KL, k1, penalize, token_kl
from rollbook.algorithms.layout import Layout
from rollbook.algorithms.registry import Estimator
from rollbook.algorithms.results import Advantages, Report, as_advantages
from rollbook.algorithms.shaping import RunningNorm, clip_advantages, clip_scores, normalize_advantages, shape_rewards
from rollbook.batch.device import Device, move_to_device, pin_memory
from rollbook.compat.lightrft.batch import ExperienceBatch as Experience
from rollbook.compat.lightrft.batch import ExperienceVL, Samples, TokenColumn
from rollbook.compat.lightrft.models import call_model, check_output, is_native
from rollbook.compat.lightrft.rewards import RewardModels, Scorer
from rollbook.compat.lightrft.samples import (
    PromptsLike,
    RolloutBatches,
    batch_from_samples,
    make_prompts,
    make_samples,
    maker_sampling,
    mean_by_row,
    none_if_empty,
    records_of_samples,
    sample_lengths,
)
from rollbook.core.checks import check_bool, check_float, check_int, suggest
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.metrics import Progress, StepMetrics, warn_user
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, current_process_group
from rollbook.core.rows import NUMPY, Rows, blank, memory
from rollbook.core.sampling import Prompt, RunInfo, Sample, Sampling
from rollbook.models.actor import Actor
from rollbook.models.head import get_device
from rollbook.rollout.engine import BaseEngine
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train import pipeline
from rollbook.train.algorithm import AlgorithmConfig, Pass

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from rollbook.core.vocabulary import Tokenizer

T = TypeVar("T")
_FIRE_TEMPERATURE = 10.0
"""FIRE's temperature of the first token."""
_ALIASES = {"on_policy_distillation": "on_policy_distill"}
"""LightRFT's names of estimators that have another name in `ESTIMATORS`."""


MakerArgs: TypeAlias = "Mapping[str, Any] | Namespace | SimpleNamespace | MakerConfig"
"""LightRFT's `strategy.args`, or settings."""

# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MakerConfig:
    """Settings of a maker. Names and defaults of the first part are those of LightRFT's `strategy.args`.

    Args:
        advantage_estimator: A key of `rollbook.algorithms.ESTIMATORS`.
        n_samples_per_prompt: Samples per prompt.
        micro_rollout_batch_size: Samples per returned batch; `None`: all in one. Numbers do not depend on it.
        packing_samples: Return packed batches instead of padded ones.
        kl_estimator: A key of `rollbook.algorithms.KL`.
        use_kl_loss: Leave the KL to the loss, and out of the reward.
        reward_clip_range: Bounds (low, high) of rewards, or of the scores of estimators that score rows.
        reward_clip: The bounds -c and c; 0: none.
        advantage_clip: Bound of advantages, applied last, so that it holds at the loss; 0: none.
        advantages_norm: Whiten advantages once, over all samples of all processes. Advantages of `group_norm` and
            `grpo` are normalized already and stay.
        no_advantage_std_norm: With `advantages_norm`, subtract the mean only.
        reward_running_norm: Divide rewards by their running standard deviation, before groups are compared.
        reward_running_norm_minus_mean: Subtract the running mean first.
        overlong_buffer: Apply DAPO's penalty for long responses.
        overlong_buffer_len: Tokens of the overlong buffer.
        overlong_buffer_penalty_factor: Penalty at the end of the overlong buffer.
        dynamic_sampling: Mask out groups whose rewards are all equal.
        use_fire: Sample the first token at temperature 10.
        high_entropy_token_ratio: Above 0, record entropies.
        entropy: Record entropies.
        batch_name: Prefix of the rollout's number in ids, so that the ids of two makers (training and evaluation)
            differ.
        estimator_options: Options of the estimator.
        token_budget: Tokens of a forward pass.
        seed: Makes rollouts repeatable.
        gamma: Discount, unless a call gives one.
        lambd: Lambda of GAE, unless a call gives one.
        kl_coef: Coefficient of the KL penalty; `None`: that of `kl_controller`.
        progress: Show progress bars; `None`: on a terminal.

    >>> MakerConfig(advantage_estimator="rloo", n_samples_per_prompt=4).micro_rollout_batch_size is None
    True
    >>> MakerConfig.from_args({"advantage_estimator": "gae", "learning_rate": 1e-6}).advantage_estimator
    'gae'
    >>> MakerConfig(advantage_estimator="dr_grpo", estimator_options={"single": "raw"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ...unknown option 'single' of dr_grpo; did you mean 'singleton'? (singleton, process_group)
    """

    advantage_estimator: str = "group_norm"
    n_samples_per_prompt: int = 1
    micro_rollout_batch_size: int | None = None
    packing_samples: bool = False
    kl_estimator: str = "k1"
    use_kl_loss: bool = False
    reward_clip_range: tuple[float, float] | None = None
    reward_clip: float = 0.0
    advantage_clip: float = 0.0
    advantages_norm: bool = False
    no_advantage_std_norm: bool = False
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    overlong_buffer: bool = False
    overlong_buffer_len: int = 1024
    overlong_buffer_penalty_factor: float = 1.0
    dynamic_sampling: bool = False
    use_fire: bool = False
    high_entropy_token_ratio: float = 0.0
    entropy: bool = False
    batch_name: str | None = None
    estimator_options: Mapping[str, Any] = field(default_factory=dict)
    token_budget: int = 16384
    seed: int | None = None
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "advantage_estimator", _ALIASES.get(self.advantage_estimator, self.advantage_estimator))
        entry = ESTIMATORS[self.advantage_estimator]
        KL[self.kl_estimator]
        for name in self.estimator_options:
            if name not in entry.options:
                raise ValueError(
                    f"estimator_options: unknown option {name!r} of {entry.name}{suggest(name, entry.options)}"
                )
        put(self, "n_samples_per_prompt", check_int("n_samples_per_prompt", self.n_samples_per_prompt, 1))
        if self.micro_rollout_batch_size is not None:
            check_int("micro_rollout_batch_size", self.micro_rollout_batch_size, 1)
        for option in dataclasses.fields(self):
            if option.type == "bool":
                put(self, option.name, check_bool(option.name, getattr(self, option.name)))
        if self.reward_clip_range is not None:
            put(self, "reward_clip_range", _bounds(self.reward_clip_range))
        for name in ("reward_clip", "advantage_clip"):
            put(self, name, check_float(name, getattr(self, name) or 0.0, 0))
        check_int("overlong_buffer_len", self.overlong_buffer_len, 1)
        check_float("overlong_buffer_penalty_factor", self.overlong_buffer_penalty_factor, 0)
        check_float("high_entropy_token_ratio", self.high_entropy_token_ratio, 0, 1)
        check_int("token_budget", self.token_budget, 1)
        if self.seed is not None:
            check_int("seed", self.seed)
        check_float("gamma", self.gamma, 0, 1)
        check_float("lambd", self.lambd, 0, 1)
        if self.kl_coef is not None:
            check_float("kl_coef", self.kl_coef, -1e30, 1e30)

    @classmethod
    def from_args(cls, args: MakerArgs | None = None) -> MakerConfig:
        """Read LightRFT's `strategy.args`: the first part of the settings; everything else is ignored.

        `group_norm` and `grpo` then have LightRFT's eps, 1e-8 (a group of equal rewards is 0 with any eps).

        Args:
            args: A namespace, a mapping, a `MakerConfig`, or `None` for the defaults.

        Returns:
            The settings.
        """
        if isinstance(args, MakerConfig):
            return args
        names = [option.name for option in dataclasses.fields(cls)]
        names = names[: names.index("entropy")]
        columns = args if isinstance(args, Mapping) else {name: getattr(args, name, None) for name in names}
        options: dict[str, Any] = {name: columns[name] for name in names if columns.get(name) is not None}
        if args is not None and options.get("advantage_estimator", "group_norm") in ("group_norm", "grpo"):
            options["estimator_options"] = {"eps": 1e-8}
        return cls(**options)

    def to_algorithm(self) -> AlgorithmConfig:
        """Return the same settings as the native pipeline takes them.

        >>> algorithm = MakerConfig(advantage_estimator="rloo", reward_clip=2.0, kl_coef=0.1).to_algorithm()
        >>> algorithm.estimator, algorithm.reward_clip, algorithm.kl_in
        ('rloo', (-2.0, 2.0), 'reward')
        """
        bounds = self.reward_clip_range
        if self.reward_clip > 0:
            low, high = (-math.inf, math.inf) if bounds is None else bounds
            clip = self.reward_clip
            bounds = min(max(low, -clip), clip), max(min(high, clip), -clip)
        norms: dict[bool, Literal["std", "mean_std"]] = {
            self.reward_running_norm: "std",
            self.reward_running_norm_minus_mean: "mean_std",
        }
        normalize: Literal["mean", "mean_std"] = "mean" if self.no_advantage_std_norm else "mean_std"
        return AlgorithmConfig(
            name="lightrft",
            estimator=self.advantage_estimator,
            estimator_options={
                name: option for name, option in self.estimator_options.items() if name != "process_group"
            },
            kl_estimator=self.kl_estimator,
            kl_coef=max(self.kl_coef or 0.0, 0.0),
            kl_in="loss" if self.use_kl_loss else "reward",
            gamma=self.gamma,
            lam=self.lambd,
            group_size=self.n_samples_per_prompt,
            advantage_clip=self.advantage_clip,
            normalize_advantages=normalize if self.advantages_norm else None,
            reward_clip=bounds,
            reward_norm=norms.get(True),
            overlong_buffer=self.overlong_buffer_len if self.overlong_buffer else 0,
            overlong_penalty=self.overlong_buffer_penalty_factor,
            high_entropy_ratio=self.high_entropy_token_ratio,
        )

    @property
    def wants_entropy(self) -> bool:
        """Whether the policy's entropies are recorded."""
        is_input = ESTIMATORS[self.advantage_estimator].inputs.get("entropy", False)
        return self.entropy or self.high_entropy_token_ratio > 0 or is_input


def _bounds(bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"reward_clip_range: got {bounds!r}, expected (low, high)") from None
    low, high = check_float("reward_clip_range[0]", low), check_float("reward_clip_range[1]", high)
    if low > high:
        raise ValueError(f"reward_clip_range: got ({low:g}, {high:g}), expected the lower bound first")
    return low, high


@dataclass(frozen=True, kw_only=True)
class _SinglePass(AlgorithmConfig):
    """An algorithm that reads the outputs of one model. LightRFT's maker runs all its models, needed or not."""

    model_pass: Pass

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.model_pass,)


# --- scores of rows ---------------------------------------------------------------------------------------------------


class RowScores(NamedTuple):
    """The rewards of a rollout after shaping, and after the estimator if it scores rows."""

    rewards: torch.Tensor
    """[N] Reward on the last action of each row, before clipping; NaN where it is missing."""
    shaping: Mapping[str, float] = MappingProxyType({})
    """Metrics of the overlong penalty and the running norm."""
    report: Callable[[], Report] | None = None
    """Computes the report of the estimator over rows."""
    estimator: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics; the estimator's report is computed here."""
        return {**self.shaping, **({} if self.report is None else self.report().to_metrics(self.estimator))}


def scores_rows(entry: Estimator) -> bool:
    """Return whether the maker adds the KL penalty to the row scores of an estimator and computes their returns.

    CPGD scores rows, but its advantages are the scores alone. `reinforce_plus_plus_baseline` takes token rewards, but
    LightRFT subtracts its baseline in `process_experiences`.

    >>> [scores_rows(ESTIMATORS[name]) for name in ("rloo", "reinforce_baseline", "gae", "cpgd")]
    [True, True, False, False]
    """
    if entry.scores == "rows":
        return bool(entry.kl_in_reward)
    return entry.compares_runs and "token_rewards" in entry.inputs


def score_rewards(
    batches: Sequence[Experience],
    config: MakerConfig,
    norm: RunningNorm | None = None,
    max_new_tokens: int | None = None,
) -> RowScores:
    """Shape the rewards of a rollout, and score them within their groups if the estimator scores rows."""
    process_group = current_process_group()
    if process_group is SINGLE_PROCESS and norm is None and not config.overlong_buffer:
        scores = _block_scores(batches, config)
        if scores is not None:
            return scores
    rollout = RolloutBatches(batches)
    if config.overlong_buffer and max_new_tokens is None:
        raise ValueError("max_new_tokens: got None, expected the longest response, for the overlong buffer")
    rewards = rollout.numbers("reward")
    rewards, shaping = shape_rewards(
        rewards,
        rollout.numbers("response_length") if config.overlong_buffer else (),
        overlong_buffer=config.overlong_buffer_len if config.overlong_buffer else 0,
        overlong_penalty=config.overlong_buffer_penalty_factor,
        max_tokens=max_new_tokens,
        norm=norm,
        process_group=process_group,
    )
    entry = ESTIMATORS[config.advantage_estimator]
    if not scores_rows(entry):
        return RowScores(rewards, shaping)
    estimate = _row_estimate(rollout, rewards, config, process_group)
    row_scores = estimate.advantages if estimate.scores is None else estimate.scores
    row_scores = torch.as_tensor(row_scores, dtype=torch.float32)
    missing = rewards.isnan()
    rewards = torch.where(missing, torch.nan, row_scores) if missing.any() else row_scores
    return RowScores(rewards, shaping, lambda: estimate.report, entry.name)


def _row_estimate(
    rollout: RolloutBatches, rewards: torch.Tensor, config: MakerConfig, process_group: ProcessGroup
) -> Advantages:
    entry = ESTIMATORS[config.advantage_estimator]
    if entry.function is reinforce_plus_plus_baseline:
        entry = ESTIMATORS["dr_grpo"]  # the same baseline; its returns and whitening come later
    options = {name: value for name, value in config.estimator_options.items() if name in entry.options}
    if "process_group" in entry.options:
        options.setdefault("process_group", process_group)
    ids = rollout.ids()
    groups = rollout.groups(config.n_samples_per_prompt, process_group)
    is_alone = config.n_samples_per_prompt == 1 if ids is None else len(set(groups)) == len(groups)
    if process_group is SINGLE_PROCESS and is_alone and len(groups) > 1:
        warn_user(
            f"{entry.name}: every group has one sample, so that all advantages are 0; n_samples_per_prompt is "
            f"{config.n_samples_per_prompt}"
        )
    inputs: dict[str, Any] = {"rewards": rewards, "groups": groups}
    if ids is not None:
        inputs |= {"runs": rollout.runs(), "ids": [eid.uid for eid in ids], "steps": [eid.step for eid in ids]}
    elif entry.inputs.get("runs"):
        inputs |= {"runs": list(range(len(rollout))), "steps": [0] * len(rollout)}
    inputs = {name: column for name, column in inputs.items() if name in entry.inputs}
    return as_advantages(entry.name, entry.call(inputs, options))


def _block_scores(batches: Sequence[Experience], config: MakerConfig) -> RowScores | None:
    """Score rewards whose groups are blocks of `n_samples_per_prompt` rows, in about ten numpy operations.

    Returns:
        The scores of the general path, bit for bit, or `None` if it is needed: other estimators or options, rows with
        ids, missing or very large rewards, rewards that are not float32 on the CPU.
    """
    size, options = config.n_samples_per_prompt, config.estimator_options
    entry = ESTIMATORS[config.advantage_estimator]
    formula = entry.function
    if formula not in _BLOCK_FORMULAS or size < 2 or (options and (formula is not grpo or list(options) != ["eps"])):
        return None
    parts = []
    for batch in batches:
        recorded_rewards = batch.info.get("reward") if batch.info else None
        if (
            batch.ids
            or type(recorded_rewards) is not torch.Tensor
            or not recorded_rewards.is_cpu
            or recorded_rewards.dtype != torch.float32
        ):
            return None
        if recorded_rewards.requires_grad:
            return None
        array, tokens = recorded_rewards.numpy(), batch.sequences
        if array.ndim != 1 or (tokens is not None and len(array) != len(batch)):
            return None
        parts.append(array)
    if not parts:
        return None
    # A copy: the report is computed later.
    rewards = parts[0].astype(np.float64) if len(parts) == 1 else np.concatenate(parts, dtype=np.float64)
    if not len(rewards) or len(rewards) % size or not rewards.dot(rewards) < _LARGEST_SQUARE:  # also if it is NaN
        return None
    blocks, count = rewards.reshape(-1, size), float(size)  # numpy converts integers slowly
    ascending = blocks.copy()
    ascending.sort()
    means = block_sums(ascending)
    means /= count  # exactly the reward if all are equal, since float64 sums of equal float32 rewards are exact
    scores = blocks - means
    if formula is rloo:
        scores *= count
        scores /= count - 1
    elif formula is grpo:
        squares = block_sums((ascending - means) ** 2)
        divisors = np.sqrt(squares / (size - 1)) + check_float("eps", options.get("eps", entry.options["eps"]), 0)
        scores /= np.where(divisors > 0, divisors, 1.0)
    scores += 0.0  # -0.0 becomes 0.0
    shaped = torch.from_numpy(scores.reshape(-1).astype(np.float32))

    def report() -> Report:
        raw = torch.from_numpy(rewards.astype(np.float32))
        return _row_estimate(RolloutBatches(batches), raw, config, SINGLE_PROCESS).report

    return RowScores(shaped, report=report, estimator=entry.name)


_BLOCK_FORMULAS = (grpo, dr_grpo, rloo, reinforce_plus_plus_baseline)
"""The estimators of `_block_scores`; the last one's scores are those of `dr_grpo`."""
_LARGEST_SQUARE = 1e60
"""Bound of the sum of squared rewards below which no score overflows float32."""


# --- the maker --------------------------------------------------------------------------------------------------------


class KLController(Protocol):
    """LightRFT's controller of the KL coefficient."""

    value: float


class Strategy(Protocol):
    """LightRFT's strategy, whose `args` have the settings of the maker."""

    args: Any


class LightRFTActor(Protocol):
    """An actor with LightRFT's `generate`, or a `rollbook.models.Actor`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probs of actions."""


class _ModelColumn(NamedTuple):
    """One output of a model: the record's column and the batch's field."""

    column: str
    batch_field: str


_OUTPUTS = {
    "policy": (_ModelColumn("old_logprobs", "action_log_probs"), _ModelColumn("entropy", "action_entropy")),
    "reference": (_ModelColumn("ref_logprobs", "base_action_log_probs"),),
    "teacher": (_ModelColumn("teacher_logprobs", "extras.teacher_logprobs"),),
    "critic": (_ModelColumn("values", "values"),),
}
"""By model (a field of `pipeline.Models`), its outputs."""
_ARGUMENTS = {"actor": "policy", "initial_model": "reference", "teacher": "teacher", "critic": "critic"}
"""Arguments of the constructor, and the models they are."""
_STAGES = {"policy": "policy", "reference": "reference", "teacher": "teacher", "critic": "values"}
"""By model, its name in the metrics."""
_INFO_ORDER = ("kl", "reward", "response_length", "total_length")
"""The first keys of `info`."""
_METHOD_ESTIMATORS = ("gae", "ppo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators over tokens that a method of LightRFT's maker computes, up to whitening."""
_ESTIMATOR_ONLY_OPTIONS = ("observations", "off_action_rewards")
"""Options that these methods lack: with one of them, the estimator itself is called."""
_SOURCES = {
    "values": "give the maker a critic",
    "teacher_logprobs": "give the maker a teacher",
    "necs": "put them into each batch's extras['necs']",
    "entropy": "set MakerConfig.entropy",
    "old_logprobs": "give the maker an actor that computes them",
}
"""Where the inputs of estimators come from."""


@dataclass(eq=False)
class _Rollout:
    """The samples of one call of `generate_samples`, which are annotated and scored together."""

    samples: list[Samples]
    records: Experiences | None = None
    experiences: dict[int, Experience] = field(default_factory=dict)
    """By index of the samples, the results of `make_experience` that were not yet returned."""


class _ProgressEngine:
    """The engine of `pipeline.generate`: shows progress, and keeps the samples that become records."""

    def __init__(self, engine: BaseEngine, engine_prompts: Sequence[Prompt], bar: Progress) -> None:
        self.engine, self.engine_prompts, self.bar = engine, engine_prompts, bar
        self.samples: list[Sample] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        order = [
            (prompt, prompt.eid.replace(run=prompt.eid.run + run).rid)
            for prompt in prompts
            if prompt.eid is not None
            for run in range(sampling.n)
        ]
        by_run: dict[str, Sample] = {}
        for sample in self.engine.stream(self.engine_prompts, sampling):
            by_run[sample.eid.rid] = sample
            self.bar.advance()
        self.samples = [by_run[rid] for _, rid in order]
        if self.engine_prompts is not prompts:  # samples keep the text that their prompt came as
            self.samples = [
                sample.replace(prompt=prompt) for sample, (prompt, _) in zip(self.samples, order, strict=True)
            ]
        return self.samples


class NaiveExperienceMaker:
    """LightRFT's maker of experience, for text and vision, padded and packed batches.

    A subclass may override `tokenize_fn`, `generate_samples`, `make_experience`, `process_experiences`,
    `get_cumulative_returns` (estimators that score rows, `reinforce`) and `get_advantages_and_returns` (`gae`, `ppo`):
    `make_experience_list` calls them through `self`, the last two once per batch.

    Args:
        actor: A `rollbook.models.Actor`, or an object with LightRFT's `generate(input_ids, attention_mask, **options)`
            and `actor(sequences, num_actions, attention_mask)`.
        critic: A `rollbook.models.Critic`, an object that is called like an actor, or `None`.
        reward_model: A module, a list of them (an empty one: rules only), or any reward of `rollbook.rewards`.
        initial_model: The reference model, or `None`.
        tokenizer: Reads prompts and responses.
        prompt_max_len: Tokens of the longest prompt; longer ones are cut on the tokenizer's truncation side.
        kl_controller: A number, an object with a `value`, or `None` if `config` has the `kl_coef`.
        strategy: Its `args` are read once; `None`: defaults.
        remote_rm_url: A URL, several, or a `.py` file with `reward_func`.
        reward_fn: LightRFT's, or a function of a response.
        reward_fn_label_map: LightRFT's.
        reward_recipe: LightRFT's.
        config: Settings instead of `strategy.args`.
        engine: Another engine to sample with, such as a server.
        processor: The processor of a vision-language model.
        teacher: The teacher of distillation.

    Attributes:
        metrics: Of the last `make_experience_list`: seconds, tokens and tokens per second of each stage, counts of rows
            with special treatment, means over the rollout.
        rollouts_made: The number of rollouts so far, which is the batch part of ids. Set it when a run is resumed.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine({"1+1=": [[4, 2], [5, 2]]})
    >>> maker = NaiveExperienceMaker(
    ...     None, None, None, None, None, 16, None, reward_fn=lambda response_ids: float(response_ids[0] == 4),
    ...     config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"), engine=engine,
    ... )
    >>> batch, = maker.make_experience_list(["1+1="])
    >>> batch.info["reward"].tolist(), batch.advantages.tolist(), batch.action_log_probs.tolist()
    ([1.0, 0.0], [[0.5, 0.5], [-0.5, -0.5]], [[-1.0, -1.0], [-1.0, -1.0]])
    """

    def __init__(
        self,
        actor: LightRFTActor | BaseEngine | None,
        critic: Callable[..., Any] | None,
        reward_model: RewardModels,
        initial_model: Callable[..., Any] | None,
        tokenizer: Tokenizer | None,
        prompt_max_len: int,
        kl_controller: float | torch.Tensor | KLController | None,
        strategy: Strategy | None = None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Callable[..., Any] | Mapping[str, Any] | None = None,
        reward_fn_label_map: Mapping[str, Any] | None = None,
        reward_recipe: Mapping[str, Any] | None = None,
        *,
        config: MakerConfig | None = None,
        engine: BaseEngine | None = None,
        processor: ProcessorMixin | None = None,
        teacher: Callable[..., Any] | None = None,
    ) -> None:
        check_int("prompt_max_len", prompt_max_len, 1)
        self.actor: Any = actor
        self.critic = critic
        self.reward_model, self.initial_model = reward_model, initial_model
        self.tokenizer, self.processor = tokenizer, processor
        self.prompt_max_len = prompt_max_len
        self.kl_ctl = kl_controller
        self.strategy = strategy
        self.remote_rm_url = remote_rm_url
        self.reward_fn, self.reward_fn_label_map, self.reward_recipe = reward_fn, reward_fn_label_map, reward_recipe
        self.config = config if config is not None else MakerConfig.from_args(getattr(strategy, "args", None))
        self.algorithm = self.config.to_algorithm()
        self._kl_coef()  # raises now rather than after the rollout
        self.advantage_estimator = self.config.advantage_estimator
        arguments: dict[str, Any] = {
            "actor": actor,
            "initial_model": initial_model,
            "teacher": teacher,
            "critic": critic,
        }
        self.models = {
            _ARGUMENTS[name]: _check_model(name, model)
            for name, model in arguments.items()
            if model is not None and not (name == "actor" and isinstance(model, BaseEngine))
        }
        self.scorer = Scorer(
            reward_model,
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            label_map=reward_fn_label_map,
            recipe=reward_recipe,
            tokenizer=tokenizer,
        )
        self.engine = engine if engine is not None else self._actor_engine()
        kind = self.algorithm.reward_norm
        self.reward_norm = None if kind is None else RunningNorm(minus_mean=kind == "mean_std")
        self.metrics: dict[str, float] = {}
        self.rollouts_made = 0
        self._step_metrics = StepMetrics()
        self._max_new_tokens: int | None = None
        self._rollout: _Rollout | None = None
        self._row_scores: RowScores | None = None

    @property
    def run(self) -> RunInfo | None:
        """The engine, model, fingerprints of tokenizer and chat template, and seed of the samples; `None` for an actor
        with LightRFT's `generate`, which does not report them."""
        return None if self.engine is None else dataclasses.replace(self.engine.run, seed=self.config.seed)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL penalty in the reward; 0 where the KL is left to the loss."""
        return 0.0 if self.config.use_kl_loss else max(self._kl_coef(), 0.0)

    @property
    def device(self) -> torch.device:
        """The device of batches: the policy's."""
        policy = self.models.get("policy")
        return get_device(policy) if isinstance(policy, torch.nn.Module) else torch.device("cpu")

    def _actor_engine(self) -> BaseEngine | None:
        """Return the actor as an engine, or `None` if it has none and is called by LightRFT's `generate`."""
        if isinstance(self.actor, BaseEngine):
            return self.actor
        if not isinstance(self.actor, Actor):
            return None
        if self.actor.tokenizer is None and self.actor.processor is None:
            self.actor.tokenizer, self.actor.processor = self.tokenizer, self.processor
        return TransformersEngine(self.actor)

    # --- prompts ------------------------------------------------------------------------------------------------

    def tokenize_fn(
        self, texts: str | list[str], max_length: int, padding: bool = True, device: torch.device | str | None = None
    ) -> Any:
        """Tokenize texts without special tokens, cut to `max_length` on the tokenizer's truncation side.

        Args:
            texts: The texts.
            max_length: Tokens of the longest text.
            padding: Whether to pad, on the tokenizer's side.
            device: The device of padded tensors; `None`: the actor's.

        Returns:
            With `padding`, a dict of tensors (B, S); without, the tokenizer's mapping of lists.

        Raises:
            ValueError: If the maker has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("tokenizer: missing, required to read prompts")
        options: dict[str, Any] = {"add_special_tokens": False, "max_length": max_length, "truncation": True}
        if not padding:
            return self.tokenizer(texts, **options)
        tokenized = self.tokenizer(texts, return_tensors="pt", padding=True, **options)
        target = device if device is not None else self.device
        return {name: tensor.to(target) for name, tensor in tokenized.items()}

    @torch.no_grad()
    def generate_samples(self, all_prompts: PromptsLike, **generate_kwargs: Any) -> list[Samples]:
        """Sample n responses to each prompt.

        Args:
            all_prompts: A prompt or a list of them.
            generate_kwargs: `all_labels`, `all_references`, `all_images`, `all_videos`, with an entry for each prompt;
                options of the engine. `gamma` and `lambd` are ignored.

        Returns:
            Batches of `micro_rollout_batch_size` samples; the n samples of a prompt follow one another.
        """
        parts, records = self._generate(all_prompts, generate_kwargs, self.config.n_samples_per_prompt)
        self._rollout = _Rollout(parts, records=records)
        self.rollouts_made += 1
        return list(parts)

    def _read_prompts(
        self, all_prompts: PromptsLike, generate_kwargs: Mapping[str, Any]
    ) -> tuple[list[Prompt], dict[str, Any]]:
        """Return the prompts of a call, with their columns, and its sampling options."""
        options = dict(generate_kwargs)
        for name in ("gamma", "lambd", "images_num", "videos_num"):
            options.pop(name, None)
        columns = {name: options.pop(f"all_{name}", None) for name in ("labels", "references", "images", "videos")}
        for name in options:
            if name.startswith("all_"):
                raise ValueError(f"{name}: unknown column{suggest(name, [f'all_{column}' for column in columns])}")
        prompts = make_prompts(all_prompts, **columns)
        if not prompts:
            raise ValueError("all_prompts: empty, expected at least one prompt")
        self.scorer.check(prompts)
        return prompts, options

    def _generate(
        self, all_prompts: PromptsLike, generate_kwargs: Mapping[str, Any], n: int
    ) -> tuple[list[Samples], Experiences | None]:
        """Generate samples in batches; also return their records if an engine made them."""
        prompts, options = self._read_prompts(all_prompts, generate_kwargs)
        self._max_new_tokens = options.get("max_new_tokens", options.get("max_tokens", self._max_new_tokens))
        if self.engine is None:
            with self._step_metrics.time("rollout") as stage:
                parts = self._generate_by_actor(prompts, options, n)
                stage["tokens"] = int(sum(float(sample_batch.response_length.sum()) for sample_batch in parts))
            return parts, None
        sampling = self._sampling(options, n)
        self._max_new_tokens = sampling.max_tokens
        prompts = [
            prompt if prompt.eid is not None else prompt.replace(eid=EID(batch=self._batch_id(), task=i, suffix=""))
            for i, prompt in enumerate(prompts)
        ]
        engine_prompts = self._tokenize_prompts(prompts) if self._overrides_tokenize_fn() else prompts
        with self._bar("rollout", len(prompts) * sampling.n) as bar:
            engine = _ProgressEngine(self.engine, engine_prompts, bar)
            records = pipeline.generate(engine, prompts, sampling, metrics=self._step_metrics)  # type: ignore[arg-type]
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        parts = []
        for start, stop in self._batch_bounds(len(records)):
            sample_batch = make_samples(
                engine.samples[start:stop],
                pad_token_id=pad,
                packed=self.config.packing_samples,
                records=records[start:stop],
            )
            parts.append(sample_batch.to_device(self.device))
        return parts, records

    def _batch_id(self) -> int | str:
        """Return the number of the rollout; with several processes also the rank, since each has its own prompts."""
        process_group, name = current_process_group(), self.config.batch_name
        number: int | str = (
            self.rollouts_made if process_group is SINGLE_PROCESS else f"{self.rollouts_made}.{process_group.rank}"
        )
        return number if name is None else f"{name}-{number}"

    def _sampling(self, options: Mapping[str, Any], n: int) -> Sampling:
        """Return the sampling options of a call, with the maker's defaults."""
        defaults: dict[str, Any] = {
            "max_prompt_tokens": self.prompt_max_len,
            "prompt_overflow": getattr(self.tokenizer, "truncation_side", "right"),
            "n": n,
            "seed": self.config.seed,
        }
        if self.config.use_fire:
            defaults["first_temperature"] = _FIRE_TEMPERATURE
        trained = getattr(self.models.get("policy"), "temperature", None)
        if isinstance(trained, float):
            defaults["temperature"] = trained
        sampling = maker_sampling(options, self.prompt_max_len, defaults)
        if isinstance(trained, float) and sampling.temperature not in (0, trained):
            warn_user(
                f"temperature: samples are drawn at {sampling.temperature:g}, but the actor's log-probs are at "
                f"{trained:g}; use Actor(temperature={sampling.temperature:g})"
            )
        return sampling

    def _overrides_tokenize_fn(self) -> bool:
        """Whether `tokenize_fn` is replaced; engines tokenize prompts themselves, with their chat templates."""
        return getattr(self.tokenize_fn, "__func__", None) is not NaiveExperienceMaker.tokenize_fn

    def _tokenize_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Tokenize plain texts by `tokenize_fn`; chats and prompts with media stay as they are."""

        def tokenized(prompt: Prompt) -> Prompt:
            if prompt.text is None or prompt.images or prompt.videos:
                return prompt
            (token_ids,) = self.tokenize_fn([prompt.text], self.prompt_max_len, padding=False)["input_ids"]
            return prompt.replace(text=None, token_ids=token_ids)

        return [tokenized(prompt) for prompt in prompts]

    def _generate_by_actor(self, prompts: Sequence[Prompt], options: Mapping[str, Any], n: int) -> list[Samples]:
        """Sample by an actor with LightRFT's `generate`, which returns sequences and masks alone."""
        for i, prompt in enumerate(prompts):
            if prompt.text is None or prompt.images or prompt.videos:
                raise ValueError(
                    f"all_prompts[{i}]: got a prompt that is not plain text, expected text: the actor has LightRFT's "
                    "generate; rollbook.models.Actor takes chats, token ids and media"
                )
        if not callable(getattr(self.actor, "generate", None)):
            kind = "None" if self.actor is None else type(self.actor).__name__
            raise ValueError(f"actor: got {kind}, expected one with generate, or an engine as engine=")
        if self.config.use_fire:
            raise ValueError("use_fire: needs an engine of rollbook.rollout, such as that of rollbook.models.Actor")
        runs = [(i, run) for i in range(len(prompts)) for run in range(n)]
        if hasattr(self.actor, "eval"):
            self.actor.eval()
        parts = []
        with self._bar("rollout", len(runs)) as bar:
            for start, stop in self._batch_bounds(len(runs)):
                rows = runs[start:stop]
                texts = [str(prompts[i].text) for i, _ in rows]
                inputs = self.tokenize_fn(texts, self.prompt_max_len, device=self.device)
                answer = self.actor.generate(**inputs, **options)
                if not isinstance(answer, (tuple, list)) or len(answer) != 3:
                    kind = f"{len(answer)} results" if isinstance(answer, (tuple, list)) else type(answer).__name__
                    raise ValueError(
                        f"actor.generate: returned {kind}, expected (sequences, attention_mask, action_mask)"
                    )
                sequences, attention_mask, action_mask = answer
                action_mask = action_mask != 0
                parts.append(
                    Samples(
                        sequences=sequences,
                        attention_mask=attention_mask,
                        action_mask=action_mask,
                        num_actions=action_mask.size(1),
                        packed_seq_lens=None,
                        response_length=action_mask.float().sum(dim=-1),
                        total_length=attention_mask.float().sum(dim=-1),
                        prompts=texts,
                        labels=none_if_empty([prompts[i].label for i, _ in rows]),
                        references=none_if_empty([prompts[i].reference for i, _ in rows]),
                        ids=[EID(batch=self._batch_id(), task=i, run=run) for i, run in rows],
                    )
                )
                bar.advance(len(rows))
        return parts

    def _batch_bounds(self, count: int) -> Iterator[tuple[int, int]]:
        """Iterate over the bounds of batches of `micro_rollout_batch_size` rows."""
        size = self.config.micro_rollout_batch_size or max(count, 1)
        return ((start, min(start + size, count)) for start in range(0, count, size))

    # --- experience ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_experience(self, samples: Samples) -> Experience:
        """Run the models over samples and score them; advantages come later.

        The rollout that the samples belong to is annotated and scored as a whole, on the first call for one of its
        parts.

        Args:
            samples: What `generate_samples` returned, or any other samples.

        Returns:
            The batch: `action_log_probs`, `base_action_log_probs`, `values` (B, A) where there are models for them,
            `kl` (B, A), and `info`: `kl` (B,), the mean over actions, `reward` (B,), `response_length`,
            `total_length`, `num_actions`, and `reward_metrics`, by name (B,), if the reward has parts.
        """
        rollout = self._rollout
        places = (
            [] if rollout is None else [i for i, sample_batch in enumerate(rollout.samples) if sample_batch is samples]
        )
        if rollout is None or not places:
            return self._experiences([samples])[0][0]
        if places[0] not in rollout.experiences:
            experiences, rollout.records = self._experiences(rollout.samples)
            rollout.experiences = dict(enumerate(experiences))
        return rollout.experiences.pop(places[0])

    def _experiences(self, parts: Sequence[Samples]) -> tuple[list[Experience], Experiences | None]:
        """Return the batches of samples, annotated and scored, and their records if an engine made them."""
        records = None
        batch = self._padded_experience(parts[0]) if len(parts) == 1 else None
        if batch is not None:
            batches = [batch]
        else:
            batches = [batch_from_samples(samples) for samples in parts]
            records = self._annotate(parts, batches)
        if batch is not None and self.scorer.reads_tokens:
            with self._step_metrics.time("reward"):
                self.scorer.score_tokens(batch)
        else:
            with self._bar("reward", sum(map(len, batches))) as bar:
                records = self.scorer.score(parts, batches, records, self._step_metrics)
                bar.advance(bar.total)
        for samples, batch in zip(parts, batches, strict=True):
            info = {**(batch.info or {}), "num_actions": samples.num_actions}
            batch.info = {**{name: info[name] for name in _INFO_ORDER if name in info}, **info}
        return batches, records

    def _annotate(self, parts: Sequence[Samples], batches: Sequence[Experience]) -> Experiences | None:
        """Add the outputs of all models and the KL to each batch; return the records if an engine made the samples."""
        rollout = RolloutBatches(batches)
        mask = rollout.column("action_mask")
        if mask is None:
            raise ValueError("action_mask: missing, and no other response-axis field gives the response slots")
        has_records = all(sample_batch.rollouts is not None for sample_batch in parts)
        records: Experiences | None = None
        if has_records or any(map(is_native, self.models.values())):
            records = records_of_samples(parts, batches)
        columns: dict[str, torch.Tensor] = {}

        def set_column(name: str, values: torch.Tensor, lengths: list[int]) -> None:
            columns[name] = _finite(name, values, lengths, *mask)
            rollout.set_column(name, columns[name], mask[1])

        with self._bar("log-probs", max(len(self.models), 1)) as bar:
            for name, model in self.models.items():
                outputs = _OUTPUTS[name] if name != "policy" or self.config.wants_entropy else _OUTPUTS[name][:1]
                if records is not None and is_native(model):
                    records = self._run_native(name, records, tuple(output.column for output in outputs))
                    for output in outputs:
                        rows = records.values(output.column)
                        set_column(output.batch_field, torch.cat(rows), list(map(len, rows)))
                else:
                    set_column(outputs[0].batch_field, *self._call_batches(name, rollout, len(outputs) > 1))
                bar.advance()
        if "policy" not in self.models and (sampled := rollout.column("extras.logprobs")) is not None:
            set_column("action_log_probs", *sampled)
        self._add_kl(rollout, columns, *mask)
        self._resume_training()
        return records if has_records else None

    def _run_native(self, name: str, records: Experiences, columns: tuple[str, ...]) -> Experiences:
        """Run a model of `rollbook.models` over all records."""
        algorithm = _SinglePass(model_pass=Pass(name, columns[0], columns))
        models = pipeline.Models(**{name: self.models[name]})
        options: dict[str, Any] = {"token_budget": self.config.token_budget, "metrics": self._step_metrics}
        return pipeline.annotate(records, algorithm, models, **options)

    def _call_batches(self, name: str, rollout: RolloutBatches, entropy: bool) -> tuple[torch.Tensor, list[int]]:
        """Call a model with LightRFT's arguments, batch by batch."""
        if entropy:
            raise ValueError("entropy: this actor does not compute it, expected a rollbook.models.Actor")
        model = self.models[name]
        if callable(getattr(model, "eval", None)):
            model.eval()
        with self._step_metrics.time(name) as stage:
            answers = rollout.compute(lambda batch: call_model(model, batch))
            stage["tokens"] = rollout.token_count()
        return answers

    def _add_kl(
        self, rollout: RolloutBatches, columns: Mapping[str, torch.Tensor], mask: torch.Tensor, lengths: list[int]
    ) -> None:
        """Add the KL of each token, 0 where the mask is False, and its mean over each row's actions."""
        logprobs, ref_logprobs = columns.get("action_log_probs"), columns.get("base_action_log_probs")
        if ref_logprobs is None and self.kl_coef > 0:
            warn_user(f"kl_controller: got {self.kl_coef:g} without initial_model: there is no KL penalty")
        counted = Rows(mask, lengths)
        if logprobs is None or ref_logprobs is None:
            kl = torch.zeros(len(mask))
        else:
            rows = Rows(logprobs, lengths), Rows(ref_logprobs, lengths)
            kl = token_kl(*rows, counted, estimator=self.config.kl_estimator).values
        rollout.set_column("kl", kl, lengths)
        counts = Layout.from_tokens(counted).counts.numpy()
        rollout.set_numbers("kl", mean_by_row(kl.double().numpy(), np.array(lengths, dtype=np.int64), counts))

    def _resume_training(self) -> None:
        for model in (self.actor, self.critic):
            if _is_trained(model):
                model.train()  # type: ignore[union-attr]

    def _padded_experience(self, samples: Samples) -> Experience | None:
        """Annotate a batch by `padded_experience`; `None` if it does not apply."""
        if self.config.wants_entropy or KL[self.config.kl_estimator].function is not k1:
            return None
        batch = padded_experience(samples, self.models, self._step_metrics)
        if batch is not None:
            self._resume_training()
        return batch

    # --- advantages ---------------------------------------------------------------------------------------------

    def process_experiences(
        self, experiences: Sequence[Experience], max_new_tokens: int | None = None
    ) -> tuple[list[Experience], list[torch.Tensor]]:
        """Shape rewards, and compare them within groups if the estimator does so.

        Groups are those of the rows' ids; rows without ids are grouped by position, `n_samples_per_prompt` in a row. A
        subclass may override this: `make_experience_list` continues with the experiences and rewards it returns, which
        may be fewer, smaller or in another order, and clips the rewards afterwards.

        Args:
            experiences: Batches with `info["reward"]`.
            max_new_tokens: The longest response, for the overlong buffer; `None`: that of the last rollout.

        Returns:
            The experiences, and for each the rewards (B,) that go on its rows' last actions, NaN where one is missing.

        Raises:
            ValueError: If one of them is not an `Experience`.
        """
        for i, experience in enumerate(experiences):
            if not isinstance(experience, Experience):
                raise ValueError(f"experiences[{i}]: got {type(experience).__name__}, expected an Experience")
        longest = max_new_tokens if max_new_tokens is not None else self._max_new_tokens
        scores = self._row_scores = score_rewards(experiences, self.config, self.reward_norm, longest)
        rewards = [scores.rewards] if len(experiences) == 1 else RolloutBatches(experiences).split(scores.rewards)
        return list(experiences), list(map(_on_reward_device, rewards, experiences))

    def get_advantages_and_returns(
        self, values: TokenColumn, rewards: TokenColumn, action_mask: TokenColumn | None, gamma: float, lambd: float
    ) -> tuple[Any, Any]:
        """Compute GAE. Slots that do not count are skipped by the recursion, and 0.

        Args:
            values: (B, A), or a list of 1-D tensors.
            rewards: The rewards of tokens, in the same layout.
            action_mask: Which slots count, in the same layout; `None`: all.
            gamma: Discount.
            lambd: GAE's lambda.

        Returns:
            Advantages and returns, in the same layout.

        >>> maker = NaiveExperienceMaker(None, None, None, None, None, 8, None)
        >>> advantages, returns = maker.get_advantages_and_returns(
        ...     torch.tensor([[0.5, 0.4, 0.3]]), torch.tensor([[0.0, 0.0, 1.0]]), None, 1.0, 0.95)
        >>> advantages, returns
        (tensor([[0.4367, 0.5650, 0.7000]]), tensor([[0.9367, 0.9650, 1.0000]]))
        """
        estimate = gae(rewards, values, action_mask, gamma=gamma, lam=lambd)
        if isinstance(values, list) and not isinstance(values, Rows):
            return list(estimate.advantages), list(estimate.returns)
        return estimate.advantages, estimate.returns

    def get_cumulative_returns(self, rewards: TokenColumn, action_mask: TokenColumn | None, gamma: float) -> Any:
        """Compute the discounted return of each slot.

        Args:
            rewards: The rewards of tokens, (B, A), or a list of 1-D tensors.
            action_mask: Which slots count, in the same layout; `None`: all.
            gamma: Discount.

        Returns:
            The returns, in the same layout.

        >>> maker = NaiveExperienceMaker(None, None, None, None, None, 8, None)
        >>> maker.get_cumulative_returns(torch.tensor([[0.0, 0.0, 1.0]]), None, 0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
        """
        returns = cumulative_returns(rewards, action_mask, gamma=gamma)
        return list(returns) if isinstance(rewards, list) and not isinstance(rewards, Rows) else returns

    @torch.no_grad()
    def make_experience_list(self, all_prompts: PromptsLike, **generate_kwargs: Any) -> list[Experience]:
        """Make finished experience: generate, score, compare within groups, estimate advantages.

        Args:
            all_prompts: See `generate_samples`.
            generate_kwargs: See `generate_samples`; `gamma` and `lambd` are options of the estimator.

        Returns:
            Batches of `micro_rollout_batch_size` samples. `info` has `return` (B,), the sum of a row's token rewards,
            and the clipped fractions if there are bounds; `info["num_actions"]` and `kl` are removed.
        """
        self._step_metrics = StepMetrics()
        self._check_models()
        self.scorer.require()
        entry = ESTIMATORS[self.config.advantage_estimator]
        greedy = self._greedy_rewards(all_prompts, generate_kwargs) if entry.greedy_baseline else None
        samples = self.generate_samples(all_prompts, **generate_kwargs)
        if self._rollout is None or list(map(id, self._rollout.samples)) != list(map(id, samples)):
            self._rollout = _Rollout(list(samples))  # a subclass returned other samples
        experiences = [self.make_experience(sample_batch) for sample_batch in samples]
        if greedy is not None:
            rollout = RolloutBatches(experiences)
            baselines = dict(enumerate(greedy.values())) if rollout.ids() is None else greedy
            groups = rollout.groups(len(rollout) // len(greedy))
            rollout.set_numbers("reward_baseline", torch.tensor([baselines[group] for group in groups]))
        failed = sum(sample.failed for sample_batch in samples for sample in sample_batch.rollouts or ())
        return self._finish(experiences, failed, generate_kwargs)

    def _check_models(self) -> None:
        """Reject an estimator or a penalty whose model is missing, before anything is sampled."""
        entry = ESTIMATORS[self.config.advantage_estimator]
        for name, model in (("values", "critic"), ("teacher_logprobs", "teacher")):
            if name in entry.inputs and model not in self.models:
                raise ValueError(f"{entry.name}: missing input {name!r}; {_SOURCES[name]}")
        coef = self.config.kl_coef
        if coef is not None and coef > 0 and not self.config.use_kl_loss and "reference" not in self.models:
            raise ValueError(
                f"initial_model: got None, expected the reference model of the KL penalty (kl_coef is {coef:g})"
            )

    def _greedy_rewards(self, all_prompts: PromptsLike, generate_kwargs: Mapping[str, Any]) -> dict[Any, float]:
        """Return the baselines of ReMax by group id: the reward of the greedy response to each prompt."""
        parts, records = self._generate(all_prompts, {**generate_kwargs, "do_sample": False}, 1)
        batches = [batch_from_samples(samples) for samples in parts]
        self.scorer.score(parts, batches, records, StepMetrics())
        rollout = RolloutBatches(batches)
        return dict(zip(rollout.groups(1), rollout.numbers("reward").tolist(), strict=True))

    def _finish(
        self, experiences: list[Experience], failed: int, generate_kwargs: Mapping[str, Any]
    ) -> list[Experience]:
        """Add advantages to scored experience, and set `metrics`."""
        gamma = generate_kwargs.get("gamma", self.config.gamma)
        lambd = generate_kwargs.get("lambd", self.config.lambd)
        self._row_scores = None
        rollout = RolloutBatches(experiences)
        processed, rewards = self.process_experiences(experiences)
        experiences = list(processed)
        with self._step_metrics.time("advantages"):
            batches = RolloutBatches(experiences)
            numbers = self._add_advantages(batches, _checked_rewards(batches, list(rewards)), gamma, lambd)
        for batch in experiences:
            batch.kl = None
            batch.info = {name: entry for name, entry in (batch.info or {}).items() if name != "num_actions"}
        self.metrics = {**self._stage_metrics(), **numbers, **_rollout_metrics(rollout, failed)}
        if self.config.packing_samples:
            return [batch.pack() for batch in experiences]
        return experiences

    def _add_advantages(
        self, rollout: RolloutBatches, row_rewards: torch.Tensor, gamma: float, lambd: float
    ) -> dict[str, float]:
        """Set `advantages`, `returns`, `info["return"]` and the clipped fractions of each batch.

        Args:
            rollout: What `process_experiences` returned.
            row_rewards: [N] the rewards it returned.
            gamma: Discount.
            lambd: GAE's lambda.

        Returns:
            Metrics.
        """
        config, process_group = self.config, current_process_group()
        entry = ESTIMATORS[config.advantage_estimator]
        mask = rollout.rows("action_mask")
        if mask is None:
            raise ValueError("action_mask: missing, and no other response-axis field gives the response slots")
        metrics = {} if self._row_scores is None else self._row_scores.metrics
        bounds = self.algorithm.reward_clip if entry.clips_rewards else None
        rewards, clip_metrics = clip_scores(row_rewards, bounds)
        has_reward = ~rewards.isnan() if entry.takes_rewards else torch.ones(len(rollout), dtype=torch.bool)
        if config.dynamic_sampling:
            groups = rollout.groups(config.n_samples_per_prompt, process_group)
            selection = zero_variance(rollout.numbers("reward"), groups, rollout.runs(), process_group=process_group)
            mask = _mask_rows(mask, selection.keep.cpu())
            rollout.set_numbers("filtered", ~selection.keep.cpu())
            metrics |= selection.report.to_metrics("dynamic_sampling")
        token_rewards, reward_metrics = self._token_rewards(rollout, rewards, mask, entry)
        metrics |= reward_metrics | {"reward/missing_reward": float((~has_reward).sum())} | clip_metrics
        options = self._estimator_options(entry, gamma, lambd, process_group)
        if scores_rows(entry):
            counted = _mask_rows(mask, has_reward)
            estimate = self._score_advantages(rollout, token_rewards, counted, entry, options, gamma)
        else:
            estimate = self._token_advantages(rollout, rewards, token_rewards, mask, entry, options)
            mask = estimate.mask if isinstance(estimate.mask, Rows) else mask
            metrics |= estimate.report.to_metrics(entry.name)
        is_whitened = bool(options.get("whiten", entry.options.get("whiten", False)))
        normalize = None if is_whitened or entry.normalized else self.algorithm.normalize_advantages
        advantages, _ = normalize_advantages(
            estimate.advantages, mask, has_reward, normalize=normalize, process_group=process_group
        )
        if config.advantage_clip > 0:
            clipped = clip_advantages(advantages, mask, config.advantage_clip)
            advantages = clipped.advantages
            rollout.set_numbers("advantage_clip_frac", clipped.fractions.cpu())
            metrics["advantage/clip_fraction"] = clipped.fraction
        if bounds is not None:
            rollout.set_numbers("reward_clip_frac", ((rewards != row_rewards) & ~row_rewards.isnan()).float())
        sums = [row.sum() for row in token_rewards]
        rollout.set_numbers("return", torch.stack(sums) if sums else torch.zeros(0))
        if config.dynamic_sampling or not scores_rows(entry):
            rollout.set_field("action_mask", mask)
        rollout.set_field("advantages", advantages)
        rollout.set_field("returns", estimate.returns)
        return metrics

    def _token_rewards(
        self, rollout: RolloutBatches, rewards: torch.Tensor, mask: Rows, entry: Estimator
    ) -> tuple[Rows, dict[str, float]]:
        """Compute the rewards of tokens: the reward of each row on its last action, minus the KL; and metrics.

        Rows with token rewards (`extras["token_level_reward"]`) keep these if the estimator reads them; their last
        action also gets the difference that shaping made to the reward of the row.
        """
        coef = self.kl_coef
        token_level = rollout.token_rewards() if entry.takes_token_rewards else None
        scale = 1.0 if self.reward_norm is None else 1 / self.reward_norm.scale
        if token_level is not None:
            rewards = torch.where(token_level[1], rewards - scale * rollout.numbers("reward"), rewards)
        # A list: a tensor with as many rows as tokens is ambiguous.
        token_rewards, report = penalize(rewards.tolist(), rollout.rows("kl") if coef > 0 else None, mask, coef=coef)
        if token_level is not None:
            token_rewards = Rows(token_rewards.values + scale * token_level[0].values, mask.lengths)
        return token_rewards, report.to_metrics("reward")

    def _estimator_options(
        self, entry: Estimator, gamma: float, lambd: float, process_group: ProcessGroup
    ) -> dict[str, Any]:
        """Return the estimator's options: those of the settings, and the maker's that it has."""
        options: dict[str, Any] = {"gamma": gamma, "lam": lambd, "process_group": process_group}
        if scores_rows(entry):
            options["whiten"] = False
        elif self.algorithm.normalize_advantages == "mean_std":
            options["whiten"] = True
        options = {name: option for name, option in options.items() if name in entry.options}
        return {**options, **self.config.estimator_options}

    def _score_advantages(
        self,
        rollout: RolloutBatches,
        token_rewards: Rows,
        mask: Rows,
        entry: Estimator,
        options: Mapping[str, Any],
        gamma: float,
    ) -> Advantages:
        """Compute the returns of row scores, from which group baselines are subtracted already."""
        if entry.function is not reinforce_plus_plus_baseline:
            returns = self._returns(rollout, token_rewards, mask, gamma)
            return Advantages(returns.apply(torch.clone), returns)
        if any(name in options for name in _ESTIMATOR_ONLY_OPTIONS):
            return as_advantages(entry.name, entry.call({"token_rewards": token_rewards, "mask": mask}, options))
        if gamma != 1:
            warn_user(f"{entry.name}: gamma {gamma} is ignored, expected 1")
        returns = self._returns(rollout, token_rewards, mask, 1.0)
        return Advantages(_whitened(returns.apply(torch.clone), mask, {**entry.options, **options}), returns)

    def _token_advantages(
        self,
        rollout: RolloutBatches,
        rewards: torch.Tensor,
        token_rewards: Rows,
        mask: Rows,
        entry: Estimator,
        options: Mapping[str, Any],
    ) -> Advantages:
        """Compute the advantages of an estimator over tokens, by LightRFT's methods if they compute it."""
        inputs = self._estimator_inputs(rollout, rewards, token_rewards, mask, entry)
        if entry.name not in _METHOD_ESTIMATORS or any(name in options for name in _ESTIMATOR_ONLY_OPTIONS):
            return as_advantages(entry.name, entry.call(inputs, options))
        options = {**entry.options, **options}
        has_reward = ~rewards.isnan()
        counted = _mask_rows(mask, has_reward)
        report = place_rewards(inputs.get("rewards") or [0.0] * len(rollout), mask, token_rewards=token_rewards)[1]
        if "values" in inputs:
            advantages, returns = self._gae(rollout, inputs["values"], token_rewards, counted, options)
            # Rows without a reward have their values as returns: no gradient for the critic.
            unknown, values = _mask_rows(mask, ~has_reward).values, inputs["values"].values
            returns = returns.apply(lambda flat: torch.where(unknown, values.to(flat.dtype), flat))
        else:
            returns = self._returns(rollout, token_rewards, counted, options["gamma"])
            advantages = returns.apply(torch.clone)
        return Advantages(_whitened(advantages, counted, options), returns, report=report)

    def _estimator_inputs(
        self, rollout: RolloutBatches, rewards: torch.Tensor, token_rewards: Rows, mask: Rows, entry: Estimator
    ) -> dict[str, Any]:
        """Return the inputs of an estimator over tokens."""
        columns = {
            "values": "values",
            "old_logprobs": "action_log_probs",
            "teacher_logprobs": "extras.teacher_logprobs",
            "entropy": "action_entropy",
            "necs": "extras.necs",
        }
        inputs: dict[str, Any] = {"mask": mask}
        inputs |= {name: rollout.rows(column) for name, column in columns.items() if name in entry.inputs}
        inputs |= {name: rollout.entries(key) for name, key in INFO_KEYS.items() if name in entry.inputs}
        if "token_rewards" in entry.inputs:
            # Token rewards of rows without a reward are 0; `rewards` says which rows these are.
            missing = rewards.isnan()
            inputs["token_rewards"] = token_rewards
            inputs["rewards"] = torch.where(missing, torch.nan, 0.0).tolist() if bool(missing.any()) else None
        else:
            inputs["rewards"] = rewards
            if self.kl_coef > 0:
                warn_user(f"{entry.name} reads no token rewards: the KL penalty is left out")
        if "groups" in entry.inputs:
            inputs["groups"] = rollout.groups(self.config.n_samples_per_prompt, current_process_group())
        inputs["runs"] = rollout.runs()
        inputs["steps"] = [eid.step for eid in rollout.ids() or ()] or None
        inputs = {name: column for name, column in inputs.items() if name in entry.inputs and column is not None}
        required = [name for name, is_required in entry.inputs.items() if is_required]
        for name in [*required, *(["baselines"] if entry.greedy_baseline else [])]:
            if name not in inputs:
                source = _SOURCES.get(name) or f"put them into the prompts' info[{INFO_KEYS.get(name, name)!r}]"
                raise ValueError(f"{entry.name}: missing input {name!r}; {source}")
        return inputs

    def _returns(self, rollout: RolloutBatches, token_rewards: Rows, mask: Rows, gamma: float) -> Rows:
        """`get_cumulative_returns` of each batch."""
        batches = zip(rollout.lay_out(token_rewards), rollout.lay_out(mask), strict=True)
        returns = [self.get_cumulative_returns(*arguments, gamma) for arguments in batches]
        return rollout.gather("get_cumulative_returns", returns)

    def _gae(
        self, rollout: RolloutBatches, values: Rows, token_rewards: Rows, mask: Rows, options: Mapping[str, Any]
    ) -> tuple[Rows, Rows]:
        """`get_advantages_and_returns` of each batch."""
        columns = (rollout.lay_out(rows) for rows in (values, token_rewards, mask))
        gamma, lam = options["gamma"], options["lam"]
        pairs = [self.get_advantages_and_returns(v, r, m, gamma, lam) for v, r, m in zip(*columns, strict=True)]
        advantages, returns = zip(*pairs, strict=True) if pairs else ((), ())
        name = "get_advantages_and_returns"
        return rollout.gather(name, advantages), rollout.gather(name, returns)

    # --- metrics ------------------------------------------------------------------------------------

    def _kl_coef(self) -> float:
        coef: Any = getattr(self.kl_ctl, "value", self.kl_ctl)
        if isinstance(coef, torch.Tensor) and coef.numel() == 1:
            coef = coef.item()
        if coef is not None:
            expected = "None, a finite number, or an object with such a value"
            coef = check_float("kl_controller", coef, -1e30, 1e30, expected)
            if self.config.kl_coef not in (None, coef):
                raise ValueError(
                    f"kl_controller: got {coef:g}, expected None, or config.kl_coef, {self.config.kl_coef:g}"
                )
        return self.config.kl_coef or coef or 0.0

    def _stage_metrics(self) -> dict[str, float]:
        """Return the timings, with LightRFT's name of the critic's stage."""
        metrics = self._step_metrics.values()
        return {name.replace("critic/", "values/", 1): number for name, number in metrics.items()}

    def _bar(self, label: str, total: int) -> Progress:
        return Progress(label, total, show=self.config.progress)


def _check_model(name: str, model: Callable[..., Any]) -> Any:
    """Return the model of a constructor's argument, or raise `ValueError` if it cannot be called."""
    if not callable(model):
        raise ValueError(f"{name}: got {type(model).__name__} ({shortened(model)}), expected a model to call, or None")
    if hasattr(type(model), "prepare_inputs_for_generation"):
        wrapper = "rollbook.models.Critic" if name == "critic" else "rollbook.models.Actor"
        raise ValueError(f"{name}: got {type(model).__name__}, a transformers model, expected {wrapper}(model)")
    return model


def _is_trained(model: Callable[..., Any] | None) -> bool:
    """Return whether a model is set to training mode afterwards, as in LightRFT; frozen models are not."""
    if isinstance(model, torch.nn.Module):
        return any(parameter.requires_grad for parameter in model.parameters())
    return callable(getattr(model, "train", None))


def _on_reward_device(rewards: torch.Tensor, batch: Experience) -> torch.Tensor:
    """Move rewards from the CPU to the device of `info["reward"]`."""
    reward = (batch.info or {}).get("reward")
    return rewards if not isinstance(reward, torch.Tensor) or reward.is_cpu else rewards.to(reward.device)


def _checked_rewards(rollout: RolloutBatches, rewards: Sequence[Any]) -> torch.Tensor:
    """[N] Concatenate the rewards that `process_experiences` returned, and check their count."""
    parts = [
        torch.as_tensor(batch_rewards, dtype=torch.float32).detach().cpu().reshape(-1) for batch_rewards in rewards
    ]
    sizes = [len(batch_rewards) for batch_rewards in parts]
    if sizes != rollout.sizes:
        raise ValueError(
            f"process_experiences: returned rewards of sizes {sizes}, expected {rollout.sizes}, "
            "one reward for each sample of each experience"
        )
    return torch.cat(parts) if parts else torch.zeros(0)


def _mask_rows(mask: Rows, keep: torch.Tensor) -> Rows:
    """Set the mask to False on rows that are not kept."""
    lengths = torch.tensor(mask.lengths, dtype=torch.int64)
    return Rows(mask.values & torch.repeat_interleave(keep, lengths), mask.lengths)


def _whitened(advantages: Rows, mask: Rows, options: Mapping[str, Any]) -> Rows:
    """Whiten and clip advantages by the options of an estimator."""
    if options.get("whiten"):
        advantages = whiten(advantages, mask, **{name: options[name] for name in ("std", "eps", "process_group")})
    if options.get("clip") is not None:
        advantages = clip_advantages(advantages, mask, options["clip"]).advantages
    return advantages


def _finite(
    name: str, values: torch.Tensor, value_lengths: list[int], mask: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Convert a column to float32 on the CPU; non-finite numbers become 0 where the mask is False."""
    if value_lengths != lengths:
        raise ValueError(f"{name}: got rows of {value_lengths} slots, expected {lengths}")
    values = values.detach().float().cpu()
    if isfinite(values.sum()):  # then every number is, unless the sum overflows
        return values
    return torch.where(mask | values.isfinite(), values, 0.0)


def _rollout_metrics(rollout: RolloutBatches, failed: int) -> dict[str, float]:
    """Compute counts and means over a rollout."""
    rewards = rollout.numbers("reward")
    rewards = rewards[~rewards.isnan()]
    metrics = {
        "rollout/samples": float(len(rollout)),
        "rollout/failed": float(failed),
        "rollout/response_length": float(rollout.numbers("response_length").mean()),
        "reward/mean": float(rewards.mean()) if len(rewards) else math.nan,
        "reward/std": float(rewards.std(correction=0)) if len(rewards) else math.nan,
        "reward/errors": float(sum(error is not None for error in rollout.entries("reward_error") or ())),
    }
    if rollout.entries("kl") is not None:
        metrics["kl/mean"] = float(rollout.numbers("kl").mean())
    parts = [(batch.info or {}).get("reward_metrics") or {} for batch in rollout.batches]
    for name in dict.fromkeys(name for batch_metrics in parts for name in batch_metrics):
        numbers = torch.cat([batch_metrics[name].float().cpu() for batch_metrics in parts if name in batch_metrics])
        numbers = numbers[~numbers.isnan()]
        metrics[f"reward/{name}"] = float(numbers.mean()) if len(numbers) else math.nan
    truncated_from = rollout.entries("prompt_truncated_from") or []
    metrics["rollout/prompts_cut"] = sum(length is not None for length in truncated_from) / len(rollout)
    finish_reasons = rollout.entries("finish_reason")
    if finish_reasons is not None:
        metrics["rollout/truncated"] = sum(reason == "length" for reason in finish_reasons) / len(finish_reasons)
    return metrics


# --- padded batches of plain callables --------------------------------------------------------------------------------


def padded_experience(
    samples: Samples, models: Mapping[str, Callable[..., Any]], metrics: StepMetrics
) -> Experience | None:
    """Call LightRFT's models for a padded batch and add the KL of the estimator k1, on matrices throughout.

    Args:
        samples: The samples.
        models: By name, the models.
        metrics: Collects timings.

    Returns:
        The batch, with `response_length`, `total_length` and the mean `kl` in `info`. `None` if the general path is
        needed: samples of an engine, packed or on a device, a row whose last prompt token or an action is not attended,
        no policy or no reference, models of `rollbook.models`.
    """
    if type(samples) is not Samples:
        return None
    tokens, attention, actions = samples.sequences, samples.attention_mask, samples.action_mask
    if samples.rollouts is not None or samples.packed_seq_lens is not None:
        return None
    if "policy" not in models or "reference" not in models or "teacher" in models:
        return None
    if any(map(is_native, models.values())) or not _are_matrices(tokens, attention, actions):
        return None
    attended = memory(attention) != 0
    responses = _find_responses(attended, memory(actions))
    if responses is None:
        return None
    columns: dict[str, torch.Tensor] = {}
    count, shape = int(np.count_nonzero(attended)), actions.shape
    for name, model in models.items():
        with metrics.time(name) as stage:
            if callable(getattr(model, "eval", None)):
                model.eval()  # type: ignore[attr-defined]
            answer = check_output(model, model(tokens, shape[1], attention), shape)
            columns[name] = _response_slots(answer, responses)
            stage["tokens"] = count
    response_lengths, total_lengths = sample_lengths(samples)
    kl, means = _k1(columns["policy"], columns["reference"], responses)
    batch = Experience(
        tokens,
        columns["policy"],
        columns["reference"],
        columns.get("critic"),
        None,
        None,
        attention,
        actions,
        {"kl": means, "response_length": response_lengths, "total_length": total_lengths},
        kl,
        None,
        samples.labels,
        samples.references,
    )
    if samples.ids is not None:
        batch.ids = list(samples.ids)
    return batch


def _are_matrices(tokens: torch.Tensor, attention: torch.Tensor, actions: torch.Tensor) -> bool:
    """Return whether all three are matrices on the CPU of matching shapes."""
    for matrix in (tokens, attention, actions):
        if type(matrix) is not torch.Tensor or not matrix.is_cpu or matrix.dim() != 2:
            return False
    rows, width = tokens.shape
    fit = attention.shape == (rows, width) and actions.shape[0] == rows and 0 < actions.shape[1] <= width
    return fit and rows > 0 and actions.dtype == torch.bool and attention.dtype in NUMPY


class _Responses(NamedTuple):
    """The responses of a padded batch of B rows and A slots."""

    mask: NDArray[np.bool_]
    """[B, A] Which slots are actions."""
    ends: NDArray[np.int64]
    """[B] Number of slots of each row up to its last attended token."""
    factors: NDArray[np.int32] | None
    """[B, A] The mask as integers, if the batch is small and the actions are exactly the slots up to `ends`."""
    has_gaps: bool
    """Whether some slot before its row's end is not an action."""


_SMALL = 1 << 16
"""Number of slots up to which a batch is masked as a whole, which is then faster than row by row."""


def _find_responses(attended: NDArray[np.bool_], mask: NDArray[np.bool_]) -> _Responses | None:
    """Return the responses; `None` if some row's last prompt token, or an action, is not attended."""
    slots = mask.shape[1]
    begin = attended.shape[1] - slots
    responses = attended[:, begin:]
    if not begin or not all(attended[:, begin - 1].tolist()):
        return None
    if responses.tobytes() == mask.tobytes():  # in half the time of numpy's comparison
        ends = np.where(mask[:, -1], slots, mask.argmin(axis=1))  # the first slot that is not an action
        if np.count_nonzero(mask) == ends.sum():
            return _Responses(mask, ends, mask.astype(np.int32) if mask.size <= _SMALL else None, has_gaps=False)
    elif (mask > responses).any():
        return None
    ends = np.where(responses.any(axis=1), slots - responses[:, ::-1].argmax(axis=1), 0)
    return _Responses(mask, ends, None, has_gaps=True)


def _response_slots(answer: torch.Tensor, responses: _Responses) -> torch.Tensor:
    """[B, A] Copy as float32, 0 after the end of each row, and 0 for non-finite numbers where the mask is False."""
    source = answer.float().numpy(force=True)
    if responses.factors is not None:
        # A product of the bits as integers, which is 0 also for NaN.
        return torch.from_numpy((source.view(np.int32) * responses.factors).view(np.float32))
    copied = blank(source.shape, torch.float32)
    matrix = copied.numpy()
    # Row by row: most of a large batch is padding, which is not read.
    for target, row, end in zip(matrix, source, responses.ends.tolist(), strict=True):
        target[:end] = row[:end]
    if responses.has_gaps:
        matrix[~(responses.mask | np.isfinite(matrix))] = 0
    return copied


def _k1(policy: torch.Tensor, reference: torch.Tensor, responses: _Responses) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the difference of log-probs [B, A], 0 where the mask is False, and its mean over actions [B]."""
    mask, ends = responses.mask, responses.ends
    if responses.factors is not None:
        kl = policy - reference
        sums = kl.sum(-1, dtype=torch.float64).numpy().astype(np.float32)
        return kl, torch.from_numpy(sums / np.maximum(ends, 1).astype(np.float32))
    kl = blank(mask.shape, torch.float32)
    matrix, counts, parts = kl.numpy(), ends, []
    with np.errstate(invalid="ignore"):
        rows = zip(matrix, policy.numpy(), reference.numpy(), ends.tolist(), strict=True)
        for target, logprobs, ref_logprobs, end in rows:
            parts.append(np.subtract(logprobs[:end], ref_logprobs[:end], out=target[:end]))
    if responses.has_gaps:
        matrix[~mask] = 0
        counts = np.count_nonzero(mask, axis=1)
    return kl, mean_by_row(np.concatenate(parts, dtype=np.float64), ends, counts)


def to(tensor: T, device: Device) -> T:
    """Copy tensors to a device: LightRFT's name of `move_to_device`.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors.
        device: The device.

    Returns:
        The same structure on the device.

    >>> to({"a": torch.ones(1)}, "meta")["a"].device
    device(type='meta')
    """
    return move_to_device(tensor, device)


__all__ = [
    "Experience",
    "ExperienceVL",
    "MakerConfig",
    "NaiveExperienceMaker",
    "Samples",
    "clip_filter_like_weight_func",
    "pin_memory",
    "to",
]
