"""Encode and decode records; see `rollbook.core.wire`."""

from rollbook.core.wire import *
from rollbook.core.wire import __all__ as __all__
