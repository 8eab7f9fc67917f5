"""Writes `docs/vectors.json`: `python -m tests.vectors.make`, and with `--peers` what released peers give as well.

Invariant: the file follows from the cases below and from `reference`, byte for byte; without `--peers` what it says of
peers is kept as it is.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.vectors import reference

FILE = Path(__file__).parents[2] / "docs" / "vectors.json"
ABOUT = (
    "Conformance vectors for advantage estimators, KL estimators and losses: what goes in, with which options, and "
    "what must come out. Tokens are lists of rows; null is a number that is not there (NaN), in logits minus infinity. "
    "docs/vectors.md explains the format and works one vector of every function by hand."
)
TOLERANCE = 2e-6

CITES = {
    "advantages.grpo": "GRPO (Shao et al., 2024, arXiv 2402.03300), section 4.1.2: (r - mean) / std",
    "advantages.dr_grpo": "Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): r - mean",
    "advantages.rloo": "RLOO (Ahmadian et al., 2024, arXiv 2402.14740): r - mean of the others",
    "advantages.opmd": "OPMD, as Trinity-RFT has it (Pan et al., 2025, arXiv 2505.17826): r - baseline",
    "advantages.asymre": "AsymRE (Arnal et al., 2025, arXiv 2506.20520): r - (mean + shift)",
    "advantages.rec": "REC (Yao et al., 2025, arXiv 2509.24203): r - mean, or over the deviation",
    "advantages.cpgd": "CPGD (Liu et al., 2025, arXiv 2505.12504): (r - mean) times a weight of the group",
    "advantages.pass_at_k": "Pass@k training (Chen et al., 2025, arXiv 2508.10751): the analytical advantage",
    "advantages.step_wise_grpo": "GRPO (arXiv 2402.03300) of each run's last reward, given to all of its steps",
    "advantages.gigpo": "GiGPO (Feng et al., 2025, arXiv 2505.10978): a run among runs + omega * a step among steps",
    "advantages.gae": "GAE (Schulman et al., 2015, arXiv 1506.02438), equation 16",
    "advantages.ppo": "PPO (Schulman et al., 2017, arXiv 1707.06347), equations 11 and 12; whitened over the batch",
    "advantages.reinforce": "REINFORCE (Williams, 1992): the return to go",
    "advantages.reinforce_plus_plus": "REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): returns, whitened",
    "advantages.reinforce_plus_plus_baseline": "REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)",
    "advantages.remax": "ReMax (Li et al., 2023, arXiv 2310.10505): the greedy response's reward as baseline",
    "advantages.on_policy_distill": "reverse KL as a reward for each token (Agarwal et al., 2023, arXiv 2306.13649)",
    "advantages.jsd": "generalized Jensen-Shannon divergence (arXiv 2306.13649); its slope by the student's p",
    "advantages.clip_b": "Clip-B (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    "advantages.clip_v": "Clip-V (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    "kl.none": "no reference: 0",
    "kl.k1": "Approximating KL Divergence (Schulman, 2020), k1: d = log p - log ref",
    "kl.k2": "Approximating KL Divergence (Schulman, 2020), k2: d^2 / 2",
    "kl.k3": "Approximating KL Divergence (Schulman, 2020), k3: exp(-d) - 1 + d",
    "kl.abs": "the absolute log-ratio |d|, as verl and Trinity-RFT have it",
    "kl.low_var_kl": "k3 with d held within +-20 and the result within +-10, as verl and Trinity-RFT have it",
    "kl.corrected_k3": "DeepSeek-V3.2 (2025), section 3.1, equation 7: p / old times k3; the ratio at most 2",
    "losses.value": "value function clipping (Engstrom et al., 2020, arXiv 2005.12729)",
    "losses.entropy": "entropy bonus (Williams and Peng, 1991): -coef * H",
    "losses.ppo": "PPO (Schulman et al., 2017, arXiv 1707.06347), equation 7; dual clip: arXiv 1912.09729",
    "losses.gspo": "GSPO (Zheng et al., 2025, arXiv 2507.18071): the ratio of whole rows, exp(mean of log-ratios)",
    "losses.gmpo": "GMPO (Zhao et al., 2025, arXiv 2507.20673): the geometric mean of clipped ratios",
    "losses.sapo": "SAPO (Gao et al., 2025, arXiv 2511.20347): 4 / tau * sigmoid(tau * (r - 1))",
    "losses.cpg": "CPGD (Liu et al., 2025, arXiv 2505.12504): the clipped policy gradient on log p",
    "losses.importance_sampling": "importance-sampled policy gradient (Degris et al., 2012): -A * r",
    "losses.cispo": "CISPO (MiniMax-M1, 2025, arXiv 2506.13585): -A * clip(r) * log p, clip(r) a constant",
    "losses.topr": "TOPR (Le Roux et al., 2025, arXiv 2503.14286): the ratio within [0, 1] where A is not positive",
    "losses.opmd": "OPMD, as Trinity-RFT has it (arXiv 2505.17826), after Kimi k1.5 (2025, arXiv 2501.12599)",
    "losses.sppo": "softmax PPO (Vaswani et al., 2022, arXiv 2108.05828): -A * log r within a range",
    "losses.rec": "REC (Yao et al., 2025, arXiv 2509.24203): REINFORCE with clip, weight and regularizer apart",
    "losses.sft": "maximum likelihood: -log p",
    "losses.sft_is": "Dynamic Fine-Tuning (Wu et al., 2025, arXiv 2508.05629): -p * log p, p a constant",
    "losses.sft_phi": "CHORD (Zhang et al., 2025, arXiv 2508.11408): -p * (1 - p) * log p, the weight a constant",
    "losses.mix": "(1 - mu) * PPO over own rows + mu * maximum likelihood over expert rows, as Trinity-RFT has it",
    "losses.mix_chord": "CHORD (Zhang et al., 2025, arXiv 2508.11408): mu by a schedule, the expert by phi",
    "losses.dpo": "DPO (Rafailov et al., 2023, arXiv 2305.18290), equation 7; one logit for each pair",
    "losses.dpo_sums": "DPO (Rafailov et al., 2023, arXiv 2305.18290), equation 7, of sums",
    "losses.kl": "coef times the aggregate of a KL estimate (Schulman, 2020)",
    "aggregate.aggregate": "token-mean: DAPO (Yu et al., 2025); seq-mean-token-mean: GRPO; sum-norm: Dr. GRPO",
    "groups.whiten": "(x - mean) / sqrt(variance + eps) over the tokens that count",
    "filters.high_entropy_mask": "Beyond the 80/20 rule (Wang et al., 2025, arXiv 2506.01939)",
    "filters.clip_filter_like_weight_func": "CPGD (arXiv 2505.12504): min(groups / groups that differ, clip)",
    "shaping.overlong_penalty": "DAPO (Yu et al., 2025, arXiv 2503.14476), equation 13",
    "corrections.importance_weights": "truncated importance sampling (Yao et al., 2025): min(exp(log-ratio), cap)",
    "corrections.diagnostics": "k1, k3 of KL(engine || policy); chi2 = mean(w^2) - 1, ESS = (sum w)^2 / (N sum w^2)",
    "logprobs.from_logits": "log softmax(x / T)[label] and the entropy of softmax(x / T)",
    "logprobs.entropy_from_logits": "-sum p log p with p = softmax(x / T)",
}

TRINITY, LIGHTRFT = "after Trinity-RFT's case {}", "after LightRFT's case {}"
CASES: list[dict[str, Any]] = []


def case(name: str, function: str, inputs: dict[str, Any], shared: str = "", **options: Any) -> None:
    cites = CITES[function] + (f"; {shared}" if shared else "")
    CASES.append({"id": name, "function": function, "cites": cites, "inputs": inputs, "options": options})


# --- estimators that compare rows -----------------------------------------------------------------------------------

FOUR = {"rewards": [0.0, 0.0, 1.0, 0.5], "groups": ["a"] * 4, "mask": [[1, 1], [1, 1, 1], [1], [1, 0, 1]]}
TWO_GROUPS = {"rewards": [1.0, 0.0, 0.0, 3.0, 1.0], "groups": ["a", "a", "b", "b", "b"]}
LONE = {"rewards": [0.7, 1.0, 0.0], "groups": ["a", "b", "b"], "mask": [[1, 1], [1], []]}
HOLES = {"rewards": [1.0, None, 0.0, 0.5], "groups": ["a"] * 4, "mask": [[1, 0, 1], [1, 1], [1], [0, 0]]}
EQUAL = {"rewards": [0.1] * 8, "groups": ["a"] * 8}
SAME_RUN = {"rewards": [1.0, 1.0, 0.0, 0.5], "groups": ["a"] * 4, "runs": [0, 0, 1, 2]}

case("grpo", "advantages.grpo", FOUR, TRINITY.format("adv_grpo_four"))
case("grpo-singleton", "advantages.grpo", LONE, "a lone row scores 0")
case("grpo-singleton-raw", "advantages.grpo", LONE, TRINITY.format("adv_grpo_singleton"), singleton="raw")
case("grpo-constant", "advantages.grpo", EQUAL, LIGHTRFT.format("grpo_zero_variance_blowup_0.1_n8"), eps=1e-9)
case("grpo-missing", "advantages.grpo", HOLES, TRINITY.format("adv_grpo_nan"))
case("grpo-population", "advantages.grpo", FOUR, std="population")
case("grpo-batch-std", "advantages.grpo", TWO_GROUPS, TRINITY.format("adv_grpo_batch_std"), level="batch")
case("grpo-runs", "advantages.grpo", SAME_RUN, "a run of two rows counts once")

case("dr_grpo", "advantages.dr_grpo", TWO_GROUPS)
case("dr_grpo-missing", "advantages.dr_grpo", HOLES)
case("dr_grpo-singleton-raw", "advantages.dr_grpo", LONE, singleton="raw")

case(
    "rloo",
    "advantages.rloo",
    {"rewards": [1.0, 0.0, 0.0, 1.0], "groups": ["a"] * 4},
    LIGHTRFT.format("naive_process_rloo"),
)
case("rloo-singleton", "advantages.rloo", LONE, LIGHTRFT.format("rloo_n1_nan"))
case("rloo-constant", "advantages.rloo", EQUAL)
case("rloo-missing", "advantages.rloo", HOLES)

PAIR = {"rewards": [0.0, 1.0], "groups": ["a", "a"], "mask": [[1, 1], [1]]}
case("opmd", "advantages.opmd", PAIR, TRINITY.format("adv_opmd"))
case("opmd-logavgexp", "advantages.opmd", PAIR, TRINITY.format("adv_opmd_logavgexp"), baseline="logavgexp", tau=0.5)
case("opmd-constant", "advantages.opmd", EQUAL, baseline="logavgexp")

case(
    "asymre",
    "advantages.asymre",
    {"rewards": [0.0, 1.0, 1.0, 1.0], "groups": ["a", "a", "b", "b"]},
    TRINITY.format("adv_asymre"),
)
case("asymre-shift", "advantages.asymre", HOLES, shift=0.25)

case(
    "rec",
    "advantages.rec",
    {"rewards": [0.0, 1.0, 1.0], "groups": ["a"] * 3},
    TRINITY.format("adv_rec_norm"),
    normalize=True,
)
case("rec-centered", "advantages.rec", HOLES)
case("rec-singleton", "advantages.rec", LONE, TRINITY.format("adv_rec_singleton"), singleton="raw")

case(
    "cpgd",
    "advantages.cpgd",
    {"rewards": [1.0, 2.0], "groups": ["a", "a"], "mask": [[1, 1, 1], [1, 1]]},
    LIGHTRFT.format("cpgd_2d_STD_weight"),
)
case(
    "cpgd-none",
    "advantages.cpgd",
    {"rewards": [1.0, 2.0], "groups": ["a", "a"], "mask": [[1, 1, 1], [1, 1, 0]]},
    LIGHTRFT.format("cpgd_2d_none"),
    weight="none",
)
case(
    "cpgd-clip_filter_like",
    "advantages.cpgd",
    {"rewards": [1.0, 0.0, 2.0, 2.0, 3.0, 3.0], "groups": list("aabbcc")},
    weight="clip_filter_like",
    weight_clip=2.0,
)
APART = {"rewards": [0.0, 1.0, 0.0, 3.0], "groups": ["a"] * 4, "runs": [0, 0, 1, 1]}
case("grpo-runs-apart", "advantages.grpo", APART, "rows of one run that were rewarded apart")

case("pass_at_k", "advantages.pass_at_k", {"rewards": [1.0, 0.0, 0.0, 0.0], "groups": ["a"] * 4}, k=2)
case(
    "pass_at_k-default", "advantages.pass_at_k", {"rewards": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, None], "groups": ["a"] * 7}
)
case(
    "pass_at_k-sure",
    "advantages.pass_at_k",
    {"rewards": [1.0, 1.0, 1.0, 0.0], "groups": ["a"] * 4},
    "fewer than k wrong: exactly 0",
    k=2,
)

STEPS = {
    "rewards": [9.0, 0.0, 1.0, 9.0, 2.0],
    "groups": ["t"] * 5,
    "runs": [0, 0, 1, 2, 2],
    "steps": [0, 1, 0, 0, 1],
    "mask": [[1, 1], [1], [1], [1, 0, 1], [1]],
}
case("step_wise_grpo", "advantages.step_wise_grpo", STEPS, TRINITY.format("adv_stepwise"))
case(
    "step_wise_grpo-step_norm", "advantages.step_wise_grpo", STEPS, TRINITY.format("adv_stepwise_norm"), step_norm=True
)
case(
    "step_wise_grpo-out-of-order",
    "advantages.step_wise_grpo",
    {"rewards": [0.0, 9.0, 1.0], "groups": ["t"] * 3, "runs": [0, 0, 1], "steps": [1, 0, 0]},
    "the last step is the one with the largest number",
)

ANCHORS = {
    "step_rewards": [0.0, 1.0, 0.5, 0.0],
    "groups": ["t"] * 4,
    "runs": [0, 0, 1, 1],
    "steps": [0, 1, 0, 1],
    "states": ["a", "b", "a", "c"],
}
ACROSS = {
    "step_rewards": [0.0, 1.0, 5.0, 7.0],
    "groups": ["t", "t", "u", "u"],
    "runs": [0, 1, 0, 1],
    "steps": [0, 0, 0, 0],
    "states": ["same"] * 4,
}
case("gigpo", "advantages.gigpo", ANCHORS, TRINITY.format("adv_gigpo"))
case(
    "gigpo-std",
    "advantages.gigpo",
    ANCHORS,
    TRINITY.format("adv_gigpo_std_gamma"),
    normalize="std",
    gamma=0.5,
    omega=2.0,
)
case("gigpo-across-tasks", "advantages.gigpo", ACROSS, TRINITY.format("adv_gigpo_cross_task") + " (the better value)")

# --- estimators over time -------------------------------------------------------------------------------------------

TOOL = {
    "token_rewards": [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]],
    "values": [[0.5, 0.6, 0.2, 0.8, 0.9, 0.7, 0.9]],
    "mask": [[1, 1, 0, 0, 0, 1, 1]],
}
TRAILING = {
    "token_rewards": [[0.0, 0.0, 1.0]],
    "values": [[0.5, 0.6, 0.9]],
    "mask": [[1, 1, 0]],
    "response": [[1, 1, 1]],
}
GAP = {"token_rewards": [[0.0, 0.0, 1.0]], "values": [[0.5, 0.9, 0.2]], "mask": [[1, 0, 1]]}
THREE = {"token_rewards": [[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]], "values": [[0.5, 0.5], [1.0, 1.0], [2.0, 2.0]]}
BROKEN = {
    "token_rewards": [[0.0, None], [None, 1.0, 2.0], [], [0.5]],
    "values": [[0.3, 0.4], [None, 0.5, 0.1], [], [0.2]],
    "mask": [[1, 1], [0, 1, 1], [], [1]],
}
case(
    "gae",
    "advantages.gae",
    GAP,
    LIGHTRFT.format("gae_interior_mask_wrong_bootstrap") + " (the better value)",
    gamma=0.9,
    lam=0.5,
)
case("gae-tool-skip", "advantages.gae", TOOL, gamma=0.95, lam=0.95)
case("gae-tool-through", "advantages.gae", TOOL, gamma=0.95, lam=0.95, observations="through")
case("gae-tool-zeroed", "advantages.gae", TOOL, gamma=0.95, lam=0.95, observations="zeroed")
case("gae-trailing-drop", "advantages.gae", TRAILING, "a reward on a trailing tool token", gamma=0.95, lam=0.95)
case("gae-trailing-carry", "advantages.gae", TRAILING, gamma=0.95, lam=0.95, off_action_rewards="carry")
case("gae-trailing-through", "advantages.gae", TRAILING, gamma=0.95, lam=0.95, observations="through")
case("gae-missing", "advantages.gae", BROKEN, "a missing reward, an empty row", gamma=0.9, lam=0.8)
case(
    "gae-whole-rewards",
    "advantages.gae",
    {"rewards": [1.0, 2.0], "values": [[0.1, 0.2], [0.3]], "mask": [[1, 1], [1]]},
    clip=0.85,
)
case("ppo-advantage", "advantages.ppo", THREE, TRINITY.format("adv_ppo_gae"), gamma=0.9, lam=0.8)
case("ppo-advantage-population", "advantages.ppo", BROKEN, gamma=0.9, lam=0.8, std="population", eps=0.0)
case("ppo-advantage-tool", "advantages.ppo", TOOL, gamma=0.95, lam=0.95)

PENALTY = {"token_rewards": [[-0.1, -0.2, 1.0], [-0.1, 2.0, 5.0], []], "mask": [[1, 1, 1], [1, 1, 0], []]}
case("reinforce", "advantages.reinforce", PENALTY, gamma=0.5)
case(
    "reinforce-rewards",
    "advantages.reinforce",
    {"rewards": [3.0, None, 1.0], "mask": [[1, 0, 1], [1, 1], [0]]},
    TRINITY.format("adv_reinforce"),
)
case("reinforce-carry", "advantages.reinforce", PENALTY, off_action_rewards="carry")
case("reinforce-rows", "advantages.reinforce", {"rewards": [3.0, None, -1.0]}, "without tokens each row is one action")
WITHOUT_VALUES = {"token_rewards": THREE["token_rewards"]}
case("reinforce_plus_plus", "advantages.reinforce_plus_plus", WITHOUT_VALUES, TRINITY.format("adv_reinforcepp"))
case(
    "reinforce_plus_plus-gamma",
    "advantages.reinforce_plus_plus",
    WITHOUT_VALUES,
    TRINITY.format("adv_reinforcepp_gamma"),
    gamma=0.5,
)
case(
    "reinforce_plus_plus-constant",
    "advantages.reinforce_plus_plus",
    {"rewards": [0.1, 0.1, 0.1], "mask": [[1, 1], [1], [0]]},
    "equal returns: exactly 0",
)
case(
    "reinforce_plus_plus-tool",
    "advantages.reinforce_plus_plus",
    {"token_rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.5]], "mask": [[1, 0, 0, 1], [1, 1]]},
    gamma=0.5,
)
BASELINE = {"rewards": [1.0, 0.0, 3.0, 1.0], "groups": ["a", "a", "b", "b"], "mask": [[1, 1], [1], [1, 0, 1], [1]]}
case("reinforce_plus_plus_baseline", "advantages.reinforce_plus_plus_baseline", BASELINE)
case(
    "reinforce_plus_plus_baseline-plain",
    "advantages.reinforce_plus_plus_baseline",
    {**BASELINE, "rewards": [1.0, 0.0, 3.0, None], "token_rewards": [[-0.1, 0.0], [-0.2], [0.0, 9.0, -0.3], [0.0]]},
    LIGHTRFT.format("naive_process_reinforce_baseline"),
    whiten=False,
)
case(
    "remax",
    "advantages.remax",
    {"token_rewards": [[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]], "baselines": [1.0, 1.0, 1.0]},
    TRINITY.format("adv_remax"),
)
case(
    "remax-hard",
    "advantages.remax",
    {
        "rewards": [1.0, 2.0, None, 1.0],
        "baselines": [0.25, None, 1.0, 0.5],
        "mask": [[1, 0, 1], [1], [1], []],
    },
    "a missing baseline, a missing reward, an empty row",
)

# --- estimators of single tokens ------------------------------------------------------------------------------------

HALF, QUARTER = round(math.log(0.5), 12), round(math.log(0.25), 12)
TEACHER = {
    "old_logprobs": [[HALF, HALF], [QUARTER, None]],
    "teacher_logprobs": [[QUARTER, HALF], [HALF, 0.0]],
    "mask": [[1, 1], [1, 0]],
}
case("on_policy_distill", "advantages.on_policy_distill", TEACHER, TRINITY.format("adv_opd"))
case("on_policy_distill-coef", "advantages.on_policy_distill", TEACHER, coef=0.5)
case("jsd", "advantages.jsd", TEACHER, TRINITY.format("adv_jsd") + " (the better value)")
case("jsd-beta1", "advantages.jsd", TEACHER, "is on_policy_distill", beta=1.0)
case("jsd-beta0", "advantages.jsd", TEACHER, "the forward KL's q / p - 1", beta=0.0)
case("jsd-slope", "advantages.jsd", TEACHER, beta=0.25, coef=2.0, normalize=False)

CLIPB = {
    "rewards": [0.0, 1.0],
    "groups": ["a", "a"],
    "mask": [[1, 1, 1], [1, 1, 1]],
    "old_logprobs": [[-0.5, -0.5, -0.5], [-0.5, -0.5, -0.5]],
    "entropy": [[0.7, 1.2, 1.2], [1.2, 1.2, 1.2]],
}
case("clip_b", "advantages.clip_b", CLIPB, mu=1.0)
case("clip_b-default", "advantages.clip_b", CLIPB)
CLIPV = {
    "rewards": [1.0, 3.0, 5.0],
    "groups": ["a"] * 3,
    "mask": [[1, 1], [1, 1], [1, 1]],
    "old_logprobs": [[-0.1, -2.0], [-0.5, -3.0], [-1.0, -0.01]],
    "entropy": [[0.3, 1.0], [0.7, 2.0], [1.0, 0.05]],
    "necs": [[0.9, 0.1], [0.2, 0.3], [0.8, 0.6]],
}
case("clip_v", "advantages.clip_v", CLIPV, mu=1.0)
case("clip_v-default", "advantages.clip_v", CLIPV)
case(
    "clip_v-trinity",
    "advantages.clip_v",
    CLIPV,
    TRINITY.format("adv_clipv_cap"),
    mu=0.1,
    centered=False,
    zero_advantage="uncapped",
)

# --- divergences ----------------------------------------------------------------------------------------------------

APART = {
    "logprobs": [[-1.0, -2.0], [-0.5, None, -3.0]],
    "ref_logprobs": [[-1.5, -1.0], [-0.75, -1.0, -3.25]],
    "mask": [[1, 1], [1, 0, 1]],
}
for name in ("none", "k1", "k2", "k3", "abs", "low_var_kl"):
    case(f"kl-{name}", f"kl.{name}", APART, TRINITY.format(f"kl_{name}") if name in ("k2", "k3", "abs") else "")
FAR = {"logprobs": [[-30.0, -4.0, -0.1]], "ref_logprobs": [[0.0, -1.0, -30.0]]}
case("kl-low_var_kl-far", "kl.low_var_kl", FAR, TRINITY.format("kl_low_var_clamped"))
case("kl-low_var_kl-options", "kl.low_var_kl", FAR, log_ratio_clamp=2.0, bound=5.0)
case("kl-corrected_k3-without", "kl.corrected_k3", APART, "without an old policy it is k3")
OLD = {"logprobs": [[-1.0, -2.0]], "ref_logprobs": [[-1.5, -1.0]], "old_logprobs": [[-1.2, -2.5]]}
case("kl-corrected_k3", "kl.corrected_k3", OLD, TRINITY.format("kl_corrected_k3"))
case("kl-corrected_k3-detached", "kl.corrected_k3", OLD, detach_ratio=True)
case("kl-corrected_k3-cap", "kl.corrected_k3", OLD, cap=1.5)


def _of_update(inputs: dict[str, Any]) -> dict[str, Any]:
    """Name the log-probs of a divergence as a loss does."""
    return {"new_logprobs" if name == "logprobs" else name: rows for name, rows in inputs.items()}


# --- losses ---------------------------------------------------------------------------------------------------------

HAND = {"new_logprobs": [[-1.0, -2.0]], "old_logprobs": [[-1.2, -1.5]], "advantages": [1.0]}
DOWN = {**HAND, "advantages": [-1.0]}
BATCH = {
    "new_logprobs": [[-1.0, -2.0, -0.5], [-0.7, -1.2, None], [-0.2, None, -0.4], [None, -1.0, -0.1], []],
    "old_logprobs": [[-1.2, -1.5, -0.5], [-0.7, -2.2, -1.0], [-0.25, -0.3, -2.0], [-1.0, -1.5, -0.1], []],
    "advantages": [1.0, -1.0, 0.5, -2.0, 1.0],
    "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], []],
}
TWO_ROWS = {
    "new_logprobs": [[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]],
    "old_logprobs": [[-1.2, -1.5, -0.5], [-0.1, -1.5, -2.0]],
    "advantages": [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]],
    "mask": [[1, 1, 0], [1, 1, 1]],
}
AGAINST = {
    "new_logprobs": [[-0.5, -1.0, -3.0], [-2.0]],
    "old_logprobs": [[-2.5, -1.1, -1.0], [-1.5]],
    "advantages": [[-1.0, -0.5, -2.0], [0.5]],
}
case("ppo", "losses.ppo", HAND)
case("ppo-batch", "losses.ppo", BATCH, TRINITY.format("loss_ppo"))
case(
    "ppo-by-row", "losses.ppo", TWO_ROWS, LIGHTRFT.format("ppo_policy_loss"), mode="seq-mean-token-mean", dual_clip=None
)
case("ppo-dual-clip", "losses.ppo", AGAINST, "the first ratio is above 3")
case("ppo-no-dual-clip", "losses.ppo", AGAINST, dual_clip=None)
case("ppo-clip-higher", "losses.ppo", TWO_ROWS, "decoupled clip: DAPO (arXiv 2503.14476)", clip_low=0.2, clip_high=0.28)
case(
    "ppo-sequence_delta",
    "losses.ppo",
    AGAINST,
    "off-policy sequence masking: DeepSeek-V3.2, section 3.1",
    sequence_delta=-0.1,
)
case("ppo-policy_gradient", "losses.ppo", TWO_ROWS, policy_gradient=True)
case(
    "ppo-whole",
    "losses.ppo",
    TWO_ROWS,
    "a micro-batch of a batch of 10 tokens",
    denominators={"tokens": 10, "sequences": 4, "samples": 4},
)
case("ppo-weights", "losses.ppo", TWO_ROWS, weights=[[0.5, 1.0, 1.0], [2.0, 0.0, 1.0]])
case(
    "ppo-empty",
    "losses.ppo",
    {"new_logprobs": [[None], []], "old_logprobs": [[None], []], "advantages": [1.0, 1.0], "mask": [[0], []]},
    "no token counts: 0, not NaN",
)

case("gspo", "losses.gspo", HAND, clip_low=0.2, clip_high=0.2)
case("gspo-batch", "losses.gspo", BATCH, TRINITY.format("loss_gspo_wide"), clip_low=0.3, clip_high=0.3)
case("gspo-default", "losses.gspo", BATCH)
case("gmpo", "losses.gmpo", {**HAND, "old_logprobs": [[-1.8, -1.5]]})
case("gmpo-batch", "losses.gmpo", BATCH)
case("sapo", "losses.sapo", HAND)
case("sapo-batch", "losses.sapo", BATCH, TRINITY.format("loss_sapo_gradient") + " (the better value)")
case("sapo-detached", "losses.sapo", BATCH, TRINITY.format("loss_sapo"), detach_gate=True)
case("cpg", "losses.cpg", HAND)
case("cpg-rows", "losses.cpg", TWO_ROWS, "LightRFT gives 0.0838957")
case("cpg-down", "losses.cpg", {**DOWN, "old_logprobs": [[-1.2, -1.9]]}, clip_low=0.05)
case("importance_sampling", "losses.importance_sampling", HAND)
case("importance_sampling-batch", "losses.importance_sampling", BATCH, TRINITY.format("loss_importance_sampling"))
case("cispo", "losses.cispo", HAND)
case("cispo-batch", "losses.cispo", BATCH, TRINITY.format("loss_cispo"))
case(
    "cispo-mask_clip",
    "losses.cispo",
    BATCH,
    TRINITY.format("loss_cispo_mask"),
    mask_clip=True,
    mask_clip_low=0.2,
    mask_clip_high=0.2,
)
case("topr", "losses.topr", DOWN)
case("topr-batch", "losses.topr", BATCH, TRINITY.format("loss_topr"))
case(
    "topr-sequence",
    "losses.topr",
    {**AGAINST, "advantages": [-1.0, -0.5]},
    "the ratio of the whole row",
    level="sequence",
)
case("opmd-loss", "losses.opmd", {"new_logprobs": [[-1.0, -2.0]], "advantages": [1.0]})
case("opmd-loss-tau", "losses.opmd", {key: BATCH[key] for key in ("new_logprobs", "advantages", "mask")}, tau=0.25)
case("sppo", "losses.sppo", HAND)
case("sppo-batch", "losses.sppo", BATCH, TRINITY.format("loss_sppo"))
case(
    "rec-loss",
    "losses.rec",
    HAND,
    TRINITY.format("loss_rec_oneside"),
    clip_mode="one-side",
    weight="importance_sampling",
)
case("rec-loss-default", "losses.rec", BATCH, TRINITY.format("loss_rec"))
case(
    "rec-loss-ring",
    "losses.rec",
    BATCH,
    TRINITY.format("loss_rec_ring"),
    clip_mode="ring",
    weight="importance_sampling",
    regularizer="k2",
    regularizer_coef=0.1,
)
case(
    "rec-loss-gspo",
    "losses.rec",
    BATCH,
    TRINITY.format("loss_rec_gspo"),
    clip_mode="gspo-one-side",
    weight="gspo_importance_sampling",
)
case(
    "rec-loss-advantage",
    "losses.rec",
    BATCH,
    clip_mode="two-side",
    weight="advantage",
    temperature=2.0,
    regularizer="forward-kl",
    regularizer_coef=0.1,
)
TEXT = {"new_logprobs": [[-1.0, -2.0]]}
LONG = {"new_logprobs": [[-1.0, -2.0, None], [-0.05, -0.7], []], "mask": [[1, 1, 0], [1, 1], []]}
case("sft", "losses.sft", TEXT)
case("sft-batch", "losses.sft", LONG, mode="seq-mean-token-sum")
case("sft_is", "losses.sft_is", TEXT)
case("sft_is-batch", "losses.sft_is", LONG, TRINITY.format("loss_sft_is"))
case("sft_phi", "losses.sft_phi", TEXT)
case("sft_phi-cutoff", "losses.sft_phi", LONG, TRINITY.format("loss_sft_phi_cut"), cutoff=0.6)
EXPERT = {**BATCH, "expert_mask": [False, True, False, True, False]}
case(
    "mix",
    "losses.mix",
    {
        "new_logprobs": [[-1.0], [-2.0]],
        "old_logprobs": [[-1.1], [None]],
        "advantages": [1.0, 0.0],
        "expert_mask": [False, True],
    },
    mu=0.25,
)
case("mix-batch", "losses.mix", EXPERT, TRINITY.format("loss_mix"))
case(
    "mix-scaled",
    "losses.mix",
    EXPERT,
    TRINITY.format("loss_mix_metric_scale"),
    usual_scale=2.0,
    expert_scale=0.5,
    mode="seq-mean-token-sum",
)
case(
    "mix_chord",
    "losses.mix_chord",
    {
        "new_logprobs": [[-1.0], [-2.0]],
        "old_logprobs": [[-1.1], [None]],
        "advantages": [1.0, 0.0],
        "expert_mask": [False, True],
        "step": 5,
    },
    warmup=10,
    peak=0.9,
)
case("mix_chord-batch", "losses.mix_chord", {**EXPERT, "step": 3}, TRINITY.format("loss_mix_chord"))
case(
    "mix_chord-decay",
    "losses.mix_chord",
    {**EXPERT, "step": [15] * 5},
    warmup=10,
    decay=20,
    peak=0.9,
    valley=0.05,
    phi=False,
)
PAIRS = {
    "new_logprobs": [[40.0], [0.0], [20.0], [0.0]],
    "pairs": ["a", "b", "b", "a"],
    "chosen": [True, True, False, False],
}
REFERRED = {
    "new_logprobs": [[-1.0, -2.0, -0.5], [-0.7, -1.2, None], [-0.2, None, -0.4], [None, -1.0, -0.1]],
    "ref_logprobs": [[-1.1, -1.9, -0.6], [-0.9, -1.0, -2.5], [-0.3, -0.2, -0.5], [-1.8, -1.2, -0.2]],
    "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]],
    "pairs": ["a", "a", "b", "b"],
    "chosen": [True, False, True, False],
}
case("dpo", "losses.dpo", PAIRS, "one logit for each pair, not one for both", reference_free=True)
case("dpo-batch", "losses.dpo", REFERRED, TRINITY.format("loss_dpo") + " (the better value)")
case(
    "dpo-smooth",
    "losses.dpo",
    REFERRED,
    TRINITY.format("loss_dpo_smooth") + " (the better value)",
    label_smoothing=0.1,
    beta=0.5,
)
case("dpo-ipo", "losses.dpo", REFERRED, "IPO (Azar et al., 2023, arXiv 2310.12036)", variant="ipo", beta=0.5)
case("dpo-hinge", "losses.dpo", REFERRED, "SLiC-HF (Zhao et al., 2023, arXiv 2305.10425)", variant="hinge", beta=0.5)
case(
    "dpo-empty",
    "losses.dpo",
    {**PAIRS, "new_logprobs": [[40.0], [0.0], [20.0], []], "mask": [[1], [1], [1], []]},
    "a pair with an empty row is left out",
    reference_free=True,
)
SUMS = {
    "chosen_logprobs": [40.0, 0.0],
    "rejected_logprobs": [0.0, 20.0],
    "ref_chosen_logprobs": [0.0, 0.0],
    "ref_rejected_logprobs": [0.0, 0.0],
}
case("dpo_sums", "losses.dpo_sums", SUMS)
case("dpo_sums-ipo", "losses.dpo_sums", {**SUMS, "ref_chosen_logprobs": [38.0, 1.0]}, variant="ipo", beta=0.25)
CRITIC = {"values": [[1.0, 2.0]], "returns": [[0.0, 3.0]], "old_values": [[0.5, 1.9]]}
case("value", "losses.value", CRITIC, LIGHTRFT.format("value_loss_clipped"))
case(
    "value-plain",
    "losses.value",
    {key: CRITIC[key] for key in ("values", "returns")},
    LIGHTRFT.format("value_loss_unclipped"),
    clip=None,
)
case(
    "value-token-mean",
    "losses.value",
    {
        "values": [[1.0, 2.0, None], [0.3], []],
        "returns": [[0.5, 1.0, 0.0], [1.0], []],
        "old_values": [[1.5, 1.9, 0.0], [0.9], []],
        "mask": [[1, 1, 0], [1], []],
    },
    mode="token-mean",
)
case("entropy", "losses.entropy", {"entropy": [[1.0, 3.0]]}, coef=0.1)
case(
    "entropy-rows",
    "losses.entropy",
    {"entropy": [[1.0, 3.0, None], [0.5]], "mask": [[1, 1, 0], [1]]},
    coef=0.1,
    mode="seq-mean-token-mean",
)
case("entropy-default", "losses.entropy", {"entropy": [[1.0, 3.0]]}, "the default coefficient is 0")
case("kl-loss", "losses.kl", {"new_logprobs": [[-1.0, -2.0]], "ref_logprobs": [[-1.5, -1.0]]}, coef=0.5)
for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
    case(
        f"kl-loss-{mode}", "losses.kl", _of_update(APART), TRINITY.format(f"kl_loss_{mode}"), estimator="k3", mode=mode
    )
case(
    "kl-loss-corrected",
    "losses.kl",
    _of_update({**OLD, "mask": [[1, 1]]}),
    estimator="corrected_k3",
    estimator_options={"cap": 1.5},
    coef=1.0,
)

# --- the rest -------------------------------------------------------------------------------------------------------

VALUES = {"values": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "mask": [[1, 1, 0], [1, 0, 0]]}
case("aggregate-token-mean", "aggregate.aggregate", VALUES)
case("aggregate-seq-mean-token-mean", "aggregate.aggregate", VALUES, mode="seq-mean-token-mean")
case(
    "aggregate-seq-mean-token-sum",
    "aggregate.aggregate",
    VALUES,
    TRINITY.format("agg_seq-mean-token-sum"),
    mode="seq-mean-token-sum",
)
case(
    "aggregate-seq-mean-token-sum-norm",
    "aggregate.aggregate",
    VALUES,
    TRINITY.format("agg_seq-mean-token-sum-norm"),
    mode="seq-mean-token-sum-norm",
    norm=3.0,
)
case(
    "aggregate-empty-row",
    "aggregate.aggregate",
    {"values": [[1.0, 2.0], [None], []], "mask": [[1, 1], [0], []]},
    "an empty row is no row",
    mode="seq-mean-token-mean",
)
case(
    "aggregate-nan", "aggregate.aggregate", {"values": [[1.0, None], [2.0]]}, "NaN on a token that counts is not hidden"
)
case(
    "aggregate-whole",
    "aggregate.aggregate",
    VALUES,
    "a micro-batch of a batch of 12 tokens",
    denominators={"tokens": 12, "sequences": 5, "samples": 5},
)
WHITE = {"values": [[1.0, 2.0], [3.0, None]], "mask": [[1, 1], [1, 0]]}
case("whiten", "groups.whiten", WHITE, TRINITY.format("masked_whiten"))
case("whiten-std", "groups.whiten", WHITE, "LightRFT's place of eps", eps_in="std", eps=0.5, std="population")
case("whiten-floor", "groups.whiten", WHITE, LIGHTRFT.format("cross_batch_norm"), eps_in="floor", std="population")
case("whiten-keep-mean", "groups.whiten", WHITE, shift_mean=False)
case("whiten-constant", "groups.whiten", {"values": [[0.1, 0.1], [0.1]]}, "equal tokens: exactly 0")
ENTROPIES = {
    "entropy": [[1.0, 5.0, 2.0, 6.0, 3.0], [2.0, 4.0, 1.0, 5.0, None]],
    "mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    "ratio": 0.4,
}
case("high_entropy_mask", "filters.high_entropy_mask", ENTROPIES, LIGHTRFT.format("high_entropy_mask_doc_example"))
case("high_entropy_mask-batch", "filters.high_entropy_mask", ENTROPIES, over="batch")
case(
    "high_entropy_mask-all",
    "filters.high_entropy_mask",
    {**ENTROPIES, "ratio": 0.0},
    LIGHTRFT.format("high_entropy_ratio_zero_returns_action_mask"),
)
case(
    "high_entropy_mask-masked",
    "filters.high_entropy_mask",
    {"entropy": [[-1.0, -2.0, 0.0]], "mask": [[1, 1, 0]], "ratio": 0.5},
    LIGHTRFT.format("high_entropy_picks_masked_token") + " (the better value)",
)
FILTER = "filters.clip_filter_like_weight_func"
case(
    "clip_filter_like_weight_func",
    FILTER,
    {"rewards": [[1.0, 1.0], [0.0, 1.0], [2.0, 2.0], [0.0, 3.0]]},
    LIGHTRFT.format("cfw_half_degenerate"),
)
case(
    "clip_filter_like_weight_func-clipped",
    FILTER,
    {"rewards": [[0.1] * 3] * 4 + [[0.0, 1.0, 0.1]], "lamda": 0.5},
    LIGHTRFT.format("cfw_clipped_to_3"),
)
case(
    "clip_filter_like_weight_func-all",
    FILTER,
    {"rewards": [[1.0, 1.0], [0.0, 0.0]]},
    LIGHTRFT.format("cfw_all_degenerate"),
)
LENGTHS = {"lengths": [12, 10, 7, 6, 0]}
case(
    "overlong_penalty",
    "shaping.overlong_penalty",
    LENGTHS,
    LIGHTRFT.format("overlong_penalty"),
    max_length=10,
    buffer=4,
)
case(
    "overlong_penalty-unbounded",
    "shaping.overlong_penalty",
    LENGTHS,
    "as LightRFT goes on",
    max_length=10,
    buffer=4,
    factor=0.5,
    bounded=False,
)
ENGINE = {
    "old_logprobs": [[-1.0, -1.0, None], [-9.0, -1.0], []],
    "logprobs": [[-1.5, -3.0, 0.0], [-1.0, -1.0], []],
    "mask": [[1, 1, 0], [1, 1], []],
}
case("importance_weights", "corrections.importance_weights", ENGINE)
case("importance_weights-sequence", "corrections.importance_weights", ENGINE, level="sequence", truncate=5.0)
case(
    "importance_weights-geometric",
    "corrections.importance_weights",
    ENGINE,
    level="geometric",
    truncate=None,
    mask_outside=[0.5, 5.0],
)
case("importance_weights-veto", "corrections.importance_weights", ENGINE, veto=1e-3, low=0.5, normalize=True)
case(
    "diagnostics",
    "corrections.diagnostics",
    {"old_logprobs": [[-1.0, -2.0], [-0.5]], "logprobs": [[-1.0, -1.0], [-0.5]]},
)
case(
    "diagnostics-masked",
    "corrections.diagnostics",
    {**ENGINE, "old_logprobs": [[-1.0, -1.0, None], [-2.0, -1.0], []]},
)
LOGITS = {"logits": [[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], [0.5, None, 1.0, 0.0]], "labels": [2, 3, 0]}
case("from_logits", "logprobs.from_logits", LOGITS, LIGHTRFT.format("entropy_from_logits"))
case("from_logits-temperature", "logprobs.from_logits", LOGITS, temperature=0.7)
case(
    "entropy_from_logits",
    "logprobs.entropy_from_logits",
    {"logits": LOGITS["logits"]},
    LIGHTRFT.format("entropy_from_logits"),
)
case("entropy_from_logits-temperature", "logprobs.entropy_from_logits", {"logits": LOGITS["logits"]}, temperature=2.0)


def rounded(value: Any, digits: int = 10) -> Any:
    """Numbers to as many digits as every machine's libm agrees on; never -0."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{digits}g}") + 0.0 if abs(value) > 1e-12 else 0.0
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list) else value


def vectors(peers: dict[str, Any]) -> list[dict[str, Any]]:
    """Every case with what must come out, and what peers give."""
    filled = []
    for case in CASES:
        outputs = rounded(reference.expected(case["function"], case["inputs"], case["options"]))
        filled.append({**case, "outputs": outputs, "tolerance": TOLERANCE, "peers": peers.get(case["id"], {})})
    return filled


def defaults() -> dict[str, dict[str, Any]]:
    """Every function's options where a vector does not give them, as the library's signatures have them."""
    from rollbook import algorithms
    from rollbook.models import logprobs

    registries = {"advantages": algorithms.ESTIMATORS, "kl": algorithms.KL, "losses": algorithms.LOSSES}
    by_function = {}
    for function in sorted({case["function"] for case in CASES}):
        section, name = function.split(".")
        implementation = (
            registries[section][name].function
            if section in registries
            else getattr(logprobs if section == "logprobs" else getattr(algorithms, section), name)
        )
        options = [p for p in inspect.signature(implementation).parameters.values() if p.default is not p.empty]
        plain = {
            p.name: p.default for p in options if p.default is None or isinstance(p.default, (bool, int, float, str))
        }
        inputs = registries[section][name].inputs if section in registries else {}
        by_function[function] = {key: value for key, value in plain.items() if key not in inputs}
    return by_function


def text(peers: dict[str, Any]) -> str:
    """The file: one vector to a line."""
    lines = ",\n".join(json.dumps(vector, allow_nan=False) for vector in vectors(peers))
    usual = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in defaults().items())
    head = f'{{"format": 1,\n"about": {json.dumps(ABOUT)},\n"defaults": {{\n{usual}\n}},\n'
    return f'{head}"vectors": [\n{lines}\n]}}\n'


def written() -> dict[str, Any]:
    """The file as it is."""
    document: dict[str, Any] = json.loads(FILE.read_text())
    return document


def main(arguments: list[str]) -> None:
    peers = {vector["id"]: vector["peers"] for vector in written()["vectors"]} if FILE.exists() else {}
    if "--peers" in arguments:
        from tests.vectors.peers import measured

        peers = {vector["id"]: measured(vector) for vector in vectors({})}
    FILE.write_text(text(peers))
    print(f"{FILE.name}: {len(CASES)} vectors of {len({case['function'] for case in CASES})} functions")


if __name__ == "__main__":
    main(sys.argv[1:])
