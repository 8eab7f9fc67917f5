"""Inputs and results of checks: `Samples` and `Thresholds` in, `Finding`, `CheckResult` and `Diagnosis` out.

Invariant: `as_dict` returns strict JSON, and ids are the only text in it that comes from records. `Samples` has one row
per record, in append order, and NaN (never 0) for a number that was not recorded. `Samples.present` is `False` for
failed runs, which only count toward their groups, and for records that a saver selected.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from rollbook.core.checks import check_choice, describe_range
from rollbook.inspect.statistics import Floats, Ints, Mask, Series, by_step

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
"""high: training is harmful or has no effect. medium: part of it is wasted or biased. low: informational."""
MAX_EVIDENCE = 24
"""Maximum number of ids in a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A triggered check, with evidence and a recommendation.

    Args:
        check: Id of the check, a key of `CHECKS`.
        severity: "high", "medium" or "low".
        title: One line with the main number.
        detail: The numbers, and the threshold that was exceeded.
        recommendation: What to do about it.
        steps: First and last affected step.
        uids: Ids of the clearest examples, at most 24; deterministic.
        count: Number of affected records.
        filter: Filter that selects these records in the viewer and in `rollbook ls --where`; "" if no filter can.
        share: Share of affected records; orders findings of equal severity.

    >>> finding = Finding("truncation", "high", "90% of recent samples are truncated", "", "", (3, 9), ("9/1",), 1, "")
    >>> finding.as_dict()["steps"]
    [3, 9]
    """

    check: str
    severity: Severity
    title: str
    detail: str
    recommendation: str
    steps: tuple[int, int]
    uids: tuple[str, ...]
    count: int
    filter: str
    share: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return strict JSON."""
        return asdict(self) | {"steps": list(self.steps), "uids": list(self.uids)}


class CheckStatus(NamedTuple):
    """The status of one check.

    Args:
        check: Id of the check, a key of `CHECKS`.
        status: "passed", "triggered", "explained" (triggered, but caused by another finding) or "skipped".
        reason: The measured numbers, or why the check was skipped.

    >>> CheckStatus("stale-data", "skipped", "no policy versions recorded").status
    'skipped'
    """

    check: str
    status: Literal["passed", "triggered", "explained", "skipped"]
    reason: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check: a finding, or why there is none."""

    status: Literal["passed", "triggered", "skipped"]
    reason: str
    finding: Finding | None = None


def passed(reason: str) -> CheckResult:
    """Return the result of a check that was not triggered."""
    return CheckResult("passed", reason)


def skipped(reason: str) -> CheckResult:
    """Return the result of a check that could not run."""
    return CheckResult("skipped", reason)


def triggered(finding: Finding) -> CheckResult:
    """Return the result of a triggered check."""
    return CheckResult("triggered", finding.title, finding)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of examining a run.

    Args:
        source: Name of the run.
        findings: Sorted by severity, then by share of affected records.
        checks: Status of every check, in the order of `CHECKS`.
        records: Number of examined records.
        steps: First and last examined step; `None` without records.
        evaluation: Whether evaluation records were examined.
        excluded: Records excluded because a saver selected them for their content, which would bias shares.

    >>> diagnosis = Diagnosis("demo", (), (CheckStatus("nans", "passed", "no NaN/Inf"),), 512, (0, 9))
    >>> diagnosis.healthy, diagnosis.checks_run, diagnosis.status()
    (True, 1, 0)
    """

    source: str
    findings: tuple[Finding, ...]
    checks: tuple[CheckStatus, ...]
    records: int
    steps: tuple[int, int] | None
    evaluation: bool = False
    excluded: int = 0

    @property
    def healthy(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def checks_run(self) -> int:
        """Number of checks that could run."""
        return sum(check.status != "skipped" for check in self.checks)

    def status(self, fail_on: str = "medium") -> int:
        """Return the exit status of `rollbook doctor`.

        Args:
            fail_on: Lowest severity that fails, or "never".

        Returns:
            1 if there is a finding of severity `fail_on` or higher, otherwise 0. (The command returns 2 for unreadable
            input.)
        """
        check_choice("fail_on", fail_on, (*SEVERITIES, "never"))
        if fail_on == "never":
            return 0
        failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        return int(any(finding.severity in failing for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Return strict JSON."""
        return {
            "source": self.source,
            "healthy": self.healthy,
            "records": self.records,
            "steps": None if self.steps is None else list(self.steps),
            "evaluation": self.evaluation,
            "excluded": self.excluded,
            "findings": [finding.as_dict() for finding in self.findings],
            "checks": [check._asdict() for check in self.checks],
        }


def percent(share: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.314), percent(0.0042), percent(0.0), percent(0.999), percent(1.0)
    ('31%', '0.42%', '0%', '99.9%', '100%')
    """
    value = 100 * share
    if value in (0.0, 100.0):
        return f"{value:.0f}%"
    return f"{value:.2g}%" if value < 99 else f"{min(value, 99.99):.4g}%"


def amount(value: float) -> str:
    """Format a number with three significant digits.

    >>> amount(0.123456), amount(1234.5), amount(-2.0), amount(0.00001234), amount(123456.0)
    ('0.123', '1,234', '-2', '1.23e-05', '123,456')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def exact(value: float) -> str:
    """Format a number for a filter without loss, so that a comparison holds for the sample it comes from.

    >>> exact(0.1), exact(3.0), exact(1e-7)
    ('0.1', '3', '1e-07')
    """
    return repr(float(value)).removesuffix(".0")


def rank_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the most severe first."""
    return tuple(
        sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.share, finding.check))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds at which checks are triggered.

    Args:
        **thresholds: Values by name; `rollbook doctor --thresholds` lists names, defaults and meanings.

    Raises:
        ValueError: If a value is out of range or of the wrong type.

    >>> Thresholds.of("zero_variance=0.8", "groups=4") == Thresholds(zero_variance=0.8, groups=4)
    True
    >>> Thresholds.of("zero_varianse=0.8")
    Traceback (most recent call last):
        ...
    ValueError: unknown threshold 'zero_varianse'; did you mean 'zero_variance'?
    """

    # Required data and significance.

    samples: int = 32
    """Minimum number of samples for a share or a mean; with fewer, the error of a share is above 0.15."""
    groups: int = 8
    """Minimum number of groups for statistics over groups."""
    certainty: float = 2.0
    """Standard errors by which a share must exceed its threshold; 2 gives one false alarm in 40 exactly at the
    threshold, and far fewer below it."""
    trend_steps: int = 4
    """Minimum number of steps for a trend; shorter runs are checked on levels only."""
    trend: float = 1.64
    """Minimum |z| of a Mann-Kendall test; 1.64 is 5% one-sided, about what 4 steps can reach."""
    window: float = 0.25
    """Share of the steps that counts as "recent", and as "early"."""
    window_steps: int = 16
    """Maximum number of steps in either window."""
    window_samples: int = 96
    """The recent window is extended until it has this many samples."""
    order_samples: int = 256
    """Same as `window_samples`, for checks on the order of samples within groups."""

    # Rewards.

    zero_variance: float = 0.6
    """Share of recent groups whose samples all have the same reward. Up to 0.5 is common with binary rewards. For
    groups of 2 or 3 it is raised to half way between the share by chance and 1."""
    reward_collapse: float = 0.5
    """Share of the best window's reward, above the run's floor (5th percentile), that the recent window has lost."""
    saturation: float = 0.95
    """Share of recent samples at the run's top reward; above it, two of three groups of 8 have zero variance."""
    top: float = 0.02
    """Distance from the run's top reward that counts as "at the top", as a share of the reward range."""
    good_reward: float = 0.8
    """Position in the reward range (1st to 99th percentile) from which on a sample counts as rewarded."""
    truncation: float = 0.5
    """Share of recent samples truncated at a token or turn limit. Runs that learn to think longer reach 0.2 to 0.3."""
    truncation_rewarded: float = 0.1
    """Share of truncated samples that are rewarded."""
    length_reward: float = 0.75
    """Somers' d between reward and length within groups; correct answers that are somewhat shorter give 0.2 to 0.5."""
    format_reward: float = 0.9
    """Somers' d between reward and its format part within groups."""
    dominance: float = 0.9
    """Somers' d between reward and one of its parts within groups."""
    influence: float = 0.2
    """Somers' d, over the pairs in which a part differs, up to which it has no influence; also the share of pairs in
    which a part must differ to count as varying."""
    advantage_mean: float = 0.1
    """Mean advantage, in standard deviations."""
    evaluation_fall: float = 0.05
    """Drop of the held-out reward from its best, as a share of the reward range."""

    # The policy.

    entropy_floor: float = 0.03
    """Mean entropy per token, in nats; typical runs have 0.1 to 1."""
    entropy_fall: float = 0.25
    """Recent entropy as a share of the early one, with a falling trend; healthy runs drop to about a third."""
    length_growth: float = 2.0
    """Recent mean length as a multiple of the early one, with a rising trend."""
    length_gain: float = 0.1
    """Rise of the reward, as a share of its range, that justifies growing lengths."""
    mismatch: float = 0.05
    """Train-inference mismatch of a sample, mean |old_logprobs - logprobs| in nats; bf16 engines have 0.005 to 0.03."""
    mismatch_share: float = 0.1
    """Share of samples above `mismatch`."""
    mismatch_lag: int = 1
    """Maximum age, in policy versions, of samples compared for the train-inference mismatch."""
    kl: float = 1.0
    """Mean KL to the reference per token (k3), in nats; runs with a KL penalty stay below 0.2."""
    kl_growth: float = 8.0
    """Recent KL as a multiple of that of earlier steps, with a rising trend; steady growth from 0 gives 2 to 3."""
    kl_least: float = 0.1
    """KL below which growth is ignored, in nats."""

    # Samples.

    loops: float = 0.05
    """Share of samples that end in a loop or are mostly repetition."""
    loop_share: float = 0.5
    """Share of a response that must be repetition for the sample to count as a loop."""
    duplicates: float = 0.1
    """Share of responses that are identical to another one of their group."""
    duplicate_tokens: int = 16
    """Minimum number of tokens for a response to count as a duplicate."""
    nan_records: float = 0.0
    """Share of records with NaN/Inf in a per-token field."""
    nan_rewards: float = 0.01
    """Share of records whose reward is NaN (not scored)."""

    # Data flow.

    stale_lag: int = 4
    """Versions behind the trainer above which a sample is stale; counted in steps if a step advances several
    versions."""
    stale: float = 0.2
    """Share of samples that are stale."""
    keep_bias: float = 0.2
    """Difference between the shares trained on of the shortest and longest quarter of each step."""
    incomplete: float = 0.05
    """Share of incomplete groups."""
    patience: int = 2
    """Number of later steps after which a group counts as incomplete."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = _RANGES.get(field.name, (0.0, 1.0))
            is_int = isinstance(field.default, int)
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                expected = "an integer" if is_int else "a number"
                raise ValueError(f"threshold {field.name!r}: got {value!r}, expected {expected}")
            if not low <= value <= high:
                expected = describe_range("a number", low, high)
                raise ValueError(f"threshold {field.name!r}: got {value!r}, expected {expected}")

    @classmethod
    def of(cls, *sources: Thresholds | Mapping[str, Any] | str | None, **named: float) -> Thresholds:
        """Combine thresholds; later values win.

        Args:
            *sources: Thresholds, mappings, texts "name=value" (comma-separated), or `None`.
            **named: Values by name.

        Raises:
            ValueError: For an unknown name or a bad value.
        """
        thresholds = cls()
        for source in (*sources, named):
            if isinstance(source, Thresholds):
                thresholds = source
            elif isinstance(source, str):
                thresholds = thresholds.with_changes(
                    dict(_parse_assignment(assignment) for assignment in source.split(",") if assignment.strip())
                )
            elif isinstance(source, Mapping):
                thresholds = thresholds.with_changes(source)
            elif source is not None:
                raise ValueError(
                    f"thresholds: got {type(source).__name__}, expected Thresholds, a mapping or text 'name=value'"
                )
        return thresholds

    def with_changes(self, changes: Mapping[str, Any]) -> Thresholds:
        """Return a copy with changes by name; numbers may be given as text.

        Args:
            changes: New values by name.

        Returns:
            The changed copy.
        """
        defaults = {field.name: field.default for field in fields(self)}
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in defaults:
                raise ValueError(f"unknown threshold {name!r}{_suggest(name, defaults)}")
            values[name] = (
                _parse_number(name, value, isinstance(defaults[name], int)) if isinstance(value, str) else value
            )
        return replace(self, **values)


_AT_LEAST_ONE = (1.0, math.inf)
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("samples", "window_samples", "order_samples", "window_steps", "kl_growth", "length_growth"),
        _AT_LEAST_ONE,
    ),
    **dict.fromkeys(("certainty", "trend", "entropy_floor", "mismatch", "kl", "kl_least"), (0.0, math.inf)),
    **dict.fromkeys(("mismatch_lag", "stale_lag", "patience", "duplicate_tokens", "advantage_mean"), (0.0, math.inf)),
    "groups": (2.0, math.inf),
    "trend_steps": (3.0, math.inf),
    "window": (0.01, 0.5),
}
"""Allowed ranges; all other thresholds are shares."""


def _parse_assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not value.strip():
        raise ValueError(f"threshold: got {text.strip()!r}, expected name=value, such as zero_variance=0.8")
    return name.strip(), value.strip()


def _parse_number(name: str, text: str, is_int: bool) -> float:
    try:
        return int(text) if is_int else float(text)
    except ValueError:
        expected = "an integer" if is_int else "a number"
        raise ValueError(f"threshold {name!r}: got {text!r}, expected {expected}") from None


def _suggest(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


TRIAGE = Thresholds(
    samples=8,
    groups=4,
    zero_variance=0.25,
    truncation_rewarded=0.0,
    loops=0.0,
    duplicates=0.02,
    mismatch_share=0.02,
    stale=0.05,
    incomplete=0.0,
)
"""Lower thresholds for the findings on the viewer's overview page."""


# --- samples ---------------------------------------------------------------------------------------------------------

NUMBER_COLUMNS = (
    *("reward", "advantage", "length", "response_tokens", "trained_tokens", "staleness", "version_max", "group_size"),
    *("entropy", "logprob", "kl", "mismatch", "nans", "repetition", "loop_at"),
)
INTEGER_COLUMNS = ("step", "run", "scored")
TEXT_COLUMNS = ("uid", "gid", "status", "state", "removed_reason", "kept", "parent", "parts", "digest", "prompt")
COLUMNS = (*TEXT_COLUMNS, *INTEGER_COLUMNS, *NUMBER_COLUMNS)
"""The columns of the index's table `samples` that the doctor reads."""

_MAX_NUMBER = 1e100
"""Larger numbers are treated as infinite, since their squares overflow."""
_UNBIASED_POLICIES = ("all", "first", "random")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups with at least two scored runs."""

    code: Ints
    """[K] code of the group in `Samples.group`"""
    low: Floats
    high: Floats
    mean: Floats
    """[K] over its scored samples"""
    runs: Ints
    step: Ints
    """[K] last step of the group"""


class Samples:
    """Records as numpy columns.

    Args:
        columns: Values by column name; "uid", "step" and "run" are required.
        base_filter: Condition added to filters, if the index has both training and evaluation records.
        evaluations: Evaluation records of the same run.

    >>> rows = {"uid": ["a", "b"], "gid": ["g", "g"], "step": [0, 0], "run": [0, 1], "reward": [1.0, None]}
    >>> samples = Samples(rows)
    >>> len(samples), samples.reward.tolist(), samples.truncated.tolist()
    (2, [1.0, nan], [False, False])
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Any]], base_filter: str = "", evaluations: Samples | None = None
    ) -> None:
        n = len(columns["uid"])
        self.evaluations = evaluations
        self._base_filter = base_filter
        empty = [None] * n
        texts = {name: columns.get(name, empty) for name in TEXT_COLUMNS}
        numbers = {name: np.array(columns.get(name, empty), np.float64) for name in NUMBER_COLUMNS}
        too_large = np.abs(numbers["reward"]) > _MAX_NUMBER
        for column in numbers.values():
            column[np.abs(column) > _MAX_NUMBER] = np.nan
        self.uid: Sequence[str] = texts["uid"]
        self.step: Ints = np.array(columns["step"], np.int64)
        self.run: Ints = np.array(columns["run"], np.int64)
        self.group, self.gids = encode_texts(texts["gid"])
        self.digest, _ = encode_texts(texts["digest"])
        self.prompt, _ = encode_texts(texts["prompt"])
        """[N] code of the prompt, the same in every step"""
        # Records removed to save space still have their numbers; failed ones never had any.
        self.present: Mask = np.array([not reason for reason in texts["removed_reason"]], bool) | (
            numbers["length"] > 0
        )
        # Records that a saver selected for their content would bias shares.
        self.selected: Mask = np.array(
            [bool(policy) and not policy.startswith(_UNBIASED_POLICIES) for policy in texts["kept"]], bool
        )
        self.partial = any(policy and not policy.startswith("all") for policy in texts["kept"])
        """Whether a saver kept only some of the records."""
        self.present &= ~self.selected
        self.status = np.array([text or "" for text in texts["status"]], "U12")
        self.state = np.array([text or "" for text in texts["state"]], "U12")
        self.derived: Mask = np.array([text is not None for text in texts["parent"]], bool)
        """[N] derived from another record, so that equal content is expected"""
        self.unscorable: Mask = np.array(columns.get("scored", empty), np.float64) == 2
        self.unscorable |= too_large
        self.reward: Floats = np.where(self.present & ~self.unscorable, numbers["reward"], np.nan)
        self.advantage = numbers["advantage"]
        self.tokens: Floats = np.where(self.present, numbers["response_tokens"], np.nan)
        self.trained_tokens = numbers["trained_tokens"]
        self.staleness = numbers["staleness"]
        self.version = numbers["version_max"]
        self.group_size = numbers["group_size"]
        self.entropy = numbers["entropy"]
        self.logprob = numbers["logprob"]
        self.kl = numbers["kl"]
        self.mismatch = numbers["mismatch"]
        self.nans = numbers["nans"]
        self.repetition = numbers["repetition"]
        self.loop_at = numbers["loop_at"]
        self._parts = texts["parts"]

    def __len__(self) -> int:
        return len(self.uid)

    @cached_property
    def truncated(self) -> Mask:
        """[N] truncated at a limit"""
        return np.asarray(self.status == "truncated")

    @cached_property
    def dropped(self) -> Mask:
        """[N] dropped before training"""
        return np.asarray(self.state == "dropped")

    @cached_property
    def steps(self) -> Ints:
        """Steps that have records, ascending."""
        return np.unique(self.step[self.present])

    @cached_property
    def low(self) -> float:
        """The run's lowest reward."""
        return float(np.nanmin(self.reward)) if np.isfinite(self.reward).any() else math.nan

    @cached_property
    def high(self) -> float:
        """The run's highest reward."""
        return float(np.nanmax(self.reward)) if np.isfinite(self.reward).any() else math.nan

    @cached_property
    def constant(self) -> bool:
        """Whether all rewards of the run are equal."""
        return self.high - self.low <= 1e-9 * max(1.0, abs(self.high))

    def window(self, count: int, thresholds: Thresholds) -> int:
        """Return how many of `count` steps are recent."""
        least = 2 if count >= 4 else 1
        return max(least, min(math.ceil(count * thresholds.window), thresholds.window_steps))

    def recent(self, thresholds: Thresholds, min_samples: int | None = None) -> Mask:
        """Return [N] the samples of the recent steps, extended until there are `min_samples`."""
        steps, counts = np.unique(self.step[self.present], return_counts=True)
        if not len(steps):
            return np.zeros(len(self), bool)
        w = self.window(len(steps), thresholds)
        cumulative = np.cumsum(counts[::-1])
        w = max(
            w, int(np.searchsorted(cumulative, thresholds.window_samples if min_samples is None else min_samples)) + 1
        )
        return np.asarray(self.present & (self.step >= steps[-min(w, len(steps))]))

    def series(self, values: Floats, mask: Mask | None = None, *, median: bool = False) -> Series:
        """Return values by step, over the present records."""
        use = self.present if mask is None else self.present & mask
        return by_step(self.step[use], values[use], median=median)

    @cached_property
    def groups(self) -> Groups:
        """Groups with at least two scored runs."""
        use = np.isfinite(self.reward)
        code, reward = self.group[use], self.reward[use]
        k = len(self.gids)
        low, high = np.full(k, np.inf), np.full(k, -np.inf)
        np.minimum.at(low, code, reward)
        np.maximum.at(high, code, reward)
        step = np.full(k, np.iinfo(np.int64).min, np.int64)
        np.maximum.at(step, code, self.step[use])
        runs = count_distinct(code, self.run[use], k)
        counts = np.bincount(code, minlength=k)
        mean = np.bincount(code, reward, minlength=k) / np.maximum(counts, 1)
        some = np.flatnonzero(runs >= 2)
        return Groups(some, low[some], high[some], mean[some], runs[some], step[some])

    @cached_property
    def blocks(self) -> Ints:
        """[N] block within which samples are compared: the group, or the step if groups have one sample."""
        scored = np.isfinite(self.reward)
        grouped = int(self.groups.runs.sum())
        return self.group if 2 * grouped >= int(scored.sum()) else self.step

    def parts(self, places: Ints) -> dict[str, Floats]:
        """Return reward parts [places] by name; NaN for records without the part."""
        parts: dict[str, Floats] = {}
        for row, i in enumerate(places.tolist()):
            text = self._parts[i]
            if not text or text == "{}":
                continue
            for name, value in json.loads(text).items():
                if isinstance(value, (int, float)) and abs(value) <= _MAX_NUMBER:
                    if name not in parts:
                        parts[name] = np.full(len(places), np.nan)
                    parts[name][row] = value
        return dict(sorted(parts.items()))

    def evidence(self, mask: Mask, key: Floats, *, one_per_group: bool = False) -> tuple[str, ...]:
        """Return the ids of up to `MAX_EVIDENCE` records of `mask` with the largest `key`; ties go to later records.

        Args:
            mask: [N] candidates.
            key: [N] sort key.
            one_per_group: Take one record of each group before a second one of any group.
        """
        places = np.flatnonzero(mask)
        order = places[np.lexsort((-places, -np.nan_to_num(key[places], nan=-np.inf)))]
        if one_per_group:
            _, first = np.unique(self.group[order], return_index=True)
            lead = np.sort(first)
            order = np.concatenate([order[lead], np.delete(order, lead)])
        return tuple(str(self.uid[i]) for i in order[:MAX_EVIDENCE])

    def build_filter(self, condition: str, first: int, last: int | None = None) -> str:
        """Return a viewer filter for a condition within steps; clauses that always hold are omitted."""
        clauses = [condition] if condition else []
        if len(self.steps) and first > self.steps[0]:
            clauses.append(f"step >= {first}")
        if len(self.steps) and last is not None and last < self.steps[-1]:
            clauses.append(f"step <= {last}")
        if self._base_filter:
            clauses.append(self._base_filter)
        return " and ".join(clauses)

    def step_range(self, mask: Mask) -> tuple[int, int]:
        """Return the first and last step of the records of `mask`."""
        return int(self.step[mask].min()), int(self.step[mask].max())


def encode_texts(texts: Sequence[str | None]) -> tuple[Ints, list[str]]:
    """Encode texts as codes in order of first appearance (-1 for `None`); return the codes and the texts by code.

    >>> codes, texts = encode_texts(["b", None, "a", "b"])
    >>> codes.tolist(), texts
    ([0, -1, 1, 0], ['b', 'a'])
    """
    codes: dict[str, int] = {}
    numbers = [-1 if text is None else codes.setdefault(text, len(codes)) for text in texts]
    return np.array(numbers, np.int64), list(codes)


def count_distinct(block: Ints, value: Ints, blocks: int) -> Ints:
    """Return [blocks] the number of distinct values of each block.

    >>> count_distinct(np.array([0, 0, 0, 2]), np.array([5, 5, 6, 5]), 3).tolist()
    [2, 0, 1]
    """
    order = np.lexsort((value, block))
    block, value = block[order], value[order]
    new = np.ones(len(block), bool)
    new[1:] = (block[1:] != block[:-1]) | (value[1:] != value[:-1])
    return np.bincount(block[new], minlength=blocks).astype(np.int64)
