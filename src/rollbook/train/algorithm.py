"""`AlgorithmConfig`: an estimator, a loss and their settings; the presets; and what a step needs for them.

Invariant: an algorithm is plain data. Every name in it is in a registry, every option one that the named function
takes, and both are checked on construction: a misspelled option fails before the first rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollbook.algorithms.registry import UnknownNameError
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest

if TYPE_CHECKING:
    from rollbook.algorithms.registry import Estimator, LossEntry
    from rollbook.core.sampling import Sampling

    PRESETS: dict[str, AlgorithmConfig]

PRESET_NAMES = [
    *("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "opmd", "topr", "asymre"),
    *("sft", "dpo", "on_policy_distill", "mix"),
]
_OWN = ("denominators", "weights", "norm")
"""Options of losses that the learner gives."""


class Pass(NamedTuple):
    """One pass of a model over the records that lack a column."""

    model: str
    """A field of `rollbook.train.pipeline.Models`."""
    column: str
    """The column whose absence makes the pass necessary."""
    outputs: tuple[str, ...]
    """The columns that the pass fills."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How records become a gradient: the only source of algorithm settings.

    >>> AlgorithmConfig.preset("grpo", kl_coef=0.0, loss_options={"clip_high": 0.28}).needs_reference
    False
    >>> AlgorithmConfig.preset("ppo").needs_critic, AlgorithmConfig.preset("sft").needs_rollouts
    (True, False)
    >>> AlgorithmConfig.preset("grpo", loss_options={"clip_hihg": 0.28})
    Traceback (most recent call last):
        ...
    ValueError: algorithm.loss_options: 'clip_hihg' is no option of ppo; did you mean 'clip_high'? (clip_low, clip_high,
    dual_clip, log_ratio_clamp, sequence_delta, policy_gradient, mode)
    """

    name: str = "own"
    """What it is called in logs; a preset's own name, or any."""
    estimator: str | None = "grpo"
    """Who says how good each token was: a name in `rollbook.algorithms.ESTIMATORS`; none where the loss asks nobody."""
    estimator_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the estimator, by name."""
    loss: str = "ppo"
    """The loss of the policy: a name in `rollbook.algorithms.LOSSES`."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loss, by name; `mode` says how tokens become one number."""
    kl_estimator: str = "k2"
    """Which estimate of the divergence from the reference: a name in `rollbook.algorithms.KL`."""
    kl_coef: float = 0.0
    """What the divergence is multiplied by; 0: there is no reference."""
    kl_in: str = "loss"
    """Where the divergence goes: `loss`, or `reward`, token by token, before the estimator."""
    entropy_coef: float = 0.0
    """The weight of the entropy bonus in the loss."""
    gamma: float = 1.0
    """The discount of estimators over time."""
    lam: float = 1.0
    """GAE's lambda."""
    n: int = 8
    """How many responses to each prompt."""
    advantage_clip: float = 0.0
    """Advantages are held within plus and minus this; 0: they are not."""
    normalize_advantages: str | None = None
    """Normalize advantages over all samples of a step: subtract the `mean`, or also divide by the standard deviation
    (`mean_std`); `None`: neither. Estimators that normalize themselves are left alone."""
    reward_clip: tuple[float, float] | None = None
    """Bounds (low, high) of rewards; estimators that score rows clip their scores instead. `None`: no bounds."""
    reward_norm: str | None = None
    """Divide rewards by the standard deviation of all rewards so far (`std`), or subtract their mean first
    (`mean_std`); `None`: neither."""
    drop_constant_groups: bool = False
    """Whether groups whose rewards are all equal are dropped from the step, and the ledger says so."""
    refill: int = 0
    """How many more rounds of prompts are sampled to make up for groups that were dropped."""
    overlong_buffer: int = 0
    """DAPO's soft penalty over the last so many tokens before the longest response; 0: none."""
    overlong_penalty: float = 1.0
    """The penalty at the very end of that buffer."""
    high_entropy_ratio: float = 0.0
    """Train on this share of each response's tokens, those of highest entropy; 0: on all."""
    value_clip: float | None = 0.2
    """How far a value may move from its old one before the critic's loss is clipped; none: never."""
    critic_warmup: int = 0
    """How many steps the critic learns alone."""
    correction: Mapping[str, Any] | None = None
    """Importance weights from the engine's log-probs to the trainer's own: options of
    `rollbook.algorithms.corrections.importance_weights`; none: the two are taken to be one policy."""

    def __post_init__(self) -> None:
        from rollbook.algorithms import ESTIMATORS, KL, LOSSES
        from rollbook.algorithms.corrections import importance_weights
        from rollbook.algorithms.registry import Entry

        put = object.__setattr__
        losses = _named("loss", self.loss, LOSSES)
        put(self, "loss", losses.name)
        if losses.role != "policy" or "new_logprobs" not in losses.inputs:
            raise ValueError(f"algorithm.loss: got {self.loss!r}, expected the loss of a policy")
        known = [name for name in losses.options if name not in _OWN]
        put(self, "loss_options", _options("loss_options", self.loss_options, losses.name, known))
        if self.estimator is not None:
            entry = _named("estimator", self.estimator, ESTIMATORS)
            put(self, "estimator", entry.name)
            own = [name for name in entry.options if name != "process_group"]
            put(self, "estimator_options", _options("estimator_options", self.estimator_options, entry.name, own))
        elif self.estimator_options:
            raise ValueError(f"algorithm.estimator_options: got {dict(self.estimator_options)}, and no estimator")
        if self.estimator is None and "advantages" in losses.inputs:
            raise ValueError(f"algorithm.estimator: got none, and the loss {self.loss!r} needs advantages")
        if self.correction is not None:
            entry = Entry("importance_weights", importance_weights, (), "")
            own = [name for name in entry.options if name not in ("process_group", "current")]
            put(self, "correction", _options("correction", self.correction, entry.name, own))
        _named("kl_estimator", self.kl_estimator, KL)
        check_choice("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        least = 0 if self.kl_in == "reward" else -1e9
        put(self, "kl_coef", check_float("algorithm.kl_coef", self.kl_coef, least, 1e9))
        put(self, "entropy_coef", check_float("algorithm.entropy_coef", self.entropy_coef, -1e9, 1e9))
        for name in ("gamma", "lam", "high_entropy_ratio"):
            put(self, name, check_float(f"algorithm.{name}", getattr(self, name), 0, 1))
        for name in ("advantage_clip", "overlong_penalty"):
            put(self, name, check_float(f"algorithm.{name}", getattr(self, name), 0))
        for name, low, high in (
            ("n", 1, 10**4),
            ("refill", 0, 1000),
            ("overlong_buffer", 0, 10**7),
            ("critic_warmup", 0, 10**9),
        ):
            put(self, name, check_int(f"algorithm.{name}", getattr(self, name), low, high))
        put(self, "drop_constant_groups", check_bool("algorithm.drop_constant_groups", self.drop_constant_groups))
        if self.normalize_advantages is not None:
            check_choice("algorithm.normalize_advantages", self.normalize_advantages, ("mean", "mean_std"))
        if self.reward_norm is not None:
            check_choice("algorithm.reward_norm", self.reward_norm, ("std", "mean_std"))
        if self.reward_clip is not None:
            put(self, "reward_clip", _bounds(self.reward_clip))
        if self.refill and not self.drop_constant_groups:
            raise ValueError(
                f"algorithm.refill: got {self.refill}, and drop_constant_groups is off: nothing is missing"
            )
        if self.value_clip is not None:
            put(
                self,
                "value_clip",
                check_float("algorithm.value_clip", self.value_clip, 1e-30, what="a positive number"),
            )

    @classmethod
    def preset(cls, given: AlgorithmConfig | str, **changes: Any) -> AlgorithmConfig:
        """Return a preset, or another algorithm, with changes.

        Args:
            given: The name of a preset, or an algorithm.
            changes: Fields with other values. `loss_options` and `estimator_options` are merged with those of `given`,
                unless another loss or estimator is named.
        """
        if isinstance(given, str):
            if given not in PRESET_NAMES:
                raise UnknownNameError(f"algorithm: got {given!r}, expected a preset{suggest(given, PRESET_NAMES)}")
            given = presets()[given]
        if not isinstance(given, AlgorithmConfig):
            raise ValueError(f"algorithm: got {type(given).__name__}, expected an AlgorithmConfig or a preset's name")
        known = [one.name for one in dataclasses.fields(cls)]
        for name in changes:
            if name not in known:
                raise ValueError(f"algorithm: {name!r} is not known{suggest(name, known)}")
        for whose in ("loss", "estimator"):
            options = f"{whose}_options"
            if changes.get(whose, getattr(given, whose)) != getattr(given, whose):
                changes.setdefault(options, {})
            elif isinstance(changes.get(options), Mapping):
                changes[options] = {**getattr(given, options), **changes[options]}
        return dataclasses.replace(given, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}

    def sampling(self, **options: Any) -> Sampling:
        """Return sampling options for this algorithm: `n` responses per prompt, and `options`."""
        from rollbook.core.sampling import Sampling

        return Sampling(**{"n": self.n, **options})

    # --- what it needs ------------------------------------------------------------------------------------------------

    @property
    def estimator_entry(self) -> Estimator | None:
        """The registry's entry of the estimator."""
        from rollbook.algorithms import ESTIMATORS

        return None if self.estimator is None else ESTIMATORS[self.estimator]

    @property
    def loss_entry(self) -> LossEntry:
        """The registry's entry of the loss."""
        from rollbook.algorithms import LOSSES

        return LOSSES[self.loss]

    @property
    def data(self) -> Literal["rollouts", "answers", "pairs", "mixed"]:
        """What it is trained on: its rollouts, given answers, pairs of answers, or rollouts mixed with an expert's
        records."""
        kind = self.loss_entry.data
        if kind in ("pairs", "mixed"):
            return kind
        return "answers" if self.estimator is None else "rollouts"

    @property
    def pairs(self) -> bool:
        """Whether it is trained on pairs of answers."""
        return self.data == "pairs"

    @property
    def mixed(self) -> bool:
        """Whether it is trained on an expert's records beside its own rollouts."""
        return self.data == "mixed"

    @property
    def needs_rollouts(self) -> bool:
        """Whether it is trained on its own rollouts."""
        return self.data in ("rollouts", "mixed")

    @property
    def needs_critic(self) -> bool:
        """Whether there must be a critic."""
        return "values" in self._estimator_inputs

    @property
    def needs_reference(self) -> bool:
        """Whether there must be a reference model."""
        return self.kl_coef != 0 or self.loss_entry.needs_reference(self.loss_options)

    @property
    def needs_teacher(self) -> bool:
        """Whether there must be a teacher."""
        return "teacher_logprobs" in self._estimator_inputs

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropies of the policy before the update decide anything."""
        return self.high_entropy_ratio > 0 or self._estimator_inputs.get("entropy", False)

    @property
    def takes_rewards(self) -> bool:
        """Whether advantages are estimated from rewards.

        >>> [AlgorithmConfig.preset(name).takes_rewards for name in ("grpo", "ppo", "sft", "on_policy_distill")]
        [True, True, False, False]
        """
        return self.estimator_entry is not None and self.estimator_entry.takes_rewards

    @property
    def takes_token_rewards(self) -> bool:
        """Whether advantages are estimated from token rewards, where records have them."""
        return self.estimator_entry is not None and self.estimator_entry.takes_token_rewards

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The model passes that records need before advantages are estimated.

        >>> [one.model for one in AlgorithmConfig.preset("ppo").passes]
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

    @property
    def _estimator_inputs(self) -> Mapping[str, bool]:
        return {} if self.estimator_entry is None else self.estimator_entry.inputs


_PASSES = {
    "old_logprobs": Pass("policy", "old_logprobs", ("old_logprobs", "entropy")),
    "entropy": Pass("policy", "entropy", ("entropy",)),
    "ref_logprobs": Pass("reference", "ref_logprobs", ("ref_logprobs",)),
    "teacher_logprobs": Pass("teacher", "teacher_logprobs", ("teacher_logprobs",)),
    "values": Pass("critic", "values", ("values",)),
}


def _bounds(given: Any) -> tuple[float, float]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"algorithm.reward_clip: got {given!r}, expected (low, high)")
    low = check_float("algorithm.reward_clip", given[0])
    return low, check_float("algorithm.reward_clip", given[1], low, what=f"an upper bound of at least {low:g}")


def _named(what: str, name: Any, registry: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in registry:
        raise UnknownNameError(
            f"algorithm.{what}: got {name!r}, expected one of its names{suggest(str(name), registry)}"
        )
    return registry[name]


def _options(what: str, given: Any, whose: str, known: list[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"algorithm.{what}: got {given!r}, expected options by name")
    for name in given:
        if name not in known:
            raise ValueError(f"algorithm.{what}: {name!r} is no option of {whose}{suggest(name, known)}")
    return dict(given)


_KL = {"kl_estimator": "k2", "kl_coef": 0.001}
"""Of Trinity-RFT's presets: k2 has the gradient of the divergence itself."""


@functools.cache
def presets() -> dict[str, AlgorithmConfig]:
    """The ready algorithms by name; `PRESETS` is the same.

    >>> sorted(presets()) == sorted(PRESET_NAMES)
    True
    """
    group: dict[str, Any] = {"estimator": "grpo", **_KL}
    given: dict[str, dict[str, Any]] = {
        "ppo": {"estimator": "ppo", "n": 1, **_KL},
        "grpo": group,
        "dr_grpo": {"estimator": "dr_grpo", "loss_options": {"mode": "seq-mean-token-sum-norm"}},
        "dapo": {
            "estimator": "grpo",
            "loss_options": {"clip_high": 0.28},
            "n": 16,
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
        "sft": {"estimator": None, "loss": "sft", "n": 1},
        "dpo": {"estimator": None, "loss": "dpo", "n": 1},
        "on_policy_distill": {"estimator": "on_policy_distill", "n": 1},
        "mix": {"estimator": "grpo", "loss": "mix"},
    }
    return {name: AlgorithmConfig(name=name, **parts) for name, parts in given.items()}


def __getattr__(name: str) -> Any:
    # The presets are checked against the registries, which load torch: not before somebody asks.
    if name == "PRESETS":
        return presets()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
