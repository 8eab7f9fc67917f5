"""Layouts of tokens, padded to a matrix or packed end to end, and sums over tokens and rows.

Invariant: a result computed through a `Layout` has the same value and gradient for padded and packed tokens. Masked
tokens are replaced by 0 before anything is computed from them, so that NaN and infinity there have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.checks import check_float
from rollbook.core.fields import DTYPES
from rollbook.core.ragged import Ragged, compute_offsets
from rollbook.core.rows import NUMPY, Rows, memory

_CPU = torch.device("cpu")

PerToken: TypeAlias = torch.Tensor | NDArray[Any] | Rows | Ragged | Sequence[Any]
"""An entry for each token of B rows: a padded matrix (B, R), or packed: `Rows`, a `Ragged` column, a list of rows."""
PerRow: TypeAlias = torch.Tensor | NDArray[Any] | Sequence[Any]
"""One entry for each row: [B]."""
Ids: TypeAlias = Sequence[Hashable] | NDArray[Any] | torch.Tensor
"""One id for each row: [B]."""
Numbers: TypeAlias = torch.Tensor | NDArray[Any] | Sequence[Any] | float
"""Numbers of any shape."""


class Layout:
    """The shape that all token arguments of one call share, and the mask over it.

    Tokens are *padded*, a matrix [B, R], or *packed*: `Rows`, a `Ragged` column, or a list of B one-dimensional rows.
    A function reads its arguments with `take`, computes on plain tensors [B, R] or [total], and converts results back
    with `restore`. Without a mask, every slot is a token.

    >>> padded = Layout.from_tokens(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    >>> padded.row_sums(torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])).tolist()
    [3.0, 12.0]
    >>> packed = Layout.from_tokens(None, values=[[1.0, 2.0], [3.0, 4.0, 5.0]])
    >>> packed.row_sums(packed.take("values", [[1.0, 2.0], [3.0, 4.0, 5.0]])).tolist()
    [3.0, 12.0]
    >>> packed.restore(packed.spread(torch.tensor([7.0, 8.0])))
    [tensor([7., 7.]), tensor([8., 8., 8.])]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        lengths: list[int] | None,
        mask: torch.Tensor,
        column: bool = False,
        flat: bool = False,
    ) -> None:
        self.shape = shape
        """(B, R) if padded, (total,) if packed."""
        self.lengths = lengths
        """Number of tokens of each packed row; `None` if padded."""
        self.rows = shape[0] if lengths is None else len(lengths)
        """B, the number of rows."""
        self.mask = mask
        """[of `shape`] bool: which tokens count."""
        self.column = column
        """Whether results are returned as a `Ragged` column, as the tokens were."""
        self.flat = flat
        """Whether some packed tokens were passed as a one-dimensional tensor, end to end."""

    @classmethod
    def from_tokens(cls, mask: PerToken | None, **tokens: PerToken | None) -> Layout:
        """Determine the layout of a mask and of arguments by name; `take` checks each against it.

        If one of them is a matrix, tokens are padded, and nested lists are matrices too; otherwise they are packed. A
        one-dimensional tensor has all rows end to end, without their lengths.

        Args:
            mask: [B, R] or packed; `None`: every slot is a token.
            tokens: Arguments by name, [B, R] or packed; `None` is skipped.

        Returns:
            The layout, on the device of the first argument that is on an accelerator, else on the CPU.

        Raises:
            ValueError: If an argument is neither a matrix nor packed rows, or none has the lengths of rows.
        """
        shape: tuple[int, ...] | None = None
        lengths: list[int] | None = None
        first: PerToken | None = None
        flat, device, names = False, _CPU, []
        for name, argument in (("mask", mask), *tokens.items()):
            if argument is None:
                continue
            names.append(name)
            first = argument if first is None else first
            size = _size(name, argument)
            if isinstance(size, list):
                lengths = size if lengths is None else lengths
            elif len(size) == 2:
                shape = size if shape is None else shape
            else:
                flat = True
            values = argument.values if isinstance(argument, Rows) else argument
            if device.type == "cpu" and isinstance(values, torch.Tensor):
                device = values.device
            elif device.type == "cpu" and isinstance(values, list):
                device = _device(values)
        if shape is None:
            if lengths is None:
                raise ValueError(
                    f"tokens: got {', '.join(names) or 'nothing'} without row lengths, expected a matrix (B, R), or "
                    "Rows(values, lengths) for packed tokens"
                )
            shape = (sum(lengths),)
        else:
            lengths, flat = None, False
        self = cls(shape, lengths, torch.empty(0, device=device), isinstance(first, Ragged), flat)
        if isinstance(first, Ragged):
            self.offsets = first.offsets - first.offsets[0]
        if mask is None:
            self.mask = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            self.mask = as_mask("mask", self.tensor("mask", mask))
        return self

    @property
    def packed(self) -> bool:
        """Whether rows are packed end to end."""
        return self.lengths is not None

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1] Start of each packed row, and the end."""
        return compute_offsets(self.lengths or [])

    @cached_property
    def counts(self) -> torch.Tensor:
        """[B] int64: number of tokens of each row that count."""
        if self.lengths is None:
            return self.mask.sum(-1)
        ends = torch.cat([self.mask.new_zeros(1, dtype=torch.int64), self.mask.cumsum(0)])
        bounds = torch.cat([self.row_lengths.new_zeros(1), self.row_lengths.cumsum(0)])
        return ends[bounds[1:]] - ends[bounds[:-1]]

    @cached_property
    def row_lengths(self) -> torch.Tensor:
        """[B] int64: number of slots of each row."""
        if self.lengths is None:
            return torch.full((self.rows,), self.shape[1], device=self.mask.device)
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.mask.device)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """[of `shape`] int64: row of each token."""
        return self.spread(torch.arange(self.rows, device=self.mask.device))

    def take(self, name: str, argument: PerToken) -> torch.Tensor:
        """Convert an argument to a float32 or float64 tensor.

        Args:
            name: Name of the argument, for errors.
            argument: [B, R] or packed, in this layout.

        Returns:
            [of `shape`] 0 where the mask is False.

        Raises:
            ValueError: If it is `None`, not numeric, or in another layout.
        """
        return self.masked(as_floats(self.tensor(name, argument)))

    def masked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace entries where the mask is False by 0; no gradient flows there. Shape: `shape`."""
        return torch.where(self.mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

    def tensor(self, name: str, argument: PerToken) -> torch.Tensor:
        """Convert an argument to a tensor of its own type, without masking; arguments as of `take`.

        Returns:
            The tensor, of `shape`.
        """
        if argument is None:
            raise ValueError(f"{name}: got None, expected {self._expected()}")
        if isinstance(argument, Rows):
            lengths, tensor = argument.lengths, argument.values
        elif isinstance(argument, Ragged):
            lengths = argument.lengths.tolist()
            tensor = argument.tensor_of_values()[int(argument.offsets[0]) : int(argument.offsets[-1])]
        elif isinstance(argument, (torch.Tensor, np.ndarray)) or self.lengths is None:
            is_tensor = isinstance(argument, torch.Tensor)
            tensor = argument if is_tensor else as_tensor(name, argument, self.mask.device)  # type: ignore[assignment]
            if tuple(tensor.shape) != self.shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {self._expected()}")
            return tensor
        elif not isinstance(argument, Sequence):
            raise ValueError(f"{name}: got {type(argument).__name__}, expected {self._expected()}")
        else:
            parts = [as_tensor(f"{name}: row {i}", row, self.mask.device) for i, row in enumerate(argument)]
            invalid = next((i for i, row_tensor in enumerate(parts) if row_tensor.dim() != 1), None)
            if invalid is not None:
                raise ValueError(f"{name}: row {invalid} has {parts[invalid].dim()} dimensions, expected 1")
            lengths = [len(row_tensor) for row_tensor in parts]
            filled = [row_tensor for row_tensor in parts if len(row_tensor)]  # an empty list has no type
            tensor = torch.cat(filled) if filled else torch.empty(0, device=self.mask.device)
        if lengths != self.lengths:
            raise ValueError(f"{name}: got rows of lengths {_abbreviate(lengths)}, expected {self._expected()}")
        return tensor

    def narrowed(self, mask: torch.Tensor) -> Layout:
        """Return the layout with a narrower mask."""
        return Layout(self.shape, self.lengths, self.mask & mask, self.column, self.flat)

    def restore(self, tensor: torch.Tensor) -> Any:
        """Convert a result of `shape` to the layout of the mask, or else of the first argument: a matrix, `Rows`, or a
        `Ragged` column."""
        if self.lengths is None:
            return tensor
        return as_column(tensor, self.offsets) if self.column else Rows(tensor, self.lengths)

    def row_sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens of each row that count; 0 for a row that has none. Shape: [B]."""
        # In float64: packed entries are added one by one, and thousands of float32 additions would drift.
        counted = self.masked(tensor).to(torch.float64)
        if self.lengths is None:
            return counted.sum(-1).to(tensor.dtype)
        if not self.lengths:
            return tensor.new_zeros(0)
        return torch.segment_reduce(counted, "sum", lengths=self.row_lengths, unsafe=True, initial=0).to(tensor.dtype)

    def row_means(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute the mean over the tokens of each row that count; 0 for a row that has none. Shape: [B]."""
        return self.row_sums(tensor) / self.counts.clamp(min=1)

    def spread(self, per_row: torch.Tensor) -> torch.Tensor:
        """Repeat the number of each row [B] on all of its slots. Shape: `shape`."""
        if self.lengths is None:
            return per_row[:, None].expand(self.shape)
        if per_row.device.type == "cpu" and not per_row.requires_grad and per_row.dtype in NUMPY:
            return torch.from_numpy(np.repeat(per_row.numpy(), self.lengths))  # about 40 times as fast as torch
        return torch.repeat_interleave(per_row, self.row_lengths, output_size=self.shape[0])

    def _expected(self) -> str:
        if self.lengths is None:
            return f"{list(self.shape)}, as the other tokens have"
        lengths = _abbreviate(self.lengths)
        return f"{self.rows} packed rows of lengths {lengths}, or their {self.shape[0]} values end to end"


def _abbreviate(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, ...]"


def _size(name: str, argument: PerToken) -> tuple[int, ...] | list[int]:
    """Return the shape of a matrix (B, R) or of values end to end (total,), or the lengths of packed rows as a list."""
    if isinstance(argument, Rows):
        return argument.lengths
    if isinstance(argument, Ragged):
        return list(argument.lengths.tolist())
    if isinstance(argument, (torch.Tensor, np.ndarray)):
        if argument.ndim not in (1, 2):
            raise ValueError(f"{name}: got {argument.ndim} dimensions, expected 2 (B, R), or packed rows")
        return tuple(argument.shape)
    if not isinstance(argument, Sequence) or isinstance(argument, (str, bytes)):
        raise ValueError(f"{name}: got {type(argument).__name__}, expected a matrix (B, R), or packed rows")
    try:
        return [len(row) for row in argument]
    except TypeError:
        raise ValueError(f"{name}: got a flat list, expected one row for each sample") from None


def _device(rows: list[Any]) -> torch.device:
    """Return the first accelerator that one of the rows is on, else the CPU."""
    for row in rows:
        if isinstance(row, torch.Tensor) and row.device.type != "cpu":
            return row.device
    return _CPU


def as_column(values: torch.Tensor, offsets: NDArray[np.int64]) -> Ragged:
    """Convert rows end to end, [total], to a column on the same memory."""
    name = str(values.dtype).removeprefix("torch.")
    return Ragged(memory(values.detach().cpu()).view(DTYPES[name].storage), offsets, name, owned=True)


def as_tensor(name: str, value: Numbers, device: torch.device | str = "cpu") -> torch.Tensor:
    """Convert numbers to a tensor; arrays keep their type, Python numbers become float32 or int64."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
        else:
            tensor = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected an array of numbers: {error}") from None
    return tensor.to(device)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Convert numbers to float32; float64 stays.

    >>> as_floats(torch.ones(1, dtype=torch.bfloat16)).dtype, as_floats(torch.ones(1, dtype=torch.int64)).dtype
    (torch.float32, torch.float32)
    """
    if not tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def same_shape(**arguments: Numbers) -> list[torch.Tensor]:
    """Convert arguments by name to tensors of at least float32 that all have the shape of the first.

    Lists go to the device of the first tensor that is on an accelerator.

    Raises:
        ValueError: If shapes or devices differ.

    >>> same_shape(logprobs=[-1, -2], ref_logprobs=torch.zeros(2, dtype=torch.float64))
    [tensor([-1., -2.]), tensor([0., 0.], dtype=torch.float64)]
    """
    device = _CPU
    for argument in arguments.values():
        if isinstance(argument, torch.Tensor) and device.type == "cpu":
            device = argument.device
    tensors: list[torch.Tensor] = []
    first, shape = next(iter(arguments)), None
    for name, argument in arguments.items():
        tensor = argument if isinstance(argument, torch.Tensor) else as_tensor(name, argument, device)
        shape = tensor.shape if shape is None else shape
        if tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, expected {device}, where the others are")
        if tensor.shape != shape:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}, as {first} have")
        tensors.append(as_floats(tensor))
    return tensors


def as_mask(name: str, value: torch.Tensor) -> torch.Tensor:
    """Convert a mask to bool, and check that it has only 0 and 1 (weights are another argument).

    On an accelerator the check is skipped, since it would synchronize; everything but 0 counts there.
    """
    if value.dtype == torch.bool:
        return value
    if value.device.type != "cpu":
        return value != 0
    entries = memory(value if value.dtype in NUMPY else value.float())  # numpy compares ten times as fast as torch
    mask = entries == 1
    if not np.array_equal(mask, entries != 0):
        invalid = entries[~mask & (entries != 0)]
        raise ValueError(f"{name}: got {invalid[0].item()}, expected 0 and 1 only (weights of tokens are not a mask)")
    return torch.from_numpy(mask)


def is_per_row(layout: Layout, name: str, value: PerToken | PerRow) -> bool:
    """Return whether a value has one entry for each row [B], not for each token.

    In a packed layout, both forms are flat tensors. If B rows have B tokens, but not one each, a flat tensor is
    read as one number per row, and rejected if another argument of the call is a flat tensor of tokens.

    >>> layout = Layout.from_tokens(None, logprobs=[[-1.0, -2.0], [-3.0]])
    >>> [is_per_row(layout, "weights", value) for value in ([1.0, 2.0], [[1.0, 2.0], [3.0]], torch.ones(3))]
    [True, False, False]
    >>> is_per_row(Layout.from_tokens(None, logprobs=[[-1.0, -2.0], []]), "weights", torch.ones(2))
    True
    """
    if isinstance(value, (Rows, Ragged)):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim != 1 or layout.lengths is None:
            return value.ndim == 1
        if layout.flat and len(value) == layout.rows == layout.shape[0] and set(layout.lengths) != {1}:
            raise ValueError(
                f"{name}: got {len(value)} numbers for as many rows and as many tokens, expected Rows(values, lengths) "
                "for tokens, or a list for rows"
            )
        return len(value) == layout.rows
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        shown = value if value is None or isinstance(value, (int, float)) else type(value).__name__
        raise ValueError(f"{name}: got {shown}, expected one number for each row or token: (B,), (B, R), or packed")
    first = value[0] if len(value) else None
    return not hasattr(first, "__len__") or getattr(first, "ndim", 1) == 0


def row_numbers(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """Convert numbers of rows to float32 or float64.

    Args:
        layout: Layout of the tokens.
        name: Name of the argument, for errors.
        value: [B] The numbers.

    Returns:
        [B] The numbers.

    >>> row_numbers(Layout.from_tokens(torch.ones(2, 3)), "rewards", [1, 0])
    tensor([1., 0.])
    """
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    return as_floats(tensor)


def row_flags(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """Convert flags of rows to bool, and check that they are 0 or 1.

    Args:
        layout: Layout of the tokens.
        name: Name of the argument, for errors.
        value: [B] The flags.

    Returns:
        [B] The flags.

    >>> row_flags(Layout.from_tokens(torch.ones(2, 3)), "chosen", [1, 0])
    tensor([ True, False])
    """
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    invalid = tensor[(tensor != 0) & (tensor != 1)]
    if len(invalid):
        raise ValueError(f"{name}: got {invalid[0].item()}, expected 0 and 1 only, or False and True")
    return tensor != 0


def on_tokens(layout: Layout, name: str, value: PerToken | PerRow) -> torch.Tensor:
    """Read numbers of tokens, or repeat numbers of rows on their tokens.

    Args:
        layout: Layout of the tokens.
        name: Name of the argument, for errors.
        value: Numbers of tokens, or [B].

    Returns:
        [of `layout.shape`] The numbers; 0 where the mask is False.

    >>> on_tokens(Layout.from_tokens(torch.tensor([[1, 1, 0], [1, 0, 0]])), "advantages", [0.5, -1.0])
    tensor([[ 0.5000,  0.5000,  0.0000],
            [-1.0000,  0.0000,  0.0000]])
    """
    # `is_per_row` is False for a column, but a type checker does not know that.
    if not isinstance(value, Ragged) and is_per_row(layout, name, value):
        return layout.masked(layout.spread(row_numbers(layout, name, value)))
    return layout.take(name, value)


def check_optional(name: str, value: float | None, low: float, expected: str) -> None:
    """Raise `ValueError` unless an option is `None` or a number above `low`.

    >>> check_optional("dual_clip", 1.0, 1, "a number > 1")
    Traceback (most recent call last):
        ...
    ValueError: dual_clip: got 1.0, expected a number > 1 or None
    """
    if value is not None and check_float(name, value, low, expected=f"{expected} or None") == low:
        raise ValueError(f"{name}: got {value!r}, expected {expected} or None")


def check_state(state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return a saved state; raise `ValueError` unless it has exactly these fields.

    >>> check_state({"value": 1.0}, ("value",))
    {'value': 1.0}
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {type(state).__name__}, expected a mapping of {', '.join(names)}")
    if set(state) != set(names):
        raise ValueError(f"state: got {', '.join(map(str, state)) or 'nothing'}, expected {', '.join(names)}")
    return state
