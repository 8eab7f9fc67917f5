"""The illnesses: what each is, how it is found, which thresholds decide, what to do, and which follow from others.

Invariant: an illness is one row of `ILLNESSES`; the diagnosis, the documentation and the command line read it from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollbook.inspect.doctor import behaviour, flow, parts, policy, rewards
from rollbook.inspect.doctor.findings import Finding, Judgement
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
        policy.nans,
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
        rewards.collapse,
    ),
    Illness(
        "evaluation-falls",
        "Held-out reward falls",
        "The policy does worse on prompts that it is not trained on than it did in an earlier evaluation.",
        "The mean reward of the last evaluation against the best earlier one, paired by prompt: the fall must be above "
        "a share of the range of rewards and above `certainty` standard errors.",
        ("evaluation_fall", "certainty", "groups"),
        "Go back to the best checkpoint; look for overfitting, reward hacking or too large a learning rate.",
        rewards.evaluation_falls,
        evaluation=False,
    ),
    Illness(
        "reward-saturation",
        "Reward saturation",
        "Nearly all samples have the top reward: there is nothing left to learn, or the reward is easy to please.",
        "The share of recent samples within `top` of the run's highest reward.",
        ("saturation", "top"),
        "Stop, take harder prompts, or make the reward finer.",
        rewards.saturation,
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
        policy.entropy_collapse,
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
        rewards.zero_variance,
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
        policy.length_explosion,
    ),
    Illness(
        "truncation",
        "Samples cut off at a limit",
        "Most responses or episodes end at a limit of tokens or turns: the model never gets to its answer.",
        "The share of recent samples that were truncated.",
        ("truncation", "certainty"),
        "Raise the limit, check the end-of-text token and stop strings, or penalize length.",
        behaviour.truncation,
    ),
    Illness(
        "truncation-rewarded",
        "Truncation that is rewarded",
        "Answers that were cut off at a limit have a good reward: the policy learns never to end.",
        "The share of truncated samples that were not dropped and whose reward is in the upper part of the range.",
        ("truncation_rewarded", "good_reward"),
        "Give truncated samples the lowest reward or mask them; raise the limit if they are right.",
        behaviour.truncation_rewarded,
    ),
    Illness(
        "repetition-loops",
        "Repetition loops",
        "Responses say the same thing over and over.",
        "The share of samples of which `loop_share` is repetition (a loop at the end, or 8-grams that were there "
        "before), or which were cut off inside a loop.",
        ("loops", "loop_share"),
        "Lowest reward for loops; check end-of-text token, stop strings and sampling.",
        behaviour.loops,
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
        behaviour.duplicates,
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
        policy.mismatch,
    ),
    Illness(
        "kl-blowup",
        "KL blow-up",
        "The policy runs away from the reference.",
        "The median over samples of the mean k3 estimate per token: a level, and growth of the recent steps against "
        "those before with a rising trend by Mann-Kendall.",
        ("kl", "kl_growth", "kl_least", "trend"),
        "A smaller learning rate, gradient clipping, a larger or adaptive KL coefficient.",
        policy.kl_blowup,
    ),
    Illness(
        "advantage-mean",
        "Advantages that are not centred",
        "The mean advantage is off zero: every answer is pushed up (or down), whatever it is.",
        "The mean over samples and the mean over tokens, both in standard deviations and both on one side of 0; the "
        "mean must be four standard errors away, with groups as units.",
        ("advantage_mean", "certainty"),
        "Subtract a baseline after shaping and filtering; centre whole groups.",
        rewards.advantage_mean,
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
        parts.reward_follows_length,
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
        parts.reward_follows_format,
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
        parts.component_dominates,
    ),
    Illness(
        "stale-data",
        "Stale data",
        "Many samples come from policies long gone.",
        "The share of samples, not dropped, whose lag (versions the policy had moved on when they were trained on, or "
        "came) is above `stale_lag`, in units of what a step moves it.",
        ("stale", "stale_lag"),
        "max_staleness when leasing, fewer engines ahead, weights synchronised more often, importance sampling.",
        flow.stale,
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
        flow.keep_bias,
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
        flow.incomplete,
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
    return not policy.exploded(samples, t, ~behaviour.looped(samples, t))


def _not_without_truncated(samples: Samples, t: Thresholds, cause: Finding) -> bool:
    return not policy.exploded(samples, t, ~samples.truncated)


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
