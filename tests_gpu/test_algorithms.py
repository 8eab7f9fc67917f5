"""Estimators, losses and corrections on a device equal those on the CPU, padded and packed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollbook import Experience, Experiences
from rollbook.algorithms import estimate, high_entropy_mask, whiten
from rollbook.algorithms.advantages import ESTIMATORS, gae, grpo, reinforce
from rollbook.algorithms.aggregate import MODES
from rollbook.algorithms.corrections import importance_weights, staleness_weights
from rollbook.algorithms.kl import KL, kl_loss, penalize
from rollbook.algorithms.losses import LOSSES
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.rows import Rows

DEVICE = torch.device("cuda")
ROWS, WIDTH = 9, 700


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return columns [B, R] on the CPU: ragged rows, some with gaps in the mask, one row empty."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, WIDTH, (ROWS,))
    mask = torch.arange(WIDTH) < lengths[:, None]
    mask[::2] &= torch.rand(mask[::2].shape) > 0.2
    mask[3] = False
    names = ("new_logprobs", "old_logprobs", "ref_logprobs", "values", "old_values", "returns", "entropy", "advantages")
    columns = {name: torch.randn(ROWS, WIDTH) * 0.3 - 1 for name in names}
    return {**columns, "mask": mask, "token_rewards": torch.randn(ROWS, WIDTH), "rewards": torch.randn(ROWS)}


def on(device: Any, data: dict[str, torch.Tensor], packed: bool) -> dict[str, Any]:
    """Return the columns on a device; packed rows are complete, so that both layouts have the same slots."""
    moved = {name: value.to(device) for name, value in data.items()}
    if not packed:
        return moved
    return {name: Rows(v.reshape(-1), [WIDTH] * ROWS) if v.dim() == 2 else v for name, v in moved.items()}


def plain(value: Any) -> torch.Tensor:
    tensor = value.values if isinstance(value, Rows) else value
    return tensor.detach().cpu().reshape(-1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("observations", ["skip", "through", "zeroed"])
@pytest.mark.parametrize("carry", ["drop", "carry"])
def test_gae_and_returns(packed: bool, observations: str, carry: str) -> None:
    data = tokens()
    data["token_rewards"][1, data["mask"][1].nonzero()[0]] = math.nan
    data["rewards"][5] = math.inf
    options = {"observations": observations, "off_action_rewards": carry, "gamma": 0.97}
    for name in ("gae", "ppo", "reinforce", "reinforce++"):
        more = {**options, "lam": 0.9} if name in ("gae", "ppo") else options
        needs = ESTIMATORS[name].inputs
        inputs = {key: value for key, value in data.items() if key in needs}
        on_cpu = ESTIMATORS.call(name, on("cpu", inputs, packed), **more)
        on_gpu = ESTIMATORS.call(name, on(DEVICE, inputs, packed), **more)
        torch.testing.assert_close(plain(on_gpu.advantages), plain(on_cpu.advantages), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(plain(on_gpu.returns), plain(on_cpu.returns), rtol=2e-4, atol=2e-4)
        assert on_gpu.report.reasons == on_cpu.report.reasons


def test_results_stay_on_the_device() -> None:
    data = on(DEVICE, tokens(), False)
    assert gae(data["token_rewards"], data["values"], data["mask"]).advantages.device.type == "cuda"
    assert reinforce(rewards=data["rewards"], mask=data["mask"]).advantages.device.type == "cuda"
    actual = grpo(data["rewards"], torch.arange(ROWS) // 3, data["mask"])
    assert actual.advantages.device.type == "cuda" and actual.scores.device.type == "cuda"
    assert whiten(data["values"], data["mask"]).device.type == "cuda"


@pytest.mark.parametrize("packed", [False, True])
def test_every_estimator(packed: bool) -> None:
    data = tokens()
    rows = {
        "groups": [i // 3 for i in range(ROWS)],
        "runs": list(range(ROWS)),
        "steps": [0] * ROWS,
        "states": [i % 2 for i in range(ROWS)],
        "baselines": [0.1] * ROWS,
        "step_rewards": data["rewards"].tolist(),
    }
    for name in ESTIMATORS.names():
        cpu_inputs, gpu_inputs = ({**on(d, data, packed), **rows} for d in ("cpu", DEVICE))
        for inputs in (cpu_inputs, gpu_inputs):
            inputs["teacher_logprobs"] = inputs["ref_logprobs"]
            inputs["necs"] = inputs["entropy"]
        needs = ESTIMATORS[name].inputs
        gpu_estimate, cpu_estimate = (
            ESTIMATORS.call(name, {k: v for k, v in d.items() if k in needs}) for d in (gpu_inputs, cpu_inputs)
        )
        torch.testing.assert_close(
            plain(gpu_estimate.advantages), plain(cpu_estimate.advantages), rtol=2e-4, atol=2e-4, msg=name
        )
        if name in ("clip_b", "clip_v"):
            assert torch.equal(plain(gpu_estimate.mask), plain(cpu_estimate.mask))


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_and_its_gradient(mode: str) -> None:
    data = tokens(1)
    names = [name for name in LOSSES.names() if "new_logprobs" in LOSSES[name].inputs and name != "dpo"]
    assert "ppo" in names
    for name in names:
        results = []
        for device, packed in (("cpu", False), (DEVICE, False), (DEVICE, True)):
            inputs = on(device, data, packed)
            leaf = data["new_logprobs"].detach().clone().to(device).requires_grad_()
            inputs["new_logprobs"] = Rows(leaf.reshape(-1), [WIDTH] * ROWS) if packed else leaf
            inputs |= {"expert_mask": [i % 2 for i in range(ROWS)], "step": 3}
            inputs = {key: value for key, value in inputs.items() if key in LOSSES[name].inputs}
            loss = LOSSES.call(
                name, inputs, **({"mode": mode, "norm": 100.0} if "mode" in LOSSES[name].options else {})
            )
            loss.backward()
            results.append((loss.value.item(), leaf.grad.cpu()))
        for value, gradient in results[1:]:
            assert value == pytest.approx(results[0][0], rel=1e-4, abs=1e-5), name
            torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_corrections_masks_and_divergences(packed: bool) -> None:
    data = tokens(2)
    cpu_inputs, gpu_inputs = on("cpu", data, packed), on(DEVICE, data, packed)
    for level in ("token", "sequence", "geometric"):
        both = [
            importance_weights(d["new_logprobs"], d["old_logprobs"], d["mask"], level=level, mask_outside=(0.2, 5.0))
            for d in (cpu_inputs, gpu_inputs)
        ]
        torch.testing.assert_close(plain(both[1].weights), plain(both[0].weights), rtol=1e-5, atol=1e-6)
        for key, value in both[0].report.metrics.items():
            assert both[1].report.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for over in ("sample", "batch"):
        marks = [high_entropy_mask(d["entropy"], d["mask"], 0.2, over=over) for d in (cpu_inputs, gpu_inputs)]
        assert torch.equal(plain(marks[1]), plain(marks[0]))
    ages = [staleness_weights([2] * ROWS, 3, d["mask"], max_staleness=2) for d in (cpu_inputs, gpu_inputs)]
    torch.testing.assert_close(*(plain(getattr(age, "weights", age)) for age in ages))
    for name in KL.names():
        values = [
            kl_loss(d["new_logprobs"], d["ref_logprobs"], d["mask"], d["old_logprobs"], estimator=name).value
            for d in (cpu_inputs, gpu_inputs)
        ]
        assert values[1].item() == pytest.approx(values[0].item(), rel=1e-4, abs=1e-7)
    placed = [penalize(d["rewards"], d["values"], d["mask"], coef=0.1)[0] for d in (cpu_inputs, gpu_inputs)]
    torch.testing.assert_close(plain(placed[1]), plain(placed[0]))


def test_a_batch_on_the_device() -> None:
    experiences = Experiences(
        Experience(
            eid={"task": i // 4, "run": i},
            tokens=list(range(3 + i)),
            prompt_length=1,
            reward=float(i % 3),
            logprobs=[-0.5] * (2 + i),
        )
        for i in range(8)
    )
    on_cpu = estimate("grpo", from_experiences(experiences))
    on_gpu = estimate("grpo", from_experiences(experiences, device=DEVICE))
    assert on_gpu.advantages.device.type == "cuda"
    torch.testing.assert_close(on_gpu.advantages.cpu(), on_cpu.advantages)
