"""Results of estimators, filters and losses: numbers, and a report of the rows that were treated specially.

Invariant: a report lists every row that was treated in a way its caller might not expect, by row number and, if ids
were given, by id.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows, empty


@dataclass(frozen=True)
class Report:
    """Rows by reason, and metrics of all rows.

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
    """How many rows there were."""
    reasons: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """For each reason, the numbers of the rows it holds for, ascending; reasons that hold for none are there too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the batch, by name."""
    ids: Sequence[Hashable] | None = None
    """[rows] What each row is called, where that is known."""

    def count(self, reason: str) -> int:
        """For how many rows a reason holds; 0 if it is not among those looked for."""
        return len(self.reasons.get(reason, ()))

    def which(self, reason: str) -> list[Hashable]:
        """The rows that a reason holds for: their ids where those are known, else their numbers."""
        rows = self.reasons.get(reason, ())
        return [self.ids[i] for i in rows] if self.ids is not None else list(rows)

    def to_metrics(self, prefix: str = "") -> dict[str, float]:
        """All counts and numbers under one prefix, so that two reports in one log never share a name."""
        start = f"{prefix}/" if prefix else ""
        counts = {f"{start}{reason.replace(' ', '_')}": len(rows) for reason, rows in self.reasons.items()}
        return {f"{start}rows": self.rows, **counts, **{start + name: value for name, value in self.metrics.items()}}

    def plus(
        self, reasons: Mapping[str, Sequence[int]] | None = None, metrics: Mapping[str, float] | None = None
    ) -> Report:
        """The same report with more in it; what is given wins over what was there."""
        return Report(self.rows, {**self.reasons, **(reasons or {})}, {**self.metrics, **(metrics or {})}, self.ids)

    def with_ids(self, ids: Sequence[Hashable]) -> Report:
        """The same report with names for its rows."""
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
    """The numbers of the rows where a mask, (B,), is true."""
    flags = mask.cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask, dtype=np.bool_)
    return list(np.flatnonzero(flags).tolist())


class Advantages:
    """Result of an estimator.

    >>> found = Advantages(torch.tensor([[1.0, 0.0]]), mask=torch.tensor([[True, False]]))
    >>> found.returns, found.returns is found.advantages
    (tensor([[1., 0.]]), False)
    """

    def __init__(
        self,
        advantages: Any,
        returns: Any = None,
        scores: torch.Tensor | None = None,
        mask: Any = None,
        report: Report | Callable[[], Report] | None = None,
    ) -> None:
        self.advantages = advantages
        """In the layout of the mask: [B, R], `Rows` if it is packed, a `Ragged` column if it is one (as that of records
        is); 0 where the mask is False. Without a mask [B]."""
        self._returns = returns
        self.scores = scores
        """[B] For estimators that score whole rows: the advantage of each, before it was put on its tokens."""
        self.mask = mask
        """Tokens to train on: the given mask, narrowed by estimators that mask some."""
        self._report = report or Report(0)

    @property
    def report(self) -> Report:
        """Rows that were treated specially; computed on first access."""
        if not isinstance(self._report, Report):
            self._report = self._report()
        return self._report

    @property
    def returns(self) -> Any:
        """Targets of a critic, in the same layout; without such, a copy of the advantages."""
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
        """The same numbers with another report."""
        return Advantages(self.advantages, self._returns, self.scores, self.mask, report)

    def __repr__(self) -> str:
        return f"Advantages({type(self.advantages).__name__}, {self.report!r})"


def as_advantages(name: str, output: Any) -> Advantages:
    """Convert the output of the estimator `name` to `Advantages`; a user's own may return plain numbers.

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
        raise ValueError(f"{name}: got {kind} back, expected a number for each row, Rows, or Advantages") from None


@dataclass(frozen=True)
class Loss:
    """A loss to call `backward` on, and its metrics. Unpacks as `loss, metrics = ...`.

    With the `denominators` of the global batch, the losses of its micro-batches add up to the loss of the batch, and so
    do the `metrics`.

    >>> loss, metrics = Loss(torch.tensor(0.5), {"pg_loss": torch.tensor(0.5)})
    >>> loss
    tensor(0.5000)
    """

    value: torch.Tensor
    """() The loss."""
    metrics: dict[str, torch.Tensor]
    """Detached numbers of shape (); each is a mean over the tokens (or rows) of the batch, so shares add up."""

    def __iter__(self) -> Any:
        return iter((self.value, self.metrics))

    def backward(self, **options: Any) -> None:
        """The gradient of the loss."""
        self.value.backward(**options)  # type: ignore[no-untyped-call]
