"""Chat rendering: conversations to token ids, comparison with the tokens already sampled, and messages for servers.

Invariant: what `Renderer.after` returns is appended to the sampled tokens and never contains or replaces one of them.
In the messages for a server, each image of a prompt appears exactly once, in order.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from rollbook.core.files import check_regular
from rollbook.core.media import MAGIC_BYTES, data_url, load_image, load_picture, source_key, unwrap
from rollbook.core.sampling import Prompt
from rollbook.core.vocabulary import Tokenizer

__all__ = ["Drift", "Drifts", "Renderer", "compare_tokens"]

Outcome = Literal["clean", "realigned", "forked", "unchecked"]
"""How a new rendering of the conversation differs from the tokens so far.

- `clean`: the tokens are equal.
- `realigned`: the text is equal but tokenized differently, or differs only in special tokens and white space.
- `forked`: the text of an earlier turn differs: reasoning is dropped, a call is rewritten, a message is moved.
- `unchecked`: they were not compared; `what` has the reason.
"""
OUTCOMES: tuple[str, ...] = get_args(Outcome)
_PLACEHOLDER = "xTURNx"
"""Content of a turn in a rendering of what surrounds the turn."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Result of comparing the sampled tokens with a new rendering, before a turn.

    Args:
        outcome: See `Outcome`.
        what: What differs: `tokens`, `glue` (special tokens, white space) or `text`; the reason if unchecked.
        kept: Number of sampled tokens between the first and the last difference.
        rendered: Number of rendered tokens in their place.
        by: Whether the other tokens come from the chat `template` or from the `engine`.
        policy: Whether the turn was sampled after the sampled tokens (`keep`) or, in a new branch, after the rendering
            (`fork`).

    >>> Drift(outcome="realigned", what="tokens", kept=2, rendered=1).to_dict()["kept"]
    2
    """

    outcome: Outcome
    what: str = ""
    kept: int = 0
    rendered: int = 0
    by: Literal["template", "engine"] = "template"
    policy: Literal["keep", "fork"] = "keep"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


class Drifts(tuple[Drift, ...]):
    """All comparisons of an episode.

    Args:
        drifts: The comparisons, in the order of the turns.

    >>> Drifts([Drift(outcome="clean"), Drift(outcome="forked"), Drift(outcome="clean")]).counts
    {'clean': 2, 'realigned': 0, 'forked': 1, 'unchecked': 0}
    """

    __slots__ = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of comparisons by outcome."""
        return {name: sum(drift.outcome == name for drift in self) for name in OUTCOMES}


def compare_tokens(
    sampled: Sequence[int],
    rendered: Sequence[int],
    decode: Callable[..., str],
    *,
    by: Literal["template", "engine"] = "template",
) -> Drift:
    """Compare the tokens so far with a new rendering.

    Args:
        sampled: The tokens so far.
        rendered: The tokens of the rendering.
        decode: `decode(ids, special=...)` returns the text of ids, with or without special tokens.
        by: Origin of the rendering.

    Returns:
        The comparison.

    >>> letters = {1: "a", 2: "b", 3: "ab", 4: "c"}
    >>> def decode(ids, special=True):
    ...     return "".join(letters[i] for i in ids)
    >>> compare_tokens([4, 1, 2, 4], [4, 3, 4], decode)
    Drift(outcome='realigned', what='tokens', kept=2, rendered=1, by='template', policy='keep')
    >>> compare_tokens([4, 1], [4, 2], decode).outcome
    'forked'
    """
    if list(sampled) == list(rendered):
        return Drift(outcome="clean", by=by)
    prefix = _common_prefix(sampled, rendered)
    max_suffix = min(len(sampled), len(rendered)) - prefix
    suffix = min(_common_prefix(sampled[::-1], rendered[::-1]), max_suffix)
    sampled, rendered = sampled[prefix : len(sampled) - suffix], rendered[prefix : len(rendered) - suffix]
    outcome: Outcome = "realigned"
    if decode(sampled) == decode(rendered):
        difference = "tokens"
    elif _visible(decode(sampled, special=False)) == _visible(decode(rendered, special=False)):
        difference = "glue"
    else:
        outcome, difference = "forked", "text"
    return Drift(outcome=outcome, what=difference, kept=len(sampled), rendered=len(rendered), by=by)


def _common_prefix(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))


def _visible(text: str) -> str:
    return "".join(text.split())


class Renderer:
    """Tokenizer and chat template of a conversation.

    Args:
        tokenizer: Tokenizer, or a processor that has one.
        chat: Whether to use the chat template. Without it, a conversation is the concatenated contents of its messages.
        tools: Tools offered to the template.
        options: Options of the template, such as `enable_thinking`.

    Raises:
        ValueError: The tokenizer has no chat template.

    >>> conversation = [{"role": "prompt", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    >>> Renderer(None, chat=False).text(conversation, generation=False)
    '2+2=4'
    >>> Renderer(None)
    Traceback (most recent call last):
        ...
    ValueError: tokenizer: got NoneType without a chat template, expected one that has it, or a prompt of text or token ids instead of messages
    """  # noqa: E501

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        chat: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if chat and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer: got {type(tokenizer).__name__} without a chat template, expected one that has it, or a "
                "prompt of text or token ids instead of messages"
            )
        self.tokenizer: Any = tokenizer
        self.chat = chat
        self.tools = None if tools is None else [dict(tool) for tool in tools]
        self.options = dict(options or {})
        self._inner: Any = getattr(tokenizer, "tokenizer", tokenizer)

    def text(self, messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
        """Render a conversation.

        Args:
            messages: The conversation.
            generation: Whether to add the beginning of the next turn.

        Returns:
            The text.
        """
        if not self.chat:
            return "".join(message["content"] for message in messages)
        plain = [_for_template(message) for message in messages]
        return str(
            self.tokenizer.apply_chat_template(
                plain, tools=self.tools, add_generation_prompt=generation, tokenize=False, **self.options
            )
        )

    def encode(self, text: str, images: Sequence[Any] = ()) -> list[int]:
        """Tokenize a text without adding special tokens. A processor expands the placeholders of images.

        Args:
            text: The text.
            images: Images of the placeholders in the text.

        Returns:
            [n] Token ids.
        """
        if images and self._inner is not self.tokenizer:
            from rollbook.rollout.transformers import PromptPreparer

            return list(PromptPreparer(self.tokenizer).prepare(Prompt(text=text, images=images)).ids)
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Decode token ids.

        Args:
            ids: The token ids.
            special: Whether the text has special tokens.

        Returns:
            The text.
        """
        return str(self._inner.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], generation: bool = True, images: Sequence[Any] = ()
    ) -> list[int]:
        """Render and tokenize a conversation.

        Args:
            messages: The conversation.
            generation: Whether to add the beginning of the next turn.
            images: Images of the messages.

        Returns:
            [n] Token ids.
        """
        return self.encode(self.text(messages, generation), images)

    def endings(self, previous: str, current: str) -> tuple[list[int], list[int]]:
        """Tokenize two texts from the last special token of their common prefix on.

        Tokenizers split a text at special tokens first, so the tokens before it are equal.

        Args:
            previous: The first text.
            current: The second text.

        Returns:
            [n] Token ids of the end of `previous`, and [m] of that of `current`.
        """
        prefix = len(previous) if current.startswith(previous) else _common_prefix(previous, current)
        last_special = max((previous.rfind(token, 0, prefix) for token in self._inner.all_special_tokens), default=0)
        start = max(last_special, 0)
        return self.encode(previous[start:]), self.encode(current[start:])

    def content(self, context: Sequence[Mapping[str, Any]], ids: Sequence[int], ended: bool) -> str:
        """Return the text of a turn, without its end tokens.

        Args:
            context: Messages before the turn.
            ids: Sampled ids of the turn.
            ended: Whether the model ended the turn; otherwise it has no end tokens.

        Returns:
            The text.
        """
        text = self.decode(ids)
        if not ended or not ids:
            return text
        try:
            closing = self._turn(context, {"role": "assistant"}, (), False)[0]
        except Exception:  # the template cannot render a plain turn
            closing = ""
        if sampled := self._overlap(text, closing):
            return text.removesuffix(sampled)
        return self.decode(ids[:-1]) if ids[-1] in self._inner.all_special_ids else text

    def after(
        self,
        context: Sequence[Mapping[str, Any]],
        turn: Mapping[str, Any],
        ids: Sequence[int],
        ended: bool,
        new: Sequence[Mapping[str, Any]],
        generation: bool = True,
        images: Sequence[Any] = (),
    ) -> list[int]:
        """Return the tokens that follow a sampled turn.

        They are the part of the turn's end that was not sampled, the new messages, and the beginning of the next turn.
        The template renders a turn with other content, since changes of this one (dropped reasoning, trimming) must not
        affect what follows.

        Args:
            context: Messages before the turn.
            turn: The assistant's message.
            ids: Sampled ids of the turn.
            ended: Whether the model ended the turn.
            new: Messages after the turn.
            generation: Whether to add the beginning of the next turn.
            images: Images of the new messages.

        Returns:
            [n] Token ids.

        Raises:
            ValueError: The template cannot render the messages there.
        """
        # A tool's message may need the call it answers. If that cannot be rendered, a plain turn may be.
        substitutes = [{"role": "assistant"}]
        if turn.get("tool_calls"):
            substitutes.insert(0, {name: entry for name, entry in turn.items() if name != "content"})
        failures = []
        for message in substitutes:
            try:
                closing, rest = self._turn(context, message, new, generation)
                break
            except Exception as error:  # templates raise any exception
                failures.append(f"{type(error).__name__}: {error}")
        else:
            raise ValueError(
                f"messages: the template cannot render {[message.get('role') for message in new]} after the model's "
                f"turn ({failures[0]}); render them yourself and use observe_tokens"
            )
        if self.chat and new and rest == self._rest_alone(context, message, generation):
            raise ValueError(
                f"messages: the template does not render {[message.get('role') for message in new]} after the model's "
                "turn; render it yourself and use observe_tokens, or set on_fork='fork'"
            )
        sampled = self._overlap(self.decode(ids), closing) if ended else ""
        return self.encode_after(sampled, closing.removeprefix(sampled) + rest, images)

    def _turn(
        self, context: Sequence[Mapping[str, Any]], turn: Mapping[str, Any], new: Sequence[Any], generation: bool
    ) -> tuple[str, str]:
        """Render a turn; return the text that ends the turn, and the text that follows it."""
        placeholder = _PLACEHOLDER
        while placeholder in repr((context, turn, new, self.tools)):
            placeholder = f"x{placeholder}x"
        messages = [*context, {**turn, "content": placeholder}]
        alone, complete = self.text(messages, False), self.text([*messages, *new], generation)
        if alone.count(placeholder) != 1 or complete.count(placeholder) != 1:
            raise ValueError("the template does not render the content of the turn exactly once")
        end, rest = (text.partition(placeholder)[2] for text in (alone, complete))
        if not turn.get("tool_calls"):
            closing = end[: _common_prefix(end, rest)]
            return closing, rest[len(closing) :]
        # Calls are between the content and the end of the turn, which is that of a turn without calls.
        closing = self._turn(context, {"role": "assistant"}, (), False)[0]
        if not complete.startswith(alone) or not alone.endswith(closing):
            raise ValueError("the template renders a turn with calls differently if messages follow")
        return closing, complete[len(alone) :]

    def _rest_alone(
        self, context: Sequence[Mapping[str, Any]], turn: Mapping[str, Any], generation: bool
    ) -> str | None:
        """Return the text that follows a turn without new messages; `None` if the template rejects that."""
        try:
            return self._turn(context, turn, (), generation)[1]
        except Exception:  # templates raise any exception
            return None

    def _overlap(self, text: str, closing: str) -> str:
        """Return the part of a turn's end that was sampled: its longest prefix, in tokens, that ends the text."""
        ids = self.encode(closing)
        prefixes = (self.decode(ids[:stop]) for stop in range(len(ids), 0, -1))
        return next(
            (prefix for prefix in prefixes if prefix and text.endswith(prefix) and closing.startswith(prefix)), ""
        )

    def encode_after(self, previous: str, text: str, images: Sequence[Any] = ()) -> list[int]:
        """Tokenize a text that follows another: some tokenizers add a space before the first word.

        Args:
            previous: The text before.
            text: The text.
            images: Images of the placeholders in the text.

        Returns:
            [n] Token ids of `text`.
        """
        alone, anchor = self.encode(text, images), previous or "a"
        start, joined = self.encode(anchor), self.encode(anchor + text, images)
        rest = joined[len(start) :]
        is_split = joined[: len(start)] == start and self.decode(rest).strip() == self.decode(alone).strip()
        return rest if is_split else alone


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of a server for templates: content is not None, arguments of calls are parsed."""
    plain = {**message, "content": message.get("content") if message.get("content") is not None else ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_parse_call(call) for call in message["tool_calls"]]
    return plain


def _parse_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


_VIDEO = re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI |OggS|FLV\x01|\0\0\x01[\xba\xb3]|G.{187}G", re.DOTALL)
"""First bytes of MP4 and MOV, WebM and Matroska, AVI, Ogg, Flash and MPEG (program stream, video, transport)."""
_PAYLOAD = re.compile(r"(data:[\w./+-]+;base64,)?[A-Za-z0-9+/=_-]{120,}")


def chat_messages(prompt: Prompt, allow_urls: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a prompt for JSON, with its media as `data:` URLs.

    Parts `{"type": "image"}` (and `"video"`) are replaced by the media in order. Without such parts, all media are put
    before the text of the last user message. A part may also contain its image: `{"type": "image", "image": picture}`.
    Images are PIL images, encoded bytes, arrays [height, width, 3] of bytes, paths, `data:` URLs, or a mapping with one
    of them under `image`, `path`, `url` or `bytes`.

    Args:
        prompt: The prompt.
        allow_urls: Whether to accept `http` URLs, which the server would fetch.

    Returns:
        The messages.

    Raises:
        ValueError: An image cannot be encoded, or the media do not match the parts.

    >>> chat_messages(Prompt(messages=[{"role": "user", "content": "hi"}]))
    [{'role': 'user', 'content': 'hi'}]
    >>> prompt = Prompt(messages=[{"role": "user", "content": "what?"}], images=["data:image/png;base64,AA=="])
    >>> [part["type"] for part in chat_messages(prompt)[0]["content"]]
    ['image_url', 'text']
    """
    messages = [dict(message) for message in prompt.messages or ()]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str):
            message["content"] = [
                _encode_part(f"prompt.messages[{i}]", part, allow_urls) for part in message["content"]
            ]
    for kind, media, encode in (("image", prompt.images, image_url), ("video", prompt.videos, video_url)):
        urls = [encode(f"prompt.{kind}s[{i}]", medium, allow_urls) for i, medium in enumerate(media)]
        _insert_media(messages, kind, urls)
    return messages


def has_media(prompt: Prompt) -> bool:
    """Return whether a prompt has images or videos, also as parts of its messages.

    Args:
        prompt: The prompt.

    >>> has_media(Prompt(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]))
    False
    """
    contents = [message.get("content") for message in prompt.messages or ()]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    has_media_parts = any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    return bool(prompt.images or prompt.videos) or has_media_parts


def _url_part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _encode_part(name: str, part: Mapping[str, Any], allow_urls: bool) -> dict[str, Any]:
    """Encode the image of a part, if any, as a URL, and check its URLs."""
    for kind, encode in (("image", image_url), ("video", video_url)):
        if part.get("type") == kind and source_key(part) is not None:
            return _url_part(kind, encode(f"{name}.{kind}", part, allow_urls))
        address = part.get(f"{kind}_url")
        url = address.get("url") if isinstance(address, Mapping) else address
        if isinstance(url, str):
            _check_url(f"{name}.{kind}_url", url, allow_urls)
    return dict(part)


def _insert_media(messages: list[dict[str, Any]], kind: str, urls: list[str]) -> None:
    parts = [_url_part(kind, url) for url in urls]
    targets = [
        (message["content"], i)
        for message in messages
        if isinstance(message.get("content"), list)
        for i, part in enumerate(message["content"])
        if part.get("type") == kind
    ]
    if targets and len(targets) != len(parts):
        raise ValueError(f"prompt.{kind}s: got {len(parts)}, expected {len(targets)}, one for each part of the chat")
    if targets:
        for (content, i), part in zip(targets, parts, strict=True):
            content[i] = part
    elif parts:
        user_message = next((message for message in reversed(messages) if message["role"] == "user"), None)
        if user_message is None:
            raise ValueError(f"prompt.{kind}s: got {len(parts)}, but there is no user message to put them in")
        content = user_message.get("content") or []
        user_message["content"] = parts + ([{"type": "text", "text": content}] if isinstance(content, str) else content)


def image_url(name: str, image: Any, allow_urls: bool = False) -> str:
    """Encode an image as a `data:` URL; a PIL image as PNG, with palettes and alpha converted to RGB.

    Args:
        name: Name of the image in errors.
        image: A PIL image, an array, encoded bytes, a path or a URL.
        allow_urls: Whether to accept `http` URLs.

    Raises:
        ValueError: The bytes, or those of the file, cannot be decoded as an image.

    >>> from PIL import Image
    >>> image_url("image", Image.new("L", (1, 1)))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    image = unwrap(image)
    if hasattr(image, "convert") or hasattr(image, "__array__"):  # a PIL image; an array or a tensor
        buffer = io.BytesIO()
        load_image(name, image).save(buffer, "PNG")
        return _data_url("image/png", buffer.getvalue())
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return _check_url(name, image, allow_urls)
    raw = _read_bytes(name, image, "a PIL image, bytes, a path or a data: URL")
    url = data_url(raw)
    if url is None:
        raise ValueError(f"{name}: got bytes that begin with {raw[:8]!r}, expected a {', '.join(MAGIC_BYTES)} file")
    load_picture(name, raw)
    return url


def video_url(name: str, video: Any, allow_urls: bool = False) -> str:
    """Encode a video file as a `data:` URL.

    Args:
        name: Name of the video in errors.
        video: Bytes, a path or a URL.
        allow_urls: Whether to accept `http` URLs.

    Raises:
        ValueError: The file does not begin like a video.

    >>> video_url("video", bytes(4) + b"ftyp")
    'data:video/mp4;base64,AAAAAGZ0eXA='
    """
    video = unwrap(video)
    if isinstance(video, str) and video.startswith(("data:", "http://", "https://")):
        return _check_url(name, video, allow_urls)
    raw = _read_bytes(name, video, "a video file's bytes, a path or a data: URL")
    if not _VIDEO.match(raw):
        raise ValueError(f"{name}: got bytes that begin with {raw[:8]!r}, expected an MP4, WebM, AVI, Ogg or MPEG file")
    return _data_url("video/mp4", raw)


def redact_secrets(text: str, secrets: Sequence[str] = (), max_length: int = 500) -> str:
    """Remove secrets and media payloads from the text of a server, and shorten it.

    Args:
        text: The text.
        secrets: Secrets to remove.
        max_length: Largest length.

    >>> redact_secrets("no image data:image/png;base64," + "A" * 5000 + " for key-1", ["key-1"])
    'no image [payload] for [secret]'
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "[secret]")
    text = _PAYLOAD.sub("[payload]", text)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _read_bytes(name: str, content: Any, expected: str) -> bytes:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    if isinstance(content, (str, os.PathLike)):
        check_regular(content)
        try:
            return Path(content).read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: cannot read {str(content)[:200]!r}: {error.strerror or error}") from None
    raise ValueError(f"{name}: got {type(content).__name__}, expected {expected}")


def _data_url(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _check_url(name: str, url: str, allow_urls: bool) -> str:
    if url.startswith("data:") or (allow_urls and url.startswith(("http://", "https://"))):
        return url
    if allow_urls:
        raise ValueError(f"{name}: got {url[:80]!r}, expected a data:, http:// or https:// URL")
    raise ValueError(f"{name}: got a URL that the server would fetch, expected the image, or allow_urls=True")
