"""`check_sync`: whether an engine samples from the weights that are trained; `make_probe` and `check_probe`: whether a
model in another process has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollbook.core.sampling import Prompt
from rollbook.models.head import get_device, get_dtype, probe_ids, scoring, text_config, unwrap
from rollbook.rollout.engine import BaseEngine, WeightSource, WeightSyncError, get_module

TOLERANCES: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest mean difference of log-probs that rounding explains, by the dtype of the weights."""
PROBE_TOKENS = 32
"""Length of the response that is compared."""


class StaleWeightsError(WeightSyncError):
    """Raised when an engine samples from other weights than the policy's."""


def check_sync(
    engine: BaseEngine,
    policy: WeightSource,
    version: int | None = None,
    *,
    tolerance: float | None = None,
) -> float:
    """Check that an engine samples from the weights of a policy.

    The engine samples a response to a probe; the policy computes the log-probs of the same tokens. Engine and policy
    differ by rounding, so the check finds updates that never arrived, went to another model or were loaded in part.
    In 16 bits it does not find that the last, small update is missing; the version of the tokens does.

    Args:
        engine: The engine. All of its replicas are checked.
        policy: An `Actor`, or a transformers model.
        version: Version that the tokens must have; `None` to not check it.
        tolerance: Largest mean difference of the log-probs; by default that of `TOLERANCES` for the less precise of
            the types of policy and engine.

    Returns:
        The mean difference.

    Raises:
        StaleWeightsError: The log-probs or the versions differ.
        WeightSyncError: The engine could not sample the probe, or returned no log-probs.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from rollbook.rollout import TransformersEngine
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64)
    >>> policy, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    >>> engine = TransformersEngine(other)
    >>> engine.update_weights(policy, version=1)
    >>> check_sync(engine, policy, version=1) < 1e-5
    True
    """
    model = get_module(policy)
    prompt = probe_ids(unwrap(model), torch.device("cpu"))[0].tolist()
    positions = getattr(text_config(model), "max_position_embeddings", None) or len(prompt) + PROBE_TOKENS
    samples = engine.generate(
        # Idle replicas get one prompt each.
        [Prompt(token_ids=prompt) for _ in range(getattr(engine, "replica_count", 1))],
        max_tokens=min(PROBE_TOKENS, positions - len(prompt)),
        temperature=1.0,
        logprobs="raw",
        ignore_eos=True,
        seed=0,
    )
    differences = []
    for sample in samples:
        if sample.failed or sample.logprobs is None or sample.logprobs_kind != "raw":
            problem = sample.error or f"{sample.logprobs_kind} log-probs"
            raise WeightSyncError(f"probe: got {problem}, expected a sample with raw log-probs")
        if version is not None and set(sample.versions or (None,)) != {version}:
            raise StaleWeightsError(
                f"probe: got tokens of version {sorted(set(sample.versions or ()))}, expected {version}"
            )
        expected = _teacher_forced(model, sample.prompt_ids, sample.response_ids)
        differences.append((torch.tensor(sample.logprobs) - expected).abs())
    if tolerance is None:
        dtypes = (get_dtype(model), getattr(engine, "dtype", None) or torch.float32)
        tolerance = max(TOLERANCES.get(dtype, max(TOLERANCES.values())) for dtype in dtypes)
    worst = max(range(len(samples)), key=lambda i: float(differences[i].mean()))
    mean, largest = float(differences[worst].mean()), float(differences[worst].max())
    if not mean <= tolerance:
        raise StaleWeightsError(
            f"the engine does not sample from the policy's weights: the log-probs of {len(differences[worst])} tokens "
            f"differ by {mean:.3g} on average and {largest:.3g} at most, expected an average of at most {tolerance:.3g}"
        )
    return mean


def make_probe(policy: WeightSource) -> dict[str, Any]:
    """Return a short sequence and its log-probs, for `check_probe` in a process that loads the weights.

    Args:
        policy: An `Actor`, or a transformers model.

    Returns:
        `prompt`, `response` and `logprobs`: lists of numbers.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64)
    >>> policy, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    >>> probe = make_probe(policy)
    >>> check_probe(policy, probe)
    >>> check_probe(other, probe)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rollbook.rollout.weight_sync.StaleWeightsError: the weights differ from those of the trainer: ...
    """
    model = get_module(policy)
    prompt = probe_ids(unwrap(model), torch.device("cpu"))[0].tolist()
    positions = getattr(text_config(model), "max_position_embeddings", None) or 2 * len(prompt)
    response = prompt[::-1][: positions - len(prompt)]
    return {"prompt": prompt, "response": response, "logprobs": _teacher_forced(model, prompt, response).tolist()}


def check_probe(policy: WeightSource, probe: Mapping[str, Any]) -> None:
    """Check that a model has the weights of the model that made a probe.

    Args:
        policy: An `Actor`, or a transformers model.
        probe: What `make_probe` returned.

    Raises:
        StaleWeightsError: The log-probs differ by more than the `TOLERANCES` allow.
    """
    model = get_module(policy)
    difference = (_teacher_forced(model, probe["prompt"], probe["response"]) - torch.tensor(probe["logprobs"])).abs()
    bound = TOLERANCES.get(get_dtype(model), max(TOLERANCES.values()))
    if not float(difference.mean()) <= bound:
        raise StaleWeightsError(
            f"the weights differ from those of the trainer: the log-probs of {len(difference)} tokens differ by "
            f"{float(difference.mean()):.3g} on average, expected at most {bound:.3g}; are model and seed those of the "
            "trainer?"
        )


def _teacher_forced(model: torch.nn.Module, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> torch.Tensor:
    """Return the raw log-probs [R] of a response, in float32 on the CPU."""
    ids = torch.tensor([[*prompt_ids, *response_ids]], device=get_device(model))
    with scoring(model):
        logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].cpu()
    return logprobs


__all__ = ["TOLERANCES", "StaleWeightsError", "check_probe", "check_sync", "make_probe"]
