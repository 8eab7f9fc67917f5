"""Results of estimators, filters and losses, with reports of the rows that were treated specially.

Invariant: a report lists every row that was treated in a way the caller might not expect, by row number and, if there
are ids, by id.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows, empty

if TYPE_CHECKING:
    from rollbook.algorithms.layout import Numbers, PerToken

__all__ = ["Advantages", "Loss", "Report"]

TokenColumn: TypeAlias = torch.Tensor | Rows | Ragged
"""An entry for each token: a padded matrix [B, R], or packed."""


@dataclass(frozen=True)
class Report:
    """Rows by reason, and metrics of the batch.

    Attributes:
        rows: Number of rows.
        reasons: Row numbers by reason, ascending. Reasons that hold for no row are included.
        metrics: Metrics of the batch by name.
        ids: [rows] Id of each row, if known.

    >>> report = Report(4, {"missing reward": [2], "constant group": [0, 1]}, {"reward_mean": 0.5}, ids=list("abcd"))
    >>> report.count("constant group"), report.which("missing reward")
    (2, ['c'])
    >>> report.to_metrics("grpo")
    {'grpo/rows': 4, 'grpo/missing_reward': 1, 'grpo/constant_group': 2, 'grpo/reward_mean': 0.5}
    >>> print(report)
    4 rows
    missing reward  1: c
    constant group  2: a, b
    reward_mean 0.5
    """

    rows: int
    reasons: Mapping[str, Sequence[int]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    ids: Sequence[Hashable] | None = None

    def count(self, reason: str) -> int:
        """Count the rows of a reason; 0 for an unknown reason.

        Args:
            reason: The reason.

        Returns:
            The number of rows.
        """
        return len(self.reasons.get(reason, ()))

    def which(self, reason: str) -> list[Hashable]:
        """Return the rows of a reason: their ids if known, else their numbers.

        Args:
            reason: The reason.

        Returns:
            Ids or numbers of the rows.
        """
        rows = self.reasons.get(reason, ())
        return [self.ids[i] for i in rows] if self.ids is not None else list(rows)

    def to_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return all counts and metrics as one dict, with a prefix that keeps reports apart in a log.

        Args:
            prefix: Prefix of the names.

        Returns:
            The numbers by name.
        """
        start = f"{prefix}/" if prefix else ""
        counts = {f"{start}{reason.replace(' ', '_')}": len(rows) for reason, rows in self.reasons.items()}
        return {f"{start}rows": self.rows, **counts, **{start + name: value for name, value in self.metrics.items()}}

    def plus(
        self, reasons: Mapping[str, Sequence[int]] | None = None, metrics: Mapping[str, float] | None = None
    ) -> Report:
        """Return the report with additional reasons and metrics, which override existing ones.

        Args:
            reasons: Rows by reason.
            metrics: Numbers by name.

        Returns:
            A new report.
        """
        return Report(self.rows, {**self.reasons, **(reasons or {})}, {**self.metrics, **(metrics or {})}, self.ids)

    def with_ids(self, ids: Sequence[Hashable]) -> Report:
        """Return the report with ids of its rows.

        Args:
            ids: [B] Id of each row.

        Returns:
            A new report.

        Raises:
            ValueError: If there is not one id for each row.
        """
        if len(ids) != self.rows:
            raise ValueError(f"ids: got {len(ids)}, expected {self.rows}, one for each row")
        return Report(self.rows, self.reasons, self.metrics, ids)

    def __str__(self) -> str:
        lines = [f"{self.rows} rows"]
        width = max(map(len, self.reasons), default=0)
        for reason, rows in self.reasons.items():
            named = ", ".join(map(str, self.which(reason)[:8])) + (", ..." if len(rows) > 8 else "")
            lines.append(f"{reason:<{width}}  {len(rows)}" + (f": {named}" if named else ""))
        lines += [f"{name} {value:g}" for name, value in self.metrics.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = ", ".join(f"{reason} {len(rows)}" for reason, rows in self.reasons.items())
        return f"Report({self.rows} rows, {counts})"


def rows_where(mask: torch.Tensor | NDArray[Any] | Sequence[Any]) -> list[int]:
    """Return the row numbers at which a mask [B] is true."""
    flags = mask.cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask, dtype=np.bool_)
    return list(np.flatnonzero(flags).tolist())


class Advantages:
    """Result of an estimator.

    Args:
        advantages: In the layout of the mask: [B, R], `Rows` if it is packed, a `Ragged` column if it is one, as that
            of records is; 0 where the mask is False. Without a mask [B].
        returns: Targets of a critic in the same layout; `None`: a copy of the advantages.
        scores: [B] Advantage of each row before it was spread over tokens, for estimators that score rows.
        mask: Tokens to train on: the given mask, narrowed by estimators that mask tokens.
        report: The report, or a function that builds it on first access.

    >>> result = Advantages(torch.tensor([[1.0, 0.0]]), mask=torch.tensor([[True, False]]))
    >>> result.returns, result.returns is result.advantages
    (tensor([[1., 0.]]), False)
    """

    def __init__(
        self,
        advantages: TokenColumn,
        returns: TokenColumn | None = None,
        scores: torch.Tensor | None = None,
        mask: PerToken | None = None,
        report: Report | Callable[[], Report] | None = None,
    ) -> None:
        # `Any`: the type depends on the layout of the arguments, which callers know.
        self.advantages: Any = advantages
        self._returns: Any = returns
        self.scores = scores
        self.mask: Any = mask
        self._report = report or Report(0)

    @property
    def report(self) -> Report:
        """Rows that were treated specially; computed on first access."""
        if not isinstance(self._report, Report):
            self._report = self._report()
        return self._report

    @property
    def returns(self) -> Any:
        """Targets of a critic in the same layout; a copy of the advantages if the estimator has none."""
        if self._returns is None:
            advantages = self.advantages
            if isinstance(advantages, Ragged):
                values = advantages.tensor_of_values()
                memory = empty(tuple(values.shape), values.dtype).copy_(values)
                self._returns = Ragged(memory.numpy(), advantages.offsets, advantages.dtype, owned=True)
            else:
                self._returns = advantages.apply(torch.clone) if isinstance(advantages, Rows) else advantages.clone()
        return self._returns

    def with_report(self, report: Report) -> Advantages:
        """Return the same advantages with another report.

        Args:
            report: The other report.

        Returns:
            The advantages.
        """
        return Advantages(self.advantages, self._returns, self.scores, self.mask, report)

    def __repr__(self) -> str:
        return f"Advantages({type(self.advantages).__name__}, {self.report!r})"


def as_advantages(name: str, output: Advantages | Rows | Numbers) -> Advantages:
    """Convert the output of the estimator `name` to `Advantages`; user-defined ones may return plain numbers.

    >>> as_advantages("half", [0.5, 0.5]).advantages
    tensor([0.5000, 0.5000])
    """
    if isinstance(output, Advantages):
        return output
    if isinstance(output, Rows):
        return Advantages(output.apply(torch.Tensor.float))
    try:
        return Advantages(torch.as_tensor(output).float())
    except (TypeError, ValueError, RuntimeError):
        kind = type(output).__name__
        raise ValueError(f"{name}: returned {kind}, expected a number for each row, Rows, or Advantages") from None


@dataclass(frozen=True)
class Loss:
    """A loss to call `backward` on, and its metrics. Unpacks as `loss, metrics = ...`.

    With the `denominators` of the global batch, the losses and metrics of micro-batches add up to those of the batch.

    Attributes:
        value: [] The loss.
        metrics: Detached scalars; each is a mean over the tokens (or rows) of the batch.

    >>> loss, metrics = Loss(torch.tensor(0.5), {"pg_loss": torch.tensor(0.5)})
    >>> loss
    tensor(0.5000)
    """

    value: torch.Tensor
    metrics: dict[str, torch.Tensor]

    def __iter__(self) -> Any:
        return iter((self.value, self.metrics))

    def backward(self) -> None:
        """Compute the gradients of the loss."""
        self.value.backward()  # type: ignore[no-untyped-call]
