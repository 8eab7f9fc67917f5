"""`ScriptedEngine` returns scripted responses (`Line`), for tests and for replaying recorded rollouts.

Invariant: with a function or a mapping as the script, a sample depends only on its prompt and id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import check_int
from rollbook.core.sampling import FinishReason, Prompt, RunInfo, Sample, token_ids
from rollbook.core.vocabulary import Tokenizer, template_fingerprint, tokenizer_fingerprint
from rollbook.rollout.engine import BaseEngine, Cancel, Request, WeightSource

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

__all__ = ["Line", "ScriptedEngine"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A scripted response.

    Args:
        ids: Token ids.
        text: Text that the tokenizer converts to ids, instead of `ids`.
        logprobs: One per token; -1 each by default.
        finish_reason: Finish reason of the sample.
        error: Error of the sample, instead of a response.

    >>> Line(ids=(4, 5)).logprobs is None
    True
    """

    ids: Sequence[int] | None = None
    text: str | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason = "stop"
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is None and (self.ids is None) == (self.text is None):
            raise ValueError("line: got both or neither of ids and text, expected one of them, or an error")


Script = Callable[[Prompt, int], Any] | Sequence[Any] | Mapping[Any, Any]


class ScriptedEngine(BaseEngine):
    """Engine that returns scripted responses, for tests and for replaying records.

    Args:
        script: One of three forms. A function `(prompt, run) -> response`. A list of responses, which samples use in
            turn, and which starts over at its end. A mapping from prompt text or task id to a response, or to a list of
            responses, one per run, which also starts over. A response is a text, token ids, a `Line`, or an exception,
            which becomes the error of the sample.
        tokenizer: Converts texts to ids and ids to text. Not needed for scripts of token ids.
        version: Version of the policy.

    Raises:
        ValueError: An argument has the wrong type.

    >>> engine = ScriptedEngine({"2+2=": [[4], [5, 6]]}, tokenizer=None)
    >>> [sample.response_ids for sample in engine.generate([Prompt(text="2+2=", info={})], n=3, batch=0)]
    [[4], [5, 6], [4]]
    """

    def __init__(self, script: Script, tokenizer: Tokenizer | None = None, version: int = 0) -> None:
        if isinstance(script, Sequence) and any(hasattr(response, "prompt_length") for response in script):
            raise ValueError(
                "script: got records, expected responses; ScriptedEngine.replaying(records) replays records"
            )
        if not (callable(script) or isinstance(script, (Sequence, Mapping))) or isinstance(script, (str, bytes)):
            raise ValueError(
                f"script: got {type(script).__name__}, expected a function, a list of responses, or a mapping"
            )
        self.script = script
        self.tokenizer: Any = tokenizer
        self.version = check_int("version", version)
        self._next = 0
        """Index of the next response, if the script is a list."""

    @property
    def run(self) -> RunInfo:
        """Description of the engine and its tokenizer."""
        return RunInfo(
            engine="scripted",
            engine_version="1",
            model="none",
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            chat_template=template_fingerprint(self.tokenizer),
        )

    @classmethod
    def replaying(cls, experiences: Iterable[Experience], tokenizer: Tokenizer | None = None) -> ScriptedEngine:
        """Create an engine that repeats recorded responses with their log-probs, versions and finish reasons.

        Prompts are matched by task id. The token ids or text of a prompt must be those of the record.

        Args:
            experiences: Single-turn records, one per run.
            tokenizer: Tokenizer of the records.

        Raises:
            ValueError: Several records have the same run, or a record has several turns.

        >>> from rollbook import Experience
        >>> old = Experience(eid={"batch": 0, "task": 1, "run": 0}, tokens=[5, 6, 7], prompt_length=2, logprobs=[-0.25])
        >>> from rollbook import EID
        >>> again = ScriptedEngine.replaying([old]).generate(Prompt(token_ids=[5, 6], eid=EID(batch=0, task=1)))
        >>> again[0].response_ids, again[0].logprobs
        ([7], [-0.25])
        """
        recorded: dict[str, Experience] = {}
        for row in experiences:
            if recorded.setdefault(row.eid.rid, row) is not row:
                raise ValueError(f"experiences: got several of run {row.eid.rid}, expected one record per run")
            if row.finish_reason != "error" and row.action_mask is not None and not bool(row.action_mask.all()):
                raise ValueError(
                    f"experience {row.eid}: got a multi-turn record, expected one whose response was sampled completely"
                )

        def find_record(prompt: Prompt, run: int) -> Any:
            if prompt.eid is None:
                raise ValueError("prompt.eid: got None, expected the id of a recorded task")
            row = recorded.get(prompt.eid.replace(run=run).rid)
            if row is None:
                raise ValueError(f"prompt.eid: run {prompt.eid.replace(run=run).rid} was not recorded")
            if prompt.text is not None and row.prompt_text not in (None, prompt.text):
                raise ValueError(
                    f"prompt.text: got {prompt.text!r}, expected {row.prompt_text!r}, as {row.eid.tid} had"
                )
            return row

        return cls(find_record, tokenizer)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Set the version; a script has no weights."""
        self.version = check_int("version", version)

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        run_id = self.run.id  # once, since the fingerprint of a large tokenizer is slow
        for request in requests:
            for k in range(len(request.eids)):
                try:
                    sample = self._make_sample(request, k, cancel, run_id)
                except Exception as error:
                    sample = request.failed(k, error, run_id)
                yield request.position + k, sample

    def _make_sample(self, request: Request, k: int, cancel: Cancel, run_id: str) -> Sample:
        eid = request.eids[k]
        prompt = request.prompt if request.prompt.eid is not None else request.prompt.replace(eid=eid)
        response = self._look_up(prompt, eid.run)
        if isinstance(response, BaseException):
            raise response
        if hasattr(response, "prompt_length"):  # a record; its class is not imported, since that imports torch
            return self._sample_from_record(request, k, response, run_id)
        line = response if isinstance(response, Line) else _as_line(response)
        if line.error is not None:
            return request.failed(k, line.error, run_id, prompt_ids=self._prompt_ids(request.prompt))
        ids = list(line.ids if line.ids is not None else self._encode("response", line.text))
        limit = 0 if cancel.requested else request.done + request.budget
        length = len(ids)
        truncated = length > limit
        reason: FinishReason = line.finish_reason
        if truncated:
            reason = "abort" if request.pauses or cancel.requested else "length"
            ids = ids[:limit]
        logprobs = list(line.logprobs if line.logprobs is not None else [-1.0] * length)
        if len(logprobs) != length:
            raise ValueError(f"response: got {len(logprobs)} log-probs, expected {length}, one for each token")
        logprobs = logprobs[: len(ids)]
        old_versions = list(request.started.versions or ()) if request.started is not None else []
        text = line.text if line.text is not None and not truncated else self._decode(ids)
        return Sample(
            prompt=request.prompt,
            eid=eid,
            prompt_ids=self._prompt_ids(request.prompt),
            response_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=old_versions + [self.version] * (len(ids) - len(old_versions)),
            text=text,
            sampling=request.options(k),
            run_id=run_id,
            group_size=request.started.group_size if request.started is not None else request.sampling.n,
        )

    def _sample_from_record(self, request: Request, k: int, row: Experience, run_id: str) -> Sample:
        tokens = row.tokens.tolist()
        prompt_ids, ids = tokens[: row.prompt_length], tokens[row.prompt_length :]
        expected = request.prompt.token_ids
        if expected is not None and list(expected) != prompt_ids:
            raise ValueError(f"prompt.token_ids: got {len(expected)} ids that are not those recorded for {row.eid.rid}")
        version = row.policy_versions
        versions = None if version is None else [version] * len(ids) if isinstance(version, int) else version.tolist()
        sampling = dict(row.sampling or {})
        kind: Any = sampling.pop("logprobs", None) or "processed"
        stop_reason = sampling.pop("stop_reason", None)
        sampling.pop("run", None)
        return Sample(
            prompt=request.prompt,
            eid=request.eids[k],
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=None if row.logprobs is None else row.logprobs.tolist(),
            logprobs_kind=kind,
            finish_reason=row.finish_reason or "stop",  # type: ignore[arg-type]
            stop_reason=stop_reason,
            error=row.info.get("error") or "recorded as failed" if row.finish_reason == "error" else None,
            versions=versions,
            text=row.response_text,
            prompt_text=row.prompt_text,
            sampling=sampling or request.options(k),
            run_id=run_id,
            group_size=row.group_size or request.sampling.n,
            media=row.multi_modal_inputs,
        )

    def _look_up(self, prompt: Prompt, run: int) -> Any:
        if callable(self.script):
            return self.script(prompt, run)
        if isinstance(self.script, Mapping):
            task = [] if prompt.eid is None else [prompt.eid.tid, prompt.eid.task]
            keys = [prompt.text, *task, prompt.token_ids]
            key = next((key for key in keys if key is not None and key in self.script), None)
            if key is None:
                raise ValueError(f"script: no response to {next((key for key in keys if key), None)!r}")
            entry = self.script[key]
            one_per_run = isinstance(entry, (list, tuple)) and entry and not isinstance(entry[0], int)
            return entry[run % len(entry)] if one_per_run else entry
        if not len(self.script):
            raise ValueError("script: got an empty list, expected responses")
        response = self.script[self._next % len(self.script)]
        self._next += 1
        return response

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            return []
        if prompt.messages is not None:
            tools = None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages], tools=tools, add_generation_prompt=True, tokenize=False
            )
            return self._encode("prompt", text)
        return self._encode("prompt", prompt.text)

    def _encode(self, name: str, text: str | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name}: got text ({text!r}), expected token ids: the engine has no tokenizer")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)


def _as_line(response: Any) -> Line:
    if isinstance(response, str):
        return Line(text=response)
    return Line(ids=token_ids("response", response))
