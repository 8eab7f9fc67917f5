"""One sample as a JSON object: LightRFT's keys first, in its order, then what makes the record complete.

Invariant: per-token arrays have an entry for each token of the response; the texts of tokens, joined, are the text they
are of; a token's entropy stands on that token. The bytes are strict JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollbook.core.fields import FIELDS
from rollbook.io.trajectories.offsets import Decoder
from rollbook.io.trajectories.repetition import reflections, repeat_score
from rollbook.io.trajectories.sample import ARRAYS, NUMBERS, Sample

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MOST_PIECES = 1 << 18


@dataclass
class Measures:
    """What statistics are made of."""

    repeat_score: float
    reflections: dict[str, int]
    policy_entropy: float | None
    tokens: int

    @property
    def reflection_score(self) -> int:
        """How many phrases of reflection there are."""
        return sum(self.reflections.values())


@dataclass
class Response:
    """What the model sampled of a sample: n tokens."""

    ids: NDArray[np.int64]
    chosen: NDArray[np.bool_]
    """[R] Which of the response's slots these are: those of the mask, or all, if none is trained on."""
    text: str
    """Without special tokens."""
    ends: NDArray[np.int64]
    """[n] Where each token ends in it; special tokens are empty."""
    pure: int
    """How many tokens there are before the end token."""

    @property
    def pure_text(self) -> str:
        """The text of what comes before the end token."""
        return self.text[: int(self.ends[self.pure - 1])] if self.pure else ""


def response_of(sample: Sample, decoder: Decoder) -> Response:
    """The model's part of a sample."""
    slots = sample.tokens[sample.prompt :]
    chosen = sample.mask if sample.mask.any() else np.ones_like(sample.mask)
    ids = slots[chosen]
    special = decoder.special(ids)
    text, ends = decoder.text_and_ends(ids[~special])
    every = np.zeros(len(ids), dtype=np.int64)
    every[~special] = ends
    ended = len(ids) > 0 and (bool(special[-1]) or int(ids[-1]) in decoder.end_ids)
    return Response(ids, chosen, text, np.maximum.accumulate(every), len(ids) - ended)


def measured(sample: Sample, response: Response) -> Measures:
    """A sample's part in the statistics."""
    entropy = sample.arrays.get("action_entropy")
    known = None if entropy is None else entropy[response.chosen]
    known = None if known is None else known[np.isfinite(known)]
    return Measures(
        repeat_score=repeat_score(response.pure_text),
        reflections=reflections(response.pure_text),
        policy_entropy=float(known.mean(dtype=np.float64)) if known is not None and len(known) else None,
        tokens=len(response.ids),
    )


def spread_of(log_probs: NDArray[Any]) -> float:
    """The sample standard deviation of log-probs; 0 of one or none."""
    return float(np.std(log_probs.astype(np.float64), ddof=1)) if len(log_probs) > 1 else 0.0


class Renderer:
    """Encode trajectories as JSON objects.

    `mark`: from the entropies [n] of the sampled tokens to the indices of those to mark, or `None` to mark none.
    """

    def __init__(
        self, decoder: Decoder, mark: Callable[[NDArray[Any]], NDArray[Any]] | None, separate_images: bool
    ) -> None:
        self.decoder = decoder
        self.mark = mark
        self.separate_images = separate_images
        self._pieces = _Pieces()

    def record(self, sample: Sample, step: int, paths: list[str | None]) -> tuple[bytes, Measures]:
        """A sample's record, as JSON, and its measures; `paths`: the files of its images."""
        text, ends = self.decoder.text_and_ends(sample.tokens)
        response = response_of(sample, self.decoder)
        found = measured(sample, response)
        entropy = sample.arrays.get("action_entropy")
        record: dict[str, Any] = {
            "global_step": step,
            "experience_index": sample.experience,
            "sample_in_exp": sample.row,
            "full_sequence": text if sample.padded is None else self.decoder.text(sample.padded),
            "generated_text": response.text,
            "pure_generated_text": response.pure_text,
            "label": sample.label,
            "reference": sample.reference,
            "repeat_score": found.repeat_score,
            "reflection_pattern_score": found.reflection_score,
            "reflection_pattern_details": found.reflections,
            "policy_entropy": found.policy_entropy,
            "response_token_count": found.tokens,
        }
        if self.mark is not None and entropy is not None:
            marked = self._marked(response, entropy[response.chosen], self.mark)
            record["generated_tokens"] = orjson.Fragment(b"[" + b",".join(marked) + b"]")
            record["pure_generated_tokens"] = orjson.Fragment(b"[" + b",".join(marked[: response.pure]) + b"]")
        for name in NUMBERS:
            if name in sample.arrays:
                record[name] = _writable(sample.arrays[name])
            elif name in sample.numbers:
                record[name] = sample.numbers[name]
        if sample.info is not None:
            record["info"] = sample.info
        record |= self._images(sample, paths)
        record |= self._more(sample, text, ends, response)
        return orjson.dumps(record, option=_OPTIONS), found

    def _marked(
        self, response: Response, entropy: NDArray[Any], mark: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> list[bytes]:
        """[n] The JSON of each token: its text, whether it is marked, and if so its entropy."""
        ends = response.ends.tolist()
        text = response.text
        tokens = [self._pieces[text[a:b]] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        if len(self._pieces) > _MOST_PIECES:
            self._pieces.clear()
        if not len(entropy):
            return tokens
        places = mark(entropy)
        scores = orjson.dumps(_writable(entropy[places]), option=_OPTIONS)[1:-1].split(b",")
        for at, score in zip(places.tolist(), scores, strict=True):
            tokens[at] = tokens[at].removesuffix(b"false}") + b'true,"entropy_score":' + score + b"}"
        return tokens

    def _images(self, sample: Sample, paths: list[str | None]) -> dict[str, Any]:
        if not sample.images:
            return {"has_images": False}
        said: dict[str, Any] = {"has_images": True, "num_images": len(sample.images)}
        if self.separate_images:
            return said | {"image_paths": paths}
        texts = [None if one is None else base64.b64encode(one.png).decode() for one in sample.images]
        return said | {"images_base64": texts}

    def _more(self, sample: Sample, text: str, ends: NDArray[np.int64], response: Response) -> dict[str, Any]:
        """What LightRFT's records lack."""
        eid, prompt = sample.eid, sample.prompt
        log_probs = sample.arrays.get("action_log_probs")
        spread = None if log_probs is None else spread_of(log_probs[response.chosen])
        own = [name for name in ARRAYS.values() if name not in NUMBERS]
        known = [name for name in sample.arrays if name in FIELDS and name not in ARRAYS.values()]
        custom = [name for name in sample.arrays if name not in FIELDS and name not in ARRAYS.values()]
        more: dict[str, Any] = {
            "action_log_prob_std": spread,
            "uid": eid.uid,
            "gid": eid.tid,
            "batch": eid.batch,
            "task": eid.task,
            "run": eid.run,
            "turn": eid.step,
            "named": sample.named,
            "rank": sample.rank,
            "kept": sample.why,
            "kept_weight": sample.weight,
            "reward": sample.reward,
            "reward_parts": sample.parts,
            "prompt_tokens": prompt,
            "prompt_text": sample.more.get("prompt_text", text[: int(ends[prompt - 1])] if prompt else ""),
            "token_ids": sample.tokens,
            "text": text,
            "token_ends": ends,
            "mask": sample.mask.astype(np.uint8),
            "segments": sample.segments,
        }
        more |= {name: _writable(sample.arrays[name]) for name in (*own, *known) if name in sample.arrays}
        if custom:
            more["custom"] = {name: _writable(sample.arrays[name]) for name in custom}
        more |= {name: value for name, value in sample.more.items() if name not in more}
        if sample.images:
            more["image_sha256"] = [None if one is None else one.sha256 for one in sample.images]
        if sample.rejected is not None:
            tokens = np.concatenate([sample.tokens[:prompt], sample.rejected])
            other, other_ends = self.decoder.text_and_ends(tokens)
            more["rejected"] = {"text": other, "token_ids": tokens, "token_ends": other_ends}
        if sample.nonfinite:
            more["nonfinite"] = sample.nonfinite
        if sample.notes:
            more["notes"] = sample.notes
        return more


class _Pieces(dict[str, bytes]):
    """The JSON of a token that is not marked, by its text: most texts come again."""

    def __missing__(self, text: str) -> bytes:
        made = self[text] = b'{"text":' + orjson.dumps(text) + b',"high_entropy":false}'
        return made


def _writable(values: NDArray[Any]) -> NDArray[Any]:
    """An array as orjson takes it; what is not finite becomes null there."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    kept = values.dtype in (np.float32, np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8)
    return np.ascontiguousarray(values if kept else values.astype(np.float32 if values.dtype.kind == "f" else np.int64))
