"""Layouts of tokens: padded to a matrix or packed end to end; sums over tokens and over rows.

Invariant: a result computed through a `Layout` has the same value and gradient for padded and packed tokens. Tokens
that the mask leaves out are replaced by 0 before anything is computed from them, so that NaN and infinity there have no
effect.
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
from rollbook.core.ragged import Ragged, offsets_of
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

    Tokens are *padded*, a matrix (B, R), or *packed*: `Rows` (or a list of B one-dimensional rows of any length). A
    function takes arguments by `take`, computes on plain tensors, (B, R) or (total,), and gives results back by `give`
    in the layout they came in. Without a mask every slot is a token.

    >>> padded = Layout.of(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    >>> padded.row_sums(torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])).tolist()
    [3.0, 12.0]
    >>> packed = Layout.of(None, values=[[1.0, 2.0], [3.0, 4.0, 5.0]])
    >>> packed.row_sums(packed.take("values", [[1.0, 2.0], [3.0, 4.0, 5.0]])).tolist()
    [3.0, 12.0]
    >>> packed.give(packed.spread(torch.tensor([7.0, 8.0])))
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
        """Whether results are returned as a `Ragged` column, since the tokens came as one."""
        self.flat = flat
        """Whether some packed tokens came as a one-dimensional tensor, end to end."""

    @classmethod
    def of(cls, mask: PerToken | None, **tokens: PerToken | None) -> Layout:
        """Determine the layout of a mask and of arguments by name; `take` checks that each agrees with it.

        If there is a matrix among them, the tokens are padded, and nested lists are matrices too; otherwise they are
        packed. A one-dimensional tensor is all rows end to end, and does not say where they end.

        Args:
            mask: [B, R] or packed; `None`: every slot is a token.
            tokens: Arguments by name, [B, R] or packed; `None` is skipped.

        Returns:
            The layout, on the device of the first argument that is on an accelerator, else on the CPU.

        Raises:
            ValueError: If an argument is neither a matrix nor packed rows, or none says where rows end.
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
                    f"tokens: got {', '.join(names) or 'nothing'} without rows, expected a matrix (B, R), or "
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
        """Whether rows lie end to end."""
        return self.lengths is not None

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1] Where each packed row begins, and the end."""
        return offsets_of(self.lengths or [])

    @cached_property
    def counts(self) -> torch.Tensor:
        """[B] int64: how many tokens of each row count."""
        if self.lengths is None:
            return self.mask.sum(-1)
        ends = torch.cat([self.mask.new_zeros(1, dtype=torch.int64), self.mask.cumsum(0)])
        bounds = torch.cat([self.row_lengths.new_zeros(1), self.row_lengths.cumsum(0)])
        return ends[bounds[1:]] - ends[bounds[:-1]]

    @cached_property
    def row_lengths(self) -> torch.Tensor:
        """[B] int64: how many slots each row has."""
        if self.lengths is None:
            return torch.full((self.rows,), self.shape[1], device=self.mask.device)
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.mask.device)

    @cached_property
    def row_of(self) -> torch.Tensor:
        """[of `shape`] int64: which row a token belongs to."""
        return self.spread(torch.arange(self.rows, device=self.mask.device))

    def take(self, name: str, argument: PerToken) -> torch.Tensor:
        """Convert an argument to a float32 or float64 tensor.

        Args:
            name: What errors call it.
            argument: [B, R] or packed, in this layout.

        Returns:
            [of `shape`] 0 where the mask is False.

        Raises:
            ValueError: If it is `None`, no numbers, or in another layout.
        """
        return self.masked(as_floats(self.tensor(name, argument)))

    def masked(self, tensor: torch.Tensor) -> torch.Tensor:
        """[of `shape`] Replace entries where the mask is False by 0; no gradient flows there."""
        return torch.where(self.mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

    def tensor(self, name: str, argument: PerToken) -> torch.Tensor:
        """[of `shape`] Convert an argument to a tensor of its own type, without masking; arguments as of `take`."""
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
            odd = next((i for i, part in enumerate(parts) if part.dim() != 1), None)
            if odd is not None:
                raise ValueError(f"{name}: row {odd} has {parts[odd].dim()} dimensions, expected 1")
            lengths = [len(part) for part in parts]
            filled = [part for part in parts if len(part)]  # an empty list has no type
            tensor = torch.cat(filled) if filled else torch.empty(0, device=self.mask.device)
        if lengths != self.lengths:
            raise ValueError(f"{name}: got rows of lengths {_some(lengths)}, expected {self._expected()}")
        return tensor

    def narrowed(self, mask: torch.Tensor) -> Layout:
        """The same layout with fewer tokens that count."""
        return Layout(self.shape, self.lengths, self.mask & mask, self.column, self.flat)

    def give(self, tensor: torch.Tensor) -> Any:
        """A result (`shape`) in the layout that the mask, or else the first argument, came in: a matrix, `Rows`, or a
        `Ragged` column."""
        if self.lengths is None:
            return tensor
        return as_column(tensor, self.offsets) if self.column else Rows(tensor, self.lengths)

    def row_sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B] The sum over each row's tokens that count; 0 for a row that has none."""
        counted = self.masked(tensor).to(
            torch.float64
        )  # added up one by one if packed: thousands of float32 would drift
        if self.lengths is None:
            return counted.sum(-1).to(tensor.dtype)
        if not self.lengths:
            return tensor.new_zeros(0)
        return torch.segment_reduce(counted, "sum", lengths=self.row_lengths, unsafe=True, initial=0).to(tensor.dtype)

    def row_means(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B] The mean over each row's tokens that count; 0 for a row that has none."""
        return self.row_sums(tensor) / self.counts.clamp(min=1)

    def spread(self, per_row: torch.Tensor) -> torch.Tensor:
        """[of `shape`] Each row's number on all of its slots."""
        if self.lengths is None:
            return per_row[:, None].expand(self.shape)
        if per_row.device.type == "cpu" and not per_row.requires_grad and per_row.dtype in NUMPY:
            return torch.from_numpy(np.repeat(per_row.numpy(), self.lengths))  # some forty times as fast
        return torch.repeat_interleave(per_row, self.row_lengths, output_size=self.shape[0])

    def _expected(self) -> str:
        if self.lengths is None:
            return f"{list(self.shape)}, as the other tokens have"
        return f"{self.rows} packed rows of lengths {_some(self.lengths)}, or their {self.shape[0]} values end to end"


def _some(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, ...]"


def _size(name: str, argument: PerToken) -> tuple[int, ...] | list[int]:
    """The shape of a matrix (B, R) or of values end to end (total,), or the lengths of packed rows as a list."""
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
    """The first accelerator that one of the rows is on, else the CPU."""
    for row in rows:
        if isinstance(row, torch.Tensor) and row.device.type != "cpu":
            return row.device
    return _CPU


def as_column(values: torch.Tensor, offsets: NDArray[np.int64]) -> Ragged:
    """Rows end to end, (total,), as a column on the same memory."""
    name = str(values.dtype).removeprefix("torch.")
    return Ragged(memory(values.detach().cpu()).view(DTYPES[name].storage), offsets, name, owned=True)


def as_tensor(name: str, value: Numbers, device: torch.device | str = "cpu") -> torch.Tensor:
    """Numbers as a tensor: a tensor as it is, an array of its own type, Python numbers as float32 or int64."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
        else:
            tensor = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: got what is no array of numbers: {error}") from None
    return tensor.to(device)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of float32, or of float64 if they are that: what is computed in, whatever came.

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
    """A mask of any type as bool, once it is known to hold 0 and 1 only (weights are another argument).

    On a device that is not looked at, since it would wait: what is not 0 counts there.
    """
    if value.dtype == torch.bool:
        return value
    if value.device.type != "cpu":
        return value != 0
    entries = memory(value if value.dtype in NUMPY else value.float())  # numpy compares ten times as fast as torch
    mask = entries == 1
    if not np.array_equal(mask, entries != 0):
        odd = entries[~mask & (entries != 0)]
        raise ValueError(f"{name}: got {odd[0].item()}, expected 0 and 1 only (weights of tokens are not a mask)")
    return torch.from_numpy(mask)


def is_per_row(layout: Layout, name: str, value: PerToken | PerRow) -> bool:
    """Whether a value has one entry for each row, (B,), and not for each token.

    Among packed tokens both values end to end and numbers of rows are flat. Where B rows have B tokens in all, but not
    one each, a flat tensor is taken for numbers of rows, and refused if other tokens of the call are end to end, too.

    >>> layout = Layout.of(None, logprobs=[[-1.0, -2.0], [-3.0]])
    >>> [is_per_row(layout, "weights", value) for value in ([1.0, 2.0], [[1.0, 2.0], [3.0]], torch.ones(3))]
    [True, False, False]
    >>> is_per_row(Layout.of(None, logprobs=[[-1.0, -2.0], []]), "weights", torch.ones(2))
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
    """[B] Numbers of rows, of at least float32.

    >>> row_numbers(Layout.of(torch.ones(2, 3)), "rewards", [1, 0])
    tensor([1., 0.])
    """
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    return as_floats(tensor)


def row_flags(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """[B] Whether something holds for each row, as bool.

    >>> row_flags(Layout.of(torch.ones(2, 3)), "chosen", [1, 0])
    tensor([ True, False])
    """
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    odd = tensor[(tensor != 0) & (tensor != 1)]
    if len(odd):
        raise ValueError(f"{name}: got {odd[0].item()}, expected 0 and 1 only, or False and True")
    return tensor != 0


def on_tokens(layout: Layout, name: str, value: PerToken | PerRow) -> torch.Tensor:
    """[of `layout.shape`] Numbers of tokens, or of rows put on all tokens of each.

    >>> on_tokens(Layout.of(torch.tensor([[1, 1, 0], [1, 0, 0]])), "advantages", [0.5, -1.0])
    tensor([[ 0.5000,  0.5000,  0.0000],
            [-1.0000,  0.0000,  0.0000]])
    """
    # A column is of tokens, which `is_per_row` knows too, but a type checker does not.
    if not isinstance(value, Ragged) and is_per_row(layout, name, value):
        return layout.masked(layout.spread(row_numbers(layout, name, value)))
    return layout.take(name, value)


def optional_number(name: str, value: float | None, low: float, expected: str) -> None:
    """Refuse an option that is neither `None` nor a number above `low`.

    >>> optional_number("dual_clip", 1.0, 1, "a number above 1")
    Traceback (most recent call last):
        ...
    ValueError: dual_clip: got 1.0, expected a number above 1, or None
    """
    if value is not None and check_float(name, value, low, what=f"{expected}, or None") == low:
        raise ValueError(f"{name}: got {value!r}, expected {expected}, or None")


def state_of(state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """A state that was saved, once it is known to have these fields and no others.

    >>> state_of({"value": 1.0}, ("value",))
    {'value': 1.0}
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {type(state).__name__}, expected a mapping of {', '.join(names)}")
    if set(state) != set(names):
        raise ValueError(f"state: got {', '.join(map(str, state)) or 'nothing'}, expected {', '.join(names)}")
    return state
