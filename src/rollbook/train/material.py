"""What a step learns from: leased records as rows for a loss, with what belongs to each beside it.

Invariant: every row knows the record it came from; whatever leaves a row, or some of its tokens, out of the loss does
so here, over the whole step, so that denominators do not depend on how it is cut afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.corrections import importance_weights
from rollbook.algorithms.masks import high_entropy_mask
from rollbook.batches.columns import mask_unpredicted
from rollbook.collate import split_dpo_experience_to_single_turn
from rollbook.experiences import Experiences, as_experiences
from rollbook.jagged import Rows
from rollbook.making.estimating import takes_token_rewards
from rollbook.train.algorithm import Algorithm
from rollbook.train.completing import takes_rewards

Ints = NDArray[np.int64]


@dataclass
class Material:
    """The rows of one step.

    >>> from rollbook import Experience
    >>> records = [Experience(tokens=[1, 2, 3], advantages=[a, a], logprobs=[-1.0, -1.0], eid={"task": i})
    ...            for i, a in enumerate((1.0, 0.0, -1.0))]
    >>> found = Material.of(records, Algorithm.of("grpo", kl_coef=0.0), drop_zero=True)
    >>> len(found.rows), found.sources.tolist(), found.left_out
    (2, [0, 2], {1: 'zero advantage'})
    """

    rows: Experiences
    sources: Ints
    """[B] The number of the record that each row is of."""
    count: int
    """How many records there were."""
    pairs: list[str] | None = None
    """[B] Of pairs of answers: which pair a row is of."""
    chosen: list[bool] | None = None
    """[B] Of pairs of answers: whether it is the better one."""
    expert: list[bool] | None = None
    """[B] Of a mix: whether a row is an expert's."""
    left_out: dict[int, str] = field(default_factory=dict)
    """The records that no row is of, and why."""
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: Any,
        algorithm: Algorithm,
        *,
        expert: Sequence[bool] | None = None,
        weights: Sequence[float] | None = None,
        drop_zero: bool = False,
        version: int | None = None,
    ) -> Material:
        """The rows of records, leased for one step; `version` is the policy's number, for a bound on staleness."""
        many = mask_unpredicted(as_experiences(records))
        for name, given in (("expert", expert), ("weights", weights)):
            if given is not None and len(given) != len(many):
                raise ValueError(f"{name}: got {len(given)} entries, expected {len(many)}, one for each record")
        if algorithm.mixed and expert is None:
            raise ValueError(f"expert: got None, expected a flag for each record, since the loss is {algorithm.loss!r}")
        if algorithm.pairs:
            return cls._of_pairs(many, weights)
        made = cls(many, np.arange(len(many)), len(many), expert=None if expert is None else list(expert))
        if weights is not None:
            made._weigh([torch.full((n,), w) for n, w in zip(made.slots(), weights, strict=True)])
        if takes_rewards(algorithm):
            made._leave_out_unrewarded(algorithm)
        made._need(algorithm)
        if algorithm.correction is not None:
            made._correct(algorithm, version)
        made._fill()
        if algorithm.high_entropy_ratio > 0:
            made._narrow(algorithm.high_entropy_ratio)
        made._sift(drop_zero and "advantages" in _inputs(algorithm))
        return made

    @classmethod
    def _of_pairs(cls, many: Experiences, weights: Sequence[float] | None) -> Material:
        if weights is not None:
            raise ValueError("weights: got some, and pairs of answers take none")
        rows = mask_unpredicted(Experiences(split_dpo_experience_to_single_turn(list(many))))
        names = [str(row.parent) for row in rows]
        return cls(
            rows,
            np.repeat(np.arange(len(many)), 2),
            len(many),
            pairs=names,
            chosen=[i % 2 == 0 for i in range(len(rows))],
        )

    def slots(self) -> list[int]:
        """[B] How many response tokens each row has."""
        return np.maximum(self.rows.token_lengths() - self.rows.prompt_lengths(), 0).tolist()  # type: ignore[no-any-return]

    @cached_property
    def masks(self) -> Rows:
        """The tokens of each row that count; found once, when nothing changes any more."""
        return self._masked()

    def _masked(self) -> Rows:
        given = self.rows.values("action_mask")
        found = [
            torch.ones(n, dtype=torch.bool) if mask is None else mask.bool()
            for mask, n in zip(given, self.slots(), strict=True)
        ]
        return Rows(torch.cat(found) if found else torch.zeros(0, dtype=torch.bool), [len(mask) for mask in found])

    # --- what changes it ----------------------------------------------------------------------------------------------

    def _need(self, algorithm: Algorithm) -> None:
        """Refuse records without what the loss asks for, by name."""
        needs = {"advantages": ("advantages",), "old_log_probs": ("policy_logprobs", "logprobs")}
        needs = {name: fields for name, fields in needs.items() if name in _inputs(algorithm)}
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            needs["ref_log_probs"] = ("ref_logprobs",)
        if algorithm.needs_critic:
            needs |= {"values": ("values",), "returns": ("returns",)}
        for need, fields in needs.items():
            columns = [self.rows.values(name) for name in fields]
            for i, found in enumerate(zip(*columns, strict=True)):
                if all(value is None for value in found) and not (self.expert is not None and self.expert[i]):
                    raise ValueError(
                        f"record {self.rows.eids()[i]}: got no {' or '.join(fields)}, expected {need} for the loss "
                        f"{algorithm.loss!r}; rollbook.train.complete computes what is missing"
                    )

    def _fill(self) -> None:
        """A number in every slot of what a loss reads.

        Old log-probs are the trainer's or else the engine's, row by row: a batch takes one column for all of its rows,
        so that which one it is would depend on how they are cut. Of an expert's rows nothing is read, and all is 0.
        """
        found = {"policy_logprobs": self.rows.values("policy_logprobs")}
        lacking = sum(value is None for value in found["policy_logprobs"])
        if self.expert is not None:
            found |= {name: self.rows.values(name) for name in ("advantages", "ref_logprobs")}
        elif lacking in (0, len(self.rows)):
            return
        if lacking:
            both = zip(found["policy_logprobs"], self.rows.values("logprobs"), strict=True)
            found["policy_logprobs"] = [theirs if ours is None else ours for ours, theirs in both]
        self.rows = self.rows.assign(**{name: self._without_expert(values) for name, values in found.items()})

    def _without_expert(self, values: Sequence[Any]) -> list[Any]:
        """Values of tokens, 0 on the expert's rows."""
        if self.expert is None:
            return list(values)
        rows = zip(values, self.expert, self.slots(), strict=True)
        return [torch.zeros(n) if expert else value for value, expert, n in rows]

    def _correct(self, algorithm: Algorithm, version: int | None) -> None:
        names = ("policy_logprobs", "logprobs")
        both = [self._without_expert(self.rows.values(name)) for name in names]
        for name, values in zip(names, both, strict=True):
            if any(value is None for value in values):
                where = self.rows.eids()[next(i for i, value in enumerate(values) if value is None)]
                raise ValueError(f"record {where}: got no {name}, which algorithm.correction compares")
        options = dict(algorithm.correction or {})
        versions = None
        if options.get("max_staleness") is not None:
            versions, options["current"] = self._versions(version), version
        found = importance_weights(Rows(both[0]), Rows(both[1]), self._masked(), versions, **options)
        self.rows = self.rows.assign(action_mask=list(found.mask))
        self._weigh(list(found.weights))
        self.metrics |= found.report.to_metrics("correction")

    def _versions(self, current: int | None) -> Rows:
        """The policy version of every response token; an expert's tokens are never stale."""
        versions = []
        for i, (version, mask) in enumerate(zip(self.rows.values("policy_versions"), self._masked(), strict=True)):
            if self.expert is not None and self.expert[i]:
                version = current
            if version is None:
                raise ValueError(
                    f"record {self.rows.eids()[i]}: got no policy_versions, which correction.max_staleness compares"
                )
            by_token = torch.as_tensor(version).expand(len(mask))
            newest = int(by_token[mask].max()) if bool(mask.any()) else 0
            if current is not None and newest > current:
                raise ValueError(
                    f"record {self.rows.eids()[i]}: policy_versions: got {newest}, expected at most {current}, the "
                    "version of the policy that learns (step - 1)"
                )
            versions.append(by_token)
        return Rows(versions)

    def _narrow(self, ratio: float) -> None:
        entropy = self.rows.values("entropy")
        if any(value is None for value in entropy):
            where = self.rows.eids()[next(i for i, value in enumerate(entropy) if value is None)]
            raise ValueError(f"record {where}: got no entropy, which algorithm.high_entropy_ratio needs")
        self.rows = self.rows.assign(action_mask=list(high_entropy_mask(Rows(entropy), self._masked(), ratio)))

    def _weigh(self, by: Sequence[torch.Tensor]) -> None:
        """Multiply what each token's loss weighs."""
        known = self.rows.values("loss_weights")
        made = [new.float() if old is None else old * new for old, new in zip(known, by, strict=True)]
        self.rows = self.rows.assign(loss_weights=made)

    def _leave_out_unrewarded(self, algorithm: Algorithm) -> None:
        """Leave out rows whose reward is NaN or infinite, or a token reward of theirs that the estimator takes. `None`
        is not: their advantages come from elsewhere."""
        expert = [False] * len(self.rows) if self.expert is None else self.expert
        missing = [
            i
            for i, reward in enumerate(self.rows.values("reward"))
            if reward is not None and not math.isfinite(reward) and not expert[i]
        ]
        if algorithm.estimator is not None and takes_token_rewards(algorithm.estimator):
            token_rewards = zip(self.rows.values("token_level_reward"), self._masked(), expert, strict=True)
            missing += [
                i
                for i, (rewards, mask, of_expert) in enumerate(token_rewards)
                if rewards is not None and not bool(rewards[mask].isfinite().all()) and not of_expert
            ]
        self._leave_out(dict.fromkeys(missing, "no reward"))

    def _sift(self, drop_zero: bool) -> None:
        """Leave out rows that no token of counts in, and those whose advantages are all 0, if that is asked for."""
        masks = self._masked()
        why: dict[int, str] = {i: "no token that counts" for i, mask in enumerate(masks) if not bool(mask.any())}
        if drop_zero:
            advantages = self.rows.values("advantages")
            for i, (value, mask) in enumerate(zip(advantages, masks, strict=True)):
                own = self.expert is None or not self.expert[i]
                if own and i not in why and not bool(value[mask].any()):
                    why[i] = "zero advantage"
        self._leave_out(why)

    def _leave_out(self, why: dict[int, str]) -> None:
        """Leave out rows, each for a reason."""
        if why:
            kept = [i for i in range(len(self.rows)) if i not in why]
            self.left_out |= {int(self.sources[i]): reason for i, reason in why.items()}
            self.rows, self.sources = self.rows.take(kept), self.sources[kept]
            self.expert = None if self.expert is None else [self.expert[i] for i in kept]
        self.metrics |= {f"left_out/{name.replace(' ', '_')}": float(n) for name, n in Counter(why.values()).items()}


def _inputs(algorithm: Algorithm) -> Any:
    from rollbook.algorithms import LOSSES

    return LOSSES[algorithm.loss].inputs
