"""Names of `lightrft.trainer.experience_maker`."""

from rollbook.compat.lightrft.maker import *
from rollbook.compat.lightrft.maker import __all__ as __all__
