"""LightRFT's technique for saving trajectories, written anew from what it was observed to do.

No copy of its code: same content, same kind and number of steps (commit 49e62cb observed), own words. Its defects are
kept, since they are part of its cost: texts begin one token early and end one early, entropies stand on the token
before theirs, and every token is decoded alone, once for each of two lists.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

PATTERNS = {
    "let_me_think": r"\blet\s+me\s+think\b",
    "let_me_reconsider": r"\blet\s+me\s+reconsider\b",
    **{word: rf"\b{word}\b" for word in ("actually", "wait", "correction", "mistake", "wrong", "rethink")},
}


def repetition(text: str) -> float:
    """The score by prefix doubling over Python lists, all rounds, and a walk over neighbours for their prefixes."""
    size = len(text)
    if size <= 1:
        return 0.0
    codes = list(map(ord, text))
    ranks = _compressed(codes)
    reach = 1
    while reach < size - 1:
        ranks = _compressed([(rank, ranks[i + reach] if i + reach < size else -1) for i, rank in enumerate(ranks)])
        reach *= 2
    order = [0] * size
    for i, rank in enumerate(ranks):
        order[rank] = i
    total = shared = 0
    for i in range(size):
        if ranks[i] == size - 1:
            shared = 0
            continue
        j = order[ranks[i] + 1]
        while i + shared < size and j + shared < size and codes[i + shared] == codes[j + shared]:
            shared += 1
        total += shared
        shared = max(shared - 1, 0)
    return 2 * total / (size * (size + 1))


def _compressed(values: list[Any]) -> list[int]:
    places = {value: i for i, value in enumerate(sorted(set(values)))}
    return [places[value] for value in values]


def reflections(text: str) -> dict[str, int]:
    """Each phrase by a search of its own."""
    return {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, pattern in PATTERNS.items()}


def marks(entropy: torch.Tensor, mask: torch.Tensor, ratio: float) -> torch.Tensor:
    """[A] 1 on the highest entropies, of which masked ones count as 0."""
    marked = torch.zeros_like(entropy)
    count = max(1, int(mask.sum().item() * ratio))
    marked[(entropy * mask).topk(count).indices] = 1
    return marked


def save(batches: list[Any], tokenizer: Any, folder: Path, step: int, ratio: float) -> tuple[Path, dict[str, float]]:
    """All samples of the batches, with entropy marks, to one file; and the means."""
    records: list[dict[str, Any]] = []
    for number, batch in enumerate(batches):
        texts = tokenizer.batch_decode(batch.sequences, skip_special_tokens=False)
        start = batch.sequences.shape[1] - batch.action_mask.shape[1] - 1
        for i in range(len(batch.sequences)):
            slots = batch.action_mask[i].nonzero(as_tuple=True)[0]
            states = batch.sequences[i][slots + start]
            text = tokenizer.decode(states, skip_special_tokens=True)
            pure = tokenizer.decode(states[1:], skip_special_tokens=True)
            record: dict[str, Any] = {
                "global_step": step,
                "experience_index": number,
                "sample_in_exp": i,
                "full_sequence": texts[i],
                "generated_text": text,
                "pure_generated_text": pure,
                "label": None,
                "reference": None,
                "repeat_score": repetition(pure),
                "reflection_pattern_score": sum(reflections(pure).values()),
                "reflection_pattern_details": reflections(pure),
                "policy_entropy": abs(torch.std(batch.action_log_probs[i]).item()),
                "response_token_count": len(states) - 1,
            }
            marked = marks(batch.action_entropy[i], batch.action_mask[i], ratio)
            for name, first in (("generated_tokens", 0), ("pure_generated_tokens", 1)):
                record[name] = [
                    _token(tokenizer, states[j], marked[slots[j]], batch.action_entropy[i][slots[j]])
                    for j in range(first, len(states))
                ]
            for name, field in (("advantages", "advantages"), ("return", "returns"), ("action_log_probs",) * 2):
                record[name] = getattr(batch, field)[i].tolist()
            record["info"] = {
                key: value[i].item() for key, value in batch.info.items() if isinstance(value, torch.Tensor)
            }
            record["has_images"] = False
            records.append(record)
    path = folder / f"trajectories_step_{step}.json"
    with open(path, "w", encoding="utf-8") as file:
        json.dump(records, file, indent=2, ensure_ascii=False)
    names = ("repeat_score", "reflection_pattern_score", "policy_entropy", "response_token_count")
    return path, {name: sum(record[name] for record in records) / len(records) for name in names}


def _token(tokenizer: Any, token: torch.Tensor, marked: torch.Tensor, entropy: torch.Tensor) -> dict[str, Any]:
    text = tokenizer.decode([token.item()], skip_special_tokens=True)
    if marked.item() > 0:
        return {"text": text, "high_entropy": True, "entropy_score": entropy.item()}
    return {"text": text, "high_entropy": False}
