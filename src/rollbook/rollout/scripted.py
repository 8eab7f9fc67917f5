"""`ScriptedEngine`: scripted responses, for tests and for replaying recorded rollouts.

Invariant: with a function or a mapping as the script, a sample depends on its prompt and id alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollbook.core.sampling import FinishReason, Prompt, RunInfo, Sample, token_ids
from rollbook.core.vocabulary import Tokenizer, template_fingerprint, tokenizer_fingerprint
from rollbook.rollout.engine import BaseEngine, Cancel, Request, WeightSource

if TYPE_CHECKING:
    from rollbook.core.experience import Experience


@dataclass(frozen=True, kw_only=True)
class Line:
    """A scripted response.

    Args:
        ids: Token ids.
        text: Text for the tokenizer, instead of `ids`.
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
        script: A function `(prompt, run) -> response`, a list that is used in turn and starts over at its end, or a
            mapping from prompt text or task id to a response or a list of them (one per run, starting over at its end).
            A response is a text, token ids, a `Line`, or an exception, which becomes the error of the sample.
        tokenizer: Tokenizer of texts.
        version: Number of the policy.

    >>> engine = ScriptedEngine({"2+2=": [[4], [5, 6]]}, tokenizer=None)
    >>> [sample.response_ids for sample in engine.generate([Prompt(text="2+2=", info={})], n=3, batch=0)]
    [[4], [5, 6], [4]]
    """

    def __init__(self, script: Script, tokenizer: Tokenizer | None = None, version: int = 0) -> None:
        if isinstance(script, Sequence) and any(hasattr(answer, "prompt_length") for answer in script):
            raise ValueError(
                "script: got records, expected responses; ScriptedEngine.replaying(records) replays records"
            )
        self.script = script
        self.tokenizer: Any = tokenizer
        self.version = version
        self._turn = 0

    @property
    def run(self) -> RunInfo:
        """Description of the script engine."""
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

        Prompts are matched by task id. Prompts of token ids must have the recorded ids.

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

        def answer(prompt: Prompt, run: int) -> Any:
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

        return cls(answer, tokenizer)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Set the version; a script has no weights."""
        self.version = version

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        run_id = self.run.id  # once, since the fingerprint of a large tokenizer is slow
        for request in requests:
            for k in range(len(request.eids)):
                try:
                    sample = self._answer(request, k, cancel, run_id)
                except Exception as error:
                    sample = request.failed(k, error, run_id)
                yield request.position + k, sample

    def _answer(self, request: Request, k: int, cancel: Cancel, run_id: str) -> Sample:
        eid = request.eids[k]
        prompt = request.prompt if request.prompt.eid is not None else request.prompt.replace(eid=eid)
        answer = self._look_up(prompt, eid.run)
        if isinstance(answer, BaseException):
            raise answer
        if hasattr(answer, "prompt_length"):
            return self._recorded(request, k, answer, run_id)
        line = answer if isinstance(answer, Line) else _line(answer)
        if line.error is not None:
            return request.failed(k, line.error, run_id, prompt_ids=self._prompt_ids(request.prompt))
        ids = list(line.ids if line.ids is not None else self._encode("answer", line.text))
        stop = 0 if cancel.requested else request.done + request.budget
        length = len(ids)
        cut = length > stop
        reason: FinishReason = line.finish_reason
        if cut:
            reason = "abort" if request.pauses or cancel.requested else "length"
            ids = ids[:stop]
        logprobs = list(line.logprobs if line.logprobs is not None else [-1.0] * length)
        if len(logprobs) != length:
            raise ValueError(f"answer: got {len(logprobs)} log-probs, expected {length}, one for each token")
        logprobs = logprobs[: len(ids)]
        before = list(request.started.versions or ()) if request.started is not None else []
        text = line.text if line.text is not None and not cut else self._decode(ids)
        return Sample(
            prompt=request.prompt,
            eid=eid,
            prompt_ids=self._prompt_ids(request.prompt),
            response_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=before + [self.version] * (len(ids) - len(before)),
            text=text,
            sampling=request.options(k),
            run_id=run_id,
            group_size=request.started.group_size if request.started is not None else request.sampling.n,
        )

    def _recorded(self, request: Request, k: int, row: Experience, run_id: str) -> Sample:
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
            answers = self.script[key]
            several = isinstance(answers, (list, tuple)) and answers and not isinstance(answers[0], int)
            return answers[run % len(answers)] if several else answers
        if not len(self.script):
            raise ValueError("script: got an empty list, expected responses")
        answer = self.script[self._turn % len(self.script)]
        self._turn += 1
        return answer

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

    def _encode(self, medium: str, text: str | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{medium}: got text ({text!r}), expected token ids: the engine has no tokenizer")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)


def _line(answer: Any) -> Line:
    if isinstance(answer, str):
        return Line(text=answer)
    return Line(ids=token_ids("answer", answer))
