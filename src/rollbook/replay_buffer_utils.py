"""Names of `lightrft.trainer.replay_buffer_utils`."""

from rollbook.compat.lightrft.replay_buffer import *
from rollbook.compat.lightrft.replay_buffer import __all__ as __all__
