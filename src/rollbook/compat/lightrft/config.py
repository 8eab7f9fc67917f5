"""`MakerConfig`: what a maker can be told, each option by name, type and default.

Invariant: options are read once, checked when they are given, and never change: every micro-batch of a rollout is
treated alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.checks import check_bool, check_float, check_int, suggest


@dataclass(frozen=True, kw_only=True)
class MakerConfig:
    """How experience is made. Names and defaults of the first part are those of LightRFT's `strategy.args`.

    - `advantage_estimator`: a name in `rollbook.algorithms.ESTIMATORS`; `estimator_options` are that function's.
    - `n_samples_per_prompt`: the runs of a task. `micro_rollout_batch_size`: samples in each batch that is given back
      (`None`: all in one); numbers do not depend on it. `packing_samples`: packed batches in place of padded ones.
    - `kl_estimator`, and `use_kl_loss`: leave the KL to the loss, and out of the reward.
    - `reward_running_norm`, `reward_running_norm_minus_mean`: rewards over their running deviation, before anything
      looks at groups. `overlong_buffer`, `overlong_buffer_len`, `overlong_buffer_penalty_factor`: DAPO's penalty.
    - `reward_clip` (±c, 0: none), `reward_clip_range` (low, high): of what the estimator made of the rewards.
    - `advantages_norm`: whiten advantages, once, over all samples of all processes (those of `group_norm` and `grpo`
      are normalized already, and are left as they are); `no_advantage_std_norm`: subtract the mean only.
    - `advantage_clip` (0: none) comes last, so that it holds at the loss.
    - `dynamic_sampling`: groups whose rewards are all equal are masked out.
    - `use_fire`: the first token at temperature 10. `high_entropy_token_ratio` above 0 records entropies.

    Rollbook's own: `batch_name` stands before the rollout's number in ids, so that two makers (for training and for
    evaluation) do not make the same; `entropy` records entropies too; `token_budget` tokens are in one forward pass;
    `seed` makes rollouts repeatable; `gamma`, `lambd` stand in where a call does not say; `kl_coef` is the coefficient
    of the KL penalty (`None`: that of `kl_controller`); `progress` shows bars (`None`: on a terminal).

    >>> MakerConfig(advantage_estimator="rloo", n_samples_per_prompt=4).micro_rollout_batch_size is None
    True
    >>> MakerConfig.of({"advantage_estimator": "gae", "learning_rate": 1e-6}).advantage_estimator  # others are not ours
    'gae'
    >>> MakerConfig(advantage_estimator="dr_grpo", estimator_options={"single": "raw"})
    Traceback (most recent call last):
        ...
    ValueError: estimator_options: 'single' is no option of dr_grpo; did you mean 'singleton'? (singleton,
    process_group)
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
        from rollbook.algorithms import ESTIMATORS, KL

        put = object.__setattr__
        put(self, "advantage_estimator", _ALIASES.get(self.advantage_estimator, self.advantage_estimator))
        entry = ESTIMATORS[self.advantage_estimator]
        KL[self.kl_estimator]
        for name in self.estimator_options:
            if name not in entry.options:
                raise ValueError(
                    f"estimator_options: {name!r} is no option of {entry.name}{suggest(name, entry.options)}"
                )
        put(self, "n_samples_per_prompt", check_int("n_samples_per_prompt", self.n_samples_per_prompt, 1))
        if self.micro_rollout_batch_size is not None:
            check_int("micro_rollout_batch_size", self.micro_rollout_batch_size, 1)
        for one in dataclasses.fields(self):
            if one.type == "bool":
                put(self, one.name, check_bool(one.name, getattr(self, one.name)))
        if self.reward_clip_range is not None:
            low, high = _pair(self.reward_clip_range)
            put(self, "reward_clip_range", (low, high))
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
    def of(cls, args: Any = None) -> MakerConfig:
        """From LightRFT's `strategy.args` (a namespace or a mapping): the first part of the options; all else there is
        another's. `group_norm` and `grpo` then have LightRFT's eps, 1e-8 (a group of equal rewards is 0 by itself)."""
        if isinstance(args, MakerConfig):
            return args
        names = [one.name for one in dataclasses.fields(cls)]
        known = names[: names.index("entropy")]
        if isinstance(args, Mapping):
            given = {name: args.get(name) for name in known}
        else:
            given = {name: getattr(args, name, None) for name in known}
        found = {name: value for name, value in given.items() if value is not None}
        if args is not None and found.get("advantage_estimator", "group_norm") in ("group_norm", "grpo"):
            found["estimator_options"] = {"eps": 1e-8}
        return cls(**found)

    @property
    def wants_entropy(self) -> bool:
        """Whether the policy's entropies are to be recorded."""
        from rollbook.algorithms import ESTIMATORS

        needed = ESTIMATORS[self.advantage_estimator].inputs.get("entropy", False)
        return self.entropy or self.high_entropy_token_ratio > 0 or needed


_ALIASES = {"on_policy_distillation": "on_policy_distill"}
"""LightRFT's names for what is called otherwise here."""


def _pair(given: Any) -> tuple[float, float]:
    try:
        low, high = given
    except (TypeError, ValueError):
        raise ValueError(f"reward_clip_range: got {given!r}, expected (low, high)") from None
    low, high = check_float("reward_clip_range[0]", low), check_float("reward_clip_range[1]", high)
    if low > high:
        raise ValueError(f"reward_clip_range: got ({low:g}, {high:g}), expected the lower bound first")
    return low, high
