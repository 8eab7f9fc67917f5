"""Losses as pure functions of log-probs, in one registry: policy, supervised, preference, critic and mixed.

Invariant: a loss has one value and one gradient, padded or packed, in one batch or in micro-batches with
`denominators`. A row without a token that counts changes neither.

Every policy loss is `f(new_logprobs, old_logprobs, advantages, mask=None, *, ...) -> Loss` and has these options:
`mode` and `norm` (see `aggregate`), `denominators` (of the global batch), and `weights`, [B, R], packed or [B], which
multiply the losses of tokens, leave denominators as they are and carry no gradient. `mask` may be narrower than the
responses, for example the tokens of high entropy: denominators then count only those, as in LightRFT; to keep the
denominators of all tokens, pass `weights` of 0 and 1 instead. `old_logprobs` and `advantages` are constants, so that
`ppo(x, x, a)` has the gradient of the policy and not 0. Advantages are [B, R], packed, or [B] for one per row.

>>> from rollbook.algorithms.losses import LOSSES, ppo
>>> data = {"new_logprobs": [[-1.0, -2.0]], "old_logprobs": [[-1.2, -1.5]], "advantages": [1.0]}
>>> LOSSES.call("ppo", data, clip_high=0.28).value
tensor(-0.9140)
>>> LOSSES.call("ppo", data, clip_hihg=0.28)
Traceback (most recent call last):
    ...
ValueError: ppo: unknown option 'clip_hihg'; did you mean 'clip_high'? (clip_low, clip_high, dual_clip,
log_ratio_clamp, sequence_delta, policy_gradient, mode, norm, denominators, weights)
"""

from rollbook.algorithms.kl import kl_loss
from rollbook.algorithms.losses.mixed import chord_mu, mix, mix_chord, mix_denominators
from rollbook.algorithms.losses.policy import (
    cispo,
    cpg,
    entropy_loss,
    gmpo,
    gspo,
    importance_sampling,
    opmd,
    ppo,
    rec,
    sapo,
    sppo,
    topr,
    value_loss,
)
from rollbook.algorithms.losses.supervised import dpo, dpo_sums, interleaved, sft, sft_is, sft_phi
from rollbook.algorithms.registry import LOSSES

LOSSES.register("kl", source="coef times the aggregate of a KL estimate (Schulman, 2020)", role="regularizer")(kl_loss)

__all__ = [
    "LOSSES",
    "chord_mu",
    "cispo",
    "cpg",
    "dpo",
    "dpo_sums",
    "entropy_loss",
    "gmpo",
    "gspo",
    "importance_sampling",
    "interleaved",
    "kl_loss",
    "mix",
    "mix_chord",
    "mix_denominators",
    "opmd",
    "ppo",
    "rec",
    "sapo",
    "sft",
    "sft_is",
    "sft_phi",
    "sppo",
    "topr",
    "value_loss",
]
