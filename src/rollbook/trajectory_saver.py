"""Names of `lightrft.utils.trajectory_saver`."""

from rollbook.compat.lightrft.saver import *
from rollbook.compat.lightrft.saver import __all__ as __all__
