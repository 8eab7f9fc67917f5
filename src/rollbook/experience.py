"""Names of `trinity.common.experience`."""

from rollbook.compat.trinity import *
from rollbook.compat.trinity import __all__ as __all__
