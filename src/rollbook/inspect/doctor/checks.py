"""`CHECKS`, the table of checks; `examine`, which runs them on a run; and the reports.

Invariant: a check is one row of `CHECKS`, which `examine`, the documentation and the command line read. Nothing in the
run is changed, torch is not imported, and a temporary index is removed. Text from records is escaped, so an id or a
name cannot move a terminal's cursor. The first word of a line of a report is its severity.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rollbook.inspect.doctor import reward_checks, rollout_checks
from rollbook.inspect.doctor.findings import (
    COLUMNS,
    TRIAGE,
    CheckResult,
    CheckStatus,
    Diagnosis,
    Finding,
    Samples,
    Thresholds,
    rank_findings,
    skipped,
)

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Source


CheckFunction = Callable[[Samples, Thresholds], CheckResult]


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the doctor, an entry of `CHECKS`.

    Args:
        id: Name, such as "zero-variance".
        title: Title in reports.
        description: What the failure is, and why it matters.
        method: How it is detected.
        thresholds: Names of the thresholds that it uses.
        recommendation: Short, general recommendation; a finding has one for its case.
        run: The function that checks samples.
        evaluation: Whether the check also runs on evaluation records.

    >>> CHECKS["nans"].title, CHECKS["stale-data"].evaluation
    ('NaN/Inf', False)
    """

    id: str
    title: str
    description: str
    method: str
    thresholds: tuple[str, ...]
    recommendation: str
    run: CheckFunction
    evaluation: bool = True


_CHECKS = (
    Check(
        "nans",
        "NaN/Inf",
        "A reward or per-token value is NaN or infinite. One such token makes the gradient of its batch NaN.",
        "Records with NaN/Inf among their trained tokens, and records whose reward is NaN (not scored) or infinite.",
        ("nan_records", "nan_rewards"),
        "Drop them before training and find the source: log-probs of -inf, empty masks, a standard deviation of 0, a "
        "failed grader.",
        rollout_checks.check_nans,
    ),
    Check(
        "reward-collapse",
        "Reward collapse",
        "The reward fell far below its earlier level, or no sample was ever rewarded.",
        "Recent median of step means against the best earlier window, measured above the 5th percentile of rewards. "
        "The drop must exceed three standard errors (over groups and steps), with three quarters of the recent steps "
        "in its lower half. Constant rewards of 0 or less also trigger it.",
        ("reward_collapse", "certainty"),
        "Return to a checkpoint before the drop; check learning rate, train-inference mismatch, grader and prompts.",
        reward_checks.check_reward_collapse,
    ),
    Check(
        "evaluation-falls",
        "Held-out reward drops",
        "The policy does worse on held-out prompts than in an earlier evaluation.",
        "Last evaluation against the best earlier one, paired by prompt. The drop must exceed a share of the reward "
        "range and `certainty` standard errors.",
        ("evaluation_fall", "certainty", "groups"),
        "Return to the best checkpoint; check for overfitting, reward hacking or a high learning rate.",
        reward_checks.check_evaluation_falls,
        evaluation=False,
    ),
    Check(
        "reward-saturation",
        "Reward saturation",
        "Nearly all samples have the top reward: the prompts are solved, or the reward is too easy.",
        "Share of recent samples within `top` of the run's highest reward.",
        ("saturation", "top"),
        "Stop, use harder prompts, or refine the reward.",
        reward_checks.check_saturation,
        evaluation=False,
    ),
    Check(
        "entropy-collapse",
        "Entropy collapse",
        "The policy is nearly deterministic: samples of a group become identical and exploration stops.",
        "Recent median of step means: below a floor, or a drop from the early steps with a Mann-Kendall trend. Without "
        "recorded entropies, the trend of the mean -log-prob is used. Severity is low if the reward is good.",
        ("entropy_floor", "entropy_fall", "trend", "good_reward"),
        "Clip-higher, an entropy bonus, temperature 1, a lower learning rate, or an earlier checkpoint.",
        rollout_checks.check_entropy_collapse,
        evaluation=False,
    ),
    Check(
        "zero-variance",
        "Zero-variance groups",
        "All samples of a group have the same reward, so their advantages are 0.",
        "Share of recent groups with equal rewards (Wilson lower bound). Severity is low if they were dropped before "
        "training.",
        ("zero_variance", "groups", "certainty"),
        "Solved: harder prompts. Unsolved: easier prompts, more samples, partial credit. Both: dynamic sampling.",
        reward_checks.check_zero_variance,
        evaluation=False,
    ),
    Check(
        "length-explosion",
        "Length explosion",
        "Responses grew several times longer while the reward did not rise.",
        "Recent against early median of step means, with a rising Mann-Kendall trend.",
        ("length_growth", "length_gain", "trend"),
        "Check the loss for a length bias, add a soft overlong penalty, and mask truncated responses.",
        rollout_checks.check_length_explosion,
    ),
    Check(
        "truncation",
        "Truncation",
        "Most responses or episodes end at a token or turn limit before reaching an answer.",
        "Share of recent samples that were truncated.",
        ("truncation", "certainty"),
        "Raise the limit, check the end-of-text token and stop strings, or penalize length.",
        rollout_checks.check_truncation,
    ),
    Check(
        "truncation-rewarded",
        "Rewarded truncation",
        "Truncated responses get a good reward, so the policy learns not to stop.",
        "Share of truncated samples, excluding dropped ones, with a reward in the upper part of the range.",
        ("truncation_rewarded", "good_reward"),
        "Give truncated samples the lowest reward or mask them; raise the limit if they are correct.",
        rollout_checks.check_truncation_rewarded,
    ),
    Check(
        "repetition-loops",
        "Repetition loops",
        "Responses repeat the same text over and over.",
        "Share of samples with at least `loop_share` repetition (a loop at the end, repeated 8-grams), or truncated in "
        "a loop.",
        ("loops", "loop_share"),
        "Give loops the lowest reward; check end-of-text token, stop strings and sampling.",
        rollout_checks.check_loops,
    ),
    Check(
        "duplicates",
        "Duplicate samples",
        "Several samples of a group have identical responses, which shrinks the effective batch.",
        "Share of redundant responses among those with at least `duplicate_tokens` generated tokens. Records derived "
        "from others (`parent`) are excluded. Severity is low if most duplicates have a good reward.",
        ("duplicates", "duplicate_tokens", "good_reward"),
        "Use a different seed per sample; look for records written twice; raise the temperature.",
        rollout_checks.check_duplicates,
        evaluation=False,
    ),
    Check(
        "train-inference-mismatch",
        "Train-inference mismatch",
        "Trainer and engine give the sampled tokens different probabilities, which makes every update off-policy.",
        "Mean of |old_logprobs - logprobs| over a sample's trained tokens: share of samples above `mismatch`, over "
        "the run and per step. Samples more than `mismatch_lag` versions old are excluded.",
        ("mismatch", "mismatch_share", "mismatch_lag"),
        "Compare token by token (temperature, template, precision, weight sync); correct with truncated importance "
        "sampling.",
        rollout_checks.check_mismatch,
    ),
    Check(
        "kl-blowup",
        "KL blow-up",
        "The policy diverges from the reference policy.",
        "Median over samples of the mean per-token k3 estimate: above a limit, or growth over earlier steps with a "
        "rising Mann-Kendall trend.",
        ("kl", "kl_growth", "kl_least", "trend"),
        "Lower the learning rate or max_grad_norm, or use a larger or adaptive KL coefficient.",
        rollout_checks.check_kl_blowup,
    ),
    Check(
        "advantage-mean",
        "Advantages not centered",
        "The mean advantage is not zero: all responses are pushed up (or down) regardless of quality.",
        "Means over samples and over tokens, in standard deviations, both on one side of 0 and at least four standard "
        "errors away (clustered by group).",
        ("advantage_mean", "certainty"),
        "Subtract a baseline after shaping and filtering; center complete groups.",
        reward_checks.check_advantage_mean,
        evaluation=False,
    ),
    Check(
        "reward-follows-length",
        "Reward follows length",
        "Within a group, the longer (or shorter) response nearly always has the higher reward.",
        "Somers' d between reward and length over pairs of a group with different rewards (lower bound clustered by "
        "group), also weighted by reward difference. Truncated samples are excluded.",
        ("length_reward", "certainty"),
        "Remove length from the reward, or compare responses of equal length.",
        reward_checks.check_reward_follows_length,
    ),
    Check(
        "reward-follows-format",
        "Reward follows format",
        "A part of the reward named after format (format, template, tags, schema, boxed, ...) decides the reward.",
        "Somers' d between reward and that part within groups is at least `format_reward`, and no other part exceeds "
        "`influence` over the pairs in which it differs.",
        ("format_reward", "influence"),
        "Reward format only with a correct answer; check why the other parts are constant.",
        reward_checks.check_reward_follows_format,
    ),
    Check(
        "component-dominates",
        "One reward part dominates",
        "One part of the reward decides nearly every comparison although others vary: their scales do not match.",
        "The parts must add up to the reward, up to weights. Within groups, one part has a Somers' d of at least "
        "`dominance`. Other parts differ in at least `influence` of the pairs, but have a d of at most `influence` "
        "there.",
        ("dominance", "influence"),
        "Normalize the parts to one scale before adding them.",
        reward_checks.check_component_dominates,
    ),
    Check(
        "stale-data",
        "Stale data",
        "Many samples come from old policy versions.",
        "Share of samples, excluding dropped ones, whose staleness (policy versions between sampling and training, or "
        "arrival) exceeds `stale_lag`, in units of versions per step.",
        ("stale", "stale_lag"),
        "Set max_staleness when leasing, generate fewer steps ahead, sync weights more often, or use importance "
        "sampling.",
        rollout_checks.check_staleness,
        evaluation=False,
    ),
    Check(
        "keep-rate-bias",
        "Keep rate biased by length",
        "Long samples are dropped more often than short ones, or the reverse.",
        "Among samples trained on or dropped: share trained on in the shortest and in the longest quarter of each "
        "step. Truncated samples are excluded.",
        ("keep_bias", "certainty"),
        "Check the drop reasons; resume long samples instead of dropping them.",
        rollout_checks.check_keep_bias,
        evaluation=False,
    ),
    Check(
        "groups-incomplete",
        "Incomplete groups",
        "Samples of a group are missing, and consumers that lease by group wait for them.",
        "Share of groups with fewer samples than `group_size` (failed ones count as present) after `patience` later "
        "steps.",
        ("incomplete", "patience", "groups"),
        "Call book.fail for failed samples, set partial_after for late ones, and find why samples are lost.",
        rollout_checks.check_incomplete_groups,
        evaluation=False,
    ),
)
CHECKS: Mapping[str, Check] = {check.id: check for check in _CHECKS}
"""Checks by id, in the order they run.

>>> CHECKS["zero-variance"].thresholds
('zero_variance', 'groups', 'certainty')
"""

_Condition = Callable[[Samples, Thresholds, Finding], bool]


def _explains_always(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return True


def _grows_only_by_loops(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.has_exploded(samples, t, ~rollout_checks.find_loops(samples, t))


def _grows_only_by_truncated(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.has_exploded(samples, t, ~samples.truncated)


def _rewards_longer(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return "longer" in cause.title


_EXPLANATIONS: Mapping[str, Mapping[str, _Condition]] = {
    "zero-variance": dict.fromkeys(
        ("reward-saturation", "reward-collapse", "entropy-collapse", "duplicates"), _explains_always
    ),
    "duplicates": {"entropy-collapse": _explains_always},
    "truncation": {"repetition-loops": _explains_always},
    "length-explosion": {
        "repetition-loops": _grows_only_by_loops,
        "truncation-rewarded": _grows_only_by_truncated,
        "reward-follows-length": _rewards_longer,
    },
    "component-dominates": dict.fromkeys(("reward-follows-length", "reward-follows-format"), _explains_always),
}
"""Causes of each check's findings, with a condition: a finding explained by another is not reported separately."""


# --- reports --------------------------------------------------------------------------------------------------------

_SHOWN_IDS = 6
"""Number of ids in a report; `as_dict` has all of them."""


def escape_text(text: str) -> str:
    """Escape everything but printable characters and spaces.

    >>> escape_text("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


def format_report(diagnosis: Diagnosis, *, width: int = 100, verbose: bool = False) -> list[str]:
    """Format a diagnosis for a terminal.

    A finding starts with its severity and a space; its details are indented by two spaces.

    Args:
        diagnosis: The diagnosis to format.
        width: Width of the wrapped lines.
        verbose: Also list passed checks.

    Returns:
        Lines of text, without control characters.

    >>> from rollbook.inspect.doctor import CheckStatus
    >>> print("\\n".join(format_report(Diagnosis("demo", (), (CheckStatus("nans", "passed", ""),), 512, (0, 9)))))
    demo: 512 records, steps 0 to 9; 1 of 1 checks ran
    <BLANKLINE>
    No findings (1 of 1 checks ran).
    """
    span = "" if diagnosis.steps is None else f", steps {diagnosis.steps[0]} to {diagnosis.steps[1]}"
    kind = "evaluation records" if diagnosis.evaluation else "records"
    excluded = f" ({diagnosis.excluded:,} excluded: selected for their content)" if diagnosis.excluded else ""
    checks = f"; {diagnosis.checks_run} of {len(diagnosis.checks)} checks ran"
    lines = [f"{escape_text(diagnosis.source) or 'run'}: {diagnosis.records:,} {kind}{span}{excluded}{checks}"]
    for finding in diagnosis.findings:
        first, last = finding.steps
        step_range = f"step {first}" if first == last else f"steps {first} to {last}"
        lines += ["", f"{finding.severity} {escape_text(finding.title)} [{finding.check}]"]
        lines += _wrap(f"{escape_text(finding.detail)} ({step_range}, {finding.count:,} records)", width)
        lines += _wrap(f"Recommendation: {escape_text(finding.recommendation)}", width)
        if finding.filter:
            lines.append(f"  filter: {escape_text(finding.filter)}")
        ids = [escape_text(uid) for uid in finding.uids[:_SHOWN_IDS]]
        more = f" and {len(finding.uids) - _SHOWN_IDS} more" if len(finding.uids) > _SHOWN_IDS else ""
        if ids:
            lines.append(f"  samples: {' '.join(ids)}{more}")
    if not diagnosis.findings:
        lines += ["", f"No findings ({diagnosis.checks_run} of {len(diagnosis.checks)} checks ran)."]
    titles = {"explained": "Explained by findings above:", "skipped": "Skipped:", "passed": "Passed:"}
    for status, title in titles.items():
        checks_with_status = [check for check in diagnosis.checks if check.status == status]
        if checks_with_status and (verbose or status != "passed"):
            lines += ["", title]
            lines += [f"  {check.check}: {escape_text(check.reason)}" for check in checks_with_status]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


@cache
def threshold_docs() -> dict[str, str]:
    """Return the description of each threshold, from its docstring.

    >>> threshold_docs()["stale"]
    'Share of samples that are stale.'
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(Thresholds))).body
    meanings = {}
    if isinstance(tree, ast.ClassDef):
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                meanings[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return meanings


def describe_checks() -> Iterator[dict[str, Any]]:
    """Describe all checks.

    Yields:
        A dict per check: id, title, description, method, thresholds (name, default, meaning), recommendation, and
        whether it runs on evaluation records.

    >>> next(describe_checks())["title"]
    'NaN/Inf'
    """
    defaults = Thresholds()
    for check in CHECKS.values():
        yield {
            "id": check.id,
            "title": check.title,
            "description": check.description,
            "method": check.method,
            "thresholds": [
                {"name": name, "default": getattr(defaults, name), "meaning": threshold_docs()[name]}
                for name in check.thresholds
            ],
            "recommendation": check.recommendation,
            "evaluation": check.evaluation,
        }


def render_markdown() -> str:
    """Describe all checks as Markdown.

    Returns:
        A section per check, and a table of the thresholds that belong to no single check.

    >>> render_markdown().splitlines()[0]
    '### NaN/Inf (`nans`)'
    """
    lines = []
    for row in describe_checks():
        thresholds = ", ".join(f"`{threshold['name']}={threshold['default']:g}`" for threshold in row["thresholds"])
        lines += [
            f"### {row['title']} (`{row['id']}`)",
            "",
            row["description"],
            "",
            f"*Method* ({thresholds}): {row['method']}",
            "",
            f"*Recommendation:* {row['recommendation']}",
            "",
        ]
    skipped_checks = ", ".join(f"`{check.id}`" for check in CHECKS.values() if not check.evaluation)
    lines += [f"Not run on evaluation records: {skipped_checks}.", ""]
    uses = Counter(name for check in CHECKS.values() for name in check.thresholds)
    lines += ["## Common thresholds", "", "| name | default | meaning |", "|---|---|---|"]
    for threshold in fields(Thresholds):
        if uses[threshold.name] != 1:
            meaning = threshold_docs()[threshold.name].replace("|", r"\|")
            lines.append(f"| `{threshold.name}` | {threshold.default:g} | {meaning} |")
    return "\n".join(lines) + "\n"


# --- running the checks ----------------------------------------------------------------------------------------------

_THRESHOLD_SENTENCE = re.compile(r" Triggered (?:above|below|at|with)\b.*?\.(?=\s|$)", re.DOTALL)
"""The sentence of a finding that names its threshold; `triage` uses other thresholds and removes it."""

Steps = int | str | tuple[int | None, int | None] | None


def examine(
    source: str | os.PathLike[str] | Book | Source | Index,
    *,
    steps: Steps = None,
    thresholds: Thresholds | Mapping[str, Any] | str | None = None,
    evaluation: bool = False,
) -> Diagnosis:
    """Check a run for common RL failure modes.

    Args:
        source: A path or URL of a book or of files, a book, a viewer's source, or an up-to-date index.
        steps: A step, (first, last) or "first-last"; either end may be omitted. `None`: all steps.
        thresholds: Thresholds that differ from the defaults.
        evaluation: Examine evaluation records instead of training records.

    Returns:
        The findings, most severe first, and the status of every check.

    Raises:
        ValueError: For an unknown threshold, bad `steps`, or a source of another type.

    >>> import rollbook
    >>> from rollbook import EID, Experience
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([
    ...     Experience(eid=EID(batch=str(i // 16), task=i // 4, run=i % 4), tokens=[1, i, 3], reward=float("nan"))
    ...     for i in range(64)
    ... ])
    >>> diagnosis = examine(book)
    >>> [(finding.check, finding.severity, finding.count) for finding in diagnosis.findings]
    [('nans', 'medium', 64)]
    """
    limits = Thresholds.of(thresholds)
    step_range = parse_steps(steps)
    with ExitStack() as stack:
        index, name = _open_index(source, stack)
        samples = read_samples(index, step_range, evaluation)
    return diagnose(samples, limits, evaluation=evaluation, source=name)


def _open_index(source: str | os.PathLike[str] | Book | Source | Index, stack: ExitStack) -> tuple[Index, str]:
    """Return an up-to-date index of the source, and its name. The stack closes what is opened here."""
    from rollbook.inspect.index import Index

    if isinstance(source, Index):
        return source, ""
    from rollbook.book.book import Book
    from rollbook.inspect.sources import load, open_source

    if isinstance(source, (str, os.PathLike)):
        opened = stack.enter_context(closing(open_source(source)))
    elif isinstance(source, Book):
        opened = open_source(source)
    elif hasattr(source, "refresh") and hasattr(source, "trajectories"):
        opened = source
    else:
        raise ValueError(f"source: got {type(source).__name__}, expected a path, a book, a viewer's source or an index")
    index = stack.enter_context(Index())
    load(opened, index)
    return index, opened.name


def triage(
    index: Index,
    *,
    steps: Steps = None,
    thresholds: Thresholds | Mapping[str, Any] | str | None = None,
    limit: int = 12,
) -> list[Finding]:
    """Return findings and near misses, most severe first.

    Args:
        index: An up-to-date index of a run.
        steps: Steps to examine, as in `examine`.
        thresholds: Thresholds that differ from the defaults.
        limit: Maximum number of findings.

    Returns:
        The findings of `examine`, then what lower thresholds find, with severity low.

    >>> from rollbook.inspect.index import Index
    >>> with Index() as index:
    ...     triage(index)
    []
    """
    samples = read_samples(index, parse_steps(steps), False)
    diagnosis = diagnose(samples, Thresholds.of(thresholds))
    reported = {check.check for check in diagnosis.checks if check.status in ("triggered", "explained")}
    near_misses = [
        replace(finding, severity="low", detail=_THRESHOLD_SENTENCE.sub(" Not triggered yet.", finding.detail))
        for finding in diagnose(samples, TRIAGE).findings
        if finding.check not in reported
    ]
    return [*diagnosis.findings, *rank_findings(near_misses)][:limit]


def diagnose(samples: Samples, t: Thresholds, *, evaluation: bool = False, source: str = "") -> Diagnosis:
    """Run the checks on samples."""
    results = {
        name: check.run(samples, t) if check.evaluation or not evaluation else skipped("not run on evaluation records")
        for name, check in CHECKS.items()
    }
    findings = {name: result.finding for name, result in results.items() if result.finding is not None}
    causes = {
        name: next(
            (
                cause
                for cause, holds in _EXPLANATIONS[name].items()
                if cause in findings and holds(samples, t, findings[cause])
            ),
            None,
        )
        for name in findings
        if name in _EXPLANATIONS
    }
    return Diagnosis(
        source,
        rank_findings(finding for name, finding in findings.items() if causes.get(name) is None),
        tuple(_apply_cause(name, result, causes.get(name)) for name, result in results.items()),
        int(samples.present.sum()),
        (int(samples.steps[0]), int(samples.steps[-1])) if len(samples.steps) else None,
        evaluation,
        int(samples.selected.sum()),
    )


def _apply_cause(name: str, result: CheckResult, cause: str | None) -> CheckStatus:
    """Return the status of a check, `explained` if the finding of another check is its cause."""
    if cause is not None:
        return CheckStatus(name, "explained", f"explained by {cause}: {result.reason}")
    return CheckStatus(name, result.status, result.reason)


def read_samples(index: Index, step_range: tuple[int | None, int | None], evaluation: bool) -> Samples:
    """Read the samples of an index; training samples come with the evaluation samples of the run."""
    from rollbook.inspect.index import COUNTED

    first, last = step_range
    conditions, values = ["evaluation = ?", COUNTED], [int(evaluation)]
    if first is not None:
        conditions.append("step >= ?")
        values.append(first)
    if last is not None:
        conditions.append("step <= ?")
        values.append(last)
    rows = index.query(f"SELECT {', '.join(COLUMNS)} FROM samples WHERE {' AND '.join(conditions)} ORDER BY n", values)
    columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
    both_kinds = index.query("SELECT 1 FROM samples WHERE evaluation = ? LIMIT 1", [int(not evaluation)])
    base_filter = "" if not both_kinds else "evaluation" if evaluation else "not evaluation"
    evaluations = read_samples(index, step_range, True) if both_kinds and not evaluation else None
    return Samples(dict(zip(COLUMNS, columns, strict=True)), base_filter, evaluations)


_STEPS = re.compile(r"\s*(\d+)?\s*(?:(-|\.\.|:)\s*(\d+)?)?\s*")


def parse_steps(steps: Steps) -> tuple[int | None, int | None]:
    """Parse `steps` to a first and a last step.

    >>> [parse_steps(steps) for steps in ("12-40", "12-", "7", 7, (None, 9), None)]
    [(12, 40), (12, None), (7, 7), (7, 7), (None, 9), (None, None)]
    """
    if steps is None:
        return None, None
    if isinstance(steps, str):
        match = _STEPS.fullmatch(steps)
        if match is None or not any(bound.isdigit() for bound in steps):
            raise ValueError(f"steps: got {steps!r}, expected a step, 'first-last', 'first-' or '-last'")
        first, dash, last = match.groups()
        low = int(first) if first is not None else None
        high = int(last) if last is not None else None
        return (low, high) if dash else (low, low)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps, steps
    if isinstance(steps, tuple) and len(steps) == 2 and all(bound is None or type(bound) is int for bound in steps):
        return steps
    raise ValueError(f"steps: got {steps!r}, expected a step, a pair (first, last) or text such as '12-40'")
