"""When two values of a record are equal: by value, all the way down, NaN equal to NaN."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: tensors and arrays by type, shape and value, NaN equal to NaN.

    >>> same({"a": [float("nan"), (1, 2)]}, {"a": [float("nan"), (1, 2)]}), same([1], (1,))
    (True, False)
    """
    if a is b:
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _same_tensors(a, b)
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        return _same_arrays(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        if len(a) != len(b):
            return False
        if all(key in b for key in a):
            return all(same(value, b[key]) for key, value in a.items())
        # A NaN among the keys is found by no look-up: compare in order.
        return all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    equal = a == b
    return equal if isinstance(equal, bool) else False


def _same_tensors(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta or b.is_meta or a.layout != b.layout:
        return False
    if str(a.layout) != "torch.strided":
        a, b = a.to_dense(), b.to_dense()

    if not (a.is_floating_point() or a.is_complex()):
        return bool((a.detach().cpu() == b.detach().cpu()).all())
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.element_size() == 1:
        a, b = a.float(), b.float()  # 8-bit floats have no arithmetic of their own
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same_arrays(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = np.asarray(a == b)
    if a.dtype.kind in "fcmM":
        equal = equal | ((a != a) & (b != b))
    return bool(equal.all())
