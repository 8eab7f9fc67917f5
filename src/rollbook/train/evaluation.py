"""Evaluation: k samples of each held-out prompt, their rewards, and success rates with confidence intervals.

Invariant: every requested sample counts; one that failed or has no reward did not succeed. Records in the book are
marked as `evaluation` and never leased for training.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.ids import EID
from rollbook.core.metrics import warn_user
from rollbook.train import statistics
from rollbook.train.statistics import Interval

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.sampling import Prompt, Sampling
    from rollbook.core.vocabulary import Tokenizer
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rollout.engine import BaseEngine, PromptLike
    from rollbook.rollout.environment import EnvironmentConfig

AnswerFunction = Callable[["Experience"], str | None]
"""Returns the answer of a sample, for maj@k; `None`: the sample does not vote."""
_TOLERANCE = 1e-6
"""Rounding error of a weighted sum of rewards."""


@runtime_checkable
class PromptSource(Protocol):
    """Prompts with ids, such as `rollbook.train.Prompts`."""

    def every(self, batch: int | str) -> Sequence[Prompt]:
        """Return all prompts, with ids of this batch."""


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt of an evaluation and its k samples, in the order of their runs.

    Args:
        task: Task id of the prompt.
        prompt: Text of the prompt, or a hash of its token ids if the text is not known.
        outcomes: [k] Which samples succeeded.
        rewards: [k] Rewards; NaN for samples without one.
        answers: [k] Answers that vote in maj@k; `None` for samples that do not vote.

    >>> PromptResult(task=0, prompt="1+1=", outcomes=(True, False), rewards=(1.0, 0.0), answers=("2", "3")).success
    0.5
    """

    task: int | str
    prompt: str
    outcomes: tuple[bool, ...]
    rewards: tuple[float, ...]
    answers: tuple[str | None, ...]

    @property
    def success(self) -> float:
        """Share of the samples that succeeded."""
        return sum(self.outcomes) / len(self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation of n prompts with k samples each.

    Args:
        step: Training step of the evaluated policy.
        k: Number of samples per prompt.
        confidence: Confidence level of the interval.
        per_prompt: [n] Results of the prompts.
        records: The samples.
        interval: avg@k with its interval, clustered by prompt (`rollbook.train.statistics.avg_at_k_interval`).
        failed: Number of samples without a response.
        unscored: Number of samples with a response but no reward.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine({(5, 6): [[4], [7]], (8,): [[4], [4]]})
    >>> evaluation = evaluate(engine, [[5, 6], [8]], lambda response_ids: float(response_ids == [4]), k=2, step=40)
    >>> evaluation.success, evaluation.metrics()["eval/pass@2"], [row.eid.rid for row in evaluation.records]
    (0.75, 1.0, ['eval-40/0/0', 'eval-40/0/1', 'eval-40/1/0', 'eval-40/1/1'])
    """

    step: int
    k: int
    confidence: float
    per_prompt: tuple[PromptResult, ...]
    records: Experiences = field(repr=False)
    interval: Interval
    failed: int
    unscored: int

    @property
    def reward_source(self) -> str | None:
        """Fingerprint of the code that scored the samples, if it is known; see `Reward.source`."""
        return next((row.info["reward_source"] for row in self.records if row.info.get("reward_source")), None)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self.per_prompt)

    @property
    def success(self) -> float:
        """avg@k: the share of samples that succeeded."""
        return self.interval.value

    @property
    def low(self) -> float:
        """Lower end of the interval of avg@k."""
        return self.interval.low

    @property
    def high(self) -> float:
        """Upper end of the interval of avg@k."""
        return self.interval.high

    @property
    def outcomes(self) -> list[tuple[bool, ...]]:
        """[n][k] Which samples succeeded."""
        return [prompt.outcomes for prompt in self.per_prompt]

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return avg@k with `/low` and `/high`, pass@1, 2, 4 ... k, maj@k, and means.

        Means are those of the reward, of the response length in sampled tokens, and of the samples that were truncated
        at the token limit, failed, or have no reward.

        Args:
            prefix: Precedes every name, with a slash.
        """
        outcomes, k = self.outcomes, self.k
        rewards = [reward for prompt in self.per_prompt for reward in prompt.rewards if math.isfinite(reward)]
        responses = [row for row in self.records if row.finish_reason != "error"]
        lengths = [
            len(row.tokens) - row.prompt_length if row.action_mask is None else int(row.action_mask.sum())
            for row in responses
        ]
        samples = self.prompts * k
        metrics = {f"avg@{k}": self.success, f"avg@{k}/low": self.low, f"avg@{k}/high": self.high}
        metrics |= {f"pass@{count}": statistics.pass_at_k(outcomes, count) for count in statistics.powers_of_two(k)}
        metrics[f"maj@{k}"] = statistics.maj_at_k([prompt.answers for prompt in self.per_prompt], outcomes)
        metrics |= {
            "reward": math.fsum(rewards) / len(rewards) if rewards else math.nan,
            "length": math.fsum(lengths) / len(lengths) if lengths else math.nan,
            "truncated": sum(row.finish_reason == "length" for row in responses) / samples,
            "failed": self.failed / samples,
            "unscored": self.unscored / samples,
            "prompts": self.prompts,
        }
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def __str__(self) -> str:
        text = f"avg@{self.k} {self.interval} on {self.prompts} prompts"
        return f"{text}, {self.failed} samples failed" if self.failed else text


def evaluate(
    engine: BaseEngine,
    prompts: PromptSource | Sequence[PromptLike],
    reward: RewardLike | None = None,
    *,
    k: int = 1,
    sampling: Sampling | Mapping[str, Any] | None = None,
    environment: EnvironmentConfig | None = None,
    step: int = 0,
    seed: int = 0,
    book: Book | None = None,
    tokenizer: Tokenizer | None = None,
    success: float | str | None = None,
    confidence: float = 0.95,
    answer: AnswerFunction | None = None,
    name: str = "eval",
    collect: Callable[[Sequence[Prompt], Sampling], Experiences] | None = None,
) -> Evaluation:
    """Sample k responses to each prompt, or play k episodes, and score them.

    Failures of single samples are counted in `failed` and `unscored`.

    Args:
        engine: The engine.
        prompts: The prompts. Their samples have the ids `{name}-{step}/{task}/{run}`; the task of a prompt without an
            id is its position.
        reward: Whatever `rollbook.rewards.as_reward` takes; may be missing with an environment.
        k: Number of samples per prompt.
        sampling: Sampling options.
        environment: Settings of multi-turn episodes.
        step: Training step of the policy.
        seed: Seed of sampling. The same seed and weights give the same samples.
        book: Stores the records, marked as evaluation.
        tokenizer: Decodes responses for the reward; `None`: that of the engine.
        success: Minimum reward of a success (default 1), or the name of a reward part that must be at least 1.
        confidence: Confidence level of the interval.
        answer: Returns the answer of a record, for maj@k; by default the marked final answer (a box, `<answer>`,
            `####`), else the whole text.
        name: Distinguishes several sets of prompts in one book.
        collect: Makes the scored records of prompts in place of `engine` and `reward`, such as on several ranks.

    Raises:
        ValueError: There are no prompts, or there is neither a reward nor an environment.

    >>> from rollbook.rollout import ScriptedEngine
    >>> str(evaluate(ScriptedEngine([[4]]), [[5, 6]], lambda response_ids: float(response_ids == [4])))
    'avg@1 1.000 (0.000 to 1.000) on 1 prompts'
    """
    from rollbook.core.sampling import Sampling
    from rollbook.rewards.recipes import as_reward
    from rollbook.rewards.types import is_reward
    from rollbook.train.pipeline import generate, score

    check_int("k", k, 1)
    check_int("step", step)
    settings = Sampling.of(sampling, n=k, seed=check_int("seed", seed))
    if settings.temperature == 0 and settings.first_temperature is None and k > 1:
        warn_user(f"k: got {k} with temperature 0, at which all samples of a prompt are equal; expected 1")
    _check_success(success)
    named_prompts = _assign_ids(prompts, f"{name}-{step}")
    if reward is None and environment is None:
        raise ValueError("reward: missing, and there is no environment that gives one")
    records = (collect or partial(generate, engine, environment=environment))(named_prompts, settings)
    fingerprint = None
    if reward is not None:
        source = as_reward(reward)
        try:
            decoder = tokenizer if tokenizer is not None else getattr(engine, "tokenizer", None)
            if collect is None:
                records = score(records, source, decoder, prompts=named_prompts)
        finally:
            if not is_reward(reward):
                source.close()
        fingerprint = source.source()
    rows = [_without_nan(row) for row in records.rows()]
    _check_part(success, rows)
    for row in rows if fingerprint is not None else ():
        row.info["reward_source"] = fingerprint
    evaluation = evaluate_records(rows, success=success, confidence=confidence, answer=answer, step=step)
    return evaluation if book is None else _append_to_book(evaluation, book)


def evaluate_records(
    records: Sequence[Experience],
    *,
    success: float | str | None = None,
    confidence: float = 0.95,
    answer: AnswerFunction | None = None,
    step: int = 0,
) -> Evaluation:
    """Compute the evaluation of scored records, such as those of a book.

    Args:
        records: The samples. Records of one task are the samples of a prompt, the same number for each.
        success: As in `evaluate`; so are `confidence` and `answer`.
        confidence: Confidence level of the interval.
        answer: Returns the answer of a record.
        step: Training step of the policy.

    Raises:
        ValueError: There are no records, or tasks have different numbers of runs.

    >>> from rollbook import EID, Experience
    >>> ids = [EID(batch="eval-0", task=task, run=run) for task in range(2) for run in range(4)]
    >>> str(evaluate_records([Experience(eid=eid, tokens=[1, 2], reward=float(eid.task)) for eid in ids]))
    'avg@4 0.500 (0.003 to 0.997) on 2 prompts'
    """
    from rollbook.core.experiences import Experiences

    _check_success(success)
    if not len(records):
        raise ValueError("records: got none, expected at least one")
    tasks: dict[str, dict[int, Experience]] = {}
    for row in records:
        # A run may have several records (turns, branches); the last has its result.
        tasks.setdefault(row.eid.tid, {})[row.eid.run] = row
    sizes = {len(runs) for runs in tasks.values()}
    if len(sizes) > 1:
        raise ValueError(f"records: got {min(sizes)} to {max(sizes)} runs per task, expected the same number for all")
    per_prompt = []
    failed = unscored = 0
    for runs in tasks.values():
        rows = [runs[run] for run in sorted(runs)]
        has_failed = [row.finish_reason == "error" for row in rows]
        rewards = [
            math.nan if is_failed or row.reward is None else float(row.reward)
            for row, is_failed in zip(rows, has_failed, strict=True)
        ]
        failed += sum(has_failed)
        unscored += sum(map(math.isnan, rewards)) - sum(has_failed)
        per_prompt.append(
            PromptResult(
                task=rows[0].eid.task,
                prompt=_prompt_text(rows),
                outcomes=tuple(_succeeds(row, reward, success) for row, reward in zip(rows, rewards, strict=True)),
                rewards=tuple(rewards),
                answers=tuple(
                    None if is_failed else (answer or _final_answer)(row)
                    for row, is_failed in zip(rows, has_failed, strict=True)
                ),
            )
        )
    return Evaluation(
        step=step,
        k=sizes.pop(),
        confidence=confidence,
        per_prompt=tuple(per_prompt),
        records=records if isinstance(records, Experiences) else Experiences(list(records)),
        interval=statistics.avg_at_k_interval([prompt.outcomes for prompt in per_prompt], confidence),
        failed=failed,
        unscored=unscored,
    )


def compare_evaluations(before: Evaluation, after: Evaluation, confidence: float | None = None) -> Interval:
    """Compute the increase of avg@k between two evaluations, paired by prompt (`statistics.paired_difference`).

    Args:
        before: An evaluation.
        after: Another one of the same prompts.
        confidence: Confidence level; `None`: that of `before`.

    Raises:
        ValueError: The prompts or the code of the reward differ.

    >>> from rollbook.rollout import ScriptedEngine
    >>> is_correct = lambda response_ids: float(response_ids == [4])
    >>> before, after = (evaluate(ScriptedEngine([[token]]), [[5], [6], [7]], is_correct) for token in (3, 4))
    >>> compare_evaluations(before, after).value
    1.0
    """
    old, new = ({prompt.task: prompt for prompt in evaluation.per_prompt} for evaluation in (before, after))
    if old.keys() != new.keys():
        missing = next(iter(old.keys() ^ new.keys()))
        side = "after" if missing in old else "before"
        raise ValueError(f"{side}: got no prompt {missing!r}, expected the same prompts before and after")
    for task, prompt in old.items():
        if prompt.prompt != new[task].prompt:
            raise ValueError(
                f"prompt {task!r}: got {new[task].prompt[:60]!r} after, expected {prompt.prompt[:60]!r}, as before"
            )
    if before.reward_source != after.reward_source:
        raise ValueError(
            f"reward: got source {after.reward_source} after, expected {before.reward_source}, as before: the reward's "
            "code was edited in between"
        )
    return statistics.paired_difference(
        [old[task].outcomes for task in old],
        [new[task].outcomes for task in old],
        before.confidence if confidence is None else confidence,
    )


def _assign_ids(prompts: PromptSource | Sequence[PromptLike], batch: str) -> list[Prompt]:
    """Return the prompts with ids of this evaluation."""
    from rollbook.core.sampling import Prompt

    rows = prompts.every(batch=batch) if isinstance(prompts, PromptSource) else prompts
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence):
        raise ValueError(f"prompts: got {type(rows).__name__}, expected a list of prompts")
    if not rows:
        raise ValueError("prompts: got none, expected at least one")
    named_prompts = []
    for i, prompt in enumerate(map(Prompt.of, rows)):
        task = i if prompt.eid is None or prompt.eid.task == "" else prompt.eid.task
        named_prompts.append(prompt.replace(eid=EID(batch=batch, task=task, suffix="")))
    return named_prompts


def _without_nan(row: Experience) -> Experience:
    """Replace a reward of NaN by `None` and drop parts that are NaN, so that SQL averages ignore them."""
    if row.reward is not None and math.isnan(row.reward):
        row.reward = None
    row.metrics = {name: number for name, number in row.metrics.items() if not math.isnan(number)}
    return row


def _append_to_book(evaluation: Evaluation, book: Book) -> Evaluation:
    """Append the records to the book, marked as evaluation.

    Appending is idempotent. Other records with the same ids, from an evaluation of the same step with other weights or
    options, get a suffix, so that no samples are lost.
    """
    import dataclasses

    from rollbook.book.errors import ConflictError
    from rollbook.core.experiences import Experiences

    rows = list(evaluation.records)
    for attempt in itertools.count(2):
        try:
            book.append(rows, evaluation=True)
        except ConflictError:
            rows = [
                row.replace(eid=row.eid.replace(suffix=f"{original.eid.suffix}-{attempt}"))
                for row, original in zip(rows, evaluation.records, strict=True)
            ]
        else:
            break
    return evaluation if attempt == 2 else dataclasses.replace(evaluation, records=Experiences(rows))


def _check_success(success: float | str | None) -> None:
    if success is not None and not (isinstance(success, str) and success):
        check_float("success", success, -1e30, 1e30, "the minimum reward of a success, or the name of a reward part")


def _check_part(success: float | str | None, rows: Sequence[Experience]) -> None:
    """Raise `ValueError` for a part that no scored record has."""
    parts = list(dict.fromkeys(name for row in rows if row.reward is not None for name in row.metrics))
    is_scored = any(row.reward is not None for row in rows)
    if isinstance(success, str) and success not in parts and is_scored:
        raise ValueError(f"success: got {success!r}, expected a part of the reward{suggest(success, parts)}")


def _succeeds(row: Experience, reward: float, success: float | str | None) -> bool:
    if math.isnan(reward):
        return False
    if isinstance(success, str):
        return float(row.metrics.get(success, math.nan)) >= 1 - _TOLERANCE
    bound = 1.0 if success is None else float(success)
    return reward >= bound - _TOLERANCE * max(1.0, abs(bound))


def _final_answer(row: Experience) -> str | None:
    """Return the answer that a response marks as final, else the whole text, or the token ids if there is no text."""
    from rollbook.rewards.answers import extract_final_answer

    if row.response_text is None:
        return " ".join(map(str, row.tokens[row.prompt_length :].tolist()))
    marked = extract_final_answer(row.response_text)
    return (row.response_text if marked is None else marked).strip() or None


def _prompt_text(rows: Sequence[Experience]) -> str:
    """Return the text of a prompt from the first sample that has it, or a hash of the token ids."""
    for row in rows:
        if row.prompt_text:
            return str(row.prompt_text)
    ids = max((row.tokens[: row.prompt_length].tolist() for row in rows), key=len)
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()


__all__ = ["AnswerFunction", "Evaluation", "PromptResult", "compare_evaluations", "evaluate", "evaluate_records"]
