"""`Algorithm`: an estimator, a loss and what goes with them, under one name; and the presets.

Invariant: an algorithm is plain data. Every name in it is in a registry, every option one that the named function
takes, and both are checked when it is made: a misspelt option fails before the first rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.algorithms.registry import UnknownNameError
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest

if TYPE_CHECKING:
    PRESETS: dict[str, Algorithm]

PAIRS = ("dpo",)
"""Losses over pairs of answers."""
MIXED = ("mix", "mix_chord")
"""Losses that tell own rows from an expert's."""
PRESET_NAMES = [
    *("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "opmd", "topr", "asymre"),
    *("sft", "dpo", "on_policy_distill", "mix"),
]
_OWN = ("whole", "weights", "norm")
"""Options of losses that the learner gives."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How experience becomes a gradient.

    >>> Algorithm.of("grpo", kl_coef=0.0, loss_options={"clip_high": 0.28}).needs_reference
    False
    >>> Algorithm.of("ppo").needs_critic, Algorithm.of("sft").needs_maker
    (True, False)
    >>> Algorithm.of("grpo", loss_options={"clip_hihg": 0.28})
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
    advantages_norm: bool = False
    """Whether advantages are whitened over all samples of a step."""
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
        if {"log_probs", "values"}.isdisjoint(losses.inputs) or self.loss in ("value", "entropy", "kl"):
            raise ValueError(f"algorithm.loss: got {self.loss!r}, expected the loss of a policy")
        known = [name for name in losses.options if name not in _OWN]
        put(self, "loss_options", _options("loss_options", self.loss_options, losses.name, known))
        if self.estimator is not None:
            entry = _named("estimator", self.estimator, ESTIMATORS)
            put(self, "estimator", entry.name)
            own = [name for name in entry.options if name != "ranks"]
            put(self, "estimator_options", _options("estimator_options", self.estimator_options, entry.name, own))
        elif self.estimator_options:
            raise ValueError(f"algorithm.estimator_options: got {dict(self.estimator_options)}, and no estimator")
        if self.estimator is None and "advantages" in losses.inputs:
            raise ValueError(f"algorithm.estimator: got none, and the loss {self.loss!r} needs advantages")
        if self.correction is not None:
            entry = Entry("importance_weights", importance_weights, (), "")
            own = [name for name in entry.options if name not in ("ranks", "current")]
            put(self, "correction", _options("correction", self.correction, entry.name, own))
        _named("kl_estimator", self.kl_estimator, KL)
        check_choice("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        least = 0 if self.kl_in == "reward" else -1e9  # a maker takes no negative penalty
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
        for name in ("drop_constant_groups", "advantages_norm"):
            put(self, name, check_bool(f"algorithm.{name}", getattr(self, name)))
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
    def of(cls, given: Algorithm | str, **changes: Any) -> Algorithm:
        """A preset by name, or an algorithm, with changes; options of loss and estimator are merged with its own,
        unless another loss or estimator is named."""
        if isinstance(given, str):
            if given not in PRESET_NAMES:
                raise UnknownNameError(f"algorithm: got {given!r}, expected a preset{suggest(given, PRESET_NAMES)}")
            given = presets()[given]
        if not isinstance(given, Algorithm):
            raise ValueError(f"algorithm: got {type(given).__name__}, expected an Algorithm or a preset's name")
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

    # --- what it needs ------------------------------------------------------------------------------------------------

    @property
    def pairs(self) -> bool:
        """Whether it learns from pairs of answers."""
        return self.loss in PAIRS

    @property
    def mixed(self) -> bool:
        """Whether it learns from an expert's rows beside its own."""
        return self.loss in MIXED

    @property
    def needs_maker(self) -> bool:
        """Whether it learns from its own rollouts."""
        return self.estimator is not None

    @property
    def needs_critic(self) -> bool:
        """Whether there must be a critic."""
        from rollbook.algorithms import ESTIMATORS

        return self.estimator is not None and "values" in ESTIMATORS[self.estimator].inputs

    @property
    def needs_reference(self) -> bool:
        """Whether there must be a reference model."""
        return self.kl_coef != 0 or (self.pairs and not self.loss_options.get("reference_free", False))

    @property
    def needs_teacher(self) -> bool:
        """Whether there must be a teacher."""
        from rollbook.algorithms import ESTIMATORS

        return self.estimator is not None and "teacher_log_probs" in ESTIMATORS[self.estimator].inputs

    @property
    def wants_entropy(self) -> bool:
        """Whether the entropies of old tokens decide anything."""
        return self.high_entropy_ratio > 0


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
def presets() -> dict[str, Algorithm]:
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
    return {name: Algorithm(name=name, **parts) for name, parts in given.items()}


def __getattr__(name: str) -> Any:
    # The presets are checked against the registries, which load torch: not before somebody asks.
    if name == "PRESETS":
        return presets()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
