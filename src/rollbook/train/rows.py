"""`TrainRows`: the records of a training step as rows of the loss, with masks and weights.

Invariant: `sources` maps every row to its record. Rows and tokens are left out of the loss here, for the whole step, so
that denominators do not depend on the split into minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.corrections import importance_weights
from rollbook.algorithms.filters import high_entropy_mask
from rollbook.batch.columns import RESPONSE_COLUMNS, mask_unpredicted
from rollbook.core.experience import split_preference_pairs
from rollbook.core.experiences import Experiences
from rollbook.core.fields import FIELDS
from rollbook.core.rows import Rows
from rollbook.train.algorithm import AlgorithmConfig

_TOKEN_FIELDS = [name for name, spec in FIELDS.items() if spec.kind == "tensor" and spec.axis == "response"]
_SAMPLE_FIELDS = ("truncate_status", "multi_modal_inputs")
"""Fields of a record that every batch is built from, besides those per token."""


@dataclass
class TrainRows:
    """The B rows of one training step, one per record, or two per preference pair.

    >>> from rollbook import Experience
    >>> records = Experiences(
    ...     Experience(tokens=[1, 2, 3], advantages=[a, a], logprobs=[-1.0, -1.0], eid={"task": i})
    ...     for i, a in enumerate((1.0, 0.0, -1.0))
    ... )
    >>> rows = TrainRows.from_records(records, AlgorithmConfig.preset("grpo", kl_coef=0.0), drop_zero_advantages=True)
    >>> len(rows), rows.sources.tolist(), rows.excluded
    (2, [0, 2], {1: 'zero advantage'})
    """

    records: Experiences
    """[B] The rows, with the columns of a batch."""
    sources: NDArray[np.int64]
    """[B] Index of the record of each row."""
    record_count: int
    """Number of records, including those that were left out."""
    pairs: list[str] | None = None
    """[B] For preference pairs: the pair of each row."""
    chosen: list[bool] | None = None
    """[B] For preference pairs: whether a row is the chosen answer."""
    expert: list[bool] | None = None
    """[B] For mixed data: whether a row is from an expert."""
    excluded: dict[int, str] = field(default_factory=dict)
    """Indices of the records without a row, with the reason."""
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        records: Experiences,
        algorithm: AlgorithmConfig,
        *,
        expert: Sequence[bool] | None = None,
        weights: Sequence[float] | None = None,
        drop_zero_advantages: bool = False,
        version: int | None = None,
    ) -> TrainRows:
        """Make the rows of a step.

        Args:
            records: The step's records, with every column that the algorithm reads.
            algorithm: The algorithm.
            expert: [N] Which records are from an expert.
            weights: [N] Weight of each record, from the sampler.
            drop_zero_advantages: Whether to leave out rows whose advantages are all 0.
            version: Version of the policy, for the staleness limit of the correction.

        Returns:
            The rows, without those that have no reward or no token in the loss.

        Raises:
            ValueError: If a record lacks a column that the algorithm reads.
        """
        for name, flags in (("expert", expert), ("weights", weights)):
            if flags is not None and len(flags) != len(records):
                raise ValueError(f"{name}: got {len(flags)} entries, expected {len(records)}, one for each record")
        if algorithm.mixed and expert is None:
            raise ValueError(f"expert: got None, expected a flag for each record, since the loss is {algorithm.loss!r}")
        if algorithm.pairs:
            return cls._from_pairs(records, weights)
        columns = mask_unpredicted(records.select(*_TOKEN_FIELDS, "reward", *_SAMPLE_FIELDS))
        rows = cls(columns, np.arange(len(columns)), len(columns), expert=None if expert is None else list(expert))
        if weights is not None:
            rows._multiply_weights(
                [torch.full((length,), weight) for length, weight in zip(rows.lengths(), weights, strict=True)]
            )
        if algorithm.takes_rewards:
            rows._leave_out_unrewarded(algorithm)
        rows._check_columns(algorithm)
        if algorithm.correction is not None:
            rows._correct(algorithm, version)
        rows._fill_columns(algorithm)
        if algorithm.high_entropy_ratio > 0:
            rows._mask_low_entropy(algorithm.high_entropy_ratio)
        rows._leave_out_empty(drop_zero_advantages and "advantages" in algorithm.loss_inputs)
        # The length of `logprobs` is the response length of a record with a truncated prompt.
        rows.records = rows.records.select(*algorithm.loss_columns, *_SAMPLE_FIELDS, "logprobs")
        return rows

    @classmethod
    def _from_pairs(cls, records: Experiences, weights: Sequence[float] | None) -> TrainRows:
        if weights is not None:
            raise ValueError("weights: got weights, expected None for preference pairs")
        answers = mask_unpredicted(Experiences(split_preference_pairs(list(records))))
        return cls(
            answers.select("action_mask", *_SAMPLE_FIELDS),
            np.repeat(np.arange(len(records)), 2),
            len(records),
            pairs=[str(parent) for parent in answers.values("parent")],
            chosen=[i % 2 == 0 for i in range(len(answers))],
        )

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def media_kinds(self) -> list[tuple[str, ...]]:
        """[B] Sorted names of the media of each row, which determine the parts of the model that it uses."""
        return [tuple(sorted(media or ())) for media in self.records.values("multi_modal_inputs")]

    def take(self, rows: Sequence[int]) -> TrainRows:
        """Return some of the rows, such as those of a micro-batch."""
        indices = np.asarray(rows, dtype=np.int64)
        taken = TrainRows(self.records.take(indices), self.sources[indices], self.record_count)
        for name in ("pairs", "chosen", "expert"):
            flags = getattr(self, name)
            if flags is not None:
                setattr(taken, name, [flags[i] for i in rows])
        return taken

    def lengths(self) -> list[int]:
        """Return the number of response tokens of each row [B]."""
        lengths: list[int] = np.maximum(self.records.token_lengths() - self.records.prompt_lengths(), 0).tolist()
        return lengths

    @property
    def loss_tokens(self) -> NDArray[np.int64]:
        """[B] Number of tokens of each row in the loss."""
        masks = self.masks
        row_of_token = np.repeat(np.arange(len(masks)), masks.lengths)
        return np.bincount(row_of_token[masks.values.numpy()], minlength=len(masks))

    @property
    def masks(self) -> Rows:
        """Mask of the tokens in the loss."""
        masks = [
            torch.ones(length, dtype=torch.bool) if mask is None else mask.bool()
            for mask, length in zip(self.records.values("action_mask"), self.lengths(), strict=True)
        ]
        return Rows(torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool), [len(mask) for mask in masks])

    # --- stages of `from_records` -------------------------------------------------------------------------------------

    def _check_columns(self, algorithm: AlgorithmConfig) -> None:
        """Raise `ValueError` if a record lacks a column that the loss reads."""
        needs: dict[str, tuple[str, ...]] = {}
        inputs = algorithm.loss_inputs
        if "advantages" in inputs:
            needs["advantages"] = ("advantages",)
        if "old_logprobs" in inputs:
            needs["old_logprobs"] = ("old_logprobs", "logprobs")
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            needs["ref_logprobs"] = ("ref_logprobs",)
        if algorithm.needs_critic:
            needs |= {"values": ("values",), "returns": ("returns",)}
        for need, fields in needs.items():
            missing = self.records.missing(fields[0])
            for alternative in fields[1:]:
                missing = np.intersect1d(missing, self.records.missing(alternative))
            if self.expert is not None:
                missing = np.setdiff1d(missing, np.flatnonzero(self.expert))
            if len(missing):
                raise ValueError(
                    f"record {self.records.eids()[missing[0]]}: got no {' or '.join(fields)}, expected {need} for the "
                    f"loss {algorithm.loss!r}; rollbook.train.pipeline computes what is missing"
                )

    def _fill_columns(self, algorithm: AlgorithmConfig) -> None:
        """Fill columns that only some rows have.

        Missing `old_logprobs` are filled with `logprobs`. Expert rows get 0, which the loss does not read. If some rows
        have `loss_weights`, the others get 1 in a batch.
        """
        columns: dict[str, Sequence[Any]] = {}
        if len(self.records.missing("old_logprobs")):
            rows = zip(self.records.values("old_logprobs"), self.records.values("logprobs"), strict=True)
            columns["old_logprobs"] = [engine if row is None else row for row, engine in rows]
        if self.expert is not None:
            names = ("advantages", "ref_logprobs", "old_logprobs")
            columns = {name: self.records.values(name) for name in names} | columns
            columns = {name: self._zero_expert(column) for name, column in columns.items()}
            for name in {*RESPONSE_COLUMNS}.intersection(algorithm.loss_columns) - columns.keys() - {"loss_weights"}:
                if 0 < len(self.records.missing(name)) < len(self):
                    rows = zip(self.records.values(name), self._zero_expert(self.records.values(name)), strict=True)
                    columns[name] = [zero if row is None else row for row, zero in rows]
        if columns:
            self.records = self.records.assign(**columns)

    def _zero_expert(self, column: Sequence[Any]) -> list[Any]:
        """Return a column with 0 in expert rows."""
        if self.expert is None:
            return list(column)
        rows = zip(column, self.expert, self.lengths(), strict=True)
        return [torch.zeros(length) if expert else row for row, expert, length in rows]

    def _correct(self, algorithm: AlgorithmConfig, version: int | None) -> None:
        """Apply the importance correction to masks and weights."""
        names = ("old_logprobs", "logprobs")
        columns = [self._zero_expert(self.records.values(name)) for name in names]
        for name, column in zip(names, columns, strict=True):
            self._check_complete(column, name, "algorithm.correction compares")
        options = dict(algorithm.correction or {})
        versions = None
        if options.get("max_staleness") is not None:
            versions, options["current"] = self._versions(version), version
        correction = importance_weights(Rows(columns[0]), Rows(columns[1]), self.masks, versions, **options)
        self.records = self.records.assign(action_mask=list(correction.mask))
        self._multiply_weights(list(correction.weights))
        self.metrics |= correction.report.to_metrics("correction")

    def _check_complete(self, column: Sequence[Any], name: str, reader: str) -> None:
        missing = next((i for i, row in enumerate(column) if row is None), None)
        if missing is not None:
            raise ValueError(f"record {self.records.eids()[missing]}: got no {name}, which {reader}")

    def _versions(self, current: int | None) -> Rows:
        """Return the policy version of every response token; expert rows have the current version."""
        versions = []
        rows = zip(self.records.values("policy_versions"), self.masks, strict=True)
        for i, (version, mask) in enumerate(rows):
            if self.expert is not None and self.expert[i]:
                version = current
            if version is None:
                raise ValueError(
                    f"record {self.records.eids()[i]}: got no policy_versions, which correction.max_staleness compares"
                )
            by_token = torch.as_tensor(version).expand(len(mask))
            newest = int(by_token[mask].max()) if bool(mask.any()) else 0
            if current is not None and newest > current:
                raise ValueError(
                    f"record {self.records.eids()[i]}: policy_versions: got {newest}, expected at most {current}, the "
                    "version of the trained policy (step - 1)"
                )
            versions.append(by_token)
        return Rows(versions)

    def _mask_low_entropy(self, ratio: float) -> None:
        """Keep only the share `ratio` of tokens with the highest entropy in the loss."""
        entropy = self.records.values("entropy")
        self._check_complete(entropy, "entropy", "algorithm.high_entropy_ratio needs")
        masks = high_entropy_mask(Rows(entropy), self.masks, ratio)
        self.records = self.records.assign(action_mask=list(masks))

    def _multiply_weights(self, factors: Sequence[torch.Tensor]) -> None:
        """Multiply the weight of each token's loss."""
        rows = zip(self.records.values("loss_weights"), factors, strict=True)
        weights = [factor.float() if weight is None else weight * factor for weight, factor in rows]
        self.records = self.records.assign(loss_weights=weights)

    def _leave_out_unrewarded(self, algorithm: AlgorithmConfig) -> None:
        """Leave out rows whose reward, or a token reward that the estimator reads, is NaN or infinite.

        A reward of `None` does not count as missing here: the advantages of such a record were computed elsewhere.
        """
        missing = {
            i
            for i, reward in enumerate(self.records.values("reward"))
            if reward is not None and not math.isfinite(reward)
        }
        if algorithm.takes_token_rewards:
            token_rewards = zip(self.records.values("token_level_reward"), self.masks, strict=True)
            for i, (rewards, mask) in enumerate(token_rewards):
                if rewards is not None and not bool(rewards[mask].isfinite().all()):
                    missing.add(i)
        if self.expert is not None:
            missing.difference_update(np.flatnonzero(self.expert).tolist())
        self._leave_out(dict.fromkeys(sorted(missing), "no reward"))

    def _leave_out_empty(self, drop_zero_advantages: bool) -> None:
        """Leave out rows without a token in the loss and, if `drop_zero_advantages`, rows whose advantages are 0."""
        empty = np.flatnonzero(self.loss_tokens == 0).tolist()
        reasons: dict[int, str] = dict.fromkeys(empty, "no trainable token")
        if drop_zero_advantages:
            advantages = self.records.values("advantages")
            for i, (row, mask) in enumerate(zip(advantages, self.masks, strict=True)):
                is_expert = self.expert is not None and self.expert[i]
                if not is_expert and i not in reasons and not bool(row[mask].any()):
                    reasons[i] = "zero advantage"
        self._leave_out(reasons)

    def _leave_out(self, reasons: dict[int, str]) -> None:
        """Remove rows, given the reason by index."""
        if not reasons:
            return
        for i, reason in reasons.items():
            self.excluded[int(self.sources[i])] = reason
            metric = f"excluded/{reason.replace(' ', '_')}"
            self.metrics[metric] = self.metrics.get(metric, 0.0) + 1.0
        remaining = np.setdiff1d(np.arange(len(self)), list(reasons))
        self.records, self.sources = self.records.take(remaining), self.sources[remaining]
        if self.expert is not None:
            self.expert = [self.expert[i] for i in remaining]
