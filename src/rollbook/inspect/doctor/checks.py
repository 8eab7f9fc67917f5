"""The table of checks: what each finds and how, its thresholds, what to do, and which follow from others; reports.

Invariant: a check is one row of `CHECKS`; the diagnosis, the documentation and the command line read it from there.
Text that came with the records is escaped, so no id or name can move a terminal's cursor; the first word of a report's
line is its severity.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rollbook.inspect.doctor import reward_checks, rollout_checks
from rollbook.inspect.doctor.findings import Diagnosis, Finding, Judgement
from rollbook.inspect.doctor.samples import Samples
from rollbook.inspect.doctor.thresholds import Thresholds

Check = Callable[[Samples, Thresholds], Judgement]


@dataclass(frozen=True, slots=True)
class Illness:
    """One row of the table."""

    id: str
    title: str
    what: str
    """What it is, and why it matters."""
    how: str
    """How it is found."""
    thresholds: tuple[str, ...]
    cure: str
    """What to do, in short; a finding says it for its own case."""
    check: Check
    evaluation: bool = True
    """Whether it can be an illness of evaluation records, on which nothing is trained."""


_ROWS = (
    Illness(
        "nans",
        "NaNs",
        "A log-prob, advantage, reward or another number is NaN or infinite. One such token makes the gradient of its "
        "whole batch NaN.",
        "Counts records with non-finite numbers among their trained tokens, and records whose reward is NaN (could not "
        "be scored) or infinite.",
        ("nan_records", "nan_rewards"),
        "Drop them before training, and find where they come from: log-probs of -inf, empty masks, a standard "
        "deviation of 0, a grader that failed.",
        rollout_checks.nans,
    ),
    Illness(
        "reward-collapse",
        "Reward collapse",
        "The reward has fallen far below what the run had reached, or no sample was ever rewarded.",
        "The recent median of step means against the best earlier window, above the 5th percentile of rewards. The "
        "fall must be three standard errors (of groups, and of steps), and three quarters of the recent steps must lie "
        "in its lower half. All rewards equal and not above 0 count too.",
        ("reward_collapse", "certainty"),
        "Go back to a checkpoint before the fall; look at learning rate, log-prob mismatch, grader and prompts.",
        reward_checks.collapse,
    ),
    Illness(
        "evaluation-falls",
        "Held-out reward falls",
        "The policy does worse on prompts that it is not trained on than it did in an earlier evaluation.",
        "The mean reward of the last evaluation against the best earlier one, paired by prompt: the fall must be above "
        "a share of the range of rewards and above `certainty` standard errors.",
        ("evaluation_fall", "certainty", "groups"),
        "Go back to the best checkpoint; look for overfitting, reward hacking or too large a learning rate.",
        reward_checks.evaluation_falls,
        evaluation=False,
    ),
    Illness(
        "reward-saturation",
        "Reward saturation",
        "Nearly all samples have the top reward: there is nothing left to learn, or the reward is easy to please.",
        "The share of recent samples within `top` of the run's highest reward.",
        ("saturation", "top"),
        "Stop, take harder prompts, or make the reward finer.",
        reward_checks.saturation,
        evaluation=False,
    ),
    Illness(
        "entropy-collapse",
        "Entropy collapse",
        "The policy has hardly any choice left; samples of a group become alike, and nothing new is tried.",
        "The recent median of step means of the entropy per token: a level, and a fall from the early steps with a "
        "trend by Mann-Kendall. Where no entropies are recorded, the fall is looked for in the mean of -log-prob. "
        "Severity is low if the reward rose to a good level: such a policy is confident because it is right.",
        ("entropy_floor", "entropy_fall", "trend", "good_reward"),
        "Clip higher, an entropy bonus, temperature 1, a smaller learning rate; go back to before the fall.",
        rollout_checks.entropy_collapse,
        evaluation=False,
    ),
    Illness(
        "zero-variance",
        "Groups without variance",
        "All samples of a group have one reward, so that their advantages are 0 and the group teaches nothing. The "
        "finding tells solved groups from unsolved ones and from those the reward does not tell apart.",
        "The share of recent groups with two scored runs or more whose rewards are all equal (its lower bound, by "
        "Wilson). Groups that were dropped before training make it a matter of cost alone: severity low.",
        ("zero_variance", "groups", "certainty"),
        "Solved: harder prompts. Unsolved: easier ones, more samples, partial credit. Both: dynamic sampling.",
        reward_checks.zero_variance,
        evaluation=False,
    ),
    Illness(
        "length-explosion",
        "Length explosion",
        "Responses have grown several times over while the reward has not.",
        "The recent median of step means of the response's tokens against the early one, with a rising trend by "
        "Mann-Kendall. A rise of the reward excuses it.",
        ("length_growth", "length_gain", "trend"),
        "See whether the loss favours long answers; punish overlong ones softly, mask truncated ones.",
        rollout_checks.length_explosion,
    ),
    Illness(
        "truncation",
        "Samples cut off at a limit",
        "Most responses or episodes end at a limit of tokens or turns: the model never gets to its answer.",
        "The share of recent samples that were truncated.",
        ("truncation", "certainty"),
        "Raise the limit, check the end-of-text token and stop strings, or penalize length.",
        rollout_checks.truncation,
    ),
    Illness(
        "truncation-rewarded",
        "Truncation that is rewarded",
        "Answers that were cut off at a limit have a good reward: the policy learns never to end.",
        "The share of truncated samples that were not dropped and whose reward is in the upper part of the range.",
        ("truncation_rewarded", "good_reward"),
        "Give truncated samples the lowest reward or mask them; raise the limit if they are right.",
        rollout_checks.truncation_rewarded,
    ),
    Illness(
        "repetition-loops",
        "Repetition loops",
        "Responses say the same thing over and over.",
        "The share of samples of which `loop_share` is repetition (a loop at the end, or 8-grams that were there "
        "before), or which were cut off inside a loop.",
        ("loops", "loop_share"),
        "Lowest reward for loops; check end-of-text token, stop strings and sampling.",
        rollout_checks.loops,
    ),
    Illness(
        "duplicates",
        "Duplicate samples",
        "Several samples of a group have the same response, token for token: the batch is smaller than it looks.",
        "The share of responses that could be left out without losing a different one. Only responses with "
        "`duplicate_tokens` or more tokens of the model's own can be duplicates; records made from others (`parent`) "
        "do not count. Severity is low if most of the copies have a good reward.",
        ("duplicates", "duplicate_tokens", "good_reward"),
        "Give each sample its own seed; look for records that are written twice; raise the temperature.",
        rollout_checks.duplicates,
        evaluation=False,
    ),
    Illness(
        "logprob-mismatch",
        "Log-prob mismatch between engine and trainer",
        "The trainer gives the sampled tokens other probabilities than the engine did, so that every update is "
        "off-policy without saying so.",
        "The mean over a sample's trained tokens of |policy_logprobs - logprobs|: the share of samples above "
        "`mismatch`, over the run and in each step. Samples more than `mismatch_lag` versions old are left out.",
        ("mismatch", "mismatch_share", "mismatch_lag"),
        "Compare token by token (temperature, template, precision, weights that did not arrive); correct with "
        "truncated importance sampling.",
        rollout_checks.mismatch,
    ),
    Illness(
        "kl-blowup",
        "KL blow-up",
        "The policy runs away from the reference.",
        "The median over samples of the mean k3 estimate per token: a level, and growth of the recent steps against "
        "those before with a rising trend by Mann-Kendall.",
        ("kl", "kl_growth", "kl_least", "trend"),
        "A smaller learning rate, gradient clipping, a larger or adaptive KL coefficient.",
        rollout_checks.kl_blowup,
    ),
    Illness(
        "advantage-mean",
        "Advantages that are not centred",
        "The mean advantage is off zero: every answer is pushed up (or down), whatever it is.",
        "The mean over samples and the mean over tokens, both in standard deviations and both on one side of 0; the "
        "mean must be four standard errors away, with groups as units.",
        ("advantage_mean", "certainty"),
        "Subtract a baseline after shaping and filtering; centre whole groups.",
        reward_checks.advantage_mean,
        evaluation=False,
    ),
    Illness(
        "reward-follows-length",
        "Reward that follows length alone",
        "Within a group the longer (or shorter) answer nearly always has the higher reward.",
        "Somers' d between reward and length, over pairs of samples of one group with different rewards, its lower "
        "bound with groups as units, and the same with pairs weighed by the difference of their rewards. Truncated "
        "samples are left out.",
        ("length_reward", "certainty"),
        "Take length out of the reward, or compare answers of equal length.",
        reward_checks.reward_follows_length,
    ),
    Illness(
        "reward-follows-format",
        "Reward that follows format alone",
        "A part of the reward whose name speaks of form (format, template, tags, schema, boxed, ...) decides it, and "
        "the other parts are flat or have no say.",
        "Somers' d between reward and that part within groups from `format_reward` on, while no other part has more "
        "than `influence` over the pairs in which it differs.",
        ("format_reward", "influence"),
        "Pay for form only with a right answer; see why the other parts are flat.",
        reward_checks.reward_follows_format,
    ),
    Illness(
        "component-dominates",
        "One reward part that dominates",
        "One part of the reward decides every comparison, though others vary: their scale is lost beside it.",
        "The parts must add up to the reward (a linear fit finds their weights). Somers' d of one part within groups "
        "from `dominance` on, while others differ in `influence` of the pairs or more and none has a larger d than "
        "`influence` over the pairs in which it differs.",
        ("dominance", "influence"),
        "Bring the parts to one scale before they are added.",
        reward_checks.component_dominates,
    ),
    Illness(
        "stale-data",
        "Stale data",
        "Many samples come from policies long gone.",
        "The share of samples, not dropped, whose lag (versions the policy had moved on when they were trained on, or "
        "came) is above `stale_lag`, in units of what a step moves it.",
        ("stale", "stale_lag"),
        "max_staleness when leasing, fewer engines ahead, weights synchronised more often, importance sampling.",
        rollout_checks.stale,
        evaluation=False,
    ),
    Illness(
        "keep-rate-bias",
        "Keep-rate biased by length",
        "Long samples are dropped more often than short ones (or the other way): training sees another distribution "
        "than the policy's.",
        "Among samples that were trained on or dropped: the share trained on of the shortest and of the longest "
        "quarter of each step. Truncated ones are left out, since those are often dropped on purpose.",
        ("keep_bias", "certainty"),
        "Look at the reasons of the drops; resume long samples instead of dropping them.",
        rollout_checks.keep_bias,
        evaluation=False,
    ),
    Illness(
        "groups-incomplete",
        "Groups that are never complete",
        "Runs of a group never came, and who leases by group waits for them.",
        "The share of groups with fewer runs than their `group_size` (failed runs count as come) although `patience` "
        "later steps have come.",
        ("incomplete", "patience", "groups"),
        "book.fail for runs that failed, partial_after for what is late; find why runs are lost.",
        rollout_checks.incomplete,
        evaluation=False,
    ),
)
ILLNESSES: Mapping[str, Illness] = {each.id: each for each in _ROWS}
"""By id, in the order in which they are examined.

>>> ILLNESSES["zero-variance"].thresholds
('zero_variance', 'groups', 'certainty')
"""

Condition = Callable[[Samples, Thresholds, Finding], bool]


def _always(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return True


def _not_without_loops(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.exploded(samples, t, ~rollout_checks.looped(samples, t))


def _not_without_truncated(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not rollout_checks.exploded(samples, t, ~samples.truncated)


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
"""Which illness follows from which, and when: one that is explained is not reported beside its cause."""


# --- reports --------------------------------------------------------------------------------------------------------

_SHOWN = 6
"""Ids that are printed; `as_dict` has all."""


def plain(text: str) -> str:
    """Text with everything but printable characters and spaces escaped.

    >>> plain("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def lines(diagnosis: Diagnosis, *, width: int = 100, verbose: bool = False) -> list[str]:
    """A diagnosis for a terminal: each finding with its numbers, ids and advice, then what could not be judged.

    A finding begins with its severity and a space; what belongs to it is indented by two. `verbose`: what is well, too.
    """
    span = "" if diagnosis.steps is None else f", steps {diagnosis.steps[0]} to {diagnosis.steps[1]}"
    kind = "evaluation records" if diagnosis.evaluation else "records"
    beside = f" ({diagnosis.left_out:,} that were kept for what they show are left out)" if diagnosis.left_out else ""
    checks = f"; {diagnosis.judged} of {len(diagnosis.examined)} checks could be made"
    made = [f"{plain(diagnosis.source) or 'run'}: {diagnosis.records:,} {kind}{span}{beside}{checks}"]
    for each in diagnosis.findings:
        first, last = each.steps
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        made += ["", f"{each.severity} {plain(each.title)} [{each.illness}]"]
        made += _wrapped(f"{plain(each.detail)} ({where}, {each.count:,} records)", width)
        made += _wrapped(f"What to do: {plain(each.advice)}", width)
        if each.filter:
            made.append(f"  filter: {plain(each.filter)}")
        ids = [plain(uid) for uid in each.uids[:_SHOWN]]
        more = f" and {len(each.uids) - _SHOWN} more" if len(each.uids) > _SHOWN else ""
        if ids:
            made.append(f"  look at: {' '.join(ids)}{more}")
    by = {status: [each for each in diagnosis.examined if each.status == status] for status in _STATUSES}
    if not diagnosis.findings:
        made += ["", f"No problem found by {diagnosis.judged} of {len(diagnosis.examined)} checks."]
    if by["explained"]:
        made += ["", "Explained by the above:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["explained"]]
    if by["not judged"]:
        made += ["", "Could not be judged:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["not judged"]]
    if verbose and by["ok"]:
        made += ["", "Well:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["ok"]]
    return made


_STATUSES = ("ok", "found", "explained", "not judged")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


@cache
def meanings() -> dict[str, str]:
    """What each threshold means, from the text under it.

    >>> meanings()["stale"]
    'Share of samples that are stale.'
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(Thresholds))).body
    found = {}
    if isinstance(tree, ast.ClassDef):
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def table() -> Iterator[dict[str, Any]]:
    """One row an illness: id, title, what, how, thresholds (name, default, meaning), cure."""
    defaults = Thresholds()
    for illness in ILLNESSES.values():
        yield {
            "id": illness.id,
            "title": illness.title,
            "what": illness.what,
            "how": illness.how,
            "thresholds": [
                {"name": name, "default": getattr(defaults, name), "meaning": meanings()[name]}
                for name in illness.thresholds
            ],
            "cure": illness.cure,
            "evaluation": illness.evaluation,
        }


def page() -> str:
    """The illnesses and the thresholds as Markdown."""
    made = []
    for row in table():
        decided = ", ".join(f"`{each['name']}` = {each['default']:g}" for each in row["thresholds"])
        made += [
            f"### {row['title']} (`{row['id']}`)",
            "",
            row["what"],
            "",
            f"*Found by:* {row['how']}",
            "",
            f"*Thresholds:* {decided}" + ("" if row["evaluation"] else ". Not judged on evaluation records."),
            "",
            f"*What to do:* {row['cure']}",
            "",
        ]
    made += ["## Thresholds", "", "| name | default | what it is |", "|---|---|---|"]
    made += [f"| `{each.name}` | {each.default:g} | {meanings()[each.name]} |" for each in fields(Thresholds)]
    return "\n".join(made) + "\n"
