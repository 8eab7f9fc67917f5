"""Evaluation: k samples of each held-out prompt, their rewards, and success rates with confidence intervals.

Invariant: every requested sample counts; one that failed or has no reward did not succeed. Records in the book are
marked as `evaluation` and never leased for training. Intervals are clustered by prompt, because samples of one prompt
are correlated. They have a positive width even if all outcomes are equal.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.errors import RollbookError
from rollbook.core.ids import EID
from rollbook.core.metrics import warn_user

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.sampling import Prompt, Sampling
    from rollbook.core.vocabulary import Tokenizer
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rollout.engine import Engine, PromptLike
    from rollbook.rollout.environment import EnvironmentConfig

AnswerFunction = Callable[["Experience"], str | None]
"""Returns the answer of a sample, for maj@k; `None`: the sample does not vote."""
_TOLERANCE = 1e-6
"""Rounding error of a weighted sum of rewards."""


class AllSamplesFailedError(RollbookError, RuntimeError):
    """Raised when every sample of a step failed or could not be scored."""


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
        interval: avg@k with its interval, clustered by prompt (`avg_at_k_interval`).
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
        metrics |= {f"pass@{count}": pass_at_k(outcomes, count) for count in powers_of_two(k)}
        metrics[f"maj@{k}"] = maj_at_k([prompt.answers for prompt in self.per_prompt], outcomes)
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
    engine: Engine,
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

    Returns:
        Success rates with their intervals, and the scored records.

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
    return evaluation if book is None else append_evaluation(evaluation, book)


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

    Returns:
        Success rates with their intervals, and the records.

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
        raise ValueError("records: missing, expected at least one")
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
        interval=avg_at_k_interval([prompt.outcomes for prompt in per_prompt], confidence),
        failed=failed,
        unscored=unscored,
    )


def compare_evaluations(before: Evaluation, after: Evaluation, confidence: float | None = None) -> Interval:
    """Compute the increase of avg@k between two evaluations, paired by prompt (`paired_difference`).

    Args:
        before: An evaluation.
        after: Another one of the same prompts.
        confidence: Confidence level; `None`: that of `before`.

    Returns:
        The increase, and the limits of its interval.

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
    return paired_difference(
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
        raise ValueError("prompts: missing, expected at least one")
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


def append_evaluation(evaluation: Evaluation, book: Book) -> Evaluation:
    """Append the records of an evaluation to a book, marked as evaluation.

    Appending is idempotent. If the book has other records with the same ids, from an evaluation of the same step with
    other weights or options, these get a suffix, so that no samples are lost.

    Args:
        evaluation: The evaluation.
        book: The book.

    Returns:
        The evaluation, with the ids that its records have in the book.

    >>> import rollbook
    >>> from rollbook.rollout import ScriptedEngine
    >>> book = rollbook.open("memory:")
    >>> evaluation = evaluate(ScriptedEngine([[4]]), [[5, 6]], lambda response_ids: float(response_ids == [4]))
    >>> append_evaluation(evaluation, book).records[0].eid.rid, book.counts().evaluation
    ('eval-0/0/0', 1)
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


Outcomes = Sequence[Sequence[bool]]
"""[prompts][samples] Which samples succeeded; every prompt has at least one sample."""

_PRIOR_PROMPTS = 2.0
"""Weight, in prompts, of the prior that the samples of a prompt are all equal (see `avg_at_k_interval`)."""
_UNCORRELATED_PROMPTS = 4.0
"""Weight, in prompts, of the prior that success rates before and after are uncorrelated (see `paired_difference`)."""
_EXACT_UP_TO = 300
"""Degrees of freedom up to which the t distribution is computed by a sum; above, an expansion is exact to 1e-9."""


class Interval(NamedTuple):
    """An estimate with its confidence interval.

    Args:
        value: The estimate.
        low: Lower end.
        high: Upper end.

    >>> print(Interval(0.5, 0.4, 0.6))
    0.500 (0.400 to 0.600)
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


# --- rates and means --------------------------------------------------------------------------------------------------


def avg_at_k(outcomes: Outcomes) -> float:
    """Compute the mean success rate over prompts.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.

    Returns:
        The rate, 0 to 1.

    >>> avg_at_k([[True, False], [True, True]])
    0.75
    """
    return _mean(_success_rates(outcomes))


def avg_at_k_interval(outcomes: Outcomes, confidence: float = 0.95) -> Interval:
    """Compute avg@k with a Wilson interval for the effective number of independent samples.

    The k samples of a prompt are correlated, so m prompts have fewer than m k independent samples. The success rates of
    the m prompts are independent, and the variance v = s^2 / m of their mean p gives the effective number
    n = p (1 - p) / v, between m and m k. With n, and Student's quantile for m - 1 degrees of freedom instead of the
    normal one, the Wilson interval equals that of a t test over prompts for p near 0.5. Near 0 and 1, where a t test
    gives a point or leaves [0, 1], it remains valid.

    If nearly all samples agree, the correlation cannot be estimated well. The design effect m k / n is therefore
    averaged with its maximum k, which has the weight of two prompts.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.
        confidence: Confidence level.

    Returns:
        The mean, and the limits of the interval.

    >>> print(avg_at_k_interval([[True, False]] * 100 + [[True, True]] * 100))
    0.750 (0.705 to 0.791)
    >>> print(avg_at_k_interval([[True]] * 200))
    1.000 (0.981 to 1.000)
    """
    rates = _success_rates(outcomes)
    _check_confidence(confidence)
    m, p = len(rates), _mean(rates)
    k = sum(map(len, outcomes)) / m
    n = float(m)
    if m > 1 and 0 < p < 1:
        variance = sum((rate - p) ** 2 for rate in rates) / (m - 1) / m
        design_effect = min(max(variance * m * k / (p * (1 - p)), 1.0), k)
        informative = min(sum(rate > 0 for rate in rates), sum(rate < 1 for rate in rates))
        n = m * k * (informative + _PRIOR_PROMPTS) / (informative * design_effect + _PRIOR_PROMPTS * k)
    t2 = student_quantile(confidence, m - 1) ** 2 if m > 1 else math.inf
    if t2 == math.inf:
        return Interval(p, 0.0, 1.0)  # the variance over prompts cannot be estimated from one prompt
    center = (p + t2 / (2 * n)) / (1 + t2 / n)
    margin = math.sqrt(t2 * (p * (1 - p) / n + t2 / (4 * n * n))) / (1 + t2 / n)
    return Interval(p, min(max(0.0, center - margin), p), max(min(1.0, center + margin), p))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Compute the mean of one number per prompt, such as a reward or a length, with Student's interval.

    Args:
        values: [prompts] The numbers; those that are not finite are ignored.
        confidence: Confidence level.

    Returns:
        The mean, and the limits of the interval.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 (-0.484 to 4.484)
    """
    _check_confidence(confidence)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.nan, math.nan, math.nan)
    center = _mean(finite)
    if len(finite) == 1:
        return Interval(center, -math.inf, math.inf)
    error = math.sqrt(sum((value - center) ** 2 for value in finite) / (len(finite) - 1) / len(finite))
    margin = student_quantile(confidence, len(finite) - 1) * error
    return Interval(center, center - margin, center + margin)


def paired_difference(before: Outcomes, after: Outcomes, confidence: float = 0.95) -> Interval:
    """Compute the increase of avg@k from `before` to `after`, paired by prompt.

    The intervals of `avg_at_k_interval` are combined by MOVER (Newcombe 1998, method 10), with the correlation of the
    success rates over prompts, which makes the interval narrower than that of unpaired evaluations. The correlation is
    shrunk by a prior with the weight of four uncorrelated prompts, so that the interval has a positive width even if
    both evaluations agree on every prompt.

    Args:
        before: [prompts][samples] Which samples succeeded.
        after: The same prompts, in the same order.
        confidence: Confidence level.

    Returns:
        The increase, and the limits of its interval.

    Raises:
        ValueError: The numbers of prompts differ.

    >>> before = [[False, False]] * 60 + [[True, False]] * 40
    >>> after = [[True, False]] * 60 + [[True, True]] * 40
    >>> print(paired_difference(before, after))
    0.500 (0.481 to 0.518)
    """
    if len(before) != len(after):
        raise ValueError(f"after: got {len(after)} prompts, expected the {len(before)} of before")
    old, new = avg_at_k_interval(before, confidence), avg_at_k_interval(after, confidence)
    correlation = _correlation(_success_rates(before), _success_rates(after))
    correlation *= len(before) / (len(before) + _UNCORRELATED_PROMPTS)
    rise = new.value - old.value
    lower = _combine_margins(new.value - new.low, old.high - old.value, correlation)
    upper = _combine_margins(new.high - new.value, old.value - old.low, correlation)
    return Interval(rise, max(-1.0, rise - lower), min(1.0, rise + upper))


def _combine_margins(first: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, first * first + other * other - 2 * correlation * first * other))


def _correlation(first: Sequence[float], other: Sequence[float]) -> float:
    """Compute the correlation over prompts; 0 if one side is constant."""
    first_mean, other_mean = _mean(first), _mean(other)
    covariance = sum((x - first_mean) * (y - other_mean) for x, y in zip(first, other, strict=True))
    scale = math.sqrt(sum((x - first_mean) ** 2 for x in first) * sum((y - other_mean) ** 2 for y in other))
    return covariance / scale if scale else 0.0


def _success_rates(outcomes: Outcomes) -> list[float]:
    """Compute the success rate of each prompt. Shape: [prompts]."""
    if not len(outcomes):
        raise ValueError("outcomes: got no prompt, expected at least one")
    for i, runs in enumerate(outcomes):
        if not len(runs):
            raise ValueError(f"outcomes[{i}]: got no sample, expected at least one for each prompt")
    return [sum(map(bool, runs)) / len(runs) for runs in outcomes]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- pass@k and maj@k ------------------------------------------------------------------------------------------------


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Compute the unbiased estimate of pass@k from n >= k samples per prompt.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.
        k: Number of samples of which at least one must succeed.

    Returns:
        The estimate, 0 to 1.

    Raises:
        ValueError: A prompt has fewer than k samples.

    >>> pass_at_k([[True, False, False, False], [False] * 4], 2)
    0.25
    """
    from rollbook.algorithms.advantages import pass_at_k_estimate  # loads torch

    check_int("k", k, 1)
    _check_sample_count(outcomes, k)
    return _mean([pass_at_k_estimate(len(runs), sum(map(bool, runs)), k) for runs in outcomes])


def powers_of_two(k: int) -> list[int]:
    """Return 1, 2, 4, ... up to k, and k itself.

    Args:
        k: The last number.

    Returns:
        The numbers, in rising order.

    >>> powers_of_two(8), powers_of_two(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    powers = [1 << i for i in range(check_int("k", k, 1).bit_length())]
    return powers if powers[-1] == k else [*powers, k]


def maj_at_k(answers: Sequence[Sequence[Hashable | None]], outcomes: Outcomes, k: int | None = None) -> float:
    """Compute maj@k: the probability that the majority answer of k samples is correct.

    The result is exact: the mean over all subsets of k of the n samples, with ties broken at random. A sample without
    an answer does not vote. If samples with equal answers have different outcomes, the answer counts as correct with
    the share of them that succeeded.

    Args:
        answers: [prompts][samples] The answers, or `None`.
        outcomes: [prompts][samples] Which samples succeeded.
        k: Number of samples that vote; `None`: all samples of a prompt.

    Returns:
        The probability.

    Raises:
        ValueError: The lengths differ, or a prompt has fewer than k samples.

    >>> answers = [["4", "4", "5"], ["1", "2", None]]
    >>> outcomes = [[True, True, False], [False, True, False]]
    >>> maj_at_k(answers, outcomes), round(maj_at_k(answers, outcomes, 2), 3)
    (0.75, 0.583)
    """
    if len(answers) != len(outcomes):
        raise ValueError(f"answers: got {len(answers)} prompts, expected the {len(outcomes)} of outcomes")
    _success_rates(outcomes)
    if k is not None:
        check_int("k", k, 1)
        _check_sample_count(outcomes, k)
    probabilities = []
    for i, (row, successes) in enumerate(zip(answers, outcomes, strict=True)):
        if len(row) != len(successes):
            raise ValueError(f"answers[{i}]: got {len(row)} answers, expected {len(successes)}, one for each sample")
        votes = Counter(answer for answer in row if answer is not None)
        wins = _win_probabilities(tuple(sorted(votes.values())), len(row) - votes.total(), len(row) if k is None else k)
        correct = Counter(answer for answer, ok in zip(row, successes, strict=True) if ok and answer is not None)
        probabilities.append(math.fsum(wins[count] * correct[answer] / count for answer, count in votes.items()))
    return _mean(probabilities)


@lru_cache(4096)
def _win_probabilities(counts: tuple[int, ...], abstaining: int, k: int) -> dict[int, float]:
    """Compute the probability that an answer wins the vote of k of all samples, by the number of samples that give it.

    An answer with x votes wins if no other has more, with probability 1 / (1 + t) if t others have x too. The subsets
    of the other samples are counted by their votes s and ties t: the coefficients of the product over answers of
    sum_{d < x} C(count, d) z^d + C(count, x) z^x u, in integers.

    Args:
        counts: Number of samples of each answer.
        abstaining: Number of samples without an answer.
        k: Number of samples that vote.
    """
    n = sum(counts) + abstaining
    if k == n:
        top = max(counts, default=0)
        return {count: float(count == top) / counts.count(top) for count in counts}
    wins = {}
    for candidate in set(counts):
        others = list(counts)
        others.remove(candidate)
        probability = 0.0
        for x in range(1, min(candidate, k) + 1):
            subsets = {(0, 0): 1}
            for count in others:
                subsets = _add_answer(subsets, count, x, k - x, ties=True)
            subsets = _add_answer(subsets, abstaining, abstaining + 1, k - x, ties=False)
            winning = math.fsum(number / (1 + t) for (s, t), number in subsets.items() if s == k - x)
            probability += math.comb(candidate, x) * winning / math.comb(n, k)
        wins[candidate] = probability
    return wins


def _add_answer(
    subsets: dict[tuple[int, int], int], count: int, x: int, max_votes: int, *, ties: bool
) -> dict[tuple[int, int], int]:
    """Add an answer of `count` samples with at most x votes to the numbers of subsets by (votes, ties)."""
    extended: Counter[tuple[int, int]] = Counter()
    for (s, t), number in subsets.items():
        for d in range(min(count, x, max_votes - s) + 1):
            extended[s + d, t + (ties and d == x)] += number * math.comb(count, d)
    return extended


def _check_sample_count(outcomes: Outcomes, k: int) -> None:
    _success_rates(outcomes)
    fewest = min(map(len, outcomes))
    if k > fewest:
        raise ValueError(f"k: got {k}, expected at most {fewest}, the samples of a prompt")


# --- Student's distribution -----------------------------------------------------------------------------------------


def _check_confidence(confidence: float) -> None:
    check_float("confidence", confidence, 1e-6, 1 - 1e-6, "a number between 0 and 1, such as 0.95")


@lru_cache(256)
def student_quantile(confidence: float, df: int) -> float:
    """Return the t with P(|T| <= t) = confidence for Student's distribution.

    Args:
        confidence: The probability.
        df: Degrees of freedom.

    Returns:
        The quantile.

    >>> round(student_quantile(0.95, 9), 4), round(student_quantile(0.95, 10**6), 4)
    (2.2622, 1.96)
    """
    _check_confidence(confidence)
    check_int("df", df, 1)
    if df > _EXACT_UP_TO:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / df + second / df**2 + third / df**3
    low, high = 0.0, math.pi / 2  # bisection for the angle with tangent t / sqrt(df)
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_probability(angle, df) < confidence else (low, angle)
    return math.tan(low) * math.sqrt(df)


def _student_probability(angle: float, df: int) -> float:
    """Compute P(|T| <= sqrt(df) tan(angle)) by a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = df % 2
    term = cosine if is_odd else 1.0
    total = term if df > 1 else 0.0
    for i in range(2 + is_odd, df - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


__all__ = [
    "AllSamplesFailedError",
    "AnswerFunction",
    "Evaluation",
    "Interval",
    "Outcomes",
    "PromptResult",
    "append_evaluation",
    "avg_at_k",
    "avg_at_k_interval",
    "compare_evaluations",
    "evaluate",
    "evaluate_records",
    "maj_at_k",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "powers_of_two",
    "student_quantile",
]
