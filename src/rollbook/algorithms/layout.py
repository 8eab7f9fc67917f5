"""Where the tokens of many rows lie: padded to a matrix, or packed end to end; and sums over tokens and over rows.

Invariant: whatever is computed through a `Layout` is the same, value and gradient, for padded and packed tokens; what
the mask leaves out is replaced by zero before anything is computed from it, so that NaN and infinity there touch
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.checks import check_float
from rollbook.core.fields import DTYPES
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import NUMPY, Rows, memory

PerToken: TypeAlias = torch.Tensor | NDArray[Any] | Rows | Ragged | Sequence[Any]
"""An entry for each token of B rows: a padded matrix (B, A), or packed: `Rows`, a `Ragged` column, a list of rows."""
PerRow: TypeAlias = torch.Tensor | NDArray[Any] | Sequence[Any]
"""One entry for each row: (B,)."""


class Layout:
    """The shape that all token arguments of one call share, and the mask over it.

    Tokens are *padded*, a matrix (B, A), or *packed*: `Rows` (or a list of B one-dimensional rows of any length). A
    function takes arguments by `take`, computes on plain tensors, (B, A) or (total,), and gives results back by `give`
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
        """(B, A) if padded, (total,) if packed."""
        self.lengths = lengths
        """How many tokens each packed row has; `None` if padded."""
        self.mask = mask
        """[of `shape`] bool: which tokens count."""
        self.column = column
        """Whether results are given back as a `Ragged` column, since the tokens came as one."""
        self.flat = flat
        """Whether some packed tokens came as a one-dimensional tensor, end to end."""

    @classmethod
    def of(cls, mask: PerToken | None, **tokens: PerToken | None) -> Layout:
        """The layout of a mask and of arguments by name; all must agree, which `take` checks one by one.

        A matrix among them makes the tokens padded, and nested lists beside it are matrices too; else they are packed.
        A one-dimensional tensor is all rows end to end, and says nothing of where they end.
        """
        given = {name: value for name, value in {"mask": mask, **tokens}.items() if value is not None}
        shapes = {name: _shape(name, value) for name, value in given.items()}
        matrices = (shape for shape in shapes.values() if isinstance(shape, tuple) and len(shape) == 2)
        shape: tuple[int, ...] | None = next(matrices, None)
        lengths: list[int] | None = None
        if shape is None:
            lengths = next((shape for shape in shapes.values() if isinstance(shape, list)), None)
            if lengths is None:
                raise ValueError(
                    f"tokens: got {', '.join(given) or 'nothing'} without rows, expected a matrix (B, A), or "
                    "Rows(values, lengths) for packed tokens"
                )
            shape = (sum(lengths),)
        first = next(iter(given.values()))
        flat = lengths is not None and any(isinstance(shape, tuple) for shape in shapes.values())
        self = cls(shape, lengths, torch.empty(0, device=_device(given.values())), isinstance(first, Ragged), flat)
        if isinstance(first, Ragged):
            self.offsets = first.offsets - first.offsets[0]
        if mask is None:
            self.mask = torch.ones(shape, dtype=torch.bool, device=self.mask.device)
        else:
            self.mask = as_mask("mask", self.whole("mask", mask))
        return self

    @property
    def packed(self) -> bool:
        """Whether rows lie end to end."""
        return self.lengths is not None

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.shape[0] if self.lengths is None else len(self.lengths)

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

    def take(self, name: str, value: PerToken) -> torch.Tensor:
        """[of `shape`] An argument as a plain tensor of float32 or float64, with zero wherever the mask is False."""
        return self.masked(as_floats(self.whole(name, value)))

    def masked(self, tensor: torch.Tensor) -> torch.Tensor:
        """[of `shape`] The tensor, with zero wherever the mask is False; no gradient flows there."""
        return torch.where(self.mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

    def whole(self, name: str, value: PerToken) -> torch.Tensor:
        """[of `shape`] An argument as a plain tensor of its own type, nothing replaced."""
        if value is None:
            raise ValueError(f"{name}: got None, expected {self._expected()}")
        if isinstance(value, Rows):
            lengths, tensor = value.lengths, value.values
        elif isinstance(value, Ragged):
            lengths = value.lengths.tolist()
            tensor = value.tensor_of_values()[int(value.offsets[0]) : int(value.offsets[-1])]
        elif isinstance(value, (torch.Tensor, np.ndarray)) or not self.packed:
            tensor = as_tensor(name, value, self.mask.device)
            if tuple(tensor.shape) != self.shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {self._expected()}")
            return tensor
        elif not isinstance(value, Sequence):
            raise ValueError(f"{name}: got {type(value).__name__}, expected {self._expected()}")
        else:
            parts = [as_tensor(f"{name}: row {i}", row, self.mask.device) for i, row in enumerate(value)]
            odd = next((i for i, part in enumerate(parts) if part.dim() != 1), None)
            if odd is not None:
                raise ValueError(f"{name}: row {odd} has {parts[odd].dim()} dimensions, expected 1")
            lengths = [len(part) for part in parts]
            filled = [part for part in parts if len(part)]  # an empty list has no type of its own
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
        kept = self.masked(tensor).to(torch.float64)  # added up one by one if packed: thousands of float32 would drift
        if self.lengths is None:
            return kept.sum(-1).to(tensor.dtype)
        if not self.lengths:
            return tensor.new_zeros(0)
        return torch.segment_reduce(kept, "sum", lengths=self.row_lengths, unsafe=True, initial=0).to(tensor.dtype)

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


def _shape(name: str, value: Any) -> tuple[int, ...] | list[int]:
    """(B, A) of a matrix, (total,) of values end to end, a list of the lengths of rows."""
    if isinstance(value, Rows):
        return value.lengths
    if isinstance(value, Ragged):
        return list(value.lengths.tolist())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim not in (1, 2):
            raise ValueError(f"{name}: got {value.ndim} dimensions, expected 2 (B, A), or packed rows")
        return tuple(value.shape)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a matrix (B, A), or packed rows")
    try:
        return [len(row) for row in value]
    except TypeError:
        raise ValueError(f"{name}: got a flat list, expected one row for each sample") from None


def _device(values: Any) -> torch.device:
    """Where results are made: with the first argument on a device, else on the CPU."""
    found = torch.device("cpu")
    for value in values:
        held = value.values if isinstance(value, Rows) else value
        for tensor in held if isinstance(held, list) else [held]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                return tensor.device
    return found


def as_column(values: torch.Tensor, offsets: NDArray[np.int64]) -> Ragged:
    """Rows end to end, (total,), as a column on the same memory."""
    name = str(values.dtype).removeprefix("torch.")
    return Ragged(memory(values.detach().cpu()).view(DTYPES[name].storage), offsets, name, owned=True)


def as_tensor(name: str, value: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    """Numbers as a tensor: a tensor as it is, an array of its own type, Python numbers as float32 or int64."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            made = torch.from_numpy(native if native.flags.writeable else native.copy())
        else:
            made = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: got what is no array of numbers: {error}") from None
    return made.to(device)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of float32, or of float64 if they are that: what is computed in, whatever came.

    >>> as_floats(torch.ones(1, dtype=torch.bfloat16)).dtype, as_floats(torch.ones(1, dtype=torch.int64)).dtype
    (torch.float32, torch.float32)
    """
    if not tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def alike(**given: Any) -> list[torch.Tensor]:
    """Numbers of at least float32, all of the first argument's shape; lists join whichever is on a device.

    >>> alike(logprobs=[-1, -2], ref_logprobs=torch.zeros(2, dtype=torch.float64))
    [tensor([-1., -2.]), tensor([0., 0.], dtype=torch.float64)]
    """
    devices = [value.device for value in given.values() if isinstance(value, torch.Tensor)]
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    found = {name: as_tensor(name, value, device) for name, value in given.items()}
    first = next(iter(found))
    for name, tensor in found.items():
        if tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, expected {device}, where the others are")
        if tensor.shape != found[first].shape:
            shapes = f"got shape {list(tensor.shape)}, expected {list(found[first].shape)}"
            raise ValueError(f"{name}: {shapes}, as {first} have")
    return [as_floats(tensor) for tensor in found.values()]


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
        got = value if value is None or isinstance(value, (int, float)) else type(value).__name__
        raise ValueError(f"{name}: got {got}, expected one number for each row or token: (B,), (B, A), or packed")
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


def constant(layout: Layout, value: float) -> torch.Tensor:
    """[of `layout.shape`] One number on every slot, for a metric that is the same for all tokens.

    >>> constant(Layout.of(torch.ones(1, 2)), 0.1)
    tensor([[0.1000, 0.1000]])
    """
    return torch.full(layout.shape, float(value), device=layout.mask.device)


def optional_number(name: str, value: Any, low: float, what: str) -> None:
    """Refuse an option that is neither `None` nor a number above `low`.

    >>> optional_number("dual_clip", 1.0, 1, "a number above 1")
    Traceback (most recent call last):
        ...
    ValueError: dual_clip: got 1.0, expected a number above 1, or None
    """
    if value is not None and check_float(name, value, low, what=f"{what}, or None") == low:
        raise ValueError(f"{name}: got {value!r}, expected {what}, or None")


def state_of(state: Any, names: Collection[str]) -> Mapping[str, Any]:
    """A state that was saved, once it is known to have these fields and no others.

    >>> state_of({"value": 1.0}, ("value",))
    {'value': 1.0}
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {type(state).__name__}, expected a mapping of {', '.join(names)}")
    if set(state) != set(names):
        raise ValueError(f"state: got {', '.join(map(str, state)) or 'nothing'}, expected {', '.join(names)}")
    return state
