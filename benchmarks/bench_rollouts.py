"""On a CUDA device: rollouts of a model of 0.5B parameters, and the share of time outside the model.

Run as `python -m benchmarks.bench_rollouts [--samples 256] [--tokens 1024] [--rounds 3] [--results FOLDER]` from the
project root, on a machine with a CUDA device and transformers; elsewhere it says so and ends (`--cpu` tries the script
out, small). The model has Qwen2-0.5B's shape with random weights, bfloat16; responses do not end before their last
token. Sampled, scored by a function, log-probs under the policy and a frozen copy of it, KL, GRPO.

A forward pass is what a CUDA event before the model's forward and one after it enclose: in sampling the whole model
with its output layer, in scoring the layers and the log-probs that are taken from them. All else is overhead: choosing
tokens, stopping, planning, padding, copying, rewards, KL, advantages. The report goes to `rollouts.md` and
`rollouts.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.models import Actor
from rollbook.rollout import Prompt

TARGET = 0.05
GROUP = 8
GIB = 1 << 30


def model_shape(small: bool) -> dict[str, Any]:
    """Return the configuration of Qwen2-0.5B's shape."""
    shape: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    small_shape = {"vocab_size": 2_000, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
    return shape | small_shape if small else shape


def model(small: bool) -> Any:
    """Return a Qwen2 model with random weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    network = AutoModelForCausalLM.from_config(
        Qwen2Config(**model_shape(small)), dtype=dtype, attn_implementation="sdpa"
    )
    return network.eval()


class Clock:
    """Seconds within a module's forward, by events on a device or by the host's clock."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.device, self.events, self.host, self._begun = device, [], 0.0, None
        self.calls = 0
        self.hooks = [module.register_forward_pre_hook(self._start), module.register_forward_hook(self._stop)]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, *_: Any) -> None:
        self._begun = self._now()

    def _stop(self, *_: Any) -> None:
        self.calls += 1
        if self.device.type == "cuda":
            self.events.append((self._begun, self._now()))
        else:
            self.host += self._now() - self._begun

    def seconds(self) -> float:
        """What the module took since the last time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        total = self.host + sum(begun.elapsed_time(ended) for begun, ended in self.events) / 1000
        self.host, self.events = 0.0, []
        return total


class ScoringClock(Clock):
    """Seconds within an actor's `token_stats`, until they are read."""

    def __init__(self, actor: Actor, device: torch.device) -> None:
        self.device, self.events, self.host, self._begun = device, [], 0.0, None
        self.calls, self.hooks, self.actor = 0, [], actor
        token_stats = actor.token_stats

        def timed(*args: Any, **options: Any) -> Any:
            self._start()
            stats = token_stats(*args, **options)
            self._stop()
            return stats

        actor.token_stats = timed  # type: ignore[method-assign]

    def seconds(self) -> float:
        """What `token_stats` took; it is not timed any more."""
        del self.actor.token_stats
        return super().seconds()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One maker, several rollouts; the first warms up and is left out."""
    device = torch.device("cpu" if options.cpu else "cuda")
    network = model(options.cpu).to(device)
    actor = Actor(network)
    reference = actor.reference()
    config = MakerConfig(advantage_estimator="grpo", n_samples_per_prompt=GROUP, token_budget=options.budget, seed=7)
    maker = NaiveExperienceMaker(
        actor,
        None,
        None,
        reference,
        None,
        options.prompt,
        0.01,
        reward_fn=lambda response_ids: float(sum(response_ids) % 7),
        config=config,
    )
    draw = torch.Generator().manual_seed(1)
    vocabulary = network.config.vocab_size
    rounds = []
    for turn in range(options.rounds + 1):
        prompts = [
            Prompt(token_ids=torch.randint(3, vocabulary, (options.prompt,), generator=draw).tolist())
            for _ in range(options.samples // GROUP)
        ]
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        clock = Clock(network, device)
        scoring = [ScoringClock(model, device) for model in (actor, reference)]
        begun = time.perf_counter()
        batches = maker.make_experience_list(prompts, max_new_tokens=options.tokens, ignore_eos=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begun
        sampling = clock.seconds()
        for hook in clock.hooks:
            hook.remove()
        metrics = maker.metrics
        policy_forward, reference_forward = (clock.seconds() for clock in scoring)
        forward = sampling + policy_forward + reference_forward
        peak = torch.cuda.max_memory_allocated() - allocated if device.type == "cuda" else 0
        (batch,) = batches
        lengths = batch.info["response_length"]
        if lengths.min() != options.tokens or len(batch) != options.samples:
            raise RuntimeError(f"got {len(batch)} samples of {lengths.min():.0f} tokens and more, expected all of them")
        engine, policy = batch.extras["logprobs"], batch.action_log_probs
        off = (engine - policy).abs()[batch.action_mask]
        numbers = {
            "seconds": elapsed,
            "forward_seconds": forward,
            "overhead_share": 1 - forward / elapsed,
            "sampling_seconds": metrics["rollout/seconds"],
            "sampling_forward_seconds": sampling,
            "sampling_overhead_share": 1 - sampling / metrics["rollout/seconds"],
            "policy_seconds": metrics["policy/seconds"],
            "policy_forward_seconds": policy_forward,
            "reference_seconds": metrics["reference/seconds"],
            "reward_seconds": metrics["reward/seconds"],
            "advantages_seconds": metrics["advantages/seconds"],
            "scoring_overhead_share": 1
            - (policy_forward + reference_forward) / max(elapsed - metrics["rollout/seconds"], 1e-9),
            "tokens_per_second": options.samples * options.tokens / elapsed,
            "peak_gib_above_weights": peak / GIB,
            "logprob_difference_mean": float(off.mean()),
            "logprob_difference_largest": float(off.max()),
        }
        if turn:
            rounds.append(numbers)
    return {name: statistics.median(round_numbers[name] for round_numbers in rounds) for name in rounds[0]} | {
        "full_logits_gib": options.samples * options.tokens * vocabulary * 2 / GIB,
        "vocabulary": vocabulary,
        "rounds": rounds,
    }


def report(options: argparse.Namespace, numbers: dict[str, Any], device: str) -> str:
    """As a page."""
    share = numbers["overhead_share"]
    lines = [
        "# Rollouts of a 0.5B model",
        "",
        f"{options.samples} samples ({options.samples // GROUP} prompts of {options.prompt} tokens, {GROUP} each) of "
        f"{options.tokens} tokens, a model of Qwen2-0.5B's shape (random weights, bfloat16, SDPA), GRPO with a "
        f"reference. {device}, torch {torch.__version__}, transformers {metadata.version('transformers')}, "
        f"{datetime.date.today()}; medians of {options.rounds} rollouts after a warm-up rollout.",
        "",
        f"`python -m benchmarks.bench_rollouts --samples {options.samples} --tokens {options.tokens} "
        f"--rounds {options.rounds}`",
        "",
        "| what | |",
        "|---|---|",
        f"| share of the time outside forward passes | {share:.1%} (target {TARGET:.0%}: "
        f"{'met' if share < TARGET else 'MISSED'}) |",
        f"| - of sampling | {numbers['sampling_overhead_share']:.1%} |",
        f"| - of everything after sampling | {numbers['scoring_overhead_share']:.1%} |",
        f"| seconds per rollout | {numbers['seconds']:.1f} |",
        f"| - sampling | {numbers['sampling_seconds']:.1f} |",
        f"| - policy's log-probs | {numbers['policy_seconds']:.2f} |",
        f"| - reference's log-probs | {numbers['reference_seconds']:.2f} |",
        f"| - rewards | {numbers['reward_seconds']:.2f} |",
        f"| - advantages | {numbers['advantages_seconds']:.2f} |",
        f"| tokens per second | {numbers['tokens_per_second']:,.0f} |",
        f"| peak memory above the weights | {numbers['peak_gib_above_weights']:.1f} GiB |",
        f"| size of all logits | {numbers['full_logits_gib']:.1f} GiB |",
        f"| log-probs of sampling and scoring: mean and largest difference | {numbers['logprob_difference_mean']:.4f}, "
        f"{numbers['logprob_difference_largest']:.3f} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run it, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=65_536, help="tokens in one scoring pass")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script out")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("bench_rollouts: there is no CUDA device here; --cpu tries the script out")
        return
    numbers = measured(options)
    text = report(options, numbers, "a CPU" if options.cpu else torch.cuda.get_device_name())
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "rollouts.md").write_text(text)
    (options.results / "rollouts.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
