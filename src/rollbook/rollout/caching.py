"""A cache of keys and values with room to grow: a token is written into it, rather than all that came before copied.

Invariant: what a layer gives equals all states it was given, end to end, as those of `transformers.DynamicCache` do,
and then zeros up to a multiple of `step`.

Concatenating at each token copies the whole cache, and leaves a trail of ever larger blocks behind in the memory of a
CUDA device. Here the room is doubled when it is used up, and never made larger than the batch can come to need.
A length that is new at every token is slow where kernels are planned for each length, as cuDNN's are: hence `step`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def room(cache: Any, most: int, step: int = 1) -> Any:
    """The same cache, still empty, whose plain attention layers have room for up to `most` tokens at last; layers of
    other kinds (sliding windows, linear attention) are left as they are.

    With a `step` above 1, keys and values are shown after the first call with zeros up to its next multiple: the model
    must have a mask, by positions, that hides them.

    >>> from transformers import DynamicCache, LlamaConfig
    >>> cache = room(DynamicCache(config=LlamaConfig(num_hidden_layers=1)), 100, step=8)
    >>> keys = torch.ones(1, 2, 3, 4)
    >>> for _ in range(3):
    ...     grown, _ = cache.update(keys, keys, 0)
    >>> grown.shape, cache.get_seq_length()
    (torch.Size([1, 2, 16, 4]), 9)
    """
    from transformers.cache_utils import DynamicLayer

    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _roomy()(most, step)
    return cache


@functools.cache
def _roomy() -> Any:
    """The class of such layers, made when transformers is first needed."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        """Keys and values (rows, heads, tokens, size) that are the first part of larger tensors."""

        def __init__(self, most: int, step: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.most, self.step = most, step
            self.length = 0
            self.whole: tuple[torch.Tensor, torch.Tensor] | None = None
            self.shown: torch.Tensor | None = None

        def get_seq_length(self) -> int:
            return self.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            new = self.length + query_length
            return (self._rounded(new) if self.length else new), 0

        def reset(self) -> None:
            self.length, self.whole = 0, None
            super().reset()

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            old, self.length = self.length, self.length + key_states.shape[-2]
            if not old or self.keys is None or self.values is None:
                self.keys, self.values = key_states, value_states  # a prompt's: its rows may be repeated first
                return self.keys, self.values
            show = self._rounded(self.length)
            # Whoever selects rows puts other tensors in place of those shown; then the room is gone.
            if self.whole is None or self.keys is not self.shown or self.whole[0].shape[-2] < show:
                size = max(show, self._rounded(min(self.most, 2 * self.length)))
                self.whole = (_extended(self.keys, old, size), _extended(self.values, old, size))
            for kept, states in zip(self.whole, (key_states, value_states), strict=True):
                kept[..., old : self.length, :] = states
            self.keys, self.values = (kept[..., :show, :] for kept in self.whole)
            self.shown = self.keys
            return self.keys, self.values

        def _rounded(self, length: int) -> int:
            return -(-length // self.step) * self.step

    return RoomyLayer


def _extended(states: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """The first `length` states in a larger tensor, with zeros after them: what is masked must not be NaN."""
    made = states.new_zeros((*states.shape[:-2], size, states.shape[-1]))
    made[..., :length, :] = states[..., :length, :]
    return made
