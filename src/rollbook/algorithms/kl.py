"""KL estimators per token; as a penalty in the reward, or as a loss; fixed and adaptive coefficients.

Invariant: with d = log p - log ref, every estimator is 0 where d is 0, and masked tokens are never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from rollbook.algorithms.aggregate import mean_over_tokens, reduce
from rollbook.algorithms.layout import (
    Layout,
    Numbers,
    PerRow,
    PerToken,
    check_state,
    is_per_row,
    on_tokens,
    row_numbers,
    same_shape,
)
from rollbook.algorithms.registry import Entry, Registry
from rollbook.algorithms.results import Loss, Report, rows_where
from rollbook.algorithms.scan import TokenPositions
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_float
from rollbook.core.ragged import Ragged

__all__ = [
    "KL",
    "AdaptiveKL",
    "FixedKL",
    "TokenRewards",
    "absolute",
    "corrected_k3",
    "k1",
    "k2",
    "k3",
    "kl",
    "kl_loss",
    "kl_penalty",
    "low_var_kl",
    "none",
    "penalize",
    "token_kl",
]

KL: Registry[Entry] = Registry("KL estimator")
"""KL estimators by name; all are elementwise, on tensors of any shape."""


class _Expm1MinusX(torch.autograd.Function):
    """exp(x) - 1 - x and its gradient exp(x) - 1, both accurate for any x, with derivatives of any order.

    Where |x| < 1/2, the difference would cancel, and the series x^2 (1/2! + x/3! + x^2/4! + ...) is used instead. A
    custom gradient avoids keeping the terms of the series.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        last = 16 if x.dtype == torch.float64 else 10
        small = x.clamp(-0.5, 0.5)
        series = small * (1 / math.factorial(last))
        for power in range(last - 1, 2, -1):
            series.add_(1 / math.factorial(power)).mul_(small)
        series.add_(0.5).mul_(small).mul_(small)
        # The clamp changes no result, but avoids inf - inf.
        return torch.where(small == x, series, torch.expm1(x).sub_(x.clamp(max=100.0)))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.expm1(x)


def _expm1_minus_x(x: torch.Tensor) -> torch.Tensor:
    difference: torch.Tensor = _Expm1MinusX.apply(x)  # type: ignore[no-untyped-call]
    return difference


@KL.register("none", source="no reference: 0")
def none(logprobs: Numbers, ref_logprobs: Numbers) -> torch.Tensor:
    """Return 0 with a gradient of 0.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> none([-1.0, -2.0], [-1.5, -1.0])
    tensor([0., 0.])
    """
    policy, _ = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return torch.where(torch.zeros_like(policy, dtype=torch.bool), policy, 0.0)


@KL.register("k1", "kl", source="Approximating KL Divergence (Schulman, 2020), k1: d = log p - log ref")
def k1(logprobs: Numbers, ref_logprobs: Numbers) -> torch.Tensor:
    """Compute d = log p - log ref: unbiased as a value, of high variance, sometimes negative.

    In a loss, its gradient has expectation 0 on-policy, so it does not pull towards the reference; it belongs in the
    reward, where the policy gradient multiplies it.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> k1([-1.0, -2.0], [-1.5, -1.0])
    tensor([ 0.5000, -1.0000])
    """
    policy, ref = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return policy - ref


@KL.register("k2", "mse", source="Approximating KL Divergence (Schulman, 2020), k2: d^2 / 2")
def k2(logprobs: Numbers, ref_logprobs: Numbers) -> torch.Tensor:
    """Compute d^2 / 2: biased as a value, but its gradient is that of KL(p, ref) on-policy.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> k2([-1.0, -2.0], [-1.5, -1.0])
    tensor([0.1250, 0.5000])
    """
    policy, ref = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (policy - ref).square() / 2


@KL.register("k3", source="Approximating KL Divergence (Schulman, 2020), k3: exp(-d) - 1 + d")
def k3(logprobs: Numbers, ref_logprobs: Numbers) -> torch.Tensor:
    """Compute exp(-d) - 1 + d: unbiased as a value, never negative; in a loss its gradient is that of KL(ref, p).

    For small d, the formula cancels: in float32, three digits are left of d = 1e-4 and none of 1e-7. There it is
    computed as a series, so that value and gradient are correct up to rounding for any d. A token that the reference
    finds far likelier than the policy (-d > 88 in float32) overflows to infinity; `low_var_kl` has a bound.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> k3([-1.0, -2.0], [-1.5, -1.0])
    tensor([0.1065, 0.7183])
    >>> k3([0.0], [1e-6])
    tensor([5.0000e-13])
    """
    policy, ref = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return _expm1_minus_x(ref - policy)


@KL.register("abs", source="the absolute log-ratio |d|, as verl and Trinity-RFT have it")
def absolute(logprobs: Numbers, ref_logprobs: Numbers) -> torch.Tensor:
    """Compute |d|.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> absolute([-1.0, -2.0], [-1.5, -1.0])
    tensor([0.5000, 1.0000])
    """
    return k1(logprobs, ref_logprobs).abs()


@KL.register(
    "low_var_kl",
    "low-variance",
    source="k3 with d held within +-20 and the result within +-10, as verl and Trinity-RFT have it",
)
def low_var_kl(
    logprobs: Numbers, ref_logprobs: Numbers, *, log_ratio_clamp: float = 20.0, bound: float = 10.0
) -> torch.Tensor:
    """Compute k3 with d and the result clamped; outside either bound the gradient is 0.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.
        log_ratio_clamp: Bound of |d|.
        bound: Bound of the absolute result.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> low_var_kl([-1.0, -2.0, -30.0], [-1.5, -1.0, 0.0])
    tensor([ 0.1065,  0.7183, 10.0000])
    """
    check_float("log_ratio_clamp", log_ratio_clamp, 0)
    check_float("bound", bound, 0)
    policy, ref = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    ratio = (ref - policy).clamp(-log_ratio_clamp, log_ratio_clamp)
    return _expm1_minus_x(ratio).clamp(-bound, bound)


@KL.register(
    "corrected_k3", source="DeepSeek-V3.2 (2025), section 3.1, equation 7: p / old times k3; the ratio at most 2"
)
def corrected_k3(
    logprobs: Numbers,
    ref_logprobs: Numbers,
    old_logprobs: Numbers | None = None,
    *,
    cap: float = 2.0,
    detach_ratio: bool = False,
) -> torch.Tensor:
    """Compute k3 times p / old, to correct for tokens that the old policy sampled.

    Without `old_logprobs` it is k3. The ratio keeps its gradient: only then is the gradient that of KL(p, ref). Where
    the ratio is below `cap`, that is d * p / old, which fades as p does, and the value is near ref / old, also where k3
    alone overflows.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.
        old_logprobs: Log-probs of the policy that sampled, of the same shape.
        cap: Bound of the ratio.
        detach_ratio: Whether the ratio is a constant weight of the gradient of k3. The value is the same.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If shapes or devices differ.

    >>> corrected_k3([-1.0, -2.0, -200.0], [-1.5, -1.0, -1.0], [-1.2, -2.5, -1.0])
    tensor([0.1301, 1.1842, 1.0000])
    """
    check_float("cap", cap, 0)
    detach_ratio = check_bool("detach_ratio", detach_ratio)
    if old_logprobs is None:
        return k3(logprobs, ref_logprobs)
    policy, ref, old = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
    if not cap:
        return (policy - ref) * 0.0
    # Clamped before the exponential, so that an overflow does not make the gradient NaN.
    log_cap, x, log_ratio = math.log(cap), ref - policy, policy - old
    bounded = log_ratio.clamp(max=log_cap)
    bounded = bounded.detach() if detach_ratio else bounded
    # Far from 0, exponents are added before exp() in ratio * (exp(x) - 1 - x), since exp(x) alone may overflow.
    far, zero, ratio = x > 1, x.new_zeros(()), bounded.exp()
    joined = bounded + x if detach_ratio else torch.where(log_ratio <= log_cap, ref - old, x + log_cap)
    beyond = torch.where(far, joined, zero).exp() - ratio * (1 + torch.where(far, x, zero))
    return torch.where(far, beyond, ratio * _expm1_minus_x(torch.where(far, zero, x)))


def kl(
    name: str, logprobs: Numbers, ref_logprobs: Numbers, old_logprobs: Numbers | None = None, **options: float
) -> torch.Tensor:
    """Compute a KL estimate by name.

    Args:
        name: A key of `KL`.
        logprobs: Log-probs of the policy, of any shape.
        ref_logprobs: Log-probs of the reference, of the same shape.
        old_logprobs: Log-probs of the policy that sampled, of the same shape.
        options: Options of the estimator.

    Returns:
        The estimate of each element, of the same shape.

    Raises:
        ValueError: If the name or an option is unknown, or shapes differ.

    >>> kl("k2", torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[0.1250, 0.5000]])
    """
    data = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
    estimate: torch.Tensor = KL.call(name, data, **options)
    return estimate


def token_kl(
    logprobs: PerToken,
    ref_logprobs: PerToken,
    mask: PerToken | None = None,
    old_logprobs: PerToken | None = None,
    *,
    estimator: str = "k1",
    **options: float,
) -> Any:
    """Compute a KL estimate for every token that counts.

    Args:
        logprobs: [B, R] or packed: log-probs of the policy.
        ref_logprobs: [B, R] or packed: log-probs of the reference.
        mask: [B, R] or packed: which tokens count. `None`: all.
        old_logprobs: [B, R] or packed: log-probs of the policy that sampled, for `corrected_k3`.
        estimator: A key of `KL`.
        options: Options of the estimator.

    Returns:
        Estimates in the layout of the arguments, 0 where the mask is False.

    Raises:
        ValueError: If the name or an option is unknown, or shapes differ.

    >>> token_kl(torch.tensor([[-1.0, -2.0, -9.0]]), [[-1.5, -1.0, float("-inf")]], [[1, 1, 0]])
    tensor([[ 0.5000, -1.0000,  0.0000]])
    """
    layout = Layout.from_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return layout.restore(_token_estimates(layout, logprobs, ref_logprobs, old_logprobs, estimator, options))


def _token_estimates(
    layout: Layout, logprobs: PerToken, ref: PerToken, old: PerToken | None, estimator: str, options: Mapping[str, Any]
) -> torch.Tensor:
    policy, reference = layout.take("logprobs", logprobs), layout.take("ref_logprobs", ref).detach()
    behavior = None if old is None else layout.take("old_logprobs", old).detach()
    data = {"logprobs": policy, "ref_logprobs": reference, "old_logprobs": behavior}
    return layout.masked(KL[estimator].call(data, options))


def kl_loss(
    new_logprobs: PerToken,
    ref_logprobs: PerToken,
    mask: PerToken | None = None,
    old_logprobs: PerToken | None = None,
    *,
    estimator: str = "k2",
    coef: float | FixedKL | AdaptiveKL = 0.001,
    estimator_options: Mapping[str, Any] | None = None,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute `coef` times the aggregate of a KL estimate, to be added to a policy loss.

    The default is `k2`: of the plain estimators, it alone has the gradient of KL(p, ref) (see `k1` and `k3`).

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        ref_logprobs: [B, R] or packed: log-probs of the reference, taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        estimator: A key of `KL`.
        coef: A number, or a controller.
        estimator_options: Options of the estimator.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `kl_loss`, the aggregate before `coef`, and `kl_coef`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> loss, metrics = kl_loss([[-1.0, -2.0, -3.0]], [[-1.5, -1.0, 0.0]], [[1, 1, 0]], coef=0.5)
    >>> loss, metrics["kl_loss"]
    (tensor(0.1562), tensor(0.3125))
    """
    coef = _coefficient(coef)
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs, ref_logprobs=ref_logprobs)
    tokens = _token_estimates(layout, new_logprobs, ref_logprobs, old_logprobs, estimator, estimator_options or {})
    if weights is not None:
        tokens = tokens * on_tokens(layout, "weights", weights).detach()
    total = reduce(layout, tokens, mode, norm, denominators)
    share = mean_over_tokens(layout, torch.full(layout.shape, float(coef), device=layout.mask.device), denominators)
    return Loss(coef * total, {"kl_loss": total.detach(), "kl_coef": share})


class TokenRewards(NamedTuple):
    """Result of `penalize`. Unpacks as `rewards, report = ...`.

    Attributes:
        rewards: [B, R] or packed: reward of each token, 0 where the mask is False.
        report: Rows under "no actions" and "missing reward"; metrics `kl` (the mean over rows of their means) and
            `kl_coef`.

    >>> rewards, report = penalize([1.0], [[0.5, 0.2]], coef=0.1)
    >>> rewards, report.count("missing reward")
    ([tensor([-0.0500,  0.9800])], 0)
    """

    rewards: Any
    report: Report


def penalize(
    rewards: PerToken | PerRow,
    kl: PerToken | None,
    mask: PerToken | None = None,
    *,
    coef: float | FixedKL | AdaptiveKL = 0.0,
    reward_clip: float | tuple[float, float] | None = None,
) -> TokenRewards:
    """Compute token rewards from rewards of rows and the KL of tokens: r_t = -coef * kl_t + (r at the last action).

    A row without actions gets no reward, and a missing one (`None` or NaN) counts as 0; the report lists both.

    Args:
        rewards: [B], each added on the last action of its row; or [B, R] or packed, one for each token.
        kl: [B, R] or packed: KL of each token; not read if `coef` is not positive.
        mask: [B, R] or packed: which tokens count. `None`: all.
        coef: A number, or a controller; below 0 it counts as 0.
        reward_clip: Bounds (low, high) of the rewards, without the penalty, or a number for ±.

    Returns:
        The rewards in the layout of the mask or the KL, and the report.

    Raises:
        ValueError: If the KL is missing, or shapes differ.

    >>> kl, mask = torch.tensor([[0.2, -0.5, 0.0], [-0.2, 0.0, -0.5]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    >>> rewards, report = penalize([1.0, -1.0], kl, mask, coef=0.1)
    >>> rewards
    tensor([[-0.0200,  1.0500,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])
    >>> report.which("no actions")
    [1]
    """
    coef = _coefficient(coef)
    by_row = rewards is not None and _are_row_rewards(mask, kl, rewards)
    layout = Layout.from_tokens(mask, kl=kl, **({} if by_row else {"rewards": rewards}))
    token_rewards = _read_rewards(layout, rewards, by_row)
    missing = token_rewards.isnan()
    token_rewards = torch.where(missing, 0.0, token_rewards)
    if reward_clip is not None:
        low, high = _clip_bounds(reward_clip)
        token_rewards = token_rewards.clamp(low, high)
    has = layout.counts > 0
    if by_row:
        missing_rows, token_rewards = missing, _place_on_last_action(layout, token_rewards)
    else:
        missing_rows = layout.row_sums(missing.to(torch.float32)) > 0
    metrics = {"kl": 0.0, "kl_coef": max(float(coef), 0.0)}
    if coef > 0:
        if kl is None:
            raise ValueError(f"kl: got None, expected the KL of tokens, since coef is {coef:g}")
        tokens = layout.take("kl", kl)
        token_rewards = layout.masked(token_rewards - coef * tokens)
        metrics["kl"] = reduce(layout, tokens.detach(), "seq-mean-token-mean").item()
    reasons = {"no actions": rows_where(~has), "missing reward": rows_where(missing_rows)}
    return TokenRewards(layout.restore(layout.masked(token_rewards)), Report(layout.rows, reasons, metrics))


def kl_penalty(
    logprobs: PerToken,
    ref_logprobs: PerToken,
    mask: PerToken | None = None,
    *,
    estimator: str = "k1",
    coef: float,
) -> TokenRewards:
    """Compute the penalty per token for the divergence from the reference: -coef * KL.

    Args:
        logprobs: [B, R] or packed, of the policy.
        ref_logprobs: Of the reference, in the same layout.
        mask: Which tokens count, in the same layout.
        estimator: A name in `KL`.
        coef: A positive coefficient.

    Returns:
        The penalties, 0 where the mask is False, and a report with the metrics `kl` and `kl_coef`.

    >>> kl_penalty([[-1.0, -2.0]], [[-1.5, -2.0]], coef=0.1).rewards
    [tensor([-0.0500,  0.0000])]
    """
    layout = Layout.from_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    tokens = _token_estimates(layout, logprobs, ref_logprobs, None, estimator, {})
    metrics = {"kl": reduce(layout, tokens, "seq-mean-token-mean").item(), "kl_coef": check_float("coef", coef, 0)}
    report = Report(layout.rows, {"no actions": rows_where(layout.counts == 0)}, metrics)
    return TokenRewards(layout.restore(layout.masked(0.0 - coef * tokens)), report)


def _are_row_rewards(mask: PerToken | None, kl: PerToken | None, rewards: PerToken | PerRow) -> bool:
    """Return whether rewards are of rows, given the number of rows of the mask or the KL."""
    if mask is None and kl is None:
        return False
    return is_per_row(Layout.from_tokens(mask, kl=kl), "rewards", rewards)


def _read_rewards(layout: Layout, rewards: PerToken | PerRow, by_row: bool) -> torch.Tensor:
    if not by_row or isinstance(rewards, Ragged):
        return layout.take("rewards", rewards)
    if not isinstance(rewards, torch.Tensor):
        rewards = [math.nan if reward is None else reward for reward in rewards]
    return row_numbers(layout, "rewards", rewards)


def _place_on_last_action(layout: Layout, rows: torch.Tensor) -> torch.Tensor:
    """Place the number of each row on its last token that counts. Shape: `shape`."""
    filled, _, last = TokenPositions(layout.mask, layout.lengths).ends()
    return rows.new_zeros(layout.mask.numel()).index_put((last,), rows[filled]).reshape(layout.shape)


def _clip_bounds(clip: float | Sequence[float]) -> tuple[float, float]:
    if not isinstance(clip, (tuple, list)):
        bound = check_float("reward_clip", clip, 0, expected="a number >= 0, a pair (low, high), or None")
        return -bound, bound
    if len(clip) != 2:
        raise ValueError(f"reward_clip: got {clip!r}, expected a pair (low, high), one number, or None")
    low = check_float("reward_clip", clip[0], expected="a number")
    return low, check_float("reward_clip", clip[1], low, expected=f"a number >= {low:g}")


def _coefficient(coef: float | FixedKL | AdaptiveKL) -> float:
    return check_float("coef", coef.value if isinstance(coef, (FixedKL, AdaptiveKL)) else coef)


class FixedKL:
    """A fixed coefficient.

    Args:
        coef: The coefficient.

    >>> FixedKL(0.01).value
    0.01
    """

    def __init__(self, coef: float) -> None:
        self.value = check_float("coef", coef, 0)

    def update(self, kl: float | torch.Tensor, n_steps: int) -> None:
        """Do nothing: the coefficient is fixed.

        Args:
            kl: Measured KL divergence; ignored.
            n_steps: Number of samples; ignored.
        """

    def state_dict(self) -> dict[str, float]:
        """Return the state."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state.

        Args:
            state: What `state_dict` returned.
        """
        self.value = check_float("value", check_state(state, ("value",))["value"], 0)


class AdaptiveKL:
    """A coefficient that grows while the KL is above its target and shrinks below it.

    Ziegler et al., 2019, section 2.2: value *= 1 + clip(kl / target - 1, ±`clip`) * n_steps / horizon.

    Args:
        init: Initial coefficient.
        target: KL at which the coefficient stays.
        horizon: Number of samples over which the coefficient adapts.
        clip: Bound of the relative error.

    >>> controller = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    >>> for kl in (12.0, 3.0, 6.3):
    ...     controller.update(kl, 256)
    ...     print(round(controller.value, 6))
    0.100512
    0.099997
    0.100125
    """

    def __init__(self, init: float, target: float, horizon: float, *, clip: float = 0.2) -> None:
        self.value = check_float("init", init, 0)
        self.target = _positive("target", target)
        self.horizon = _positive("horizon", horizon)
        self.clip = _positive("clip", clip)

    def update(self, kl: float | torch.Tensor, n_steps: int) -> None:
        """Adapt the coefficient.

        Args:
            kl: Mean KL of the samples.
            n_steps: Number of samples.

        Raises:
            ValueError: If the KL is not finite, or `n_steps` is too large for `horizon`.
        """
        measured = _as_number(kl)
        if not math.isfinite(measured):
            raise ValueError(f"kl: got {measured}, expected a finite number; the coefficient stays {self.value:g}")
        steps = check_float("n_steps", n_steps, 0)
        if self.clip * steps >= self.horizon:
            limit = self.horizon / self.clip
            raise ValueError(f"n_steps: got {n_steps}, expected fewer than {limit:g} (horizon / clip)")
        error = min(max(measured / self.target - 1, -self.clip), self.clip)
        self.value *= 1 + error * steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state: the coefficient and the constants."""
        return {"value": self.value, "target": self.target, "horizon": self.horizon, "clip": self.clip}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state.

        Args:
            state: What `state_dict` returned.
        """
        state = check_state(state, ("value", "target", "horizon", "clip"))
        value = check_float("value", state["value"], 0)
        others = [_positive(name, state[name]) for name in ("target", "horizon", "clip")]
        self.value, (self.target, self.horizon, self.clip) = value, others


def _as_number(kl: float | torch.Tensor) -> float:
    try:
        return float(kl)
    except (TypeError, ValueError, RuntimeError):
        shown = f"shape {list(kl.shape)}" if hasattr(kl, "shape") else repr(kl)
        raise ValueError(f"kl: got {shown}, expected one number") from None


def _positive(name: str, value: float) -> float:
    check_float(name, value, expected="a positive number")
    if value <= 0 or math.isinf(value):
        raise ValueError(f"{name}: got {value!r}, expected a positive number")
    return float(value)
