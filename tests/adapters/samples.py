"""Records and batches for the adapters' tests: of every length, with every field, all of them or none with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.core.fields import FIELDS
from tests.strategies import make_tensor

LAYOUTS = ("left", "prompt_left_response_right", "packed")
LAYOUT = "prompt_left_response_right"
RESPONSE = ("logprobs", "old_logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs")
"""Fields that a test may give to all its records."""
TRL_NAMES = ("logprobs", "old_logprobs")
MORE = ("loss_weights", "policy_versions", "routed_experts")


def make_records(
    seed: int, count: int = 5, names: Sequence[str] = ("logprobs",), media: bool = False, **changes: Any
) -> Experiences:
    """Records of random lengths, of two tasks, some with tool tokens; `names` are the fields that all have."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        columns: dict[str, Any] = {
            "eid": EID(batch="b/1", task=int(rng.integers(2)), run=i, step=0, suffix=f"s{i}"),
            "tokens": rng.integers(1, 50, prompt + response).tolist(),
            "prompt_length": prompt,
            "reward": float(rng.normal()),
            "info": {"model_version": int(rng.integers(5)), "score": float(rng.normal()), "tag": f"t{i}"},
            "metrics": {"time": float(rng.random())},
            "messages": [{"role": "user", "content": f"q{i}"}],
            "response_text": f"r{i}",
        }
        if rng.random() < 0.5 and response > 1:
            mask = rng.integers(0, 2, response)
            mask[-1] = 1
            columns["action_mask"] = mask.tolist()
        for name in names:
            field = FIELDS[name]
            shape = (response, *[2] * field.trailing)
            if field.accepts == "integer":
                columns[name] = torch.from_numpy(rng.integers(0, 9, shape).astype(field.dtype))
            else:
                columns[name] = torch.from_numpy(rng.normal(size=shape).astype(field.dtype))
        if media and i % 3:
            grids = torch.tensor([[1, 2, 2 + j] for j in range(i % 3)])
            pixels = torch.from_numpy(rng.normal(size=(int(grids.prod(-1).sum()), 6)).astype(np.float32))
            columns["multi_modal_inputs"] = {"pixel_values": pixels, "image_grid_thw": grids}
        rows.append(Experience(**{**columns, **changes}))
    return Experiences(rows)


def make_batch(seed: int, layout: str = LAYOUT, media: bool = False) -> ExperienceBatch:
    """A batch with every field that a batch has and a record has not."""
    records = make_records(seed, names=("old_logprobs", "logprobs", "advantages", "returns", *MORE), media=media)
    batch = from_experiences(records, packing_samples=True)
    for name in ("base_action_log_probs", "values", "kl", "action_entropy"):
        batch.__setattr__(name, [torch.randn(len(row)) for row in batch.action_mask])
    batch.labels = [f"label {i}" for i in range(len(batch))]
    batch.references = [None, *range(1, len(batch))]
    return batch if layout == "packed" else batch.pad(layout=layout)


def scored_records(seed: int, count: int = 4, spread: float = 0.2) -> Experiences:
    """Records with log-probs that a fresh model of 64 words is near to, and one advantage for each."""
    rows = []
    for row in make_records(seed, count=count, names=TRL_NAMES):
        advantages = row.action_mask.float() * row.reward
        old_logprobs = -4.16 + spread * row.old_logprobs
        rows.append(row.replace(advantages=advantages, old_logprobs=old_logprobs, logprobs=old_logprobs + 0.1))
    return Experiences(rows)


def odd_bits(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Random bits: NaNs, infinities and subnormals too."""
    return make_tensor(dtype, (length,), seed)


EXPERT = CustomField("model_version", "expert_version", torch.int32)
