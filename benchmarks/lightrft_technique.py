"""LightRFT's technique for splitting, unpadding and batching, written anew from what it was observed to do.

LightRFT has no wheel that can be installed beside this project, so its released code cannot be the peer. What follows
is no copy of it: same results, same kind and number of tensor operations per item and field (commit 49e62cb observed),
own words. Text only, and only what the comparison calls; its defects are kept, since they are part of its cost:

- splitting gives views of the padded batch, so every item keeps all of it alive;
- unpadding cuts as many slots from the right as the action mask has zeros *anywhere*, in place;
- batching pads each row by itself, to the left with zeros, and stacks the padded rows: each byte is written twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TENSORS = (
    "sequences",
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
    "attention_mask",
    "action_mask",
    "action_entropy",
)
"""The nine fields that travel with an item, padded each to its own longest row."""


@dataclass
class Item:
    """One sample: every field (S,) or (A,), or None."""

    sequences: Tensor
    action_log_probs: Tensor
    base_action_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor
    advantages: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    info: dict[str, Any]
    action_entropy: Tensor | None = None


@dataclass
class Batch:
    """Many samples: every field (B, S) or (B, A), a list of (S,) or (A,) when packed, or None."""

    sequences: Any
    action_log_probs: Any
    base_action_log_probs: Any
    values: Any
    returns: Any
    advantages: Any
    attention_mask: Any
    action_mask: Any
    info: dict[str, Any]
    kl: Any = None
    action_entropy: Any = None
    labels: Any = None
    references: Any = None


def split_experience_batch(batch: Batch) -> list[Item]:
    """One item per row; its tensors are views of the batch, one-element `info` entries become Python numbers."""
    size = len(batch.sequences)
    columns_of_items: list[dict[str, Any]] = [{"info": {}} for _ in range(size)]
    for name in TENSORS:
        column = getattr(batch, name)
        if column is None:
            rows: Sequence[Any] = [None] * size
        else:
            rows = torch.unbind(column) if isinstance(column, Tensor) else column
        for fields, row in zip(columns_of_items, rows, strict=True):
            fields[name] = row
    for key, entry in batch.info.items():
        if isinstance(entry, Tensor):
            values: Sequence[Any] = [v.item() if v.numel() == 1 else v for v in torch.unbind(entry)]
        elif isinstance(entry, list) and len(entry) == size:
            values = entry
        else:
            values = [entry] * size
        for fields, value in zip(columns_of_items, values, strict=True):
            fields["info"][key] = value
    return [Item(**fields) for fields in columns_of_items]


def remove_padding_in_sequences(items: list[Item]) -> list[Item]:
    """The same items with shorter views, cut at the first attended token and by the *count* of masked slots."""
    for item in items:
        left = item.attention_mask.long().argmax()
        masked = (1 - item.action_mask.long()).sum()
        stop = None if masked == 0 else -masked
        item.sequences = item.sequences[left:stop]
        item.attention_mask = item.attention_mask[left:stop]
        item.action_log_probs = item.action_log_probs[:stop]
        item.returns = item.returns[:stop]
        item.advantages = item.advantages[:stop]
        item.action_mask = item.action_mask[:stop]
        if item.base_action_log_probs is not None:
            item.base_action_log_probs = item.base_action_log_probs[:stop]
        if item.values is not None:
            item.values = item.values[:stop]
        if item.action_entropy is not None:
            item.action_entropy = item.action_entropy[:stop]
    return items


def owned(items: list[Item]) -> list[Item]:
    """The items with a copy of each tensor, where others must not see what is written into them."""
    for item in items:
        for name in TENSORS:
            value = getattr(item, name)
            if value is not None:
                setattr(item, name, value.clone())
    return items


def zero_pad_sequences(sequences: Sequence[Tensor], side: str = "left") -> Tensor:
    """(B, longest): each row padded with zeros by itself, then all of them stacked."""
    longest = max(len(row) for row in sequences)
    padded = []
    for row in sequences:
        missing = longest - len(row)
        padded.append(F.pad(row, (missing, 0) if side == "left" else (0, missing)))
    return torch.stack(padded)


def make_experience_batch(items: Sequence[Item], packing_samples: bool = False) -> Batch:
    """The items as one batch, padded on the left, or as lists; the first item decides which fields there are."""
    columns: dict[str, Any] = {}
    for name in TENSORS:
        rows = [getattr(item, name) for item in items]
        if rows[0] is None:
            columns[name] = None
        elif packing_samples and name != "action_entropy":
            columns[name] = rows
        else:
            columns[name] = zero_pad_sequences(rows, "left")
    info: dict[str, Any] = {}
    for key in items[0].info:
        entries = [item.info[key] for item in items]
        info[key] = torch.tensor(entries) if isinstance(entries[0], (int, float, bool)) else entries
    return Batch(info=info, **columns)


def end_to_end(batch: Batch) -> dict[str, Any]:
    """What its trainer makes of a packed batch: a tensor for each list, lengths, an attention mask of row numbers."""
    columns = {name: getattr(batch, name) for name in TENSORS}
    columns["attention_mask"] = [torch.full_like(row, i) for i, row in enumerate(batch.sequences, 1)]
    joined: dict[str, Any] = {
        name: torch.cat(rows).unsqueeze(0) for name, rows in columns.items() if isinstance(rows, list)
    }
    joined["packed_seq_lens"] = [row.numel() for row in batch.sequences]
    joined["num_actions"] = [row.numel() for row in batch.advantages]
    return joined


class ReplayBuffer:
    """Split and unpadded items in a list; a sample is drawn without replacement and batched."""

    def __init__(
        self, sample_batch_size: int, limit: int = 0, packing_samples: bool = False, *, seed: int | None = None
    ) -> None:
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.packing_samples = packing_samples
        self.items: list[Item] = []
        self._random: Any = random if seed is None else random.Random(seed)

    @torch.no_grad()
    def append(self, batch: Batch) -> None:
        """Split, unpad unless packing, keep the newest `limit`."""
        items = split_experience_batch(batch)
        if not self.packing_samples:
            items = remove_padding_in_sequences(items)
        self.items.extend(items)
        if 0 < self.limit < len(self.items):
            self.items = self.items[-self.limit :]

    def sample(self) -> Batch:
        """`sample_batch_size` items at random, as a batch."""
        return make_experience_batch(self._random.sample(self.items, self.sample_batch_size), self.packing_samples)

    def normalize(self, attribute: str, strategy: Any = None) -> None:
        """Mean and deviation over all items end to end (its sum runs over masked slots too), then item by item."""
        rows = [getattr(item, attribute) for item in self.items]
        values = torch.cat(rows).float()
        mask = torch.cat([item.action_mask for item in self.items])
        mean = values.sum() / mask.sum()
        scale = ((values - mean).pow(2) * mask).sum().div(mask.sum()).clamp(min=1e-8).rsqrt()
        for item, row in zip(self.items, rows, strict=True):
            setattr(item, attribute, (row - mean) * scale)


# --- the maker and what is beside it ----------------------------------------------------------------------------------


def to(tensor: Any, device: Any) -> Any:
    """Tensors, and lists of them."""
    return [to(part, device) for part in tensor] if isinstance(tensor, list) else tensor.to(device)


@torch.no_grad()
def to_device(batch: Batch, device: Any) -> None:
    """Move all but base log-probs and `info`, in place."""
    for name in TENSORS:
        value = getattr(batch, name)
        if name != "base_action_log_probs" and value is not None:
            setattr(batch, name, to(value, device))


def is_vl_experience(batch: Any) -> bool:
    """By an attribute of the class."""
    return hasattr(batch, "pixel_values")


def clip_filter_like_weight_func(rewards: Tensor, clip_eps: float = 3.0, lamda: float = 1.0) -> Tensor:
    """Groups whose rewards are equal weigh `lamda`, the others as if there were as many as all."""
    flat = rewards.std(dim=-1) == 0
    groups, degenerate = len(rewards), int(flat.sum())
    if degenerate == groups:
        return torch.ones_like(rewards)
    weights = torch.full_like(rewards, min(groups / (groups - degenerate), clip_eps))
    weights[flat] = lamda
    return weights


def create_high_entropy_mask(entropy: Tensor, action_mask: Tensor, ratio: float) -> Tensor:
    """Row by row, the top k of the masked entropies."""
    marked = torch.zeros_like(entropy)
    for i in range(len(entropy)):
        numbers = action_mask[i].to(entropy.dtype)
        masked, counted = entropy[i] * numbers, numbers.bool()
        if counted.any():
            k = max(1, int(counted.sum().item() * ratio))
            marked[i, torch.topk(masked, k).indices] = 1
    return marked


@dataclass
class Maker:
    """The steps of its naive maker, one micro-batch, with RLOO over groups by place and KL in the reward."""

    actor: Any
    initial_model: Any
    critic: Any
    reward_model: Any
    group: int
    kl_coef: float = 0.01

    @torch.no_grad()
    def get_advantages_and_returns(
        self, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
    ) -> tuple[Tensor, Tensor]:
        """A Python loop over time on columns of the matrix; masked slots are zeroed first."""
        values, rewards = action_mask * values, action_mask * rewards
        width = rewards.size(1)
        carried: Any = 0
        backwards = []
        for t in range(width - 1, -1, -1):
            following: Any = values[:, t + 1] if t + 1 < width else 0.0
            carried = rewards[:, t] + gamma * following - values[:, t] + gamma * lambd * carried
            backwards.append(carried)
        advantages = torch.stack(backwards[::-1], dim=1)
        return advantages.detach(), advantages + values

    @torch.no_grad()
    def get_cumulative_returns(self, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
        """The same kind of loop, written into a matrix of zeros."""
        rewards = action_mask * rewards
        returns = torch.zeros_like(rewards)
        carried: Any = torch.zeros(rewards.size(0))
        for t in range(rewards.size(1) - 1, -1, -1):
            carried = rewards[:, t] + gamma * carried
            returns[:, t] = carried
        return returns

    @torch.no_grad()
    def make_experience(self, samples: Any) -> Batch:
        """Call each model once, mask the KL of tokens, and take its mean over each row."""
        for model in (self.actor, self.initial_model, self.reward_model, self.critic):
            model.eval()
        inputs = samples.sequences, samples.num_actions, samples.attention_mask
        logprobs, base = self.actor(*inputs), self.initial_model(*inputs)
        values = self.critic(*inputs)
        reward = self.reward_model(samples.sequences, samples.attention_mask)
        kl = (logprobs.float() - base.float()) * samples.action_mask
        info = {
            "kl": (kl * samples.action_mask).sum(-1) / samples.action_mask.sum(-1),
            "reward": reward,
            "response_length": samples.response_length,
            "total_length": samples.total_length,
            "num_actions": samples.num_actions,
        }
        self.actor.train()
        self.critic.train()
        batch = Batch(
            samples.sequences, logprobs, base, values, None, None, samples.attention_mask, samples.action_mask, info
        )
        batch.kl, batch.labels, batch.references = kl, samples.labels, samples.references
        return batch

    @torch.no_grad()
    def process_experiences(self, batches: list[Batch]) -> tuple[list[Batch], list[Tensor]]:
        """RLOO over groups by place."""
        rewards = torch.cat([batch.info["reward"] for batch in batches]).reshape(-1, self.group)
        baseline = (rewards.sum(-1, keepdim=True) - rewards) / (self.group - 1)
        return batches, list((rewards - baseline).flatten().chunk(len(batches)))

    def estimated(self, samples: Any, gamma: float) -> Batch:
        """The rewards on the last action less the KL, returns, and advantages as a copy of them."""
        (batch,), (reward,) = self.process_experiences([self.make_experience(samples)])
        mask = batch.action_mask
        last = mask.size(1) - 1 - mask.long().fliplr().argmax(dim=1, keepdim=True)
        kl = batch.kl
        placed = torch.zeros_like(kl).scatter_(1, last, reward.unsqueeze(1).to(kl.dtype))
        token_rewards = placed - self.kl_coef * kl
        batch.returns = self.get_cumulative_returns(token_rewards, mask, gamma)
        batch.advantages = batch.returns.clone()
        batch.info["return"] = token_rewards.sum(-1)
        return batch
