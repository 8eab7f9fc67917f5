"""Evaluation: k samples of each held-out prompt, scored, counted with intervals, and kept in the book.

Invariant: every sample that was asked for counts: one that failed, or that has no reward, did not succeed. What is
evaluated is in the book as `evaluation`, which no consumer is ever handed for training.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.ids import EID
from rollbook.core.metrics import advise
from rollbook.train import statistics
from rollbook.train.statistics import Interval

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.sampling import Prompt, Sampling
    from rollbook.rollout.engine import BaseEngine
    from rollbook.rollout.environment import EnvironmentConfig

Answer = Callable[["Experience"], str | None]
"""What a sample answers, for a vote among samples; `None`: it does not vote."""
_NEARLY = 1e-6
"""Sums of weighted parts that should be 1 are a rounding error less."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One prompt and what came of its k samples, in the order of their runs."""

    task: int | str
    prompt: str
    """Its text, or 16 hex digits of its token ids where no text is known."""
    outcomes: tuple[bool, ...]
    """[k] Which succeeded."""
    rewards: tuple[float, ...]
    """[k] NaN where there is none."""
    answers: tuple[str | None, ...]
    """[k]"""

    @property
    def share(self) -> float:
        """Of its samples that succeeded."""
        return sum(self.outcomes) / len(self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found: n prompts, k samples of each.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine({(5, 6): [[4], [7]], (8,): [[4], [4]]})
    >>> found = evaluate(engine, [[5, 6], [8]], lambda response_ids: float(response_ids == [4]), k=2, step=40)
    >>> found.success, found.metrics()["eval/pass@2"], [row.eid.rid for row in found.records]
    (0.75, 1.0, ['eval-40/0/0', 'eval-40/0/1', 'eval-40/1/0', 'eval-40/1/1'])
    """

    step: int
    k: int
    confidence: float
    per_prompt: tuple[Answered, ...]
    records: Experiences = field(repr=False)
    interval: Interval
    """Of avg@k, clustered by prompt: see `rollbook.train.statistics.share`."""
    failed: int
    """Number of samples without a response."""
    unscored: int
    """Number of samples with a response but no reward."""

    @property
    def reward_source(self) -> str | None:
        """The fingerprint of the user's code that scored the samples, if it is known; see `Reward.source`."""
        return next((row.info["reward_source"] for row in self.records if row.info.get("reward_source")), None)

    @property
    def prompts(self) -> int:
        """How many prompts there were."""
        return len(self.per_prompt)

    @property
    def success(self) -> float:
        """avg@k: the share of samples that succeeded."""
        return self.interval.value

    @property
    def low(self) -> float:
        """The lower end of its interval."""
        return self.interval.low

    @property
    def high(self) -> float:
        """The upper end of its interval."""
        return self.interval.high

    @property
    def outcomes(self) -> list[tuple[bool, ...]]:
        """[n][k] Which samples succeeded."""
        return [prompt.outcomes for prompt in self.per_prompt]

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """All numbers by name: avg@k with `/low` and `/high`, pass@1, 2, 4 ... k, maj@k, the mean reward, the mean
        length of a response in sampled tokens, and the shares of samples that were cut at the token limit, failed, or
        got no reward."""
        outcomes, k = self.outcomes, self.k
        rewards = [reward for prompt in self.per_prompt for reward in prompt.rewards if math.isfinite(reward)]
        answered = [row for row in self.records if row.finish_reason != "error"]
        lengths = [
            len(row.tokens) - row.prompt_length if row.action_mask is None else int(row.action_mask.sum())
            for row in answered
        ]
        samples = self.prompts * k
        metrics = {f"avg@{k}": self.success, f"avg@{k}/low": self.low, f"avg@{k}/high": self.high}
        metrics |= {f"pass@{count}": statistics.pass_at_k(outcomes, count) for count in statistics.powers_of_two(k)}
        metrics[f"maj@{k}"] = statistics.maj_at_k([prompt.answers for prompt in self.per_prompt], outcomes)
        metrics |= {
            "reward": math.fsum(rewards) / len(rewards) if rewards else math.nan,
            "length": math.fsum(lengths) / len(lengths) if lengths else math.nan,
            "truncated": sum(row.finish_reason == "length" for row in answered) / samples,
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
    prompts: Any,
    reward: Any = None,
    *,
    k: int = 1,
    sampling: Sampling | Mapping[str, Any] | None = None,
    environment: EnvironmentConfig | None = None,
    step: int = 0,
    seed: int = 0,
    book: Book | None = None,
    tokenizer: Any = None,
    success: float | str | None = None,
    confidence: float = 0.95,
    answer: Answer | None = None,
    name: str = "eval",
) -> Evaluation:
    """Sample k answers to each prompt, or play k episodes, score them, and say how many succeed.

    - `prompts`: a list of whatever an engine takes, or what has `.every(batch=)` (`rollbook.train.Prompts`).
      The samples
      have the ids `{name}-{step}/{row}/{run}`: `row` is the task of a prompt that has an id, else its place. Several
      sets that are evaluated into one book have a `name` each.
    - `reward`: whatever `rollbook.rewards.as_reward` takes; with an `environment` it may be missing. `success`: a
      sample succeeds with a reward of at least this (1.0), or, by name, if that part of the reward is at least 1.
    - `sampling`: as for training, or greedy ({"temperature": 0}), for which k = 1 says all.
    - `seed`: the same samples again for the same weights, whatever else is evaluated.
    - `answer`: what a record answers, for maj@k; by default the answer that its text marks as final (a box, `<answer>`,
      `####`), else all of it.
    - `tokenizer`: for rewards that read texts, if the engine has none.

    What goes wrong with some samples is counted, in `failed` and `unscored`, and the others are what they would be.
    """
    from rollbook.core.sampling import Sampling
    from rollbook.rewards.recipes import as_reward
    from rollbook.rewards.types import is_reward
    from rollbook.train.pipeline import generate, score

    check_int("k", k, 1)
    check_int("step", step)
    settings = Sampling.of(sampling, n=k, seed=check_int("seed", seed))
    if settings.temperature == 0 and settings.first_temperature is None and k > 1:
        advise(f"k: got {k} with temperature 0, at which all samples of a prompt are one; k=1 says as much")
    _check_success(success)
    named = _asked(prompts, f"{name}-{step}")
    if reward is None and environment is None:
        raise ValueError("reward: missing, and there is no environment that gives one")
    records = generate(engine, named, settings, environment)
    fingerprint = None
    if reward is not None:
        source = as_reward(reward)
        try:
            decoder = tokenizer if tokenizer is not None else getattr(engine, "tokenizer", None)
            records = score(records, source, decoder, prompts=named)
        finally:
            if not is_reward(reward):
                source.close()
        fingerprint = source.source()
    rows = [_without_nan(row) for row in records.rows()]
    _check_part(success, rows)
    for row in rows if fingerprint is not None else ():
        row.info["reward_source"] = fingerprint
    evaluation = evaluated(rows, success=success, confidence=confidence, answer=answer, step=step)
    return evaluation if book is None else _kept(evaluation, book)


def evaluated(
    records: Sequence[Experience],
    *,
    success: float | str | None = None,
    confidence: float = 0.95,
    answer: Answer | None = None,
    step: int = 0,
) -> Evaluation:
    """The evaluation that records amount to, which somebody else made (episodes with tools, a book's): those of one
    task are the samples of a prompt, as many for each.

    >>> from rollbook import EID, Experience
    >>> rows = [Experience(eid=EID(batch="eval-0", task=t, run=r), tokens=[1, 2], reward=float(t)) for t in range(2)
    ...         for r in range(4)]
    >>> str(evaluated(rows))
    'avg@4 0.500 (0.003 to 0.997) on 2 prompts'
    """
    from rollbook.core.experiences import Experiences

    _check_success(success)
    if not len(records):
        raise ValueError("records: got none, expected at least one prompt's")
    tasks: dict[str, dict[int, Experience]] = {}
    for row in records:
        # Of a run with several records (turns, branches) the last tells how it ended.
        tasks.setdefault(row.eid.tid, {})[row.eid.run] = row
    sizes = {len(runs) for runs in tasks.values()}
    if len(sizes) > 1:
        raise ValueError(f"records: got {min(sizes)} to {max(sizes)} runs of a task, expected as many of each")
    per_prompt = []
    failed = unscored = 0
    for runs in tasks.values():
        rows = [runs[run] for run in sorted(runs)]
        broken = [row.finish_reason == "error" for row in rows]
        both = list(zip(rows, broken, strict=True))
        rewards = [math.nan if lost or row.reward is None else float(row.reward) for row, lost in both]
        failed += sum(broken)
        unscored += sum(map(math.isnan, rewards)) - sum(broken)
        per_prompt.append(
            Answered(
                task=rows[0].eid.task,
                prompt=_prompt(rows),
                outcomes=tuple(_succeeds(row, reward, success) for row, reward in zip(rows, rewards, strict=True)),
                rewards=tuple(rewards),
                answers=tuple(None if lost else (answer or _final)(row) for row, lost in both),
            )
        )
    return Evaluation(
        step=step,
        k=sizes.pop(),
        confidence=confidence,
        per_prompt=tuple(per_prompt),
        records=records if isinstance(records, Experiences) else Experiences(list(records)),
        interval=statistics.share([prompt.outcomes for prompt in per_prompt], confidence),
        failed=failed,
        unscored=unscored,
    )


def difference(before: Evaluation, after: Evaluation, confidence: float | None = None) -> Interval:
    """How much more of the samples succeed in `after`, paired by prompt, with its interval (see `statistics.paired`).

    Raises:
        ValueError: The prompts differ, or the source of the reward does.

    >>> from rollbook.rollout import ScriptedEngine
    >>> right = lambda response_ids: float(response_ids == [4])
    >>> old, new = (evaluate(ScriptedEngine([[id]]), [[5], [6], [7]], right) for id in (3, 4))
    >>> difference(old, new).value
    1.0
    """
    was, now = ({earliermpt.task: earliermpt for earliermpt in evaluation.per_prompt} for evaluation in (before, after))
    if was.keys() != now.keys():
        odd = next(iter(was.keys() ^ now.keys()))
        whose = "after" if odd in was else "before"
        raise ValueError(f"{whose}: got no prompt {odd!r}, expected the same prompts before and after")
    for task, earlier in was.items():
        if earlier.prompt != now[task].prompt:
            raise ValueError(
                f"prompt {task!r}: got {now[task].prompt[:60]!r} after, expected {earlier.prompt[:60]!r}, as before"
            )
    if before.reward_source != after.reward_source:
        raise ValueError(
            f"reward: got source {after.reward_source} after, expected {before.reward_source}, as before: the reward's "
            "code was edited in between"
        )
    return statistics.paired(
        [was[task].outcomes for task in was],
        [now[task].outcomes for task in was],
        before.confidence if confidence is None else confidence,
    )


# --- asking ---------------------------------------------------------------------------------------------------------


def _asked(prompts: Any, batch: str) -> list[Prompt]:
    """The prompts with ids of this evaluation."""
    from rollbook.core.sampling import Prompt

    rows = prompts.every(batch=batch) if hasattr(prompts, "every") else prompts
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence):
        raise ValueError(f"prompts: got {type(rows).__name__}, expected a list of prompts")
    if not rows:
        raise ValueError("prompts: got none, expected at least one")
    named = []
    for row, prompt in enumerate(map(Prompt.of, rows)):
        task = row if prompt.eid is None or prompt.eid.task == "" else prompt.eid.task
        named.append(prompt.replace(eid=EID(batch=batch, task=task, suffix="")))
    return named


def _without_nan(row: Experience) -> Experience:
    """Replace a reward of NaN by none, and drop parts that are NaN: averages of SQL leave them out."""
    if row.reward is not None and math.isnan(row.reward):
        row.reward = None
    row.metrics = {name: number for name, number in row.metrics.items() if not math.isnan(number)}
    return row


def _kept(evaluation: Evaluation, book: Book) -> Evaluation:
    """The evaluation with its records in the book, for evaluation alone.

    The same again is nothing new. Another one of the same step and seed (other weights, other options) is kept beside
    the first: the ends of its ids say which it is, and hours of sampling are not lost over a name that is taken.
    """
    import dataclasses

    from rollbook.book.errors import ConflictError
    from rollbook.core.experiences import Experiences

    rows = list(evaluation.records)
    for again in itertools.count(2):
        try:
            book.append(rows, evaluation=True)
        except ConflictError:
            rows = [row.replace(eid=row.eid.replace(suffix=f"{was.eid.suffix}-{again}"))
                    for row, was in zip(rows, evaluation.records, strict=True)]  # fmt: skip
        else:
            break
    return evaluation if again == 2 else dataclasses.replace(evaluation, records=Experiences(rows))


# --- judging --------------------------------------------------------------------------------------------------------


def _check_success(success: float | str | None) -> None:
    if success is not None and not (isinstance(success, str) and success):
        check_float("success", success, -1e30, 1e30, "a reward that counts as success, or the name of a part of it")


def _check_part(success: float | str | None, rows: Sequence[Experience]) -> None:
    """Raise `ValueError` for a part that no scored record has."""
    parts = list(dict.fromkeys(name for row in rows if row.reward is not None for name in row.metrics))
    is_scored = any(row.reward is not None for row in rows)
    if isinstance(success, str) and success not in parts and is_scored:
        raise ValueError(f"success: got {success!r}, which is no part of the reward{suggest(success, parts)}")


def _succeeds(row: Experience, reward: float, success: float | str | None) -> bool:
    if math.isnan(reward):
        return False
    if isinstance(success, str):
        return float(row.metrics.get(success, math.nan)) >= 1 - _NEARLY
    bound = 1.0 if success is None else float(success)
    return reward >= bound - _NEARLY * max(1.0, abs(bound))


def _final(row: Experience) -> str | None:
    """The answer that a response marks as its own, else all of it; token ids where there is no text."""
    from rollbook.rewards.answers import final_answer

    if row.response_text is None:
        return " ".join(map(str, row.tokens[row.prompt_length :].tolist()))
    marked = final_answer(row.response_text)
    return (row.response_text if marked is None else marked).strip() or None


def _prompt(rows: Sequence[Experience]) -> str:
    """What was asked, as far as any of its samples tells: one that failed early may not."""
    for row in rows:
        if row.prompt_text:
            return str(row.prompt_text)
    ids = max((row.tokens[: row.prompt_length].tolist() for row in rows), key=len)
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()


__all__ = ["Answer", "Answered", "Evaluation", "difference", "evaluate", "evaluated"]
