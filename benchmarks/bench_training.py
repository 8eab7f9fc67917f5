"""On a CUDA device: GRPO steps of a model of 0.5B parameters by the trainer, and by a plain padded loop beside it.

Run as `python -m benchmarks.bench_training [--prompts 32] [--rounds 3] [--results FOLDER]` from the project root, on a
machine with a CUDA device and transformers (`--cpu` tries the script out, small). The model has Qwen2-0.5B's shape with
random weights, bfloat16 with float32 copies in AdamW on both sides. Prompts are U(64, 512) random tokens, eight
responses each; a response ends at any of 1/200 of the vocabulary's ids, so that lengths are ragged (mean about 200, at
most 512). A step: sample, log-probs of the policy and a frozen copy, GRPO with a KL term, one update.

The plain loop is what one writes by hand: `generate` on all prompts at once, batches padded on both sides to the
longest, whole logits and `log_softmax`, micro-batches of a fixed number of rows that fit. Rounds alternate. Seconds are
the host's, with the device waited for at the end of each stage; "outside the model" is what a step spends neither in a
forward or backward pass nor in the optimizer, by CUDA events.
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
from torch import nn

import rollbook
from benchmarks.bench_rollouts import GIB, model
from rollbook.models import Actor
from rollbook.rollout import TransformersEngine
from rollbook.train import AlgorithmConfig, MinibatchConfig, OptimizerConfig, Prompts, Trainer

GROUP, LONGEST, ENDS = 8, 512, 200


class Clock:
    """Seconds on the device within what is timed, by events; of what is timed within something timed, the outermost."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.depth = device, 0
        self.pairs: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured. Nothing runs then; the replays are timed."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def begin(self, *_: Any) -> None:
        if self._is_capturing():
            return
        if not self.depth:
            self._begun = self._now()
        self.depth += 1

    def end(self, *_: Any) -> None:
        if self._is_capturing():
            return
        self.depth -= 1
        if not self.depth:
            self.pairs.append((self._begun, self._now()))

    def around(self, function: Any) -> Any:
        """The same function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self.begin()
            try:
                return function(*arguments, **named)
            finally:
                self.end()

        return timed

    def take(self) -> float:
        """What was timed since the last time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            total = sum(a.elapsed_time(b) for a, b in self.pairs) / 1000
        else:
            total = sum(b - a for a, b in self.pairs)
        self.pairs = []
        return total


def watch(clock: Clock, *modules: nn.Module) -> None:
    """Time forward passes of these modules, what actors take from hidden states, every backward pass, every step of an
    optimizer and every replay of a CUDA graph."""
    for module in modules:
        module.register_forward_pre_hook(clock.begin)
        module.register_forward_hook(clock.end)
    Actor.token_stats = clock.around(Actor.token_stats)  # type: ignore[method-assign]
    torch.Tensor.backward = clock.around(torch.Tensor.backward)  # type: ignore[method-assign]
    torch.optim.AdamW.step = clock.around(torch.optim.AdamW.step)  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.replay = clock.around(torch.cuda.CUDAGraph.replay)  # type: ignore[method-assign]


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def drawn(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(64, 513, (count,), generator=draw).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def ends_of(vocabulary: int) -> list[int]:
    return list(range(3, vocabulary, ENDS))


class Ours:
    """The trainer and its parts, as a user puts them together."""

    def __init__(self, options: argparse.Namespace, device: torch.device, clock: Clock) -> None:
        network = model(options.cpu).to(device)
        attention = "sdpa" if options.cpu else "varlen"
        self.actor = Actor(network, attn_implementation=attention)
        algorithm = AlgorithmConfig.preset("grpo", group_size=GROUP, kl_coef=0.001)
        reference = self.actor.reference()
        TransformersEngine(self.actor).max_batch_rows = options.prompts * GROUP
        self.trainer = Trainer(
            self.actor,
            algorithm,
            rollbook.open("memory:"),
            prompts=Prompts([{"prompt": [0]}]),
            reward=lambda response_ids: float(sum(response_ids) % 7),
            sampling={"max_tokens": LONGEST, "stop_token_ids": ends_of(network.config.vocab_size)},
            prompts_per_step=options.prompts,
            reference=reference,
            optimizer=OptimizerConfig(lr=1e-6),
            minibatch=MinibatchConfig(token_budget=options.budget),
            precision="float32" if options.cpu else "bfloat16",
            seed=7,
        )
        watch(clock, self.actor.model, reference.model)

    def step(self, prompts: list[list[int]]) -> dict[str, float]:
        self.trainer.prompts = Prompts([{"prompt": prompt} for prompt in prompts], shuffle=False)
        report = self.trainer.step()
        scoring = sum(report[f"{name}/seconds"] for name in ("policy", "reference", "reward", "advantages"))
        return {
            "sampled": report["rollout/tokens"],
            "tokens": report["tokens"],
            "generation": report["rollout/seconds"],
            "scoring": scoring,
            "training": report["update/seconds"],
            "book": report["lease/seconds"]
            + report["acknowledge/seconds"]
            + report["collect/seconds"]
            - scoring
            - report["rollout/seconds"],
        }


class Plain:
    """The loop that one writes by hand."""

    def __init__(self, options: argparse.Namespace, device: torch.device, clock: Clock) -> None:
        self.device, self.rows = device, options.rows
        self.model, self.reference = model(options.cpu).to(device), model(options.cpu).to(device)
        self.masters = [parameter.detach().float().clone() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, fused=device.type == "cuda")
        watch(clock, self.model, self.reference)

    def log_probs(self, network: Any, tokens: Any, attention: Any, width: int) -> Any:
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = network(input_ids=tokens, attention_mask=attention, position_ids=positions).logits[:, -width - 1 : -1]
        return logits.float().log_softmax(-1).gather(-1, tokens[:, -width:, None])[..., 0]

    def step(self, prompts: list[list[int]]) -> dict[str, float]:
        begun = wait(self.device)
        longest, ends = max(map(len, prompts)), ends_of(self.model.config.vocab_size)
        rows = [prompt for prompt in prompts for _ in range(GROUP)]
        prompt_ids = torch.full((len(rows), longest), 2)
        prompt_mask = torch.zeros_like(prompt_ids)
        for i, prompt in enumerate(rows):
            prompt_ids[i, longest - len(prompt) :], prompt_mask[i, longest - len(prompt) :] = torch.tensor(prompt), 1
        prompt_ids, prompt_mask = prompt_ids.to(self.device), prompt_mask.to(self.device)
        self.model.eval()
        with torch.no_grad():
            tokens = self.model.generate(
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=LONGEST,
                eos_token_id=ends,
                pad_token_id=2,
            )
        response = tokens[:, longest:]
        ended = torch.isin(response, torch.tensor(ends, device=self.device)).int()
        mask = (ended.cumsum(1) - ended) == 0
        attention = torch.cat([prompt_mask, mask.long()], 1)
        sampled = wait(self.device)
        width = response.shape[1]
        parts = torch.arange(len(rows)).split(self.rows)
        with torch.no_grad():
            old = torch.cat([self.log_probs(self.model, tokens[p], attention[p], width) for p in parts])
            ref = torch.cat([self.log_probs(self.reference, tokens[p], attention[p], width) for p in parts])
        rewards = ((response * mask).sum(1) % 7).float().view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        scored = wait(self.device)
        self.model.train()
        count = mask.sum()
        for p in parts:
            logprobs = self.log_probs(self.model, tokens[p], attention[p], width)
            ratio = (logprobs - old[p]).exp()
            loss = -torch.minimum(ratio * advantages[p], ratio.clamp(0.8, 1.2) * advantages[p])
            loss = loss + 0.001 * (logprobs - ref[p]).square() / 2
            ((loss * mask[p]).sum() / count).backward()
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.masters, strict=True):
                weight.copy_(master)
                master.grad = None
        done = wait(self.device)
        return {
            "sampled": float(mask.sum()),
            "tokens": float(attention.sum()),
            "generation": sampled - begun,
            "scoring": scored - sampled,
            "training": done - scored,
            "book": 0.0,
        }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Both, in turn, on the same prompts; the first round warms up and is left out."""
    device = torch.device("cpu" if options.cpu else "cuda")
    rounds_by_side: dict[str, list[dict[str, float]]] = {"trainer": [], "plain loop": []}
    clocks = {name: Clock(device) for name in rounds_by_side}
    kinds = {"trainer": Ours, "plain loop": Plain}
    for name, kind in kinds.items():  # one after the other: each with the memory to itself
        if device.type == "cuda":
            torch.cuda.empty_cache()
        saved = Actor.token_stats, torch.Tensor.backward, torch.optim.AdamW.step, torch.cuda.CUDAGraph.replay
        side = kind(options, device, clocks[name])
        for turn in range(options.rounds + 1):
            prompts = drawn(options.prompts, 2_000 if options.cpu else 151_936, turn)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            clocks[name].take()
            begun = wait(device)
            row = side.step(prompts)
            row["seconds"] = wait(device) - begun
            row["outside"] = 1 - clocks[name].take() / row["seconds"]
            row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
            print(name, turn, {key: round(value, 3) for key, value in row.items()}, flush=True)
            if turn:
                rounds_by_side[name].append(row)
        Actor.token_stats, torch.Tensor.backward, torch.optim.AdamW.step, torch.cuda.CUDAGraph.replay = saved  # type: ignore[method-assign]
        del side
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
        "options": vars(options) | {"results": None},
        "rounds": rounds_by_side,
    }


def report(measurements: dict[str, Any]) -> str:
    """A table of medians."""
    sides = measurements["rounds"]

    def median(side: str, name: Any) -> float:
        return statistics.median(name(row) if callable(name) else row[name] for row in sides[side])

    rows = [
        ("generation, tokens per second", lambda r: r["sampled"] / r["generation"], ",.0f"),
        (
            "log-probs of policy and reference, advantages: tokens per second",
            lambda r: r["tokens"] / r["scoring"],
            ",.0f",
        ),
        ("training, tokens per second", lambda r: r["tokens"] / r["training"], ",.0f"),
        ("seconds per step", "seconds", ".2f"),
        ("- generation", "generation", ".2f"),
        ("- log-probs and advantages", "scoring", ".2f"),
        ("- training", "training", ".2f"),
        ("- records, book, leases", "book", ".2f"),
        ("share of a step outside the model", "outside", ".1%"),
        ("peak memory, GiB", "peak_gib", ".1f"),
    ]
    lines = [
        "# GRPO step of a 0.5B model",
        "",
        f"{measurements['device']}, torch {measurements['torch']}, "
        f"transformers {measurements['transformers']}, {measurements['date']}; "
        f"`python -m benchmarks.bench_training`: {measurements['options']['prompts']} prompts x {GROUP}, medians of "
        f"{measurements['options']['rounds']} rounds after a warm-up round.",
        "",
        "| | trainer | plain padded loop | ratio |",
        "|---|---|---|---|",
    ]
    for label, name, form in rows:
        trainer_median, loop_median = median("trainer", name), median("plain loop", name)
        ratio = f"x{trainer_median / loop_median:.2f}" if loop_median else ""
        lines.append(f"| {label} | {trainer_median:{form}} | {loop_median:{form}} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=32_768, help="tokens of the trainer's micro-batches")
    parser.add_argument("--rows", type=int, default=16, help="rows of the plain loop's micro-batches")
    parser.add_argument("--cpu", action="store_true", help="try the script out, small")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device (--cpu tries it out)")
    measurements = measured(options)
    text = report(measurements)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "training.json").write_text(json.dumps(measurements))
    (options.results / "training.md").write_text(text)


if __name__ == "__main__":
    main()
