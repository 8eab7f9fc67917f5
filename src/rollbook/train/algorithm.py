"""`AlgorithmConfig`: an advantage estimator, a loss and their settings; and the presets.

Invariant: an algorithm is plain data. Every name is in a registry and every option is accepted by the named function;
both are checked on construction, so that a misspelled option fails before the first rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from rollbook.algorithms.registry import UnknownNameError
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest

if TYPE_CHECKING:
    from rollbook.algorithms.registry import Entry, Estimator, LossEntry
    from rollbook.core.sampling import Sampling

    PRESETS: dict[str, AlgorithmConfig]

__all__ = ["AlgorithmConfig", "Pass", "presets"]

EntryT = TypeVar("EntryT")

PRESET_NAMES = [
    *("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "opmd", "topr", "asymre"),
    *("sft", "dpo", "on_policy_distill", "mix"),
]


class Pass(NamedTuple):
    """One pass of a model over the records that lack a column; see `AlgorithmConfig.passes`.

    Args:
        model: A field of `rollbook.train.pipeline.Models`.
        column: The column whose absence makes the pass necessary.
        outputs: The columns that the pass fills.
    """

    model: str
    column: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Settings of a training algorithm: advantage estimator, loss, KL divergence, group size, filters.

    Args:
        name: Name in logs: that of the preset, or any.
        estimator: Advantage estimator (a key of `rollbook.algorithms.ESTIMATORS`); null if the loss uses no advantages.
        estimator_options: Keyword arguments of the estimator.
        loss: Policy loss (a key of `rollbook.algorithms.LOSSES`).
        loss_options: Keyword arguments of the loss; `mode` is the aggregation over tokens.
        kl_estimator: Estimator of the KL divergence from the reference (a key of `rollbook.algorithms.KL`).
        kl_coef: Coefficient of the KL divergence; 0: no reference model.
        kl_in: Where the KL divergence is added: to the `loss`, or to the `reward` of each token.
        entropy_coef: Coefficient of the entropy bonus in the loss.
        gamma: Discount factor of estimators over time.
        lam: Lambda of GAE.
        group_size: Number of responses per prompt.
        advantage_clip: Clip advantages to plus and minus this value; 0: no clipping.
        normalize_advantages: Normalize advantages over all samples of a step: subtract the `mean`, or also divide by
            the standard deviation (`mean_std`); null: neither. Estimators that normalize themselves are left alone.
        reward_clip: Bounds (low, high) of rewards; estimators that score rows clip their scores instead. null: no
            bounds.
        reward_norm: Divide rewards by the standard deviation of all rewards so far (`std`), or subtract their mean
            first (`mean_std`); null: neither.
        drop_constant_groups: Drop groups whose rewards are all equal; the ledger records them as dropped.
        refill: Maximum number of further rounds of prompts that replace dropped groups. Rollout workers replace all of
            them.
        overlong_buffer: Length of DAPO's soft overlong penalty: the last N tokens before the maximum response length;
            0: none.
        overlong_penalty: Penalty at the end of that buffer.
        high_entropy_ratio: Train only on this share of the tokens of a response, those with the highest entropy; 0: all
            tokens.
        value_clip: Clipping range of the critic's values around the old ones; null: no clipping.
        critic_warmup: Number of steps at the beginning that train only the critic.
        correction: Importance correction between the log-probs of the engine and of the trainer: options of
            `rollbook.algorithms.corrections.importance_weights`; null: none.

    >>> AlgorithmConfig.preset("grpo", kl_coef=0.0, loss_options={"clip_high": 0.28}).needs_reference
    False
    >>> AlgorithmConfig.preset("ppo").needs_critic, AlgorithmConfig.preset("sft").needs_rollouts
    (True, False)
    >>> AlgorithmConfig.preset("grpo", loss_options={"clip_hihg": 0.28})
    Traceback (most recent call last):
        ...
    ValueError: algorithm.loss_options: unknown option 'clip_hihg' of ppo; did you mean 'clip_high'? (clip_low,
    clip_high, dual_clip, log_ratio_clamp, sequence_delta, policy_gradient, mode)
    """

    name: str = "own"
    estimator: str | None = "grpo"
    estimator_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "ppo"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    kl_estimator: str = "k2"
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    group_size: int = 8
    advantage_clip: float = 0.0
    normalize_advantages: Literal["mean", "mean_std"] | None = None
    reward_clip: tuple[float, float] | None = None
    reward_norm: Literal["std", "mean_std"] | None = None
    drop_constant_groups: bool = False
    refill: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    high_entropy_ratio: float = 0.0
    value_clip: float | None = 0.2
    critic_warmup: int = 0
    correction: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        from rollbook.algorithms import LOSSES

        loss = _named("loss", self.loss, LOSSES)
        self._check_loss(loss)
        self._check_estimator(loss)
        self._check_correction(loss)
        self._check_kl(loss)
        self._check_numbers()
        self._put("drop_constant_groups", check_bool("algorithm.drop_constant_groups", self.drop_constant_groups))
        if self.normalize_advantages is not None:
            check_choice("algorithm.normalize_advantages", self.normalize_advantages, ("mean", "mean_std"))
        if self.reward_norm is not None:
            check_choice("algorithm.reward_norm", self.reward_norm, ("std", "mean_std"))
        if self.reward_clip is not None:
            self._put("reward_clip", _bounds(self.reward_clip))
        if self.refill and not self.drop_constant_groups:
            raise ValueError(f"algorithm.refill: got {self.refill}, which requires drop_constant_groups")
        if self.value_clip is not None:
            value_clip = check_float("algorithm.value_clip", self.value_clip, 1e-30, expected="a positive number")
            self._put("value_clip", value_clip)

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_loss(self, loss: LossEntry) -> None:
        self._put("loss", loss.name)
        if loss.role != "policy" or "new_logprobs" not in loss.inputs:
            raise ValueError(f"algorithm.loss: got {self.loss!r}, expected the loss of a policy")
        if "denominators" not in loss.options:
            raise ValueError(f"algorithm.loss: {self.loss!r} has no option 'denominators', which micro-batches need")
        self._put("loss_options", _options("loss_options", self.loss_options, loss))

    def _check_estimator(self, loss: LossEntry) -> None:
        from rollbook.algorithms import ESTIMATORS

        if self.estimator is not None:
            estimator = _named("estimator", self.estimator, ESTIMATORS)
            self._put("estimator", estimator.name)
            self._put("estimator_options", _options("estimator_options", self.estimator_options, estimator))
        elif self.estimator_options:
            raise ValueError(f"algorithm.estimator_options: got {dict(self.estimator_options)}, and no estimator")
        if self.estimator is None and "advantages" in loss.inputs:
            raise ValueError(
                f"algorithm.estimator: missing, required by the loss {self.loss!r}, which needs advantages"
            )

    def _check_correction(self, loss: LossEntry) -> None:
        from rollbook.algorithms.corrections import importance_weights
        from rollbook.algorithms.registry import Entry

        if self.correction is None:
            return
        if "weights" not in loss.options:
            raise ValueError(f"algorithm.correction: the loss {self.loss!r} has no option 'weights', which applies it")
        weights = Entry("importance_weights", importance_weights, (), "", supplied=("process_group", "current"))
        self._put("correction", _options("correction", self.correction, weights))

    def _check_kl(self, loss: LossEntry) -> None:
        from rollbook.algorithms import KL

        _named("kl_estimator", self.kl_estimator, KL)
        check_choice("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        self._put("kl_coef", check_float("algorithm.kl_coef", self.kl_coef, 0, 1e9))
        if self.kl_coef and loss.data == "pairs":
            raise ValueError(
                f"algorithm.kl_coef: got {self.kl_coef:g}, expected 0: the loss {self.loss!r} compares pairs of "
                "answers and has no KL term"
            )
        if self.kl_coef and self.kl_in == "reward" and self.estimator is None:
            raise ValueError("algorithm.kl_in: got 'reward', expected 'loss'; no estimator takes rewards")

    def _check_numbers(self) -> None:
        self._put("entropy_coef", check_float("algorithm.entropy_coef", self.entropy_coef, -1e9, 1e9))
        for name in ("gamma", "lam", "high_entropy_ratio"):
            self._put(name, check_float(f"algorithm.{name}", getattr(self, name), 0, 1))
        for name in ("advantage_clip", "overlong_penalty"):
            self._put(name, check_float(f"algorithm.{name}", getattr(self, name), 0))
        for name, low, high in (
            ("group_size", 1, 10**4),
            ("refill", 0, 1000),
            ("overlong_buffer", 0, 10**7),
            ("critic_warmup", 0, 10**9),
        ):
            self._put(name, check_int(f"algorithm.{name}", getattr(self, name), low, high))

    @classmethod
    def preset(cls, algorithm: AlgorithmConfig | str, **changes: Any) -> AlgorithmConfig:
        """Return a preset, or another algorithm, with changes.

        Args:
            algorithm: The name of a preset, or an algorithm.
            changes: Fields with other values. `loss_options` and `estimator_options` are merged with those of
                `algorithm`, unless another loss or estimator is named.

        Raises:
            ValueError: A name or an option is unknown.
        """
        if isinstance(algorithm, str):
            if algorithm not in PRESET_NAMES:
                raise UnknownNameError(
                    f"algorithm: got {algorithm!r}, expected a preset{suggest(algorithm, PRESET_NAMES)}"
                )
            algorithm = presets()[algorithm]
        if not isinstance(algorithm, AlgorithmConfig):
            raise ValueError(
                f"algorithm: got {type(algorithm).__name__}, expected an AlgorithmConfig or a preset's name"
            )
        field_names = [spec.name for spec in dataclasses.fields(cls)]
        for name in changes:
            if name not in field_names:
                raise ValueError(f"algorithm: unknown field {name!r}{suggest(name, field_names)}")
        for function in ("loss", "estimator"):
            options = f"{function}_options"
            if changes.get(function, getattr(algorithm, function)) != getattr(algorithm, function):
                changes.setdefault(options, {})
            elif isinstance(changes.get(options), Mapping):
                changes[options] = {**getattr(algorithm, options), **changes[options]}
        return dataclasses.replace(algorithm, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}

    def sampling(self, **options: Any) -> Sampling:
        """Return sampling options with `n=group_size`, and `options`.

        Args:
            options: Other sampling options.

        Returns:
            The sampling options.
        """
        from rollbook.core.sampling import Sampling

        return Sampling(**{"n": self.group_size, **options})

    # --- derived from the registries ----------------------------------------------------------------------------------

    @cached_property
    def estimator_entry(self) -> Estimator | None:
        """Registry entry of the estimator, or `None`."""
        from rollbook.algorithms import ESTIMATORS

        return None if self.estimator is None else ESTIMATORS[self.estimator]

    @cached_property
    def loss_entry(self) -> LossEntry:
        """Registry entry of the loss."""
        from rollbook.algorithms import LOSSES

        return LOSSES[self.loss]

    @cached_property
    def data(self) -> Literal["rollouts", "answers", "pairs", "mixed"]:
        """Training data: rollouts, given answers, pairs of answers, or rollouts mixed with expert records."""
        kind = self.loss_entry.data
        if kind in ("pairs", "mixed"):
            return kind
        return "answers" if self.estimator is None else "rollouts"

    @cached_property
    def pairs(self) -> bool:
        """Whether the training data are pairs of answers."""
        return self.data == "pairs"

    @cached_property
    def mixed(self) -> bool:
        """Whether expert records are mixed with the rollouts."""
        return self.data == "mixed"

    @cached_property
    def needs_rollouts(self) -> bool:
        """Whether the policy is trained on its own rollouts."""
        return self.data in ("rollouts", "mixed")

    @cached_property
    def needs_critic(self) -> bool:
        """Whether a critic is required."""
        return self.estimator_entry is not None and "values" in self.estimator_entry.inputs

    @cached_property
    def needs_reference(self) -> bool:
        """Whether a reference model is required."""
        return self.kl_coef != 0 or self.loss_entry.needs_reference(self.loss_options)

    @cached_property
    def needs_teacher(self) -> bool:
        """Whether a teacher is required."""
        return self.estimator_entry is not None and "teacher_logprobs" in self.estimator_entry.inputs

    @cached_property
    def needs_entropy(self) -> bool:
        """Whether the entropies of the policy before the update are required."""
        entry = self.estimator_entry
        return self.high_entropy_ratio > 0 or (entry is not None and entry.inputs.get("entropy", False))

    @cached_property
    def needs_groups(self) -> bool:
        """Whether one response per prompt carries no signal: the estimator compares responses to a prompt.

        >>> [AlgorithmConfig.preset(name).needs_groups for name in ("grpo", "rloo", "ppo")]
        [True, True, False]
        """
        entry = self.estimator_entry
        return entry is not None and entry.compares_runs and self.estimator_options.get("singleton", "zero") == "zero"

    @cached_property
    def takes_rewards(self) -> bool:
        """Whether advantages are estimated from rewards.

        >>> [AlgorithmConfig.preset(name).takes_rewards for name in ("grpo", "ppo", "sft", "on_policy_distill")]
        [True, True, False, False]
        """
        return self.estimator_entry is not None and self.estimator_entry.takes_rewards

    @cached_property
    def takes_token_rewards(self) -> bool:
        """Whether advantages are estimated from token rewards, where records have them."""
        return self.estimator_entry is not None and self.estimator_entry.takes_token_rewards

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Model passes that records need before advantages are estimated.

        >>> [model_pass.model for model_pass in AlgorithmConfig.preset("ppo").passes]
        ['policy', 'reference', 'critic']
        """
        needed = {
            "old_logprobs": self.needs_rollouts,
            "entropy": self.needs_rollouts and self.needs_entropy,
            "ref_logprobs": self.kl_coef != 0 and not self.pairs,
            "teacher_logprobs": self.needs_teacher,
            "values": self.needs_critic,
        }
        return tuple(_PASSES[column] for column, is_needed in needed.items() if is_needed)

    @cached_property
    def loss_inputs(self) -> frozenset[str]:
        """Inputs of the policy loss, by column name.

        >>> sorted(AlgorithmConfig.preset("grpo").loss_inputs)
        ['action_mask', 'advantages', 'new_logprobs', 'old_logprobs']
        """
        return frozenset("action_mask" if name == "mask" else name for name in self.loss_entry.inputs)

    @cached_property
    def loss_columns(self) -> tuple[str, ...]:
        """Columns of a batch that an update reads, those of the critic included.

        >>> AlgorithmConfig.preset("grpo", kl_coef=0.0).loss_columns
        ('tokens', 'action_mask', 'old_logprobs', 'advantages', 'loss_weights')
        """
        from rollbook.batch.columns import RESPONSE_COLUMNS

        columns = {"tokens", "action_mask", "loss_weights", *self.loss_inputs}
        if self.kl_coef and self.kl_in == "loss":
            columns |= {"old_logprobs", "ref_logprobs"}
        if self.needs_critic:
            columns |= {"values", "returns"}
        return tuple(name for name in ("tokens", "action_mask", *RESPONSE_COLUMNS) if name in columns)

    @cached_property
    def aggregation_mode(self) -> str:
        """How the loss aggregates tokens.

        >>> AlgorithmConfig.preset("gspo").aggregation_mode, AlgorithmConfig.preset("dr_grpo").aggregation_mode
        ('seq-mean-token-mean', 'seq-mean-token-sum-norm')
        """
        mode = self.loss_options.get("mode", self.loss_entry.options.get("mode"))
        return "token-mean" if mode is None else str(mode)


_PASSES = {
    "old_logprobs": Pass("policy", "old_logprobs", ("old_logprobs", "entropy")),
    "entropy": Pass("policy", "entropy", ("entropy",)),
    "ref_logprobs": Pass("reference", "ref_logprobs", ("ref_logprobs",)),
    "teacher_logprobs": Pass("teacher", "teacher_logprobs", ("teacher_logprobs",)),
    "values": Pass("critic", "values", ("values",)),
}


def _bounds(bounds: Sequence[float]) -> tuple[float, float]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(f"algorithm.reward_clip: got {bounds!r}, expected (low, high)")
    low = check_float("algorithm.reward_clip", bounds[0])
    return low, check_float("algorithm.reward_clip", bounds[1], low, expected=f"an upper bound of at least {low:g}")


def _named(field_name: str, name: str, registry: Mapping[str, EntryT]) -> EntryT:
    if not isinstance(name, str) or name not in registry:
        raise UnknownNameError(
            f"algorithm.{field_name}: unknown name {name!r}{suggest(str(name), registry)}. A custom one must be "
            "registered before the configuration is loaded"
        )
    return registry[name]


def _options(field_name: str, options: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ValueError(f"algorithm.{field_name}: got {options!r}, expected options by name")
    settings = entry.settings
    for name in options:
        if name not in settings:
            raise ValueError(
                f"algorithm.{field_name}: unknown option {name!r} of {entry.name}{suggest(name, settings)}"
            )
    return dict(options)


_KL = {"kl_estimator": "k2", "kl_coef": 0.001}
"""Settings of Trinity-RFT's presets. The gradient of k2 is that of the KL divergence."""


@functools.cache
def presets() -> dict[str, AlgorithmConfig]:
    """Return the presets by name; `PRESETS` is the same.

    >>> sorted(presets()) == sorted(PRESET_NAMES)
    True
    """
    group: dict[str, Any] = {"estimator": "grpo", **_KL}
    settings: dict[str, dict[str, Any]] = {
        "ppo": {"estimator": "ppo", "group_size": 1, **_KL},
        "grpo": group,
        "dr_grpo": {"estimator": "dr_grpo", "loss_options": {"mode": "seq-mean-token-sum-norm"}},
        "dapo": {
            "estimator": "grpo",
            "loss_options": {"clip_high": 0.28},
            "group_size": 16,
            "drop_constant_groups": True,
            "refill": 3,
        },
        "rloo": {"estimator": "rloo", **_KL},
        "reinforce++": {"estimator": "reinforce_plus_plus", **_KL},
        "gspo": {**group, "loss": "gspo"},
        "cispo": {**group, "loss": "cispo"},
        "opmd": {"estimator": "opmd", "loss": "opmd", **_KL},
        "topr": {"estimator": "reinforce", "loss": "topr", **_KL},
        "asymre": {"estimator": "asymre", "loss": "opmd"},
        "sft": {"estimator": None, "loss": "sft", "group_size": 1},
        "dpo": {"estimator": None, "loss": "dpo", "group_size": 1},
        "on_policy_distill": {"estimator": "on_policy_distill", "group_size": 1},
        "mix": {"estimator": "grpo", "loss": "mix"},
    }
    return {name: AlgorithmConfig(name=name, **parts) for name, parts in settings.items()}


def __getattr__(name: str) -> Any:
    # Built on first use, because the registries load torch.
    if name == "PRESETS":
        return presets()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
