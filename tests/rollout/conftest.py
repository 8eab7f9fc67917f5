"""One thread: at the size of these models more of them only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
