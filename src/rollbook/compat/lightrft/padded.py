"""Forward passes over one padded batch of tensors on the CPU, by models that take LightRFT's arguments.

Invariant: the batch is the one that `batch_of`, `Passes.run` and the KL of `NaiveExperienceMaker` give together. These
cut every field to the samples' own tokens and pad it again; here a field is copied once, row by row.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.compat.lightrft.batch import ExperienceBatch, Samples
from rollbook.compat.lightrft.passes import Passes, checked_answer, is_planned
from rollbook.compat.lightrft.rollout_batches import mean_by_row
from rollbook.compat.lightrft.samples import lengths_of_samples
from rollbook.core.metrics import Progress, Stages
from rollbook.core.rows import NUMPY, empty, memory


def padded_experience(samples: Samples, passes: Passes, stages: Stages, bar: Progress) -> ExperienceBatch | None:
    """Ask the models for a batch's log-probs and values, and measure the KL by its estimator k1.

    Returns:
        The batch, with `response_length`, `total_length` and the mean `kl` in `info`. `None` if the general path is
        needed: samples of an engine, packed or on a device, a row without a prompt, an action that is not attended, no
        policy or no reference, models that plan their own forward passes.
    """
    if type(samples) is not Samples:
        return None
    models = passes.models
    tokens, attention, actions = samples.sequences, samples.attention_mask, samples.action_mask
    if samples.rollouts is not None or samples.packed_seq_lens is not None or not _plain(tokens, attention, actions):
        return None
    if (
        "policy" not in models
        or "reference" not in models
        or "teacher" in models
        or any(map(is_planned, models.values()))
    ):
        return None
    attended = memory(attention)
    attended = attended if attended.dtype == np.bool_ else attended != 0
    mask = memory(actions)
    ends = _response_ends(attended, mask)
    if ends is None:
        return None
    columns: dict[str, torch.Tensor] = {}
    count = int(np.count_nonzero(attended))
    for name, model in models.items():
        with stages(name) as stage:
            if callable(getattr(model, "eval", None)):
                model.eval()
            answer = checked_answer(model, model(tokens, actions.shape[1], attention), tuple(actions.shape))
            columns[name] = _own_slots(answer, mask, ends)
            stage["tokens"] = count
        bar.advance()
    responses, totals = lengths_of_samples(samples)
    kl, means = _token_kl(columns["policy"], columns["reference"], mask, ends)
    batch = ExperienceBatch(
        tokens,
        columns["policy"],
        columns["reference"],
        columns.get("values"),
        None,
        None,
        attention,
        actions,
        {"kl": means, "response_length": responses, "total_length": totals},
        kl,
        None,
        samples.labels,
        samples.references,
    )
    if samples.ids is not None:
        batch.ids = list(samples.ids)
    return batch


def _plain(tokens: Any, attention: Any, actions: Any) -> bool:
    """Whether all three are matrices on the CPU that fit together."""
    for matrix in (tokens, attention, actions):
        if type(matrix) is not torch.Tensor or not matrix.is_cpu or matrix.dim() != 2:
            return False
    fit = tokens.shape == attention.shape and len(actions) == len(tokens) and actions.shape[1] <= tokens.shape[1]
    return fit and len(tokens) > 0 and actions.dtype == torch.bool and attention.dtype in NUMPY


def _response_ends(attended: NDArray[np.bool_], mask: NDArray[np.bool_]) -> list[int] | None:
    """[B] How many response slots each row has up to its last attended token; `None` if a row has no prompt, or an
    action that is not attended."""
    count, width = attended.shape
    begin = width - mask.shape[1]
    if np.greater(mask, attended[:, begin:]).any():
        return None
    flags, ends = attended.tobytes(), []  # searched as text, which takes a fraction of numpy's time
    for start in range(0, count * width, width):
        response = start + begin
        if flags.find(1, start, response) < 0:
            return None
        ends.append(max(flags.rfind(1, response, start + width) - response + 1, 0))
    return ends


def _own_slots(answer: torch.Tensor, mask: NDArray[np.bool_], ends: list[int]) -> torch.Tensor:
    """[B, A] A copy as float32, 0 after each row's end, and 0 for what is no number where nothing counts."""
    source = answer.detach().float().cpu().numpy()
    copied = empty(source.shape, torch.float32)
    matrix, squares = copied.numpy(), 0.0
    # Row by row: of a large batch most is padding, which is not read.
    for target, row, end in zip(matrix, source, ends, strict=True):
        part = row[:end]
        target[:end] = part
        target[end:] = 0
        squares += float(part.dot(part))
    if not isfinite(squares):  # some number is not finite, or the sum overflows
        matrix[~(mask | np.isfinite(matrix))] = 0
    return copied


def _token_kl(
    policy: torch.Tensor, reference: torch.Tensor, mask: NDArray[np.bool_], ends: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, A] The difference of log-probs, 0 where nothing counts, and [B] its mean over the slots that count."""
    kl = empty(mask.shape, torch.float32)
    matrix, counts, parts = kl.numpy(), np.array(ends), []
    with np.errstate(invalid="ignore"):
        for target, ours, base, end in zip(matrix, policy.numpy(), reference.numpy(), ends, strict=True):
            parts.append(np.subtract(ours[:end], base[:end], out=target[:end]))
            target[end:] = 0
    lengths = counts
    if np.count_nonzero(mask) != counts.sum():
        matrix[~mask] = 0
        counts = np.count_nonzero(mask, axis=1)
    return kl, mean_by_row(np.concatenate(parts, dtype=np.float64), lengths, counts)
