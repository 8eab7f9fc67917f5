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
    """One row of the table."""

    id: str
    title: str
    description: str
    """What it is, and why it matters."""
    method: str
    """How it is detected."""
    thresholds: tuple[str, ...]
    recommendation: str
    """What to do, in short; a finding has one for its own case."""
    run: CheckFunction
    evaluation: bool = True
    """Whether it applies to evaluation records, on which nothing is trained."""


_ROWS = (
    Check(
        "nans",
        "NaNs",
        "A log-prob, advantage, reward or another number is NaN or infinite. One such token makes the gradient of its "
        "whole batch NaN.",
        "Counts records with non-finite numbers among their trained tokens, and records whose reward is NaN (could not "
        "be scored) or infinite.",
        ("nan_records", "nan_rewards"),
        "Drop them before training, and find where they come from: log-probs of -inf, empty masks, a standard "
        "deviation of 0, a grader that failed.",
        rollout_checks.check_nans,
    ),
    Check(
        "reward-collapse",
        "Reward collapse",
        "The reward has fallen far below what the run had reached, or no sample was ever rewarded.",
        "The recent median of step means against the best earlier window, above the 5th percentile of rewards. The "
        "fall must be three standard errors (of groups, and of steps), and three quarters of the recent steps must lie "
        "in its lower half. All rewards equal and not above 0 count too.",
        ("reward_collapse", "certainty"),
        "Go back to a checkpoint before the fall; look at learning rate, log-prob mismatch, grader and prompts.",
        reward_checks.check_reward_collapse,
    ),
    Check(
        "evaluation-falls",
        "Held-out reward falls",
        "The policy does worse on prompts that it is not trained on than it did in an earlier evaluation.",
        "The mean reward of the last evaluation against the best earlier one, paired by prompt: the fall must be above "
        "a share of the range of rewards and above `certainty` standard errors.",
        ("evaluation_fall", "certainty", "groups"),
        "Go back to the best checkpoint; look for overfitting, reward hacking or too large a learning rate.",
        reward_checks.check_evaluation_falls,
        evaluation=False,
    ),
    Check(
        "reward-saturation",
        "Reward saturation",
        "Nearly all samples have the top reward: there is nothing left to learn, or the reward is easy to please.",
        "The share of recent samples within `top` of the run's highest reward.",
        ("saturation", "top"),
        "Stop, take harder prompts, or make the reward finer.",
        reward_checks.check_saturation,
        evaluation=False,
    ),
    Check(
        "entropy-collapse",
        "Entropy collapse",
        "The policy has hardly any choice left; samples of a group become alike, and nothing new is tried.",
        "The recent median of step means of the entropy per token: a level, and a fall from the early steps with a "
        "trend by Mann-Kendall. Where no entropies are recorded, the fall is looked for in the mean of -log-prob. "
        "Severity is low if the reward rose to a good level: such a policy is confident because it is right.",
        ("entropy_floor", "entropy_fall", "trend", "good_reward"),
        "Clip higher, an entropy bonus, temperature 1, a smaller learning rate; go back to before the fall.",
        rollout_checks.check_entropy_collapse,
        evaluation=False,
    ),
    Check(
        "zero-variance",
        "Groups without variance",
        "All samples of a group have one reward, so that their advantages are 0 and the group teaches nothing. The "
        "finding tells solved groups from unsolved ones and from those the reward does not tell apart.",
        "The share of recent groups with two scored runs or more whose rewards are all equal (its lower bound, by "
        "Wilson). Groups that were dropped before training make it a matter of cost alone: severity low.",
        ("zero_variance", "groups", "certainty"),
        "Solved: harder prompts. Unsolved: easier ones, more samples, partial credit. Both: dynamic sampling.",
        reward_checks.check_zero_variance,
        evaluation=False,
    ),
    Check(
        "length-explosion",
        "Length explosion",
        "Responses have grown several times over while the reward has not.",
        "The recent median of step means of the response's tokens against the early one, with a rising trend by "
        "Mann-Kendall. A rise of the reward excuses it.",
        ("length_growth", "length_gain", "trend"),
        "See whether the loss favours long answers; punish overlong ones softly, mask truncated ones.",
        rollout_checks.check_length_explosion,
    ),
    Check(
        "truncation",
        "Samples cut off at a limit",
        "Most responses or episodes end at a limit of tokens or turns: the model never gets to its answer.",
        "The share of recent samples that were truncated.",
        ("truncation", "certainty"),
        "Raise the limit, check the end-of-text token and stop strings, or penalize length.",
        rollout_checks.check_truncation,
    ),
    Check(
        "truncation-rewarded",
        "Truncation that is rewarded",
        "Answers that were cut off at a limit have a good reward: the policy learns never to end.",
        "The share of truncated samples that were not dropped and whose reward is in the upper part of the range.",
        ("truncation_rewarded", "good_reward"),
        "Give truncated samples the lowest reward or mask them; raise the limit if they are right.",
        rollout_checks.check_truncation_rewarded,
    ),
    Check(
        "repetition-loops",
        "Repetition loops",
        "Responses say the same thing over and over.",
        "The share of samples of which `loop_share` is repetition (a loop at the end, or 8-grams that were there "
        "before), or which were cut off inside a loop.",
        ("loops", "loop_share"),
        "Lowest reward for loops; check end-of-text token, stop strings and sampling.",
        rollout_checks.check_loops,
    ),
    Check(
        "duplicates",
        "Duplicate samples",
        "Several samples of a group have the same response, token for token: the batch is smaller than it looks.",
        "The share of responses that could be left out without losing a different one. Only responses with "
        "`duplicate_tokens` or more tokens of the model's own can be duplicates; records made from others (`parent`) "
        "do not count. Severity is low if most of the copies have a good reward.",
        ("duplicates", "duplicate_tokens", "good_reward"),
        "Give each sample its own seed; look for records that are written twice; raise the temperature.",
        rollout_checks.check_duplicates,
        evaluation=False,
    ),
    Check(
        "logprob-mismatch",
        "Log-prob mismatch between engine and trainer",
        "The trainer gives the sampled tokens other probabilities than the engine did, so that every update is "
        "off-policy without saying so.",
        "The mean over a sample's trained tokens of |old_logprobs - logprobs|: the share of samples above "
        "`mismatch`, over the run and in each step. Samples more than `mismatch_lag` versions old are left out.",
        ("mismatch", "mismatch_share", "mismatch_lag"),
        "Compare token by token (temperature, template, precision, weights that did not arrive); correct with "
        "truncated importance sampling.",
        rollout_checks.check_mismatch,
    ),
    Check(
        "kl-blowup",
        "KL blow-up",
        "The policy runs away from the reference.",
        "The median over samples of the mean k3 estimate per token: a level, and growth of the recent steps against "
        "those before with a rising trend by Mann-Kendall.",
        ("kl", "kl_growth", "kl_least", "trend"),
        "A smaller learning rate, gradient clipping, a larger or adaptive KL coefficient.",
        rollout_checks.check_kl_blowup,
    ),
    Check(
        "advantage-mean",
        "Advantages that are not centred",
        "The mean advantage is off zero: every answer is pushed up (or down), whatever it is.",
        "The mean over samples and the mean over tokens, both in standard deviations and both on one side of 0; the "
        "mean must be four standard errors away, with groups as units.",
        ("advantage_mean", "certainty"),
        "Subtract a baseline after shaping and filtering; centre whole groups.",
        reward_checks.check_advantage_mean,
        evaluation=False,
    ),
    Check(
        "reward-follows-length",
        "Reward that follows length alone",
        "Within a group the longer (or shorter) answer nearly always has the higher reward.",
        "Somers' d between reward and length, over pairs of samples of one group with different rewards, its lower "
        "bound with groups as units, and the same with pairs weighed by the difference of their rewards. Truncated "
        "samples are left out.",
        ("length_reward", "certainty"),
        "Take length out of the reward, or compare answers of equal length.",
        reward_checks.check_reward_follows_length,
    ),
    Check(
        "reward-follows-format",
        "Reward that follows format alone",
        "A part of the reward whose name speaks of form (format, template, tags, schema, boxed, ...) decides it, and "
        "the other parts are flat or have no say.",
        "Somers' d between reward and that part within groups from `format_reward` on, while no other part has more "
        "than `influence` over the pairs in which it differs.",
        ("format_reward", "influence"),
        "Pay for form only with a right answer; see why the other parts are flat.",
        reward_checks.check_reward_follows_format,
    ),
    Check(
        "component-dominates",
        "One reward part that dominates",
        "One part of the reward decides every comparison, though others vary: their scale is lost beside it.",
        "The parts must add up to the reward (a linear fit finds their weights). Somers' d of one part within groups "
        "from `dominance` on, while others differ in `influence` of the pairs or more and none has a larger d than "
        "`influence` over the pairs in which it differs.",
        ("dominance", "influence"),
        "Bring the parts to one scale before they are added.",
        reward_checks.check_component_dominates,
    ),
    Check(
        "stale-data",
        "Stale data",
        "Many samples come from policies long gone.",
        "The share of samples, not dropped, whose lag (versions the policy had moved on when they were trained on, or "
        "came) is above `stale_lag`, in units of what a step moves it.",
        ("stale", "stale_lag"),
        "max_staleness when leasing, fewer engines ahead, weights synchronised more often, importance sampling.",
        rollout_checks.check_staleness,
        evaluation=False,
    ),
    Check(
        "keep-rate-bias",
        "Keep-rate biased by length",
        "Long samples are dropped more often than short ones (or the other way): training sees another distribution "
        "than the policy's.",
        "Among samples that were trained on or dropped: the share trained on of the shortest and of the longest "
        "quarter of each step. Truncated ones are left out, since those are often dropped on purpose.",
        ("keep_bias", "certainty"),
        "Look at the reasons of the drops; resume long samples instead of dropping them.",
        rollout_checks.check_keep_bias,
        evaluation=False,
    ),
    Check(
        "groups-incomplete",
        "Groups that are never complete",
        "Runs of a group never came, and who leases by group waits for them.",
        "The share of groups with fewer runs than their `group_size` (failed runs count as come) although `patience` "
        "later steps have come.",
        ("incomplete", "patience", "groups"),
        "book.fail for runs that failed, partial_after for what is late; find why runs are lost.",
        rollout_checks.check_incomplete_groups,
        evaluation=False,
    ),
)
CHECKS: Mapping[str, Check] = {check.id: check for check in _ROWS}
"""By id, in the order in which they run.

>>> CHECKS["zero-variance"].thresholds
('zero_variance', 'groups', 'certainty')
"""

Condition = Callable[[Samples, Thresholds, Finding], bool]


def _always(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return True


def _not_without_loops(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.has_exploded(samples, t, ~rollout_checks.are_loops(samples, t))


def _not_without_truncated(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.has_exploded(samples, t, ~samples.truncated)


def _longer_wins(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return "longer" in cause.title


EXPLAINED: Mapping[str, Mapping[str, Condition]] = {
    "zero-variance": dict.fromkeys(("reward-saturation", "reward-collapse", "entropy-collapse", "duplicates"), _always),
    "duplicates": {"entropy-collapse": _always},
    "truncation": {"repetition-loops": _always},
    "length-explosion": {
        "repetition-loops": _not_without_loops,
        "truncation-rewarded": _not_without_truncated,
        "reward-follows-length": _longer_wins,
    },
    "component-dominates": dict.fromkeys(("reward-follows-length", "reward-follows-format"), _always),
}
"""Which check follows from which, and when: a finding that another one explains is not reported beside it."""


# --- reports --------------------------------------------------------------------------------------------------------

_SHOWN = 6
"""Ids that are printed; `as_dict` has all."""


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
    """Format a diagnosis for a terminal: each finding with its numbers and ids, then what could not be judged.

    A finding begins with its severity and a space; its details are indented by two. `verbose`: also list passed checks.
    """
    span = "" if diagnosis.steps is None else f", steps {diagnosis.steps[0]} to {diagnosis.steps[1]}"
    kind = "evaluation records" if diagnosis.evaluation else "records"
    beside = f" ({diagnosis.left_out:,} selected for their content are left out)" if diagnosis.left_out else ""
    checks = f"; {diagnosis.judged} of {len(diagnosis.checks)} checks could run"
    lines = [f"{escape_text(diagnosis.source) or 'run'}: {diagnosis.records:,} {kind}{span}{beside}{checks}"]
    for finding in diagnosis.findings:
        first, last = finding.steps
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        lines += ["", f"{finding.severity} {escape_text(finding.title)} [{finding.check}]"]
        lines += _wrapped(f"{escape_text(finding.detail)} ({where}, {finding.count:,} records)", width)
        lines += _wrapped(f"What to do: {escape_text(finding.recommendation)}", width)
        if finding.filter:
            lines.append(f"  filter: {escape_text(finding.filter)}")
        ids = [escape_text(uid) for uid in finding.uids[:_SHOWN]]
        more = f" and {len(finding.uids) - _SHOWN} more" if len(finding.uids) > _SHOWN else ""
        if ids:
            lines.append(f"  look at: {' '.join(ids)}{more}")
    by = {status: [check for check in diagnosis.checks if check.status == status] for status in _STATUSES}
    if not diagnosis.findings:
        lines += ["", f"No problem found by {diagnosis.judged} of {len(diagnosis.checks)} checks."]
    if by["explained"]:
        lines += ["", "Explained by the above:"]
        lines += [f"  {status.check}: {escape_text(status.why)}" for status in by["explained"]]
    if by["not judged"]:
        lines += ["", "Could not be judged:"]
        lines += [f"  {status.check}: {escape_text(status.why)}" for status in by["not judged"]]
    if verbose and by["ok"]:
        lines += ["", "Passed:"]
        lines += [f"  {status.check}: {escape_text(status.why)}" for status in by["ok"]]
    return lines


_STATUSES = ("ok", "found", "explained", "not judged")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


@cache
def threshold_docs() -> dict[str, str]:
    """Return what each threshold means, from its docstring.

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
    """Yield one row per check: id, title, description, method, thresholds (name, default, meaning), recommendation."""
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
    """Return the checks and the thresholds as Markdown."""
    lines = []
    for row in describe_checks():
        decided = ", ".join(f"`{threshold['name']}` = {threshold['default']:g}" for threshold in row["thresholds"])
        lines += [
            f"### {row['title']} (`{row['id']}`)",
            "",
            row["description"],
            "",
            f"*Method:* {row['method']}",
            "",
            f"*Thresholds:* {decided}" + ("" if row["evaluation"] else ". Not judged on evaluation records."),
            "",
            f"*Recommendation:* {row['recommendation']}",
            "",
        ]
    lines += ["## Thresholds", "", "| name | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{threshold.name}` | {threshold.default:g} | {threshold_docs()[threshold.name]} |"
        for threshold in fields(Thresholds)
    ]
    return "\n".join(lines) + "\n"


# --- running the checks ----------------------------------------------------------------------------------------------

_VERDICT = re.compile(r" Triggered (?:above|below|at|with)\b.*?\.(?=\s|$)", re.DOTALL)
"""The sentence of a finding that gives its threshold: with the thresholds of `triage` it would be wrong."""

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
        source: A path or URL of a book or of files, a book, a viewer's source, or an index that is up to date.
        steps: One step, (first, last) or "first-last", either of which may be left out.
        thresholds: Thresholds that differ from the defaults.
        evaluation: Examine the evaluation records instead of those that are trained on.

    >>> import rollbook
    >>> from rollbook import EID, Experience
    >>> book = rollbook.open("memory:")
    >>> made = [Experience(eid=EID(batch=str(i // 16), task=i // 4, run=i % 4), tokens=[1, i, 3], reward=float("nan"))
    ...         for i in range(64)]
    >>> _ = book.append(made)
    >>> diagnosis = examine(book)
    >>> [(finding.check, finding.severity, finding.count) for finding in diagnosis.findings]
    [('nans', 'medium', 64)]
    """
    chosen = Thresholds.of(thresholds)
    span = span_of(steps)
    with ExitStack() as stack:
        index, name = _indexed(source, stack)
        samples = read(index, span, evaluation)
    return diagnose(samples, chosen, evaluation=evaluation, source=name)


def _indexed(source: Any, stack: ExitStack) -> tuple[Index, str]:
    """Return an up-to-date index of the source, and its name; the stack closes what is opened here."""
    from rollbook.inspect.index import Index

    if isinstance(source, Index):
        return source, ""
    from rollbook.book.book import Book
    from rollbook.inspect.sources import load, open_source

    if isinstance(source, (str, os.PathLike)):
        opened = stack.enter_context(closing(open_source(source)))
    elif isinstance(source, Book):
        opened = open_source(source)
    elif hasattr(source, "refresh") and hasattr(source, "documents"):
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
    most: int = 12,
) -> list[Finding]:
    """Return what is worth a look, the worst first: the findings, and near misses (severity low), which say so."""
    samples = read(index, span_of(steps), False)
    surely = diagnose(samples, Thresholds.of(thresholds))
    named = {finding.check for finding in surely.findings} | {
        check.check for check in surely.checks if check.status == "explained"
    }
    maybe = diagnose(samples, TRIAGE)
    more = [
        replace(finding, severity="low", detail=_VERDICT.sub(" Not triggered yet.", finding.detail))
        for finding in maybe.findings
        if finding.check not in named
    ]
    return [*surely.findings, *rank_findings(more)][:most]


def diagnose(samples: Samples, t: Thresholds, *, evaluation: bool = False, source: str = "") -> Diagnosis:
    """Run the checks on samples."""
    judged = {
        name: check.run(samples, t)
        if check.evaluation or not evaluation
        else skipped("these are evaluation records, on which nothing is trained")
        for name, check in CHECKS.items()
    }
    findings = {name: outcome.finding for name, outcome in judged.items() if outcome.finding is not None}
    causes = {
        name: next(
            (
                cause
                for cause, holds in EXPLAINED[name].items()
                if cause in findings and holds(samples, t, findings[cause])
            ),
            None,
        )
        for name in findings
        if name in EXPLAINED
    }
    return Diagnosis(
        source,
        rank_findings(finding for name, finding in findings.items() if causes.get(name) is None),
        tuple(_status_of(name, outcome, causes.get(name)) for name, outcome in judged.items()),
        int(samples.there.sum()),
        (int(samples.steps[0]), int(samples.steps[-1])) if len(samples.steps) else None,
        evaluation,
        int(samples.chosen.sum()),
    )


def _status_of(name: str, judgement: CheckResult, cause: str | None) -> CheckStatus:
    if cause is not None:
        return CheckStatus(name, "explained", f"follows from {cause}: {judgement.why}")
    return CheckStatus(name, judgement.status, judgement.why)


def read(index: Index, span: tuple[int | None, int | None], evaluation: bool) -> Samples:
    """Read the samples of an index that count; with the evaluation samples beside those for training."""
    from rollbook.inspect.index import COUNTS

    first, last = span
    conditions, values = ["evaluation = ?", COUNTS], [int(evaluation)]
    if first is not None:
        conditions.append("step >= ?")
        values.append(first)
    if last is not None:
        conditions.append("step <= ?")
        values.append(last)
    rows = index.query(f"SELECT {', '.join(COLUMNS)} FROM samples WHERE {' AND '.join(conditions)} ORDER BY n", values)
    columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
    mixed = index.query("SELECT 1 FROM samples WHERE evaluation = ? LIMIT 1", [int(not evaluation)])
    apart = "" if not mixed else "evaluation" if evaluation else "not evaluation"
    evaluations = read(index, span, True) if mixed and not evaluation else None
    return Samples(dict(zip(COLUMNS, columns, strict=True)), apart, evaluations)


_SPAN = re.compile(r"\s*(\d+)?\s*(?:(-|\.\.|:)\s*(\d+)?)?\s*")


def span_of(steps: Steps) -> tuple[int | None, int | None]:
    """Parse `steps` to a first and a last step.

    >>> span_of("12-40"), span_of("12-"), span_of("7"), span_of(7), span_of((None, 9)), span_of(None)
    ((12, 40), (12, None), (7, 7), (7, 7), (None, 9), (None, None))
    """
    if steps is None:
        return None, None
    if isinstance(steps, str):
        match = _SPAN.fullmatch(steps)
        if match is None or not any(part.isdigit() for part in steps):
            raise ValueError(f"steps: got {steps!r}, expected a step, 'first-last', 'first-' or '-last'")
        first, dash, last = match.groups()
        low = int(first) if first is not None else None
        high = int(last) if last is not None else None
        return (low, high) if dash else (low, low)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps, steps
    if isinstance(steps, tuple) and len(steps) == 2 and all(part is None or type(part) is int for part in steps):
        return steps
    raise ValueError(f"steps: got {steps!r}, expected a step, a pair (first, last) or text such as '12-40'")
