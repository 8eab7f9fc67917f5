"""What the released peers give for the same vectors: each is installed as it is on its index, and called as it is.

Invariant: a peer's number in the file is what its own function returned for the vector's inputs, padded on the right,
in float32; where it is another number than the vector's, `NOTES` says why.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from tests.vectors import reference

Outputs = dict[str, Any]
VERL, TRINITY, TRL = (
    f"{name} {version}"
    for name, version in (
        ("verl", peers.VERL_VERSION),
        ("trinity-rft", peers.TRINITY_VERSION),
        ("trl", peers.TRL_VERSION),
    )
)
ROWS = {
    *(
        "mask",
        "response",
        "token_rewards",
        "values",
        "logprobs",
        "new_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "entropy",
        "necs",
    ),
    *("teacher_logprobs", "returns", "old_values", "advantages"),
}


class NotOffered(Exception):
    """The peer has no such option."""


@cache
def verl(module: str = "trainer.ppo.core_algos") -> Any:
    peers.verl()
    return importlib.import_module(f"verl.{module}")


@cache
def trinity(module: str) -> Any:
    peers.verl()  # Trinity-RFT's estimators import it
    peers.trinity()
    return importlib.import_module(f"trinity.{module}")


@cache
def trl(module: str = "trainer.utils") -> Any:
    peers.trl()
    return importlib.import_module(f"trl.{module}")


class Sample:
    """A vector's inputs as padded float32 tensors, and its options, each to be asked for once."""

    def __init__(self, vector: dict[str, Any]) -> None:
        self.inputs, self.left = vector["inputs"], dict(vector["options"])
        rows = [value for name, value in self.inputs.items() if name in ROWS and _nested(value)]
        count = len(next(iter(self.inputs.values())))
        self.lengths = [len(row) for row in rows[0]] if rows else [1] * count
        self.by_row = not rows
        self.width = max([1, *self.lengths])

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "mask" and name not in self.inputs:
            return self._padded([[1] * n for n in self.lengths])
        if name not in self.inputs:
            raise NotOffered(name)
        value = self.inputs[name]
        if name in ROWS:
            if not _nested(value):
                value = [[x] * n for x, n in zip(value, self.lengths, strict=True)]
            return self._padded(self._seen(value))
        return torch.tensor([math.nan if x is None else x for x in value], dtype=torch.float32)

    def _seen(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Rows with NaN for what is not there, on tokens that count."""
        pairs = zip(rows, self._mask_rows(), strict=True)
        return [[math.nan if x is None and m else x for x, m in zip(*pair, strict=True)] for pair in pairs]

    def _padded(self, rows: list[list[Any]]) -> torch.Tensor:
        # A slot that nobody may read is 0: peers multiply by the mask, and NaN times 0 is NaN.
        filled = [[0.0 if x is None else x for x in row] + [0.0] * (self.width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.float32)

    def leaf(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self, name).clone().requires_grad_()
        return tensor

    def option(self, name: str, default: Any) -> Any:
        return self.left.pop(name, default)

    def only(self, **fixed: Any) -> None:
        """Options that the peer has one value of."""
        for name, value in fixed.items():
            if self.left.pop(name, value) != value:
                raise NotOffered(name)

    def done(self) -> None:
        if self.left:
            raise NotOffered(", ".join(self.left))

    def placed(self) -> torch.Tensor:
        """Each row's reward on its last token that counts, the first slot if none does; or the token rewards."""
        if "token_rewards" in self.inputs:
            if "rewards" in self.inputs:
                raise NotOffered("both rewards")
            return self.token_rewards
        mask, rewards = self.mask, self.rewards
        token_rewards = torch.zeros_like(mask)
        for i, row in enumerate(mask):
            last = int(row.nonzero()[-1]) if row.any() else 0
            token_rewards[i, last] = rewards[i]
        return token_rewards

    def _mask_rows(self) -> list[list[int]]:
        return self.inputs.get("mask") or [[1] * n for n in self.lengths]

    @property
    def ids(self) -> Any:
        return np.array(self.inputs["groups"], dtype=object)

    def read(self, matrix: torch.Tensor) -> Any:
        """Rows again; what lies on tokens that do not count is left out of the comparison as 0."""
        unmasked = torch.where(self.mask.bool(), matrix.detach(), 0.0)
        if self.by_row:
            return _number(unmasked[:, 0].tolist())
        return _number([row[:n] for row, n in zip(unmasked.tolist(), self.lengths, strict=True)])


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) for row in value)


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    value = value.item() if isinstance(value, torch.Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else float(f"{value:.7g}") + 0.0


def _loss(sample: Sample, value: torch.Tensor, *leaves: tuple[str, torch.Tensor]) -> Outputs:
    value.backward()
    slopes = {
        name: sample.read(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)) for name, leaf in leaves
    }
    return {"value": _number(value), "gradient": slopes}


# --- verl -----------------------------------------------------------------------------------------------------------


def _verl_grouped(name: str, **more: Any) -> Callable[[Sample], Outputs]:
    def run(sample: Sample) -> Outputs:
        if "runs" in sample.inputs or "token_rewards" in sample.inputs:
            raise NotOffered("runs")
        sample.only(std="sample", level="group", singleton="raw")
        options = {"epsilon": sample.option("eps", 1e-6), **more}
        advantages = getattr(verl(), name)(sample.placed(), sample.mask, sample.ids, **options)[0]
        return {"advantages": sample.read(advantages)}

    return run


def _verl_baseline(sample: Sample) -> Outputs:
    sample.only(singleton="raw", whiten=True)
    function = verl().compute_reinforce_plus_plus_baseline_outcome_advantage
    if "token_rewards" in sample.inputs:
        raise NotOffered("token_rewards beside a baseline")
    advantages = function(sample.placed(), sample.mask, sample.ids)[0]
    return {"advantages": sample.read(advantages)}


def _verl_gae(sample: Sample) -> Outputs:
    sample.only(observations="skip", off_action_rewards="drop", std="sample")
    whiten = sample.option("whiten", None)
    arguments = sample.placed(), sample.values, sample.mask, sample.option("gamma", 1.0), sample.option("lam", 1.0)
    advantages, returns = verl().compute_gae_advantage_return(*arguments)
    advantages = advantages if whiten else returns - sample.values
    return {"advantages": sample.read(advantages), "returns": sample.read(returns)}


def _verl_plus_plus(sample: Sample) -> Outputs:
    sample.only(whiten=True, observations="skip", off_action_rewards="drop")
    config = SimpleNamespace(gamma=sample.option("gamma", 1.0))
    function = verl().compute_reinforce_plus_plus_outcome_advantage
    advantages, returns = function(sample.placed(), sample.mask, config=config)
    return {"advantages": sample.read(advantages), "returns": sample.read(returns)}


def _verl_remax(sample: Sample) -> Outputs:
    advantages, returns = verl().compute_remax_outcome_advantage(sample.placed(), sample.baselines, sample.mask)
    return {"advantages": sample.read(advantages), "returns": sample.read(returns)}


def _verl_kl(kind: str) -> Callable[[Sample], Outputs]:
    def run(sample: Sample) -> Outputs:
        logprobs = sample.leaf("logprobs")
        penalties = verl().kl_penalty(logprobs, sample.ref_logprobs, kind) * sample.mask
        penalties.sum().backward()
        return {"values": sample.read(penalties), "gradient": {"logprobs": sample.read(logprobs.grad)}}

    return run


def _verl_policy(name: str, mode: str, **defaults: float) -> Callable[[Sample], Outputs]:
    """A registered policy loss; `defaults` are Rollbook's, so that both are called with the same numbers."""

    def run(sample: Sample) -> Outputs:
        low, high = (sample.option(key, defaults.get(key, 0.2)) for key in ("clip_low", "clip_high"))
        settings = {"clip_ratio_low": low, "clip_ratio_high": high}
        if name == "vanilla":
            settings["clip_ratio_c"] = sample.option("dual_clip", 3.0)
            if settings["clip_ratio_c"] is None:
                raise NotOffered("no dual clip")
        denominators, weights = sample.option("denominators", None), sample.option("weights", None)
        chosen = sample.option("mode", mode)
        sample.only(detach_gate=False, mask_clip=False)
        sample.done()
        config = verl("workers.config").ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
        )
        if denominators is not None:
            config.global_batch_info.update(
                dp_size=1, batch_num_tokens=denominators["tokens"], global_batch_size=denominators["sequences"]
            )
        logprobs = sample.leaf("new_logprobs")
        correction = {} if weights is None else {"rollout_is_weights": torch.tensor(weights)}
        function = verl().get_policy_loss_fn(name)
        arguments = sample.old_logprobs, logprobs, sample.advantages, sample.mask, chosen
        value, _ = function(*arguments, config=config, **correction)
        return _loss(sample, value, ("new_logprobs", logprobs))

    return run


def _verl_value(sample: Sample) -> Outputs:
    predicted = sample.leaf("values")
    bound = sample.option("clip", 0.2)
    if bound is None:
        raise NotOffered("no clip")
    mode = sample.option("mode", "seq-mean-token-mean")
    arguments = predicted, sample.returns, sample.old_values, sample.mask, bound, mode
    return _loss(sample, verl().compute_value_loss(*arguments)[0], ("values", predicted))


def _verl_aggregate(sample: Sample) -> Outputs:
    mode, norm, denominators = (
        sample.option("mode", "token-mean"),
        sample.option("norm", None),
        sample.option("denominators", None),
    )
    more = (
        {}
        if denominators is None
        else {"batch_num_tokens": denominators["tokens"], "global_batch_size": denominators["sequences"]}
    )
    if norm is not None:
        more["loss_scale_factor"] = norm
    return {"value": _number(verl().agg_loss(sample.values, sample.mask, mode, **more))}


def _verl_whiten(sample: Sample) -> Outputs:
    sample.only(std="sample", eps=1e-8, eps_in="variance", scale=True)
    whiten = verl("utils.torch_functional").masked_whiten
    return {"values": sample.read(whiten(sample.values, sample.mask, sample.option("shift_mean", True)))}


def _logits(sample: Sample) -> torch.Tensor:
    rows = [[-math.inf if x is None else x for x in row] for row in sample.inputs["logits"]]
    return torch.tensor(rows) / sample.option("temperature", 1.0)


def _verl_from_logits(sample: Sample) -> Outputs:
    functions, logits = verl("utils.torch_functional"), _logits(sample)
    chosen = functions.logprobs_from_logits_naive(logits, torch.tensor(sample.inputs["labels"]))
    return {"logprobs": _number(chosen.tolist()), "entropy": _number(functions.entropy_from_logits(logits).tolist())}


def _verl_entropy(sample: Sample) -> Outputs:
    return {"entropy": _number(verl("utils.torch_functional").entropy_from_logits(_logits(sample)).tolist())}


VERL_CALLS = {
    "advantages.grpo": ("compute_grpo_outcome_advantage", _verl_grouped("compute_grpo_outcome_advantage")),
    "advantages.dr_grpo": (
        "compute_grpo_outcome_advantage(norm_adv_by_std_in_grpo=False)",
        _verl_grouped("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False),
    ),
    "advantages.rloo": ("compute_rloo_outcome_advantage", _verl_grouped("compute_rloo_outcome_advantage")),
    "advantages.reinforce_plus_plus_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        _verl_baseline,
    ),
    "advantages.gae": ("compute_gae_advantage_return, its returns minus the values", _verl_gae),
    "advantages.ppo": ("compute_gae_advantage_return", lambda s: (s.left.setdefault("whiten", True), _verl_gae(s))[1]),
    "advantages.reinforce_plus_plus": ("compute_reinforce_plus_plus_outcome_advantage", _verl_plus_plus),
    "advantages.remax": ("compute_remax_outcome_advantage", _verl_remax),
    "kl.k1": ("kl_penalty('k1')", _verl_kl("k1")),
    "kl.k2": ("kl_penalty('k2')", _verl_kl("k2")),
    "kl.k3": ("kl_penalty('k3')", _verl_kl("k3")),
    "kl.abs": ("kl_penalty('abs')", _verl_kl("abs")),
    "kl.low_var_kl": ("kl_penalty('low_var_kl')", _verl_kl("low_var_kl")),
    "losses.ppo": ("compute_policy_loss_vanilla", _verl_policy("vanilla", "token-mean")),
    "losses.gspo": (
        "compute_policy_loss_gspo",
        _verl_policy("gspo", "seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4),
    ),
    "losses.sapo": ("compute_policy_loss_sapo", _verl_policy("sapo", "token-mean")),
    "losses.gmpo": (
        "compute_policy_loss_geo_mean",
        _verl_policy("geo_mean", "seq-mean-token-mean", clip_low=0.4, clip_high=0.4),
    ),
    "losses.cispo": ("compute_policy_loss_cispo", _verl_policy("cispo", "token-mean", clip_low=1.0, clip_high=0.28)),
    "losses.value": ("compute_value_loss", _verl_value),
    "aggregate.aggregate": ("agg_loss", _verl_aggregate),
    "groups.whiten": ("masked_whiten", _verl_whiten),
    "logprobs.from_logits": ("logprobs_from_logits_naive, entropy_from_logits", _verl_from_logits),
    "logprobs.entropy_from_logits": ("entropy_from_logits", _verl_entropy),
}


# --- Trinity-RFT ----------------------------------------------------------------------------------------------------


def _experiences(sample: Sample, rewards: str = "rewards") -> list[Any]:
    record = trinity("common.experience")
    groups = sample.inputs.get("groups", ["a"] * len(sample.lengths))
    rows = []
    for i, keep in enumerate(sample.mask):
        run = sample.inputs["runs"][i] if "runs" in sample.inputs else i
        step = sample.inputs["steps"][i] if "steps" in sample.inputs else 0
        info = {"order": i}
        if "states" in sample.inputs:
            info |= {"env_state_hash": sample.inputs["states"][i], "step_reward": sample.inputs["step_rewards"][i]}
        reward = sample.inputs[rewards][i]
        rows.append(
            record.Experience(
                eid=record.EID(batch=0, task=groups[i], run=run, step=step, suffix=str(i)),
                tokens=[1] * (1 + len(keep)),
                prompt_length=1,
                reward=math.nan if reward is None else reward,
                action_mask=keep.bool(),
                info=info,
            )
        )
    return rows


def _trinity_records(name: str, rewards: str = "rewards", **names: str) -> Callable[[Sample], Outputs]:
    """An estimator of records: `names` are the peer's option for Rollbook's."""

    def run(sample: Sample) -> Outputs:
        if ("runs" in sample.inputs and "steps" not in sample.inputs) or rewards not in sample.inputs:
            raise NotOffered("runs, or rewards of tokens")
        renamed = {
            peer_name: sample.left.pop(own_name) for own_name, peer_name in names.items() if own_name in sample.left
        }
        population = "population" if name == "RECGroupedAdvantage" else "sample"
        sample.only(singleton="raw", std=population)
        sample.done()
        function = getattr(trinity(f"algorithm.advantage_fn.{_MODULES[name]}"), name)
        records, _ = function(**renamed)(_experiences(sample, rewards))
        ordered = sorted(records, key=lambda record: record.info["order"])
        return {"advantages": sample.read(torch.stack([record.advantages for record in ordered]).float())}

    return run


def _trinity_batch(name: str, **names: str) -> Callable[[Sample], Outputs]:
    """An estimator of verl's batches."""

    def run(sample: Sample) -> Outputs:
        renamed = {
            peer_name: sample.left.pop(own_name) for own_name, peer_name in names.items() if own_name in sample.left
        }
        sample.only(whiten=True, std="sample", singleton="raw", observations="skip", off_action_rewards="drop")
        batch = {"response_mask": sample.mask}
        if "rewards" in sample.inputs or "token_rewards" in sample.inputs:
            batch["token_level_rewards"] = sample.placed()
        columns = {
            "values": "values",
            "baselines": "reward_baselines",
            "old_logprobs": "old_log_probs",
            "teacher_logprobs": "teacher_logprobs",
            "entropy": "entropys",
            "necs": "necs",
        }
        batch |= {
            peer_name: getattr(sample, own_name) for own_name, peer_name in columns.items() if own_name in sample.inputs
        }
        if "old_logprobs" in sample.inputs:
            batch["rollout_log_probs"] = sample.old_logprobs
        tensors = {"uid": sample.ids} if "groups" in sample.inputs else {}
        data = SimpleNamespace(batch=batch, non_tensor_batch=tensors)
        module = trinity(f"algorithm.advantage_fn.{_MODULES[name]}")
        defaults = getattr(module, name).default_args()
        data, _ = getattr(module, name)(**{**defaults, **renamed})(data)
        outputs = {"advantages": sample.read(data.batch["advantages"]), "returns": sample.read(data.batch["returns"])}
        if name.startswith("Clip"):
            outputs["mask"] = [[int(m) for m in row] for row in sample.read(data.batch["response_mask"])]
        return outputs

    return run


_MODULES = {
    "GRPOGroupedAdvantage": "grpo_advantage",
    "OPMDGroupAdvantage": "opmd_advantage",
    "ASYMREGroupAdvantage": "asymre_advantage",
    "RECGroupedAdvantage": "rec_advantage",
    "REINFORCEGroupAdvantage": "reinforce_advantage",
    "StepWiseGRPOAdvantageFn": "multi_step_grpo_advantage",
    "GiGPOAdvantageFn": "gigpo_advantage",
    "PPOAdvantageFn": "ppo_advantage",
    "REINFORCEPLUSPLUSAdvantageFn": "reinforce_plus_plus_advantage",
    "REMAXAdvantageFn": "remax_advantage",
    "RLOOAdvantageFn": "rloo_advantage",
    "OnPolicyDistillAdvantage": "on_policy_distill_advantage",
    "JSDAdvantage": "jsd_advantage",
    "ClipBAdvantageFn": "clipb_advantage",
    "ClipVAdvantageFn": "clipv_advantage",
}


def _trinity_gae(sample: Sample) -> Outputs:
    sample.only(clip=None)
    outputs = _trinity_batch("PPOAdvantageFn", gamma="gamma", lam="lam")(sample)
    pairs = zip(outputs["returns"], sample.read(sample.values), strict=True)
    raw = [[math.nan if r is None else r - v for r, v in zip(*pair, strict=True)] for pair in pairs]
    return {"advantages": _number(raw), "returns": outputs["returns"]}


def _trinity_kl(name: str) -> Callable[[Sample], Outputs]:
    def run(sample: Sample) -> Outputs:
        sample.done()
        logprobs = sample.leaf("logprobs")
        old = sample.old_logprobs if "old_logprobs" in sample.inputs else None
        penalties = getattr(trinity("algorithm.kl_fn.kl_fn"), name)().calculate_kl(logprobs, sample.ref_logprobs, old)
        penalties = penalties * sample.mask
        if penalties.requires_grad:
            penalties.sum().backward()
        slope = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        return {"values": sample.read(penalties), "gradient": {"logprobs": sample.read(slope)}}

    return run


_COMMON = {"clip_low": "clip_range_low", "clip_high": "clip_range_high", "mode": "loss_agg_mode"}


def _trinity_loss(
    module: str, name: str, fixed: dict[str, Any] | None = None, **names: str
) -> Callable[[Sample], Outputs]:
    """A policy loss; `fixed` are options of Rollbook's with one value there, `names` the others."""

    def run(sample: Sample) -> Outputs:
        function = getattr(trinity(f"algorithm.policy_loss_fn.{module}"), name)
        renamed = {
            peer_name: sample.left.pop(own_name) for own_name, peer_name in names.items() if own_name in sample.left
        }
        sample.only(**(fixed or {}))
        sample.done()
        if None in renamed.values():
            raise NotOffered("without a bound")
        defaults = {key: value for key, value in function.default_args().items() if key not in renamed}
        if "clip_range" in defaults and {"clip_range_low", "clip_range_high"} <= set(renamed):
            defaults.pop("clip_range")
        if "delta_sequence_masking" in renamed:
            defaults["enable_sequence_masking"] = True
        if name.startswith("MIX"):  # sizes by which each part's mean stays a mean
            expert = sum(sample.inputs["expert_mask"])
            defaults |= {"train_batch_size_expert": expert, "train_batch_size_usual": len(sample.lengths) - expert}
        logprobs = sample.leaf("new_logprobs")
        arguments = {"logprob": logprobs, "action_mask": sample.mask}
        columns = {"old_logprobs": "old_logprob", "advantages": "advantages", "ref_logprobs": "ref_logprob"}
        arguments |= {
            peer_name: getattr(sample, own_name) for own_name, peer_name in columns.items() if own_name in sample.inputs
        }
        if "expert_mask" in sample.inputs:
            arguments["expert_mask"] = torch.tensor(sample.inputs["expert_mask"])
        if "step" in sample.inputs:
            step = sample.inputs["step"]
            arguments["step"] = torch.tensor(step if isinstance(step, list) else [step] * len(sample.lengths))
        value, _ = function(**{**defaults, **renamed})(**arguments)
        return _loss(sample, value, ("new_logprobs", logprobs))

    return run


def _trinity_dpo(sample: Sample) -> Outputs:
    """Rows in its order: chosen, rejected, chosen, rejected."""
    sample.only(variant="sigmoid")
    order = []
    for pair in dict.fromkeys(sample.inputs["pairs"]):
        rows = [i for i, name in enumerate(sample.inputs["pairs"]) if name == pair]
        order += sorted(rows, key=lambda i: not sample.inputs["chosen"][i])
    logprobs = sample.leaf("new_logprobs")
    free = sample.option("reference_free", False)
    ref = torch.zeros_like(logprobs) if free else sample.ref_logprobs
    options = {"beta": sample.option("beta", 0.1), "label_smoothing": sample.option("label_smoothing", 0.0)}
    function = trinity("algorithm.policy_loss_fn.dpo_loss").DPOLossFn(**options)
    value, _ = function(logprobs[order], ref[order], sample.mask[order])
    return _loss(sample, value, ("new_logprobs", logprobs))


def _trinity_entropy(sample: Sample) -> Outputs:
    entropy = sample.leaf("entropy")
    function = trinity("algorithm.entropy_loss_fn.entropy_loss_fn").DefaultEntropyLossFn(sample.option("coef", 0.0))
    value, _ = function(entropy, sample.mask, sample.option("mode", "token-mean"))
    return _loss(sample, -value, ("entropy", entropy))


_KL_CLASSES = {
    "none": "DummyKLFn",
    "k1": "K1Fn",
    "k2": "K2Fn",
    "k3": "K3Fn",
    "abs": "AbsFn",
    "low_var_kl": "LowVarKLFn",
    "corrected_k3": "CorrectedK3Fn",
}


def _trinity_kl_loss(sample: Sample) -> Outputs:
    logprobs, mode = sample.leaf("new_logprobs"), sample.option("mode", "token-mean")
    kind = getattr(trinity("algorithm.kl_fn.kl_fn"), _KL_CLASSES[sample.option("estimator", "k2")])
    old = sample.old_logprobs if "old_logprobs" in sample.inputs else None
    function = kind(kl_coef=sample.option("coef", 0.001))
    value, _ = function.calculate_kl_loss(logprobs, sample.ref_logprobs, sample.mask, mode, old)
    return _loss(sample, value, ("new_logprobs", logprobs))


def _trinity_aggregate(sample: Sample) -> Outputs:
    mode, norm = sample.option("mode", "token-mean"), sample.option("norm", None)
    function = trinity("algorithm.utils").aggregate_loss
    return {"value": _number(function(sample.values, sample.mask, mode, norm))}


def _trinity_whiten(sample: Sample) -> Outputs:
    sample.only(std="sample", eps=1e-8, eps_in="variance", scale=True)
    whiten = trinity("algorithm.utils").masked_whiten
    return {"values": sample.read(whiten(sample.values, sample.mask, sample.option("shift_mean", True)))}


_REC = {
    "clip_low": "epsilon_low",
    "clip_high": "epsilon_high",
    "ring_low": "epsilon_low_prime",
    "ring_high": "epsilon_high_prime",
    "clip_mode": "clip_mode",
    "weight": "weight",
    "regularizer": "regularizer",
    "regularizer_coef": "regularizer_coef",
    "temperature": "temp",
}
_CHORD = {
    "warmup": "mu_warmup_steps",
    "decay": "mu_decay_steps",
    "peak": "mu_peak",
    "valley": "mu_valley",
    "phi": "enable_phi_function",
    **_COMMON,
}
_TRINITY_RECORDS = {
    "grpo": ("GRPOGroupedAdvantage", {"eps": "epsilon", "level": "std_cal_level"}),
    "opmd": ("OPMDGroupAdvantage", {"baseline": "opmd_baseline", "tau": "tau"}),
    "asymre": ("ASYMREGroupAdvantage", {"shift": "baseline_shift"}),
    "rec": ("RECGroupedAdvantage", {"eps": "epsilon", "normalize": "std_normalize"}),
    "step_wise_grpo": (
        "StepWiseGRPOAdvantageFn",
        {"eps": "epsilon", "step_norm": "enable_step_norm", "level": "std_cal_level"},
    ),
}
_TRINITY_LOSSES = {
    "ppo": (
        "ppo_policy_loss",
        "PPOPolicyLossFn",
        {},
        {
            **_COMMON,
            "dual_clip": "clip_ratio_c",
            "sequence_delta": "delta_sequence_masking",
            "policy_gradient": "fallback_to_policy_gradient",
        },
    ),
    "gspo": ("gspo_policy_loss", "GSPOLossFn", {}, _COMMON),
    "sapo": (
        "sapo_policy_loss",
        "SAPOPolicyLossFn",
        {"detach_gate": True},
        {"tau_pos": "tau_pos", "tau_neg": "tau_neg", "mode": "loss_agg_mode"},
    ),
    "importance_sampling": (
        "importance_sampling_policy_loss",
        "ImportanceSamplingLossFn",
        {},
        {"mode": "loss_agg_mode"},
    ),
    "cispo": (
        "cispo_policy_loss",
        "CISPOPolicyLossFn",
        {},
        {
            **_COMMON,
            "mask_clip": "enable_mask_clip",
            "mask_clip_low": "mask_clip_range_low",
            "mask_clip_high": "mask_clip_range_high",
        },
    ),
    "topr": (
        "topr_policy_loss",
        "TOPRPolicyLossFn",
        {"level": "token"},
        {"threshold": "advantage_threshold", "mode": "loss_agg_mode"},
    ),
    "opmd": ("opmd_policy_loss", "OPMDPolicyLossFn", {}, {"tau": "tau", "mode": "loss_agg_mode"}),
    "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn", {}, {"epsilon": "epsilon", "mode": "loss_agg_mode"}),
    "rec": ("rec_policy_loss", "RECPolicyLossFn", {}, _REC),
    "sft": ("sft_loss", "SFTLossFn", {}, {"mode": "loss_agg_mode"}),
    "sft_is": ("chord_policy_loss", "SFTISLossFn", {}, {"mode": "loss_agg_mode"}),
    "sft_phi": ("chord_policy_loss", "SFTPhiLossFn", {}, {"mode": "loss_agg_mode", "cutoff": "cutoff_prob"}),
    "mix": ("mix_policy_loss", "MIXPolicyLossFn", {}, {"mu": "mu", **_COMMON}),
    "mix_chord": ("chord_policy_loss", "MIXCHORDPolicyLossFn", {}, _CHORD),
}
TRINITY_CALLS: dict[str, tuple[str, Callable[[Sample], Outputs]]] = {
    **{
        f"advantages.{estimator}": (name, _trinity_records(name, **more))
        for estimator, (name, more) in _TRINITY_RECORDS.items()
    },
    "advantages.gigpo": (
        "GiGPOAdvantageFn",
        _trinity_records(
            "GiGPOAdvantageFn", "step_rewards", omega="omega", gamma="gamma", normalize="fnorm", eps="epsilon"
        ),
    ),
    "advantages.reinforce": ("REINFORCEGroupAdvantage", _trinity_records("REINFORCEGroupAdvantage")),
    "advantages.rloo": ("RLOOAdvantageFn", _trinity_batch("RLOOAdvantageFn")),
    "advantages.gae": ("PPOAdvantageFn, its returns minus the values", _trinity_gae),
    "advantages.ppo": ("PPOAdvantageFn", _trinity_batch("PPOAdvantageFn", gamma="gamma", lam="lam")),
    "advantages.reinforce_plus_plus": (
        "REINFORCEPLUSPLUSAdvantageFn",
        _trinity_batch("REINFORCEPLUSPLUSAdvantageFn", gamma="gamma"),
    ),
    "advantages.remax": ("REMAXAdvantageFn", _trinity_batch("REMAXAdvantageFn")),
    "advantages.on_policy_distill": (
        "OnPolicyDistillAdvantage",
        _trinity_batch("OnPolicyDistillAdvantage", coef="kl_coef"),
    ),
    "advantages.jsd": ("JSDAdvantage", _trinity_batch("JSDAdvantage", beta="lambda_coef", coef="kl_coef")),
    "advantages.clip_b": ("ClipBAdvantageFn", _trinity_batch("ClipBAdvantageFn", mu="mu", eps="epsilon")),
    "advantages.clip_v": (
        "ClipVAdvantageFn",
        lambda sample: (
            sample.only(centered=False, zero_advantage="uncapped"),
            _trinity_batch("ClipVAdvantageFn", mu="mu", eps="epsilon", max_frac="max_frac")(sample),
        )[1],
    ),
    **{f"kl.{estimator}": (f"{name}.calculate_kl", _trinity_kl(name)) for estimator, name in _KL_CLASSES.items()},
    **{
        f"losses.{estimator}": (name, _trinity_loss(module, name, fixed, **more))
        for estimator, (module, name, fixed, more) in _TRINITY_LOSSES.items()
    },
    "losses.dpo": ("DPOLossFn, chosen and rejected rows in turn", _trinity_dpo),
    "losses.entropy": ("DefaultEntropyLossFn, with the sign of a loss", _trinity_entropy),
    "losses.kl": ("KLFn.calculate_kl_loss", _trinity_kl_loss),
    "aggregate.aggregate": ("aggregate_loss", _trinity_aggregate),
    "groups.whiten": ("masked_whiten", _trinity_whiten),
}


# --- TRL ------------------------------------------------------------------------------------------------------------


def _trl_from_logits(sample: Sample) -> Outputs:
    logits = _logits(sample)
    chosen = trl().selective_log_softmax(logits, torch.tensor(sample.inputs["labels"]))
    return {"logprobs": _number(chosen.tolist()), "entropy": _number(trl().entropy_from_logits(logits).tolist())}


def _trl_entropy(sample: Sample) -> Outputs:
    return {"entropy": _number(trl().entropy_from_logits(_logits(sample)).tolist())}


def _trl_high_entropy(sample: Sample) -> Outputs:
    sample.only(over="batch")
    alone = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    function = trl("trainer.grpo_trainer").GRPOTrainer.get_high_entropy_mask
    ratio = sample.inputs["ratio"]
    selected = function(SimpleNamespace(accelerator=alone), sample.entropy, sample.mask, 1 - ratio)
    return {"mask": [[int(x) for x in row] for row in sample.read(selected.float())]}


TRL_CALLS: dict[str, tuple[str, Callable[[Sample], Outputs]]] = {
    "logprobs.from_logits": ("selective_log_softmax, entropy_from_logits", _trl_from_logits),
    "logprobs.entropy_from_logits": ("entropy_from_logits", _trl_entropy),
    "filters.high_entropy_mask": ("GRPOTrainer.get_high_entropy_mask", _trl_high_entropy),
}
CALLS = {VERL: VERL_CALLS, TRINITY: TRINITY_CALLS, TRL: TRL_CALLS}


def measured(vector: dict[str, Any]) -> dict[str, Outputs]:
    """What each peer that has such a function gives for a vector: its call, its outputs, and why they are others.

    A peer is called where its options can say what the vector's say, and also with the vector's defaults where it has
    no choice (singleton groups, say): there its number shows the difference.
    """
    by_peer = {}
    for peer, calls in CALLS.items():
        if vector["function"] not in calls:
            continue
        call, run = calls[vector["function"]]
        sample = Sample(vector)
        try:
            outputs = run(sample)
            sample.done()
        except NotOffered:
            continue
        except Exception as error:
            by_peer[peer] = {"call": call, "raises": type(error).__name__}
        else:
            by_peer[peer] = {"call": call, **{key: value for key, value in outputs.items() if key in vector["outputs"]}}
        if (vector["id"], peer) in NOTES:
            by_peer[peer]["note"] = NOTES[vector["id"], peer]
    return by_peer


_POISON = "a reward that is missing makes its whole group NaN"
_RAW = "a lone row gets its raw reward: singleton='raw'"
_EMPTY = "a row without tokens counts as a row"
_THROUGH = "goes through tool tokens as states with values: observations='through'"
_POOLED = "adds up all pairs of a call into one logit"
_GATE = "a detached gate times log p: detach_gate=True"
_IMPOSSIBLE = "a logit of minus infinity makes the entropy NaN"
_NOTES = {
    "grpo-singleton": _RAW,
    "grpo-constant": "the float32 mean of equal rewards is off by a rounding, and eps is below that",
    "grpo-missing": _POISON,
    "dr_grpo-missing": _POISON,
    "rloo-singleton": _RAW,
    "rloo-missing": _POISON,
    "asymre-shift": _POISON,
    "rec-centered": _POISON,
    "rec-singleton": "a lone row is not provided for",
    "step_wise_grpo-out-of-order": "takes the last step listed, not the one with the largest number",
    "gigpo-across-tasks": "compares states across tasks",
    "gae": _THROUGH,
    "gae-tool-skip": _THROUGH,
    "gae-trailing-drop": _THROUGH,
    "gae-missing": "a reward that is missing makes its row NaN",
    "ppo-advantage-tool": _THROUGH,
    "reinforce-rewards": "a reward that is missing makes its row NaN",
    "reinforce-rows": "a reward that is missing makes its row NaN",
    "reinforce_plus_plus-tool": _THROUGH,
    "remax-hard": "a reward or a baseline that is missing makes its row NaN",
    "jsd": "the term is never positive, so it rewards any mismatch",
    "jsd-beta0": "beta=0 is the reverse KL there, the forward KL here",
    "jsd-beta1": "the sign is the other way round",
    "clip_v": "compares D itself, not its distance from the mean, and spares A = 0 without a limit: "
    "centered=False, zero_advantage='uncapped'",
    "ppo-empty": "0 / 0",
    "gspo-batch": _EMPTY,
    "gspo-default": _EMPTY,
    "gmpo-batch": _EMPTY,
    "sapo": _GATE,
    "sapo-batch": _GATE,
    "rec-loss-gspo": _EMPTY,
    "sft-batch": _EMPTY,
    "dpo": _POOLED,
    "dpo-batch": _POOLED,
    "dpo-smooth": _POOLED,
    "dpo-empty": _POOLED + ", the one with an empty row too",
    "aggregate-seq-mean-token-sum-norm": "divides by the rows as well: norm is rows times its factor",
    "aggregate-empty-row": _EMPTY,
    "high_entropy_mask": "over the batch, and all that are at or above a quantile",
    "high_entropy_mask-batch": "all that are at or above a quantile, not a number of them",
    "high_entropy_mask-all": "a share of 0 marks the largest only",
    **dict.fromkeys(("from_logits", "from_logits-temperature"), _IMPOSSIBLE),
    **dict.fromkeys(("entropy_from_logits", "entropy_from_logits-temperature"), _IMPOSSIBLE),
}
NOTES = {(name, peer): note for name, note in _NOTES.items() for peer in CALLS}
NOTES["sapo-batch", VERL] = "always the mean over rows of their means: mode='seq-mean-token-mean'"
# Where one peer differs and the other does not.
_ALIKE = {
    VERL: (
        *("gae", "gae-tool-skip", "gae-trailing-drop", "ppo-advantage-tool", "reinforce_plus_plus-tool", "sapo"),
        *("gspo-batch", "gspo-default", "aggregate-empty-row"),
    ),
    TRINITY: ("aggregate-seq-mean-token-sum-norm", "ppo-empty", "high_entropy_mask"),
}
for _peer, _names in _ALIKE.items():
    for _name in _names:
        del NOTES[_name, _peer]


# --- the page about peers -------------------------------------------------------------------------------------------
# Expected results for each section of docs/other_frameworks.md and each row of its table. For packages that pip can
# install, the functions call them; for LightRFT, OpenRLHF, SkyRL, slime and prime-rl they compute the formula.

TOOL = {
    "token_rewards": [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]],
    "values": [[0.5, 0.6, 0.2, 0.8, 0.9, 0.7, 0.9]],
    "mask": [[1, 1, 0, 0, 0, 1, 1]],
}
TRAILING = {"token_rewards": [[0.0, 0.0, 1.0]], "values": [[0.5, 0.6, 0.9]], "mask": [[1, 1, 0]]}
DISCOUNT = {"gamma": 0.95, "lam": 0.95}
FOUR = {"rewards": [0.0, 0.0, 1.0, 0.5], "groups": ["a"] * 4}
MISSING = {"rewards": [1.0, None, 0.0, 0.5], "groups": ["a"] * 4}
LONE = {"rewards": [0.7], "groups": ["a"]}
EQUAL = {"rewards": [0.1] * 8, "groups": ["a"] * 8}
LOSSES_OF_TOKENS = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
RETURNS = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
PAIRS = {
    "new_logprobs": [[40.0], [0.0], [0.0], [20.0]],
    "pairs": ["a", "a", "b", "b"],
    "chosen": [True, False, True, False],
}


def _of(peer: str, function: str, inputs: dict[str, Any], key: str = "advantages", **options: Any) -> list[Any]:
    """What a peer's call gives, without the tokens that do not count."""
    sample = Sample({"inputs": inputs, "options": options})
    numbers = CALLS[peer][function][1](sample)[key]
    if not isinstance(numbers, list):
        return [numbers]
    if not _nested(numbers):
        return numbers
    mask = inputs.get("mask") or [[1] * len(row) for row in numbers]
    return [x for row, keep in zip(numbers, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def _gae(inputs: dict[str, Any], **options: Any) -> list[Any]:
    advantages = reference.gae(**inputs, **DISCOUNT, **options)["advantages"]
    return reference.counted(advantages, inputs["mask"])


def _float32_norm(rewards: list[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps) in float32, as LightRFT and OpenRLHF write it."""
    tensor = torch.tensor(rewards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deviation of one number
        return _number(((tensor - tensor.mean()) / (tensor.std() + eps)).tolist())


def _trl_norm(rewards: list[Any]) -> list[float]:
    """The formula of TRL's trainer with TRL's own `nanstd`."""
    tensor = torch.tensor([math.nan if r is None else r for r in rewards])
    spread = trl().nanstd(tensor[None], dim=1) if len(rewards) > 1 else torch.zeros(1)
    return _number(((tensor - tensor.nanmean()) / (spread + 1e-4)).nan_to_num(0.0).tolist())


def _aggregated(peer: str, parts: list[slice], mode: str, width: int = 3, **more: Any) -> list[float]:
    """The mean of what a peer gives for micro-batches, each as wide as told."""
    function = verl().agg_loss if peer == VERL else trinity("algorithm.utils").aggregate_loss
    wide = [torch.nn.functional.pad(tensor, (0, width - 3)) for tensor in (LOSSES_OF_TOKENS, MASK)]
    return [_number(sum(function(wide[0][part], wide[1][part], mode, **more) for part in parts) / len(parts))]


def _whitened(peer: str) -> list[float]:
    module = verl("utils.torch_functional") if peer == VERL else trinity("algorithm.utils")
    return _number(module.masked_whiten(RETURNS, torch.ones(2, 2)).flatten().tolist())


def _apart() -> list[float]:
    return [x for row in RETURNS.tolist() for x in _float32_norm(row, 1e-8)]


_ROWS, _WHOLE = [slice(0, 1), slice(1, 2)], [slice(0, 2)]
PAGE: dict[str, dict[str, Callable[[], list[Any]]]] = {
    "Tool output inside a response": {
        "verl": lambda: _of(VERL, "advantages.gae", TOOL, **DISCOUNT)[:1],
        "Trinity-RFT": lambda: _of(TRINITY, "advantages.gae", TOOL, **DISCOUNT)[:1],
        "SkyRL, slime": lambda: _gae(TOOL, observations="through")[:1],
        "OpenRLHF, LightRFT": lambda: _gae(TOOL, observations="zeroed")[:1],
    },
    "A reward on a trailing tool token": {
        "verl": lambda: _of(VERL, "advantages.gae", TRAILING, **DISCOUNT),
        "Trinity-RFT": lambda: _of(TRINITY, "advantages.gae", TRAILING, **DISCOUNT),
        "SkyRL, slime": lambda: _gae({**TRAILING, "response": [[1, 1, 1]]}, observations="through"),
        "OpenRLHF": lambda: _gae({"values": TRAILING["values"], "mask": TRAILING["mask"], "rewards": [1.0]}),
    },
    "A group of one": {
        "verl": lambda: _of(VERL, "advantages.grpo", LONE),
        "Trinity-RFT": lambda: _of(TRINITY, "advantages.grpo", LONE),
        "TRL": lambda: _trl_norm(LONE["rewards"]),
        "SkyRL": lambda: reference.grpo(**LONE, singleton="raw")["advantages"],
        "OpenRLHF, LightRFT": lambda: _float32_norm(LONE["rewards"], 1e-9),
        "prime-rl": lambda: reference.dr_grpo(**LONE)["advantages"],
    },
    "A group of equal rewards": {
        "LightRFT": lambda: _float32_norm(EQUAL["rewards"], 1e-9)[:1],
        "verl, eps 1e-9": lambda: _of(VERL, "advantages.grpo", EQUAL, eps=1e-9)[:1],
        "verl": lambda: _of(VERL, "advantages.grpo", EQUAL)[:1],
        "Trinity-RFT": lambda: _of(TRINITY, "advantages.grpo", EQUAL)[:1],
        "TRL": lambda: _trl_norm(EQUAL["rewards"])[:1],
    },
    "A reward that is NaN": {
        "verl": lambda: _of(VERL, "advantages.grpo", MISSING),
        "Trinity-RFT": lambda: _of(TRINITY, "advantages.grpo", MISSING),
        "TRL": lambda: _trl_norm(MISSING["rewards"]),
    },
    "Standard deviation": {
        "verl": lambda: _of(VERL, "advantages.grpo", FOUR)[:1],
        "Trinity-RFT, grpo": lambda: _of(TRINITY, "advantages.grpo", FOUR)[:1],
        "Trinity-RFT, rec": lambda: _of(TRINITY, "advantages.rec", FOUR, normalize=True)[:1],
        "TRL": lambda: _trl_norm(FOUR["rewards"])[:1],
        "LightRFT, group_norm": lambda: _float32_norm(FOUR["rewards"], 1e-9)[:1],
        "LightRFT, cpgd": lambda: reference.cpgd(**FOUR)["advantages"][:1],
    },
    "Token mean and micro-batches": {
        "verl, whole batch": lambda: _aggregated(VERL, _WHOLE, "token-mean"),
        "verl, two micro-batches": lambda: _aggregated(VERL, _ROWS, "token-mean"),
        "verl, batch_num_tokens=3": lambda: [2 * x for x in _aggregated(VERL, _ROWS, "token-mean", batch_num_tokens=3)],
        "Trinity-RFT, whole batch": lambda: _aggregated(TRINITY, _WHOLE, "token-mean"),
        "Trinity-RFT, two micro-batches": lambda: _aggregated(TRINITY, _ROWS, "token-mean"),
    },
    "Padding and seq-mean-token-sum-norm": {
        "verl, width 3": lambda: _aggregated(VERL, _WHOLE, "seq-mean-token-sum-norm"),
        "verl, width 6": lambda: _aggregated(VERL, _WHOLE, "seq-mean-token-sum-norm", 6),
        "Trinity-RFT, width 3": lambda: _aggregated(TRINITY, _WHOLE, "seq-mean-token-sum-norm"),
        "Trinity-RFT, width 6": lambda: _aggregated(TRINITY, _WHOLE, "seq-mean-token-sum-norm", 6),
    },
    "Two DPO pairs in one call": {
        "Trinity-RFT": lambda: _of(TRINITY, "losses.dpo", PAIRS, "value", reference_free=True),
        "TRL": lambda: [reference.dpo(**PAIRS, frozen={}, reference_free=True)],
    },
    "Whitening per micro-batch": {
        "verl": lambda: _whitened(VERL),
        "Trinity-RFT": lambda: _whitened(TRINITY),
        "LightRFT, one row per micro-batch": _apart,
    },
}
"""Rows named after a peer alone, or after it and a setting."""
RAN = {"verl", "Trinity-RFT", "TRL"}
"""Peers that pip can install here. TRL's estimator and DPO stand inside its trainers: their formulas, its helpers."""
