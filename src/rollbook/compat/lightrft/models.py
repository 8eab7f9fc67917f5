"""Actors and critics that are called as LightRFT's, and models called on LightRFT's batches.

Invariant: sampled tokens are not changed, and no end token is added; all tokens of a response are actions. Unknown
options are rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollbook.algorithms.kernels.vocabulary import check_positive
from rollbook.batch import Batch
from rollbook.batch.media import BY_TOKEN, TYPES, placeholders, token_types
from rollbook.compat.lightrft.batch import Device, ExperienceBatch
from rollbook.compat.lightrft.ragged_batch import (
    media_inputs,
)
from rollbook.core.checks import check_int, suggest
from rollbook.core.rows import Rows, Spans
from rollbook.core.sampling import ALIASES, Prompt, Sample, Sampling
from rollbook.models.actor import Actor as NativeActor
from rollbook.models.actor import Critic as NativeCritic
from rollbook.models.head import has_adapters, model_inputs, run, unwrap
from rollbook.models.lora import Reference as NativeReference
from rollbook.rollout.transformers import TransformersEngine

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rollbook.batch.batch import Tokens

# Options of transformers' `generate` that are accepted with the values listed, which have no effect here.
_IGNORED_VALUES: dict[str, tuple[Any, ...] | None] = {
    "use_cache": (True, None),
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "early_stopping": (False, None),
    "length_penalty": (1.0, None),
    "repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "return_dict_in_generate": (False, None),
    "output_scores": (False, None),
    "synced_gpus": (False, None),
    "typical_p": (1.0, None),
    "tokenizer": None,  # any
    "generation_config": (None,),
}


def _ids(ids: int | Sequence[int] | torch.Tensor | None, name: str) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return [check_int(name, token_id) for token_id in (ids if isinstance(ids, (list, tuple)) else [ids])]


def process_sequences(
    sequences: torch.Tensor, input_len: int, eos_token_id: int | Sequence[int] | torch.Tensor | None, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the masks of generated rows.

    Padding at the start of the prompt and at the end of the response is not attended. Every attended token of the
    response is an action, also an end token inside it. If the pad token is an end token, the first one after the
    response is the sampled end, and the rest is padding (a prompt that begins with that token reads as a padded one).

    Args:
        sequences: (B, S) Generated rows.
        input_len: Width of the prompts.
        eos_token_id: End token, or several.
        pad_token_id: Pad token.

    Returns:
        The sequences, unchanged, the attention mask (B, S) int64, and the action mask (B, S - input_len) bool.

    Raises:
        ValueError: If `sequences` is not a matrix, or narrower than `input_len`.

    >>> process_sequences(torch.tensor([[0, 5, 6, 7, 2, 0]]), 3, eos_token_id=2, pad_token_id=0)[1:]
    (tensor([[0, 1, 1, 1, 1, 0]]), tensor([[ True,  True, False]]))
    >>> process_sequences(torch.tensor([[2, 5, 6, 7, 2, 2]]), 3, eos_token_id=2, pad_token_id=2)[1:]
    (tensor([[0, 1, 1, 1, 1, 0]]), tensor([[ True,  True, False]]))
    """
    check_matrix("sequences", sequences, "(B, S)")
    width = sequences.shape[1]
    begin = check_int("input_len", input_len)
    if begin > width:
        raise ValueError(f"input_len: got {begin}, expected at most the {width} tokens of a row")
    pad = check_int("pad_token_id", pad_token_id)
    real = sequences != pad
    positions = torch.arange(width, device=sequences.device)
    # A prompt of only padding begins at its end.
    first = torch.where(real[:, :begin].any(-1), real[:, :begin].int().argmax(-1) if begin else 0, begin)
    last = torch.where(real & (positions >= begin), positions, begin - 1).amax(-1) if width else first - 1
    if pad in _ids(eos_token_id, "eos_token_id"):
        last = (last + 1).clamp(max=width - 1)
    attended = (positions >= first[:, None]) & (positions <= last[:, None])
    return sequences, attended.long(), attended[:, begin:]


def lay_out_samples(
    samples: Sequence[Sample], pad_token_id: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sequences, attention_mask int64, action_mask bool) of samples; masks are computed from lengths."""
    for i, sample in enumerate(samples):
        if sample.failed:
            raise RuntimeError(f"sample {i} ({sample.eid}): {sample.error}")
    tokens, spans, prompt_ends = concatenate_samples(samples)
    attended = spans.mask(torch.int64).to(device)
    return spans.pad(tokens, pad_token_id).to(device), attended, attended[:, prompt_ends:].bool()


def concatenate_samples(samples: Sequence[Sample], slots: int = 0) -> tuple[torch.Tensor, Spans, int]:
    """Concatenate the tokens of samples, [total] int64.

    Also returns their spans in a matrix in which prompts end and responses begin at the same column, and that column.
    There are at least `slots` columns for responses.
    """
    prompts = [len(sample.prompt_ids) for sample in samples]
    responses = [len(sample.response_ids) for sample in samples]
    begin, end = max(prompts, default=0), max(responses, default=0)
    lengths = [prompt_length + after for prompt_length, after in zip(prompts, responses, strict=True)]
    spans = Spans(lengths, [begin - prompt_length for prompt_length in prompts], begin + max(end, slots))
    ids = [token for sample in samples for token in (*sample.prompt_ids, *sample.response_ids)]
    return torch.tensor(ids, dtype=torch.int64), spans, begin


MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", *BY_TOKEN)
"""Outputs of a processor for the media of all prompts, as `generate` accepts them."""


def split_media_by_row(
    rows: Sequence[Sequence[int]],
    masks: Sequence[torch.Tensor],
    media: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
) -> list[dict[str, torch.Tensor]]:
    """Split media by prompt, by the number of placeholders of each.

    Args:
        rows: Token ids of each prompt, placeholders expanded.
        masks: Attention mask of each prompt, for entries per token.
        media: Media of all prompts.
        config: Configuration of the model.

    Returns:
        The media of each prompt; empty for a prompt without placeholders.
    """
    row_media: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    placeholder_ids = placeholders(config)
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        values, grid = media.get(pixels), media.get(f"{kind}_grid_thw")
        if values is None:
            continue
        counts = [list(row).count(placeholder_ids[kind]) if kind in placeholder_ids else 0 for row in rows]
        if grid is None:
            count, patches = len(values), [1] * len(values)
            sizes = [sum(counts) // count] * count if count else []
        else:
            patches = grid.prod(-1).tolist()
            merge = int(getattr(config.vision_config, "spatial_merge_size", 1)) ** 2
            sizes = [size // merge for size in patches]
        at = row_start = 0
        for tensors, count in zip(row_media, counts, strict=True):
            first, left = at, count
            while left > 0 and at < len(sizes):
                left -= sizes[at]
                at += 1
            if left:
                raise ValueError(f"{pixels}: got {len(sizes)}, expected as many {kind}s as the prompts' placeholders")
            if at > first:
                rows_here = sum(patches[first:at])
                tensors[pixels] = values[row_start : row_start + rows_here]
                row_start += rows_here
                if grid is not None:
                    tensors[f"{kind}_grid_thw"] = grid[first:at]
        if at != len(sizes):
            raise ValueError(f"{pixels}: got {len(sizes)}, expected {at}, as many {kind}s as the prompts' placeholders")
    for name in BY_TOKEN:
        if media.get(name) is not None:
            for tensors, mask, kinds in zip(row_media, masks, media[name], strict=True):
                if tensors:
                    tensors[name] = kinds[mask.to(kinds.device)][None]
    return row_media


def make_sampling(options: dict[str, Any], prompt_width: int, suppress: tuple[int, ...]) -> Sampling:
    """Build `Sampling` from the options of LightRFT's and transformers' `generate`, without padding and media.

    >>> sampling = make_sampling({"max_length": 10, "do_sample": False, "top_k": 50, "num_beams": 1, "eos_token_id": 2}, 4, ())
    >>> sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop_token_ids, sampling.ignore_eos
    (6, 0.0, 50, (2,), True)
    >>> make_sampling({"num_beams": 4}, 4, ())
    Traceback (most recent call last):
        ...
    ValueError: num_beams: got 4, expected 1: not supported
    >>> make_sampling({"top_kk": 4}, 4, ())
    Traceback (most recent call last):
        ...
    ValueError: generate: unknown option 'top_kk'; did you mean 'top_k'? (n, max_tokens, min_tokens, temperature, top_p, top_k, min_p, first_temperature, stop, stop_token_ids, include_stop, ignore_eos, seed, suppress, max_prompt_tokens, prompt_overflow, logprobs, extra, max_new_tokens, min_new_tokens, stop_strings, max_length, num_return_sequences, do_sample, eos_token_id, suppress_tokens)
    """  # noqa: E501
    arguments = dict(options)
    for name, fine in _IGNORED_VALUES.items():
        if name in arguments:
            value = arguments.pop(name)
            if fine is not None and value not in fine:
                raise ValueError(f"{name}: got {value!r}, expected {fine[0]!r}: not supported")
    names = [*Sampling.__dataclass_fields__, *ALIASES]
    names += ["max_length", "num_return_sequences", "do_sample", "eos_token_id", "suppress_tokens"]
    for name in arguments:
        if name not in names:
            raise ValueError(f"generate: unknown option {name!r}{suggest(name, names)}")
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if arguments.pop("do_sample", True) is False:
        arguments["temperature"] = 0.0
    if "max_length" in arguments:
        max_new_tokens = check_int("max_length", arguments.pop("max_length"), prompt_width + 1) - prompt_width
        arguments.setdefault("max_new_tokens", max_new_tokens)
    if "num_return_sequences" in arguments:
        arguments["n"] = arguments.pop("num_return_sequences")
    if "eos_token_id" in arguments:
        ends = _ids(arguments.pop("eos_token_id"), "eos_token_id")
        arguments["stop_token_ids"] = [*ends, *_ids(arguments.get("stop_token_ids"), "stop_token_ids")]
        arguments.setdefault("ignore_eos", True)  # instead of the model's end tokens
    banned = [
        *suppress,
        *_ids(arguments.pop("suppress_tokens", None), "suppress_tokens"),
        *arguments.get("suppress", ()),
    ]
    arguments["suppress"] = list(dict.fromkeys(banned))
    return Sampling.of(arguments)


def batch_from_call(
    sequences: torch.Tensor,
    num_actions: int | Sequence[int] | torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_seq_lens: Sequence[int] | torch.Tensor | None,
) -> Batch:
    """Build a batch from the arguments of a call in LightRFT's layout.

    Args:
        sequences: (B, S) or, packed, (1, tokens).
        num_actions: Number of response tokens at the end of each row; packed [B].
        attention_mask: (B, S) or, packed, (1, tokens) with the number of the sample, from 1.
        packed_seq_lens: `None`; packed [B].

    >>> batch_from_call(torch.tensor([[1, 2, 3]]), 2, None, None)
    Batch(1 records, padded, tokens 1x3, responses 1x2)
    >>> batch_from_call(torch.tensor([[1, 2, 3, 4]]), [1, 1], torch.tensor([[1, 1, 2, 2]]), [2, 2])
    Batch(2 records, packed, 4 tokens)
    """
    check_matrix("sequences", sequences, "(B, S), or (1, tokens) if packed")
    if attention_mask is not None and attention_mask.shape != sequences.shape:
        raise ValueError(
            f"attention_mask: got shape {list(attention_mask.shape)}, expected {list(sequences.shape)}, as sequences"
        )
    if packed_seq_lens is None:
        actions = check_int("num_actions", num_actions)
        if actions >= max(sequences.shape[1], 1):
            raise ValueError(
                f"num_actions: got {actions}, expected fewer than the {sequences.shape[1]} tokens of a row"
            )
        mask = torch.ones(len(sequences), actions, dtype=torch.bool, device=sequences.device)
        return Batch(tokens=sequences, attention_mask=attention_mask, action_mask=mask)
    lengths, counts = _numbers("packed_seq_lens", packed_seq_lens), _numbers("num_actions", num_actions)
    if len(sequences) != 1 or sum(lengths) != sequences.shape[1]:
        raise ValueError(
            f"packed_seq_lens: got {len(lengths)} samples with {sum(lengths)} tokens in all, expected as many as "
            f"sequences {list(sequences.shape)} has"
        )
    if attention_mask is not None:
        counted = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths, dtype=torch.int64))
        if not torch.equal(attention_mask[0].cpu().long(), counted):
            raise ValueError("attention_mask: expected the number of the sample, from 1, at each packed token")
    if len(counts) != len(lengths):
        raise ValueError(f"num_actions: got {len(counts)} entries, expected {len(lengths)}, one for each sample")
    for i, (actions, length) in enumerate(zip(counts, lengths, strict=True)):
        if actions > length:
            raise ValueError(f"num_actions[{i}]: got {actions}, expected at most its {length} tokens")
    mask = torch.ones(sum(counts), dtype=torch.bool, device=sequences.device)
    return Batch(tokens=Rows(sequences[0], lengths), action_mask=Rows(mask, counts))


def check_matrix(name: str, matrix: torch.Tensor, expected: str) -> None:
    """Raise `ValueError` unless the argument is a matrix.

    >>> check_matrix("sequences", torch.zeros(3), "(B, S)")
    Traceback (most recent call last):
        ...
    ValueError: sequences: got shape [3], expected a tensor (B, S)
    """
    if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
        shown = f"shape {list(matrix.shape)}" if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise ValueError(f"{name}: got {shown}, expected a tensor {expected}")


def _numbers(name: str, numbers: int | Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"{name}: got {numbers!r}, expected a number for each packed sample")
    return [check_int(f"{name}[{i}]", number) for i, number in enumerate(numbers)]


def call_inputs(model: torch.nn.Module, batch: Batch, media: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """Build the keyword arguments of one forward pass over a batch and the media of all its rows together."""
    extra = {name: tensor for name, tensor in media.items() if tensor is not None}
    if not any(name.endswith("grid_thw") for name in media):
        return model_inputs(model, batch, extra)
    if isinstance(batch.tokens, Rows):
        raise ValueError(
            "media: got grids with packed sequences, expected a Batch, which assigns images to samples "
            "(Actor.token_stats)"
        )
    if TYPES not in extra:
        extra[TYPES] = token_types(batch.tokens, getattr(unwrap(model), "config", None))
        if batch.attention_mask is not None:
            extra[TYPES] *= batch.attention_mask != 0
    inputs = model_inputs(model, batch, extra)
    del inputs["position_ids"]  # the model computes spatial ones
    return inputs


def call_output(column: Tokens) -> torch.Tensor:
    """Return a column in the layout of a call: [B, R] as it is; packed rows as [1, all actions].

    >>> call_output(Rows(torch.arange(3), [1, 2])).shape
    torch.Size([1, 3])
    """
    return column.values.unsqueeze(0) if isinstance(column, Rows) else column


class Actor(NativeActor):
    """A `rollbook.models.Actor` that is called as LightRFT's, with its `generate` and `process_sequences`.

    Arguments are those of `rollbook.models.Actor`.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> Actor(config)(torch.tensor([[1, 5, 6, 7]]), num_actions=2).shape
    torch.Size([1, 2])
    """

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int | Sequence[int] | torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | torch.Tensor | None = None,
        *,
        entropy: bool = False,
        temperature: float | None = None,
        **media: torch.Tensor | None,
    ) -> Any:
        """Compute log-probs of actions, with the arguments of LightRFT's actors.

        Args:
            sequences: [B, S] Token ids; packed [1, tokens].
            num_actions: The number of response tokens at the end of each row; packed [B]. `None`: only run the model,
                and return its output, with `return_output`.
            attention_mask: [B, S]; packed [1, tokens], the number of the sample, from 1.
            return_output: Whether to return the output of the model, too; it has `action_entropy` if `entropy` is set.
            packed_seq_lens: [B] Number of tokens of each packed sample.
            entropy: Whether to compute entropies.
            temperature: What logits are divided by. `None`: the actor's.
            media: Inputs of the model, such as `pixel_values` and `image_grid_thw`.

        Returns:
            [B, R] or, packed, [1, all actions]: log-probs, 0 on slots that are not attended.

        Raises:
            ValueError: If shapes do not match, or the model does not separate packed samples.
        """
        if num_actions is None:
            if not return_output:
                raise ValueError("num_actions: got None, expected it, or return_output=True for the model's output")
            lengths = [] if packed_seq_lens is None else [0] * len(packed_seq_lens)
            batch = batch_from_call(sequences, lengths or 0, attention_mask, packed_seq_lens)
            return run(self.model, call_inputs(self.model, batch, media))
        batch = batch_from_call(sequences, num_actions, attention_mask, packed_seq_lens)
        if batch.layout == "packed":
            self._check_packs()
        temperature = check_positive(
            "temperature", self.temperature if temperature is None else temperature, torch.float32
        )
        inputs = call_inputs(self.model, batch, media)
        stats, output = self.head.stats(batch, inputs, temperature=temperature, entropy=entropy)
        columns = [None if column is None else call_output(column) for column in stats]
        if not return_output:
            return columns[0]
        if isinstance(output, torch.Tensor):
            output = {"logits": output}
        if columns[1] is not None:
            output["action_entropy"] = columns[1]
        return columns[0], output

    def reference(self) -> Actor | Reference:
        """Return the reference policy of `rollbook.models.Actor.reference`, which is called as this actor is."""
        if has_adapters(self.model):
            return Reference(self)
        frozen = super().reference()
        return Actor(
            frozen.model,
            tokenizer=self.tokenizer,
            processor=self.processor,
            temperature=self.temperature,
            trainable=False,
            suppress=self.suppress,
        )

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample responses to prompts. `TransformersEngine(actor)` also returns log-probs and finish reasons.

        Args:
            input_ids: (B, P) Left-padded prompts.
            attention_mask: (B, P); `None`: derived from the pad token.
            kwargs: Options of transformers (`max_new_tokens`, `max_length`, `min_new_tokens`, `do_sample`,
                `temperature`, `top_p`, `top_k`, `eos_token_id`, `pad_token_id`, `num_return_sequences`, ...) or of
                `rollbook.rollout.Sampling`, and outputs of a processor for the media of all prompts (`pixel_values`,
                `image_grid_thw`, ...). Options without effect (`num_beams=1`) are accepted.

        Returns:
            On the actor's device, sequences (B, S), each `[pad.. prompt | response.. pad]`, the attention mask (B, S)
            int64, and the action mask (B, A) bool.

        Raises:
            ValueError: If an option is unknown.
        """
        check_matrix("input_ids", input_ids, "(B, P)")
        pad = kwargs.pop("pad_token_id", None)
        if pad is None:
            pad = self.pad_token_id
        if attention_mask is None:
            attention_mask = process_sequences(input_ids, input_ids.shape[1], None, pad)[1]
        kwargs.setdefault("temperature", self.temperature)
        media = {name: kwargs.pop(name) for name in MEDIA if name in kwargs}
        sampling = make_sampling(kwargs, input_ids.shape[1], self.suppress)
        masks = list(attention_mask.cpu() != 0)
        rows = [row[mask].tolist() for row, mask in zip(input_ids.cpu(), masks, strict=True)]
        media_by_row = split_media_by_row(rows, masks, media, self.config) if media else [{} for _ in rows]
        prompts = [
            Prompt(token_ids=row, images=[images] if images else ())
            for row, images in zip(rows, media_by_row, strict=True)
        ]
        # One batch id for all calls: with a seed, a second call samples the same.
        return lay_out_samples(TransformersEngine(self).generate(prompts, sampling, batch="generate"), pad, self.device)

    def process_sequences(
        self,
        sequences: torch.Tensor,
        input_len: int,
        eos_token_id: int | Sequence[int] | torch.Tensor | None,
        pad_token_id: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the masks of generated rows. See `rollbook.compat.lightrft.models.process_sequences`."""
        return process_sequences(sequences, input_len, eos_token_id, pad_token_id)


class Reference(NativeReference):
    """A `rollbook.models.Reference` that is called as LightRFT's models are.

    Args:
        actor: An actor with adapters.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> reference = Actor(config, lora={"r": 2, "target_modules": ["q_proj"]}).reference()
    >>> reference(torch.tensor([[1, 5, 6, 7]]), num_actions=2).shape
    torch.Size([1, 2])
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Compute log-probs without adapters; see `Actor.forward`."""
        with self._base():
            return self.actor(*args, **options)


class Critic(NativeCritic):
    """A `rollbook.models.Critic` that is called as LightRFT's.

    Arguments are those of `rollbook.models.Critic`.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> Critic(config)(torch.tensor([[1, 5, 6, 7]]), num_actions=2).tolist()
    [[0.0, 0.0]]
    """

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int | Sequence[int] | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | torch.Tensor | None = None,
        **media: torch.Tensor | None,
    ) -> Any:
        """Compute values, [B, R] or, packed, [1, all actions]. See `Actor.forward` for the arguments."""
        batch = batch_from_call(sequences, num_actions, attention_mask, packed_seq_lens)
        values, output = self._values(batch, call_inputs(self.backbone, batch, media))
        return (call_output(values), output) if return_output else call_output(values)


# --- models over LightRFT's batches ---------------------------------------------------------------------------------


def is_native(model: Callable[..., Any]) -> bool:
    """Return whether a model is one of `rollbook.models`, which run over all records of a rollout at once."""
    return hasattr(type(model), "token_stats") or hasattr(type(model), "token_values")


def call_model(model: Callable[..., Any], batch: ExperienceBatch) -> torch.Tensor | Rows:
    """Call a model with LightRFT's arguments: `model(sequences, num_actions, attention_mask)`.

    Args:
        model: Returns a tensor (B, A), or a tuple that begins with one; of a packed batch (1, slots).
        batch: The batch, in either layout.

    Returns:
        (B, A), or `Rows` of a packed batch.
    """
    # Types of tokens that a batch has none of are not added: the model may not take them.
    config = getattr(getattr(model, "model", model), "config", None) if TYPES in (batch.media or {}) else None
    media = media_inputs(batch, config)
    if batch.layout == "packed":
        lengths = batch.cu_seqlens.diff().tolist()
        numbers = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
        tokens = batch.sequences.values.unsqueeze(0)
        actions = batch.action_cu_seqlens.diff().tolist()
        answer = model(tokens, actions, numbers.unsqueeze(0).to(tokens.device), packed_seq_lens=lengths, **media)
    else:
        answer = model(batch.sequences, int(batch.action_mask.shape[1]), batch.attention_mask, **media)
    if batch.layout == "padded":
        return check_output(model, answer, tuple(batch.action_mask.shape))
    return Rows(check_output(model, answer, (1, len(batch.action_mask.values)))[0], batch.action_mask.lengths)


def check_output(
    model: Callable[..., Any], output: torch.Tensor | tuple[Any, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the output of a model, or its first part; raise `ValueError` unless it is a tensor of the shape."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{type(model).__name__}: returned {type(tensor).__name__}, expected a tensor (B, A)")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{type(model).__name__}: returned shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor


__all__ = ["Actor", "Critic", "Reference", "process_sequences"]
