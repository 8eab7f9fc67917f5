"""What records lack is computed: log-probs of policy, reference and teacher, values, advantages.

Invariant: what a record has stays as it is; a record that lacks nothing costs nothing. Advantages are made as the maker
makes them, over all records that come together, by group id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.inputs import row_rewards
from rollbook.algorithms.kl import token_kl
from rollbook.compat.lightrft import estimation
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.config import MakerConfig
from rollbook.compat.lightrft.maker import NaiveExperienceMaker
from rollbook.compat.lightrft.rollout_batches import Whole
from rollbook.core.checks import check_int
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.metrics import advise
from rollbook.core.ragged import Ragged
from rollbook.models.forward import policy_log_probs, reference_log_probs, values
from rollbook.train.algorithm import Algorithm


def maker_config(algorithm: Algorithm, **more: Any) -> MakerConfig:
    """What a maker is to be told so that its experience is what the algorithm learns from; `more` are other options.

    >>> maker_config(Algorithm.of("dapo"), seed=1).n_samples_per_prompt
    16
    """
    options = dict(algorithm.estimator_options)
    if algorithm.estimator == "reinforce_plus_plus_baseline":
        options.setdefault("whiten", True)  # as the function itself does; a maker does not, like LightRFT's
    given: dict[str, Any] = {
        "advantage_estimator": algorithm.estimator or "reinforce",
        "estimator_options": options,
        "n_samples_per_prompt": algorithm.n,
        "kl_estimator": algorithm.kl_estimator,
        "use_kl_loss": algorithm.kl_in == "loss",
        "kl_coef": algorithm.kl_coef,
        "advantage_clip": algorithm.advantage_clip,
        "advantages_norm": algorithm.advantages_norm,
        "overlong_buffer": algorithm.overlong_buffer > 0,
        "overlong_buffer_len": max(algorithm.overlong_buffer, 1),
        "overlong_buffer_penalty_factor": algorithm.overlong_penalty,
        "gamma": algorithm.gamma,
        "lambd": algorithm.lam,
        "entropy": True,
    }
    return MakerConfig(**{**given, **more})


def check_maker(maker: NaiveExperienceMaker, algorithm: Algorithm, generate: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a maker estimates advantages by other settings than the algorithm's.

    Args:
        maker: The maker, whose advantages are trained on as they are.
        algorithm: What the trainer learns by.
        generate: Options of each call of the maker, among them `gamma` and `lambd`.
    """
    config = dataclasses.replace(
        maker.config, **{name: generate[name] for name in ("gamma", "lambd") if name in generate}
    )
    expected = maker_config(algorithm)
    settings = _settings(config, maker.kl_coef)
    kl_coef = 0.0 if expected.use_kl_loss else algorithm.kl_coef
    for name, value in _settings(expected, kl_coef).items():
        if settings[name] != value:
            raise ValueError(
                f"maker: got {name} {settings[name]!r}, expected the algorithm's, {value!r}; "
                "config=maker_config(algorithm) makes them the same"
            )


def _settings(config: MakerConfig, kl_coef: float) -> dict[str, Any]:
    """Everything that decides about advantages and that an algorithm has, too; what is switched off is `None`."""
    from rollbook.algorithms import ESTIMATORS, KL

    overlong = (config.overlong_buffer_len, config.overlong_buffer_penalty_factor) if config.overlong_buffer else None
    return {
        "advantage_estimator": ESTIMATORS[config.advantage_estimator].name,
        "estimator_options": dict(config.estimator_options),
        "n_samples_per_prompt": config.n_samples_per_prompt,
        "gamma": config.gamma,
        "lambd": config.lambd,
        "kl_coef (in the reward)": kl_coef,
        "kl_estimator": KL[config.kl_estimator].name if kl_coef else None,
        "advantage_clip": config.advantage_clip,
        "advantages_norm": config.advantages_norm,
        "overlong_buffer": overlong,
    }


def complete(
    records: Any,
    algorithm: Algorithm,
    *,
    actor: Any = None,
    critic: Any = None,
    reference: Any = None,
    teacher: Any = None,
    token_budget: int = 16384,
    max_tokens: int | None = None,
    anew: bool = False,
    expert: Sequence[bool] | None = None,
) -> Experiences:
    """The records with all that an algorithm learns from.

    `actor`, `reference`, `teacher`: `rollbook.models.Actor`s, `critic`: a `Critic`; asked only for records that lack
    what they say. `max_tokens`: the longest response, for an overlong buffer. `anew`: advantages are estimated also for
    records that have some. Pairs of answers come back as they are.

    Estimators over time take `token_level_reward` where a record has it, else its `reward` on the last action; those
    that compare records take `reward`, or the sum of `token_level_reward` where it is `None`. A record with neither is
    named in a warning, and comes back with advantages of 0 and a `reward` of NaN, so that the learner leaves it out;
    but an `expert`'s needs none.

    >>> from rollbook import Experience
    >>> records = [Experience(tokens=[1, 2, 3], reward=float(r), logprobs=[-1.0, -1.0], eid={"task": 0, "run": r})
    ...            for r in range(2)]
    >>> complete(records, Algorithm.of("dr_grpo"))[1].advantages.tolist()
    [0.5, 0.5]
    """
    many = as_experiences(records)
    check_int("token_budget", token_budget, 1)
    if algorithm.pairs or not len(many):
        return many
    budget: dict[str, Any] = {"token_budget": token_budget}
    if _needs_old(algorithm) and not _all(many, "policy_logprobs"):
        if algorithm.correction is None:
            # Without a correction the two are taken for one policy: each record has the one or the other.
            pairs = zip(many.values("policy_logprobs"), many.values("logprobs"), strict=True)
            many = many.assign(policy_logprobs=[ours if ours is not None else engines for ours, engines in pairs])
        many = _filled(many, "policy_logprobs", actor, "actor", lambda m, rows: policy_log_probs(m, rows, **budget))
    if algorithm.kl_coef:
        many = _filled(
            many, "ref_logprobs", reference, "reference", lambda m, rows: reference_log_probs(m, rows, **budget)
        )
    if algorithm.needs_teacher:
        many = _filled(
            many, "teacher_logprobs", teacher, "teacher", lambda m, rows: policy_log_probs(m, rows, **budget)
        )
    if algorithm.needs_critic:
        many = _filled(many, "values", critic, "critic", lambda m, rows: values(m, rows, **budget))
    if algorithm.estimator is not None and (anew or not (_all(many, "advantages") and _all(many, "returns"))):
        many = _estimated(many, algorithm, max_tokens, anew, expert)
    return many


def takes_rewards(algorithm: Algorithm) -> bool:
    """Whether advantages are estimated from rewards.

    >>> [takes_rewards(Algorithm.of(name)) for name in ("grpo", "ppo", "sft", "on_policy_distill")]
    [True, True, False, False]
    """
    from rollbook.algorithms import ESTIMATORS

    return algorithm.estimator is not None and "rewards" in ESTIMATORS[algorithm.estimator].inputs


def _rewards(
    many: Experiences, rewards: NDArray[np.float64], anew: bool, expert: Sequence[bool] | None
) -> list[float | None]:
    """The records' rewards, NaN where one is missing (`None`) that the estimate needed; a warning names these."""
    known, advantages = many.values("reward"), many.values("advantages")
    missing = [
        i
        for i in np.flatnonzero(np.isnan(rewards)).tolist()
        if known[i] is None and (anew or advantages[i] is None) and not (expert and expert[i])
    ]
    if missing:
        names = ", ".join(many[i].eid.uid for i in missing[:3]) + (", ..." if len(missing) > 3 else "")
        advise(
            f"reward: {len(missing)} of {len(many)} records have none ({names}): their advantages are 0, and they are "
            "not trained on"
        )
    for i in missing:
        known[i] = math.nan
    return known


def _needs_old(algorithm: Algorithm) -> bool:
    """Whether the policy's log-probs from before the step are asked for: by the loss, the estimator or the KL."""
    from rollbook.algorithms import ESTIMATORS, LOSSES

    estimator = {} if algorithm.estimator is None else ESTIMATORS[algorithm.estimator].inputs
    return "old_log_probs" in LOSSES[algorithm.loss].inputs or "log_probs" in estimator or algorithm.kl_coef != 0


def _all(many: Experiences, name: str) -> bool:
    """Whether every record has a field."""
    column = many.column(name)
    if isinstance(column, Ragged) and column.valid is None:
        return True
    return all(value is not None for value in many.values(name))


def _filled(many: Experiences, name: str, model: Any, who: str, ask: Any) -> Experiences:
    """The records with a field that some lack, which a model knows."""
    if _all(many, name):
        return many
    known = many.values(name)
    lacking = [i for i, value in enumerate(known) if value is None]
    if model is None:
        where = many.eids()[lacking[0]]
        raise ValueError(f"record {where}: got no {name}, and no {who} that could tell, expected one of them")
    found = ask(model, many.take(lacking))
    column = found.values if name == "values" else found.log_probs
    for i, value in zip(lacking, column, strict=True):
        known[i] = torch.as_tensor(value)
    return many.assign(**{name: known})


def _estimated(
    many: Experiences, algorithm: Algorithm, max_tokens: int | None, anew: bool, expert: Sequence[bool] | None
) -> Experiences:
    """The records with advantages and returns: made of all of them, given to those that lack them."""
    config = maker_config(algorithm)
    rewards = row_rewards(many)
    batch = from_experiences(many.assign(reward=rewards.tolist()), packing_samples=True)
    if algorithm.kl_coef:
        batch.kl = token_kl(
            batch.action_log_probs, batch.base_action_log_probs, batch.action_mask, estimator=algorithm.kl_estimator
        )
    whole = Whole([batch])
    scored = estimation.score(whole, config, None, max_tokens)
    estimation.finish(whole, scored, config, kl_coef=algorithm.kl_coef, gamma=algorithm.gamma, lambd=algorithm.lam)
    made: dict[str, list[Any]] = {}
    if takes_rewards(algorithm):
        made["reward"] = _rewards(many, rewards, anew, expert)
    for name in ("advantages", "returns"):
        found, known = list(getattr(batch, name)), many.values(name)
        made[name] = [new if anew or old is None else old for old, new in zip(known, found, strict=True)]
    return many.assign(**made)
