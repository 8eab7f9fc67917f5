"""A prompt's tokens and media: text or a chat through the tokenizer, images and videos through the processor, once.

Invariant: a prompt is processed once, however many samples are made of it; its ids hold a placeholder for everything
that its media give to the model, and no prompt with media is ever cut.

Images are PIL images, paths, `file://` and `data:` addresses, encoded bytes, arrays or tensors (height, width,
channels, or channels first), or a mapping with one of them under `image`, `path`, `url` or `bytes`. Media that are
processed already go with token ids that hold their placeholders: `Prompt(token_ids=..., images={"pixel_values": ...,
"image_grid_thw": ...})`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.batch.vision import BY_TOKEN, GRIDS, TYPES, placeholders, token_types
from rollbook.core.images import load_image, source
from rollbook.core.media import SHARED
from rollbook.core.sampling import Prompt, Sampling

_TOKENS = ("input_ids", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prompt as a model takes it.

    `ids`: with placeholders expanded. `media`: the processor's tensors under the model's names, `None` without any.
    `text`: what was tokenized. `truncated_from`: how many ids there were, if some were cut.

    >>> Prepared(ids=(5, 6)).media is None
    True
    """

    ids: tuple[int, ...]
    media: Mapping[str, torch.Tensor] | None = None
    text: str | None = None
    truncated_from: int | None = None


class Preparer:
    """Makes prompts ready with a tokenizer, or a processor that has one; `config` is the model's, if it is known.

    `add_special_tokens` is for plain text; the text of a chat has its special tokens from the template.

    >>> Preparer().prepare(Prompt(token_ids=[5, 6, 7]), Sampling(max_prompt_tokens=2, prompt_overflow="left"))
    Prepared(ids=(6, 7), media=None, text=None, truncated_from=3)
    """

    def __init__(
        self, tokenizer: Any = None, processor: Any = None, config: Any = None, *, add_special_tokens: bool = False
    ) -> None:
        if processor is None and hasattr(tokenizer, "tokenizer"):
            tokenizer, processor = None, tokenizer
        self.processor = processor
        self.tokenizer = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", None)
        self.config = config
        self.add_special_tokens = add_special_tokens

    def prepare(self, prompt: Prompt, sampling: Sampling | None = None) -> Prepared:
        """One prompt's ids, media and text; a `ValueError` says what is wrong with it."""
        how = sampling if sampling is not None else Sampling()
        ready = _ready(prompt)
        if ready is not None:
            made = self._with_ready(prompt, ready)
        elif prompt.messages is not None:
            messages, images, videos = _parts(prompt)
            made = self._tokenized(self._templated(prompt, messages), images, videos, special=False)
        elif prompt.token_ids is not None:
            made = self._with_ids(prompt)
        else:
            text = prompt.text or ""
            made = self._tokenized(text, list(prompt.images), list(prompt.videos), special=self.add_special_tokens)
        if not made.ids:
            raise ValueError("prompt: got no tokens, expected at least one")
        return self._fitted(made, how)

    # --- text ---------------------------------------------------------------------------------------------------------

    def _templated(self, prompt: Prompt, messages: list[dict[str, Any]]) -> str:
        maker = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if maker is None:
            raise ValueError("prompt.messages: got a chat, expected token ids: there is no tokenizer")
        if not getattr(maker, "chat_template", None):
            raise ValueError("prompt.messages: got a chat, expected text or token ids: the tokenizer has no template")
        tools = None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
        made = maker.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return str(made)

    def _tokenized(self, text: str, images: list[Any], videos: list[Any], special: bool) -> Prepared:
        if self.tokenizer is None:
            raise ValueError(f"prompt.text: got text ({text[:40]!r}), expected token ids: there is no tokenizer")
        if not images and not videos:
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
            return Prepared(ids=tuple(ids), text=text)
        features = self._processed(text, images, videos, special)
        ids = tuple(features["input_ids"].reshape(-1).tolist())
        return Prepared(ids=ids, media=self._media(features, ids, len(images), len(videos)), text=text)

    def _fitted(self, made: Prepared, how: Sampling) -> Prepared:
        most, length = how.max_prompt_tokens, len(made.ids)
        if most is None or length <= most:
            return made
        if made.media is not None:
            raise ValueError(
                f"prompt: got {length} tokens, expected at most {most} (max_prompt_tokens); one with media is not cut"
            )
        if how.prompt_overflow == "error":
            raise ValueError(f"prompt: got {length} tokens, expected at most {most} (max_prompt_tokens)")
        ids = made.ids[-most:] if how.prompt_overflow == "left" else made.ids[:most]
        text = None if self.tokenizer is None else self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return Prepared(ids=ids, text=text, truncated_from=length)

    # --- media --------------------------------------------------------------------------------------------------------

    def _processed(self, text: str, images: list[Any], videos: list[Any], special: bool) -> Any:
        """What the processor makes of text and media; the text has a placeholder for each of them."""
        if self.processor is None:
            raise ValueError(f"prompt: got {len(images)} images and {len(videos)} videos, expected none: no processor")
        if videos and getattr(self.processor, "video_processor", None) is None:
            raise ValueError(f"prompt.videos: got {len(videos)}, expected none: the processor takes no videos")
        for what, count in (("image", len(images)), ("video", len(videos))):
            marks = [
                getattr(self.processor, name, None) for name in (f"{what}_token", f"boi_{what}_token", "boi_token")
            ]
            written = [text.count(mark) for mark in marks if isinstance(mark, str) and mark in text]
            if written and written[0] != count:
                raise ValueError(
                    f"prompt.{what}s: got {count}, expected {written[0]}, one for each {what} in the prompt's text"
                )
        given: dict[str, Any] = {}
        if images:
            given["images"] = [load_image(f"prompt.images[{i}]", image) for i, image in enumerate(images)]
        if videos:
            given["videos"] = videos
        return self.processor(text=[text], return_tensors="pt", add_special_tokens=special, **given)

    def _media(
        self, features: Mapping[str, Any], ids: Sequence[int], images: int = 0, videos: int = 0
    ) -> dict[str, torch.Tensor]:
        media = {name: value for name, value in features.items() if name not in _TOKENS and value is not None}
        for name, value in media.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"media[{name!r}]: got {type(value).__name__}, expected a tensor")
        holder = self.config if placeholders(self.config) else self.processor
        known = placeholders(holder)
        for what, count in (("image", images), ("video", videos)):
            if what in known and ids.count(known[what]) < count:
                raise ValueError(
                    f"prompt.{what}s: got {count}, expected {ids.count(known[what])}, as many as the prompt has "
                    "placeholders for"
                )
            grid = media.get(f"{what}_grid_thw")
            merge = getattr(getattr(self.config, "vision_config", None), "spatial_merge_size", None)
            if grid is not None and what in known and merge is not None:
                wanted = int(grid.reshape(-1, 3).prod(-1).sum()) // merge**2
                if ids.count(known[what]) != wanted:
                    raise ValueError(
                        f"prompt: got {ids.count(known[what])} {what} placeholders, expected {wanted}, by its grids"
                    )
        if TYPES not in media and any(grid in media for grid in GRIDS) and ("image" in known or "video" in known):
            # Models whose positions go by these types ask for them, in training too.
            media[TYPES] = token_types(torch.tensor([list(ids)]), holder)
        return {name: SHARED.keep(value) for name, value in media.items()}

    def _with_ready(self, prompt: Prompt, ready: Mapping[str, Any]) -> Prepared:
        if prompt.token_ids is None:
            raise ValueError("prompt.images: got processed media, expected them beside token_ids with placeholders")
        tensors = {name: torch.as_tensor(value) for name, value in ready.items()}
        ids = tuple(prompt.token_ids)
        return Prepared(ids=ids, media=self._media(tensors, ids), text=self._decoded(ids))

    def _with_ids(self, prompt: Prompt) -> Prepared:
        """Token ids that hold the expanded placeholders of the images beside them."""
        ids = tuple(prompt.token_ids or ())
        if not prompt.images and not prompt.videos:
            return Prepared(ids=ids, text=self._decoded(ids))
        marks = [
            str(getattr(self.processor, f"{what}_token", "")) * len(getattr(prompt, f"{what}s"))
            for what in ("image", "video")
        ]
        features = self._processed("".join(marks), list(prompt.images), list(prompt.videos), special=False)
        alone = features["input_ids"].reshape(-1).tolist()
        for token in set(placeholders(self.config or self.processor).values()):
            if alone.count(token) != ids.count(token):
                raise ValueError(
                    f"prompt.token_ids: got {ids.count(token)} placeholders ({token}), expected {alone.count(token)}, "
                    "as many as its media give"
                )
        # By-token entries are of the placeholders alone, without the text.
        features = {name: value for name, value in features.items() if name not in BY_TOKEN}
        return Prepared(ids=ids, media=self._media(features, ids), text=self._decoded(ids))

    def _decoded(self, ids: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _ready(prompt: Prompt) -> Mapping[str, Any] | None:
    """Media that are processed already, of images and of videos, or `None`."""
    ready = [
        each for each in (*prompt.images, *prompt.videos) if isinstance(each, Mapping) and not source(each) and each
    ]
    if not ready:
        return None
    if len(ready) != len(prompt.images) + len(prompt.videos):
        raise ValueError("prompt.images: got processed media among others, expected only such, or none")
    return {name: value for each in ready for name, value in each.items()}


def _parts(prompt: Prompt) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """A chat's messages with bare image and video parts, and the images and videos of these parts in their order."""
    beside = {"image": iter(prompt.images), "video": iter(prompt.videos)}
    inside: dict[str, list[Any]] = {"image": [], "video": []}
    bare = {"image": 0, "video": 0}

    def part_of(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        what = {"image": "image", "image_url": "image", "video": "video"}.get(kind or "")
        if what is None:
            return part
        key = source(part)
        if key is None:
            bare[what] += 1
            image = next(beside[what], None)
            if image is None:
                raise ValueError(
                    f"prompt.{what}s: got {bare[what] - 1}, expected one for each {what} part of the messages"
                )
        else:
            image = part[key]
        inside[what].append(image)
        return {"type": what}

    messages = []
    for message in prompt.messages or ():
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [part_of(part) for part in content]}
        messages.append(dict(message))
    for what, rest in beside.items():
        left = list(rest)
        if left and inside[what]:
            raise ValueError(
                f"prompt.{what}s: got {bare[what] + len(left)}, expected {bare[what]}, one for each part of the "
                f"messages without {what} of its own"
            )
        inside[what] += left  # their places are marked in the messages' text
    return messages, inside["image"], inside["video"]
