"""An engine's samples as LightRFT's `Samples`, as a batch to fill in, and as records.

Invariant: tokens are those the engine sampled, none added, none left out; in a padded batch prompts end and responses
begin at the same column, and slot j of a row speaks of its response's token j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Samples, from_experiences
from rollbook.compat.lightrft.estimation import RolloutBatches
from rollbook.compat.lightrft.models import end_to_end, sampling_of
from rollbook.compat.lightrft.ragged_batch import predicted_mask
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ragged import offsets_of
from rollbook.core.rows import NUMPY, Rows, Spans, memory
from rollbook.core.sampling import Prompt, Sample, Sampling, as_media


def prompts_of(
    all_prompts: Any,
    *,
    labels: Sequence[Any] | None = None,
    references: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
) -> list[Prompt]:
    """Prompts, each with its own label, reference and media, whatever the others have. A bare string is one prompt.

    >>> made = prompts_of(["a", "b"], labels=["x", None], images=[None, ["one.png", "two.png"]])
    >>> [(prompt.text, prompt.label, prompt.images) for prompt in made]
    [('a', 'x', ()), ('b', None, ('one.png', 'two.png'))]
    """
    if all_prompts is None:
        raise ValueError("all_prompts: got None, expected prompts")
    given = [all_prompts] if isinstance(all_prompts, (str, Prompt)) else list(all_prompts)
    if given and isinstance(given[0], Mapping) and "role" in given[0]:
        given = [given]
    made = [Prompt.of(one) for one in given]
    columns = {"label": labels, "reference": references, "images": images, "videos": videos}
    for name, column in columns.items():
        if column is None:
            continue
        if isinstance(column, str) or len(column) != len(made):
            plural = name if name.endswith("s") else f"{name}s"
            got = repr(column) if isinstance(column, str) else f"{len(column)} entries"
            raise ValueError(f"all_{plural}: got {got}, expected {len(made)}, one for each prompt")
        for i, value in enumerate(column):
            if name in ("images", "videos"):
                value = as_media(f"all_{name}[{i}]", value)
            if value is not None and value != ():
                made[i] = made[i].replace(**{name: value})
    return made


_WORDS = {"include_stop_str_in_output": "include_stop"}
_NOTHING = ("pad_token_id", "skip_special_tokens", "spaces_between_special_tokens")
"""What LightRFT's callers say of decoding and padding: tokens are kept as they are, and padded by the tokenizer."""


def maker_sampling(options: Mapping[str, Any], prompt_max_len: int, **defaults: Any) -> Sampling:
    """`Sampling` from what LightRFT's callers give their maker; see `rollbook.compat.lightrft.models.sampling_of`.

    >>> given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "include_stop_str_in_output": False}
    >>> made = maker_sampling(given, 16, n=4)
    >>> made.n, made.temperature, made.include_stop
    (4, 0.0, False)
    """
    given = {**defaults, **{_WORDS.get(name, name): value for name, value in options.items() if name not in _NOTHING}}
    return sampling_of(given, prompt_max_len, ())


def samples_of(rollouts: Sequence[Sample], *, pad_token_id: int = 0, packed: bool = False) -> Samples:
    """An engine's samples as one `Samples`, padded or packed.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine([[20, 2], [21, 21, 2]])
    >>> made = samples_of(engine.generate([[57, 58], [57, 58]]), packed=True)
    >>> made.sequences.tolist(), made.attention_mask.tolist(), made.num_actions.tolist()
    ([[57, 58, 20, 2, 57, 58, 21, 21, 2]], [[1, 1, 1, 1, 2, 2, 2, 2, 2]], [2, 3])
    """
    if not rollouts:
        raise ValueError("rollouts: got none, expected at least one sample")
    # A slot at least: models and losses want a response axis, if only of padding.
    tokens, spans, begin = end_to_end(rollouts, slots=1)
    lengths, responses = torch.from_numpy(spans.lengths), [len(one.response_ids) for one in rollouts]
    actions = [0 if one.failed else length for one, length in zip(rollouts, responses, strict=True)]
    shared: dict[str, Any] = {
        "response_length": torch.tensor(actions, dtype=torch.float32),
        "total_length": lengths.float(),
        "prompts": [_shown(one) for one in rollouts],
        "labels": if_any([one.prompt.label for one in rollouts]),
        "references": if_any([one.prompt.reference for one in rollouts]),
        "pad_len": None,
        "rollouts": list(rollouts),
    }
    if packed:
        numbers = torch.repeat_interleave(torch.arange(1, len(rollouts) + 1), lengths)
        return Samples(
            sequences=tokens.unsqueeze(0),
            attention_mask=numbers.unsqueeze(0),
            action_mask=None,
            num_actions=torch.tensor(responses),
            packed_seq_lens=lengths,
            **shared,
        )
    slots = spans.width - begin
    return Samples(
        sequences=spans.pad(tokens, pad_token_id),
        attention_mask=spans.mask(torch.int64),
        action_mask=Spans(actions, [0] * len(actions), slots).mask(torch.bool),
        num_actions=slots,
        packed_seq_lens=None,
        **shared,
    )


def _shown(one: Sample) -> Any:
    """A prompt as its user wrote it, or as it reads."""
    prompt = one.prompt
    if prompt.text is not None:
        return prompt.text
    if one.prompt_text is not None:
        return one.prompt_text
    return prompt.messages if prompt.messages is not None else list(prompt.token_ids or ())


def if_any(values: list[Any]) -> list[Any] | None:
    """A column of `Samples`, unless there is nothing in it."""
    return None if all(value is None for value in values) else values


def batch_of(samples: Samples, records: Sequence[Experience] | None = None) -> ExperienceBatch:
    """The batch of `Samples` with nothing computed yet: tokens, masks, labels, and of an engine's samples also ids,
    media, the engine's log-probs and policy versions (in `extras`), and why each response ended. `records`: those of
    the engine's samples, if somebody has made them."""
    if not isinstance(samples, Samples):
        raise ValueError(f"samples: got {type(samples).__name__}, expected Samples")
    if samples.sequences is None or samples.sequences.dim() != 2:
        raise ValueError("samples.sequences: got no matrix, expected (B, S), or (1, tokens) packed")
    info: dict[str, Any] = dict(zip(("response_length", "total_length"), lengths_of_samples(samples), strict=True))
    shared: dict[str, Any] = {"labels": samples.labels, "references": samples.references}
    packs = samples.packed_seq_lens is not None
    if packs:
        lengths = torch.as_tensor(samples.packed_seq_lens).tolist()
        actions = torch.as_tensor(samples.num_actions).reshape(-1).tolist()
        if len(actions) != len(lengths):
            raise ValueError(f"samples.num_actions: got {len(actions)} entries, expected {len(lengths)}, one a sample")
        _check_lengths(lengths, actions, samples.sequences.shape[1])
        mask = torch.ones(sum(actions), dtype=torch.bool, device=samples.sequences.device)
        if samples.rollouts is not None:
            for one, (start, stop) in zip(samples.rollouts, pairwise(offsets_of(actions).tolist()), strict=True):
                mask[start:stop] = not one.failed
        sequences: Any = Rows(samples.sequences[0], lengths)
        action_mask: Any = Rows(mask, actions)
        attention: Any = sequences.apply(torch.ones_like)
    else:
        sequences, attention, action_mask = samples.sequences, samples.attention_mask, samples.action_mask
        if action_mask is None:
            raise ValueError("samples.action_mask: got None, expected (B, A); or packed_seq_lens, if they are packed")
        action_mask = action_mask if action_mask.dtype == torch.bool else action_mask != 0
        if attention is not None:
            attention = _attended(attention, action_mask)
        actions = [] if samples.rollouts is None else [len(one.response_ids) for one in samples.rollouts]
    if samples.rollouts is None:
        batch = ExperienceBatch(
            sequences=sequences,
            action_log_probs=None,
            base_action_log_probs=None,
            values=None,
            returns=None,
            advantages=None,
            attention_mask=attention,
            action_mask=action_mask,
            info=info,
            ids=None if samples.ids is None else list(samples.ids),
            **shared,
        )
        batch.action_mask = predicted_mask(batch)
        return batch
    if records is None:
        records = [one.to_experience() for one in samples.rollouts]
    batch = from_experiences(records, packing_samples=packs, layout="prompt_left_response_right")
    # Of samples whose prompt's ids an engine did not say, the first token stays: their records have it masked where
    # they are trained on (`rollbook.batch.columns.mask_unpredicted`).
    batch.sequences, batch.attention_mask, batch.action_mask = sequences, attention, action_mask
    batch.extras = _extras(batch, samples, actions, packs)
    batch.action_log_probs = None
    batch.info = info | {"finish_reason": [one.finish_reason for one in samples.rollouts]}
    if any(one.failed for one in samples.rollouts):
        batch.info["error"] = [one.error for one in samples.rollouts]
    pictured = any(one.prompt.images for one in samples.rollouts)
    own = (*_OWN, "images") if pictured else _OWN
    for key in dict.fromkeys(key for record in records for key in record.info if key not in own):
        batch.info.setdefault("info", {})[key] = [record.info.get(key) for record in records]
    batch.labels, batch.references = samples.labels, samples.references
    if pictured:
        batch.raw_images = [list(one.prompt.images) or None for one in samples.rollouts]
    return batch.to_device(samples.sequences.device)


def _attended(attention: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """The attention mask, with every action attended: it was sampled, and lies in its row, but some masks leave the
    last one out."""
    begin = attention.shape[1] - action_mask.shape[1]
    if attention.device.type == "cpu" and attention.dtype in NUMPY:
        unattended = memory(attention)[:, begin:] == 0  # in a tenth of torch's time
        if not (memory(action_mask) & unattended).any():
            return attention
    attention = attention.clone()
    attention[:, begin:] |= action_mask.to(attention.dtype)
    return attention


def lengths_of_samples(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] each: how many actions and how many tokens, as float32; counted, where nobody did."""
    responses, totals = samples.response_length, samples.total_length
    home = samples.sequences.device
    if responses is None:
        packed, mask = samples.packed_seq_lens is not None, samples.action_mask
        counted = [0] * len(samples.sequences) if mask is None else (mask != 0).sum(-1)
        responses = samples.num_actions if packed else counted
    if totals is None and samples.packed_seq_lens is not None:
        totals = samples.packed_seq_lens
    elif totals is None:
        tokens, mask = samples.sequences, samples.attention_mask
        totals = torch.full((len(tokens),), tokens.shape[1]) if mask is None else mask.sum(-1)
    first, second = torch.as_tensor(responses), torch.as_tensor(totals)
    return first.float().to(home), second.float().to(home)


_OWN = ("label", "reference", "error")
"""What a sample's record keeps in `info`, and a batch has a place of its own for."""


def _check_lengths(lengths: list[int], actions: list[int], total: int) -> None:
    if sum(lengths) != total:
        raise ValueError(f"samples.packed_seq_lens: got a sum of {sum(lengths)}, expected {total}, all tokens")
    for i, (length, count) in enumerate(zip(lengths, actions, strict=True)):
        if count > length:
            raise ValueError(f"samples.num_actions[{i}]: got {count}, expected at most the sample's {length} tokens")


def _extras(batch: ExperienceBatch, samples: Samples, actions: list[int], packs: bool) -> dict[str, Any] | None:
    """What the engine said of each token, laid out as the batch is: log-probs it sampled with, versions, experts."""
    extras = dict(batch.extras or {})
    if batch.action_log_probs is not None:
        extras["logprobs"] = batch.action_log_probs
    if not packs:
        slots = int(samples.num_actions)  # type: ignore[arg-type]
        for name, value in extras.items():
            if value.shape[1] < slots:  # nobody answered: there is a slot for nothing
                extras[name] = value.new_zeros((len(actions), slots, *value.shape[2:]))
    return extras or None


_FIELDS = {
    "old_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "entropy": "action_entropy",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""A record's fields, and those of a batch that they come from."""


def records_of(
    rollouts: Sequence[Sample], whole: RolloutBatches, made: Sequence[Experience] | None = None
) -> Experiences:
    """The records of those of an engine's samples that `whole` still has, in its order. `made`: the samples' records as
    `to_experience` gives them, if somebody has made them already; what was found out is put into these.

    >>> from rollbook.compat.lightrft.samples import batch_of, samples_of
    >>> from rollbook.rollout import ScriptedEngine
    >>> rollouts = ScriptedEngine([[7, 2]]).generate([[5], [6]])
    >>> batch = batch_of(samples_of(rollouts))
    >>> batch.info["reward"], batch.advantages = torch.tensor([1.0, 0.0]), torch.ones(2, 2)
    >>> [(row.reward, row.advantages.tolist()) for row in records_of(rollouts, RolloutBatches([batch]))]
    [(1.0, [1.0, 1.0]), (0.0, [1.0, 1.0])]
    """
    return finished([one.to_experience() for one in rollouts] if made is None else made, whole)


def finished(rows: Sequence[Experience], whole: RolloutBatches) -> Experiences:
    """Records with what was found out about them: masks, rewards, log-probs, values, advantages.

    `whole` has a row for each record, matched by id: a record without a row (filtered out) is left out, and the result
    is in the order of `whole`. Rows without ids are matched by place.

    >>> from rollbook.compat.lightrft.batch import from_experiences
    >>> record = Experience(tokens=[5, 7, 2], prompt_length=1)
    >>> batch = from_experiences([record])
    >>> batch.info["reward"], batch.values = torch.tensor([1.0]), torch.ones(1, 2)
    >>> finished([record], RolloutBatches([batch]))[0].values.tolist()
    [1.0, 1.0]
    """
    rows = _matched(rows, whole)
    if not rows:
        return Experiences([])
    masks = whole.rows("action_mask")
    rows = [_masked(row, None if masks is None else masks[i]) for i, row in enumerate(rows)]
    for row, error in zip(rows, whole.entries("reward_error") or (), strict=False):
        if error is not None:
            row.info["reward_error"] = error
    for row, parts in zip(rows, whole.entries("reward_parts") or (), strict=False):
        if parts is not None:
            row.info["reward_parts"] = parts
    at = 0
    for batch, size in zip(whole.batches, whole.sizes, strict=True):
        for name, values in ((batch.info or {}).get("reward_metrics") or {}).items():
            for row, value in zip(rows[at : at + size], values.tolist(), strict=True):
                row.metrics[name] = value
        at += size
    found: dict[str, list[Any]] = {"reward": whole.numbers("reward").tolist()}
    for name, field in _FIELDS.items():
        column = whole.rows(field)
        if column is not None:
            found[name] = [values.clone() for values in column]
    return Experiences(rows).assign(**found)


def _matched(records: Sequence[Experience], whole: RolloutBatches) -> list[Experience]:
    """[N] The record of each row."""
    ids = whole.ids()
    by_uid = {record.eid.uid: record for record in records}
    uids = [] if ids is None else [eid.uid for eid in ids]
    if ids is not None and by_uid.keys() >= set(uids) and len(by_uid) == len(records):
        return [by_uid[uid] for uid in uids]
    if len(records) != len(whole):
        raise ValueError(
            f"experiences: got {len(whole)} rows, expected {len(records)}, one for each sample, or rows with the "
            "samples' ids"
        )
    return list(records)


def _masked(row: Experience, mask: torch.Tensor | None) -> Experience:
    """A record with another mask, where the estimator or a filter left tokens out."""
    if mask is None or (row.action_mask is not None and torch.equal(row.action_mask, mask.cpu())):
        return row
    return row.replace(action_mask=mask.cpu())
