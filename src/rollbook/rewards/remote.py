"""`RemoteReward`: reward models behind HTTP in LightRFT's format, with batching, concurrency and retries.

Invariant: a request yields a score or an error for each sample, and a wrong number of scores raises. Only transient
errors are retried. Requests are never logged. Only data that decodes as an image is sent. A file that is named by text
is never opened, because the text may come from a record.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from rollbook.core.addresses import redacted, without_user
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.media import load_picture, names_file, read_encoded
from rollbook.rewards.functions import MissingExtraError, describe_error
from rollbook.rewards.types import (
    Image,
    Json,
    OnError,
    Reward,
    RewardInput,
    RewardResult,
    WrongCountError,
    as_float,
    as_inputs,
    check_on_error,
    failed_score,
    locate,
    log_failures,
    run_sync,
)
from rollbook.rollout.server import RETRY_STATUSES, Backoff, parse_retry_after

if TYPE_CHECKING:
    import httpx
    import PIL.Image

__all__ = ["RemoteReward"]


ImageFormat = Literal["jpeg", "png"]

_SAVE_OPTIONS: dict[str, dict[str, int]] = {"jpeg": {"quality": 95}, "png": {}}
_MODES = {"jpeg": ("L", "RGB"), "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
"""Image modes that each format supports. Images of other modes are converted to RGB."""


class ImageEncoder:
    """Encodes images as base64 text: all types that `rollbook.core.media` reads, except paths and URLs as text.

    Images are cached by object and by content, because the samples of a prompt share them.

    Args:
        format: `jpeg`, or `png` (lossless).

    >>> ImageEncoder().text("/home/me/photo.png")
    Traceback (most recent call last):
        ...
    ValueError: image: got a path or an address as text, expected the image itself or a pathlib.Path
    """

    def __init__(self, format: ImageFormat = "jpeg") -> None:
        check_choice("image_format", format, ("jpeg", "png"))
        self._format = format
        self._by_object: dict[int, tuple[Any, str]] = {}
        self._by_content: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self.encoded = 0
        """Number of images that were encoded because they were not in the cache."""

    def text(self, image: Image) -> str:
        """Return the base64 text of an image."""
        with self._lock:  # concurrent requests may share an image
            cached = self._by_object.get(id(image))
            if cached is not None:
                return cached[1]
            encoded_text = self._to_base64(image)
            self._by_object[id(image)] = (image, encoded_text)  # keeps the object alive, so that its id stays unique
            return encoded_text

    def _to_base64(self, image: Image) -> str:
        if names_file(image):
            raise ValueError("image: got a path or an address as text, expected the image itself or a pathlib.Path")
        raw = read_encoded("image", image)
        picture = load_picture("image", image if raw is None else raw)
        if raw is not None:
            return self._cached_base64(raw, lambda: raw)
        if picture.mode not in _MODES[self._format]:
            picture = picture.convert("RGB")
        palette = bytes(picture.getpalette() or ()) + repr(picture.info.get("transparency")).encode()
        content = f"{picture.mode} {picture.size} ".encode() + palette + picture.tobytes()
        return self._cached_base64(content, lambda: self._compress(picture))

    def _compress(self, picture: PIL.Image.Image) -> bytes:
        buffer = io.BytesIO()
        picture.save(buffer, self._format.upper(), **_SAVE_OPTIONS[self._format])
        return buffer.getvalue()

    def _cached_base64(self, content: bytes, compress: Callable[[], bytes]) -> str:
        key = xxhash.xxh3_128_digest(content)
        if key not in self._by_content:
            self._by_content[key] = base64.b64encode(compress()).decode()
            self.encoded += 1
        return self._by_content[key]


class _RequestError(RollbookError):
    """A failed request: whether to retry it, and the seconds that the server wants the client to wait."""

    def __init__(self, text: str, retry: bool = False, wait: float = 0.0) -> None:
        super().__init__(text)
        self.retry = retry
        self.wait = wait


class RemoteReward(Reward):
    """A reward model behind a URL, or behind several replicas that share the work.

    Request: POST of JSON {`queries`: prompt + response, `prompts`, `references`, `labels`, `images`}, each a list with
    one entry per sample. The last three are sent only if a sample has one. Reply: {`rewards`: [numbers]}, optionally
    {`metrics`: {name: [numbers]}}. A score that is not a finite number is an error of its sample. An invalid reply is
    an error of all samples of the request. A wrong number of scores raises `WrongCountError`.

    Each distinct image is encoded once per call; bytes and files (`pathlib.Path`) are sent unchanged. A sample is
    an error, and is not sent, if an image of it cannot be decoded or is text that names a file.

    Args:
        url: Address, or addresses of replicas.
        name: Name in errors and metrics.
        batch_size: Samples per request.
        concurrency: Requests in flight.
        timeout: Seconds per attempt, from connecting to the last byte.
        backoff: Waits between retries; a longer wait that the server requests has precedence. Connection errors,
            timeouts, incomplete replies and the statuses in `rollout.server.RETRY_STATUSES` are retried, at the next
            replica if there are several.
        headers: HTTP headers.
        score_key: Key of the scores in the reply.
        send_responses: Add `responses`, the response texts alone.
        image_format: `jpeg`, or `png` (lossless).
        dedupe_images: Send each image once per request: `images` is then a flat list and `image_indices` has the
            indices of each query. The server must support that form.
        on_error: See `FunctionReward`.

    Raises:
        ValueError: A URL or an option is invalid.

    >>> RemoteReward("ftp://nowhere")
    Traceback (most recent call last):
        ...
    ValueError: url: got 'ftp://nowhere', expected one that begins with http:// or https://
    """

    waits = True

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        name: str = "remote",
        batch_size: int = 32,
        concurrency: int = 8,
        timeout: float = 60.0,
        backoff: Backoff | None = None,
        headers: Mapping[str, str] | None = None,
        score_key: str = "rewards",
        send_responses: bool = False,
        image_format: ImageFormat = "jpeg",
        dedupe_images: bool = False,
        on_error: OnError = "exclude",
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls:
            raise ValueError("url: missing")
        for address in urls:
            if not isinstance(address, str) or not address.startswith(("http://", "https://")):
                shown = redacted(address) if isinstance(address, str) else address
                raise ValueError(f"url: got {shown!r}, expected one that begins with http:// or https://")
        # User names and passwords are removed, because httpx logs the URLs of requests.
        self.urls, self._users = map(list, zip(*map(without_user, urls), strict=True))
        _httpx()
        self.name = name
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.concurrency = check_int("concurrency", concurrency, 1)
        self.timeout = check_float("timeout", timeout, 1e-3, 1e6)
        self.backoff = backoff if backoff is not None else Backoff()
        self._headers = dict(headers or {})
        self._score_key = score_key
        self._send_responses = check_bool("send_responses", send_responses)
        ImageEncoder(image_format)  # checks the format
        self._image_format = image_format
        self._dedupe_images = check_bool("dedupe_images", dedupe_images)
        self.on_error: OnError = check_on_error(on_error)

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples. Inside a running event loop, the loop is blocked."""
        return run_sync(lambda: self.score_async(inputs))

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples without blocking the event loop.

        Args:
            inputs: The samples, in any form that `as_inputs` takes.

        Returns:
            Rewards, metrics and errors of the samples.
        """
        httpx = _httpx()
        inputs = as_inputs(inputs)
        encoder = ImageEncoder(self._image_format)
        chunks = [range(i, min(i + self.batch_size, len(inputs))) for i in range(0, len(inputs), self.batch_size)]
        slots = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits(max_connections=self.concurrency)
        # A client per call, because its connections belong to this event loop.
        async with httpx.AsyncClient(limits=limits, timeout=None, headers=self._headers) as client:
            parts = await asyncio.gather(
                *(
                    self._score_chunk(client, slots, k, [inputs[i] for i in chunk], encoder)
                    for k, chunk in enumerate(chunks)
                )
            )
        scores = RewardResult(rewards=[nan] * len(inputs))
        for chunk, chunk_scores in zip(chunks, parts, strict=True):
            for metric, values in chunk_scores.metrics.items():
                column = scores.metrics.setdefault(metric, [nan] * len(inputs))
                column[chunk.start : chunk.stop] = values
            for i, reward, error in zip(chunk, chunk_scores.rewards, chunk_scores.errors, strict=True):
                scores.rewards[i] = reward
                if error is not None:
                    scores.errors[i] = f"{self.name}: {error}"
                    scores.rewards[i] = failed_score(self.on_error, locate(inputs[i], i), f"{self.name}: {error}")
        return log_failures(self.name, scores)

    async def _score_chunk(
        self,
        client: httpx.AsyncClient,
        slots: asyncio.Semaphore,
        k: int,
        inputs: list[RewardInput],
        encoder: ImageEncoder,
    ) -> RewardResult:
        """Score the samples of request `k`, which is first sent to replica `k` modulo the number of replicas."""
        scores = RewardResult(rewards=[nan] * len(inputs))
        async with slots:
            try:
                scores.errors = await asyncio.to_thread(_check_images, inputs, encoder)
                sent = [i for i, error in enumerate(scores.errors) if error is None]
                if not sent:
                    return scores
                body = await asyncio.to_thread(self._encode_body, [inputs[i] for i in sent], encoder)
                reply = self._parse_reply(await self._request(client, k, body), len(sent))
            except _RequestError as failed:
                scores.errors = [error or str(failed) for error in scores.errors]
                return scores
        for i, reward, error in zip(sent, reply.rewards, reply.errors, strict=True):
            scores.rewards[i], scores.errors[i] = reward, error
        for metric, values in reply.metrics.items():
            column = scores.metrics.setdefault(metric, [nan] * len(inputs))
            for i, value in zip(sent, values, strict=True):
                column[i] = value
        return scores

    def payload(self, inputs: Sequence[RewardInput], encoder: ImageEncoder | None = None) -> dict[str, Any]:
        """Build the body of a request.

        Args:
            inputs: The samples.
            encoder: Encodes images. `None`: a new encoder.

        Returns:
            The JSON object.

        >>> reward = RemoteReward("http://localhost:1/score")
        >>> reward.payload([RewardInput(prompt="2+2=", response="4", reference="4", label="math")])
        {'queries': ['2+2=4'], 'prompts': ['2+2='], 'references': ['4'], 'labels': ['math']}
        """
        body: dict[str, Any] = {
            "queries": [sample.query for sample in inputs],
            "prompts": [sample.prompt for sample in inputs],
        }
        if self._send_responses:
            body["responses"] = [sample.response for sample in inputs]
        optional = {
            "references": [sample.reference for sample in inputs],
            "labels": [sample.label for sample in inputs],
        }
        body |= {key: values for key, values in optional.items() if any(value is not None for value in values)}
        if any(len(sample.images) for sample in inputs):
            encoder = encoder if encoder is not None else ImageEncoder(self._image_format)
            nested = [[encoder.text(image) for image in sample.images] for sample in inputs]
            if self._dedupe_images:
                table = {text: i for i, text in enumerate(dict.fromkeys(t for row in nested for t in row))}
                body["images"] = list(table)
                body["image_indices"] = [[table[text] for text in row] for row in nested]
            else:
                body["images"] = nested
        return body

    def _encode_body(self, inputs: Sequence[RewardInput], encoder: ImageEncoder) -> bytes:
        try:
            return json.dumps(self.payload(inputs, encoder), allow_nan=False).encode()
        except (TypeError, ValueError, OSError) as error:
            raise _RequestError(f"cannot be sent ({describe_error(error)})") from None

    async def _request(self, client: httpx.AsyncClient, k: int, body: bytes) -> Json:
        """Send a request and return the reply. Retries go to the next replica."""
        waits = self.backoff.waits()
        attempt = 0
        while True:
            replica = (k + attempt) % len(self.urls)
            attempt += 1
            try:
                return await self._try_once(client, self.urls[replica], self._users[replica], body)
            except _RequestError as failed:
                wait = next(waits, None) if failed.retry else None
                if wait is None:
                    tries = f" ({attempt} tries)" if attempt > 1 else ""
                    raise _RequestError(f"{redacted(self.urls[replica])}: {failed}{tries}") from None
                await asyncio.sleep(max(wait, failed.wait))

    async def _try_once(self, client: httpx.AsyncClient, url: str, user: tuple[str, str] | None, body: bytes) -> Json:
        httpx = _httpx()
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self.timeout):
                reply = await client.post(url, content=body, headers=headers, auth=user or httpx.USE_CLIENT_DEFAULT)
        except TimeoutError:
            raise _RequestError(f"timed out after {self.timeout:g} s", retry=True) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError) as error:
            raise _RequestError(describe_error(error)) from None
        except httpx.TransportError as error:
            raise _RequestError(describe_error(error), retry=True) from None
        if reply.status_code != 200:
            retry = reply.status_code in RETRY_STATUSES
            message = _error_text(reply.content) or reply.reason_phrase
            raise _RequestError(f"status {reply.status_code}: {message}", retry, parse_retry_after(reply.headers))
        try:
            parsed: Json = json.loads(reply.content)
            return parsed
        except ValueError:
            raise _RequestError(
                f"gave {len(reply.content)} bytes that are not JSON, expected {self._expected_form()}"
            ) from None

    def _expected_form(self) -> str:
        return f'{{"{self._score_key}": [numbers]}}'

    def _parse_reply(self, reply: Json, n: int) -> RewardResult:
        """Parse the scores and metrics of a reply to a request with `n` samples."""
        values = reply.get(self._score_key) if isinstance(reply, dict) else None
        if not isinstance(reply, dict) or not isinstance(values, list):
            raise _RequestError(f"gave {_describe_json(reply)}, expected {self._expected_form()}")
        if len(values) != n:
            raise WrongCountError(f"{self.name}: gave {len(values)} scores, expected {n}, one for each query")
        scores = RewardResult(rewards=[nan] * n)
        for i, value in enumerate(values):
            try:
                scores.rewards[i] = as_float(value)
            except ValueError as error:
                scores.errors[i] = str(error)
        metrics = reply.get("metrics") or {}
        if not isinstance(metrics, dict):
            raise _RequestError(f"gave metrics as {type(metrics).__name__}, expected {{name: [{n} numbers]}}")
        for name, column in metrics.items():
            if not isinstance(column, list) or len(column) != n:
                raise _RequestError(
                    f"gave the metric {name!r} as {_describe_json(column)}, expected a list of {n} numbers"
                )
            try:
                scores.metrics[name] = [nan if value is None else as_float(value) for value in column]
            except ValueError as error:
                raise _RequestError(f"metric {name!r}: {error}") from None
        return scores


def _check_images(inputs: Sequence[RewardInput], encoder: ImageEncoder) -> list[str | None]:
    """Encode the images of the samples. Return an error for each sample with an invalid image, else `None`."""
    errors: list[str | None] = []
    for sample in inputs:
        try:
            for image in sample.images:
                encoder.text(image)
            errors.append(None)
        except (TypeError, ValueError, OSError) as error:
            errors.append(f"cannot be sent ({describe_error(error)})")
    return errors


def _error_text(content: bytes) -> str:
    """Extract the message of an error reply, in one line. The rest of the reply may quote the request.

    >>> _error_text(b'{"detail": [{"loc": ["body", "query"], "msg": "Field required", "input": {"queries": ["..."]}}]}')
    'body.query: Field required'
    """
    try:
        value = json.loads(content)
        while isinstance(value, dict):
            value = next(value[key] for key in ("detail", "message", "error", "msg") if key in value)
    except (ValueError, StopIteration):
        return ""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = "; ".join(f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg', '')}" for entry in entries)
    return " ".join(str(value)[:200].split())


def _describe_json(value: Json) -> str:
    """Describe the structure of a reply without its contents."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, list(value)[:8])) or 'nothing'}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("remote rewards need httpx: install the extra 'remote' of Rollbook") from None
    return httpx
