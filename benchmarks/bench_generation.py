"""On a CUDA device: tokens per second of rollout engines on a model of 0.5B parameters, with a roofline.

Run as `python -m benchmarks.bench_generation [--rounds 3] [--results FOLDER]` from the project root, on a
machine with a CUDA device and transformers (`--cpu` tries the script out, small). The model has Qwen2-0.5B's shape with
random weights in bfloat16. Workload: 32 prompts of U(64, 512) random tokens, eight samples each, 256 new tokens. Times
include the prompts. "Captured" rows are not engines but bounds for comparison: one decode step of the plain
transformers forward pass over a `StaticCache`, captured in a CUDA graph and replayed, without prompts, stop conditions
or refilling.

The ragged workload ends a response at any of 1/200 of the vocabulary's ids (mean about 200 tokens, at most 512).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.bench_rollouts import model as make_model
from benchmarks.bench_rollouts import model_shape
from benchmarks.bench_training import drawn, ends_of
from rollbook.rollout import TransformersEngine

SAMPLES, NEW_TOKENS, LONGEST = 8, 256, 512


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Time a call, with the device waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, output


def shaped_model(kind: str, small: bool) -> Any:
    """Return a model of the 0.5B shape in the architecture of Llama or Qwen3."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config_class: Any = LlamaConfig if kind == "llama" else Qwen3Config
    extra = {} if kind == "llama" else {"head_dim": 64}
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    return AutoModelForCausalLM.from_config(config_class(**model_shape(small), **extra), dtype=dtype).eval()


# --- engines ----------------------------------------------------------------------------------------------------------


def pad_left(prompts: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return all prompts, repeated for their samples, as `generate` takes them."""
    rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), 2), torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def run_generate(network: Any, prompts: list[list[int]], device: torch.device, **options: Any) -> Any:
    with torch.no_grad():
        return network.generate(**pad_left(prompts, device), do_sample=True, top_k=0, pad_token_id=2, **options)


def run_generate_batch(network: Any, prompts: list[list[int]]) -> int:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    previous = network.config._attn_implementation
    network.set_attn_implementation("paged|sdpa")
    try:
        config = GenerationConfig(do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=2)
        rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
        outputs = network.generate_batch(inputs=rows, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())
    finally:
        network.set_attn_implementation(previous)


def token_by_token(network: Any, rows: int) -> TransformersEngine:
    """Return the engine without CUDA graphs."""
    engine = TransformersEngine(network, max_batch_rows=rows)
    engine._not_paged = "for comparison"
    return engine


# --- bounds -----------------------------------------------------------------------------------------------------------


def grouped_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    """SDPA that does not repeat keys and values for the query heads of a group."""
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


def replay_seconds(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Capture a step in a CUDA graph and return the seconds of a replay."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return seconds(lambda: [graph.replay() for _ in range(steps)], device)[0] / steps


def written_step(network: Any, token: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Run one decode step of a Qwen2 model, written by hand.

    Args:
        network: The model.
        token: [rows, 1]
        position: [1] Position of all rows.
        cache: [layers, 2, rows, key heads, width, size] Keys and values.

    Returns:
        Logits [rows, V].
    """
    body, config = network.model, network.config
    rows, size, width = len(token), cache.shape[-1], cache.shape[-2]
    mask = (torch.arange(width, device=token.device) <= position)[None, None, None].expand(rows, 1, 1, width)
    hidden = body.embed_tokens(token)
    cos, sin = body.rotary_emb(hidden, position.expand(rows, 1))
    cos, sin = cos[:, None], sin[:, None]

    def rotate(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat([-second, first], -1) * sin

    def norm(states: torch.Tensor, module: Any) -> torch.Tensor:
        return F.rms_norm(states, (states.shape[-1],), module.weight, config.rms_norm_eps)

    for i, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        states = norm(hidden, layer.input_layernorm)
        query, key, value = (
            projection(states).view(rows, 1, -1, size).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cache[i, 0].index_copy_(2, position, rotate(key))
        cache[i, 1].index_copy_(2, position, value)
        attended = F.scaled_dot_product_attention(rotate(query), *cache[i], attn_mask=mask, enable_gqa=True)
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).reshape(rows, 1, -1))
        states = norm(hidden, layer.post_attention_layernorm)
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states))
    logits: torch.Tensor = network.lm_head(norm(hidden, body.norm))[:, -1]
    return logits


def captured_written_step(network: Any, rows: int, width: int = 768, steps: int = 100) -> float:
    """Return the seconds of one replayed `written_step`."""
    config, device = network.config, network.device
    size = config.hidden_size // config.num_attention_heads
    with torch.inference_mode():
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, width, size)
        cache = torch.zeros(shape, dtype=network.dtype, device=device)
        token = torch.full((rows, 1), 3, device=device)
        position = torch.full((1,), 512, device=device)

        def step() -> None:
            scores = written_step(network, token, position, cache).float()
            noise = -torch.log(-torch.log(torch.rand_like(scores)))
            token.copy_((scores + noise).argmax(-1, keepdim=True))
            scores.gather(1, token).sub_(scores.logsumexp(-1, keepdim=True))
            position.add_(1)

        return replay_seconds(step, steps, device)


def captured_step(network: Any, attention: str, rows: int, width: int = 768, steps: int = 100) -> float:
    """Return the seconds of one replayed decode step over a static cache."""
    from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", AttentionMaskInterface()["sdpa"])
    previous = network.config._attn_implementation
    network.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            cache = StaticCache(config=network.config, max_cache_len=width)
            prompt = torch.randint(3, network.config.vocab_size, (rows, 512), device=network.device)
            logits = network(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token, position = logits[:, -1:].argmax(-1), torch.full((rows, 1), 512, device=network.device)
            mask = (torch.arange(width, device=network.device) <= 640)[None, None, None].repeat(rows, 1, 1, 1)

            def step() -> None:
                inputs = {"input_ids": token, "position_ids": position, "attention_mask": mask}
                scores = network(**inputs, past_key_values=cache, use_cache=True).logits[:, -1].float()
                noise = -torch.log(-torch.log(torch.rand_like(scores)))
                token.copy_((scores + noise).argmax(-1, keepdim=True))
                scores.gather(1, token).sub_(scores.logsumexp(-1, keepdim=True))
                position.add_(1)

            return replay_seconds(step, steps, network.device)
    finally:
        network.set_attn_implementation(previous)


def engine_step(engine: TransformersEngine, rows: int, device: torch.device) -> float:
    """Return the seconds of a decode step of the engine, with sampling: the difference of two response lengths."""
    times = []
    for tokens in (64, 64, 320):  # the first call warms up
        arguments: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "seed": 1}
        times.append(seconds(lambda arguments=arguments: engine.generate([[5] * 256] * rows, **arguments), device)[0])
    return (times[2] - times[1]) / (320 - 64)


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    elapsed = seconds(lambda: [target.copy_(source) for _ in range(10)], device)[0]
    return 2 * 10 * source.nbytes / elapsed


def roofline(network: Any, prompts: list[list[int]], device: torch.device) -> dict[str, float]:
    """Return the time in which a mean step of 256 rows reads weights and cache and writes and reads logits once."""
    config = network.config
    rows = len(prompts) * SAMPLES
    weights = sum(parameter.nbytes for parameter in network.parameters())
    tokens = sum(map(len, prompts)) * SAMPLES + rows * NEW_TOKENS / 2
    size = config.hidden_size // config.num_attention_heads
    cache = tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * size * network.dtype.itemsize
    logits = 2 * rows * config.vocab_size * network.dtype.itemsize
    bandwidth = copy_bandwidth(device)
    return {
        "weights_gb": weights / 1e9,
        "cache_gb": cache / 1e9,
        "logits_gb": logits / 1e9,
        "bandwidth_tb": bandwidth / 1e12,
        "step_ms": (weights + cache + logits) / bandwidth * 1e3,
        "tokens_per_second": rows / ((weights + cache + logits) / bandwidth),
    }


# --- correctness ------------------------------------------------------------------------------------------------------


def teacher_forced(network: Any, samples: list[Any]) -> list[torch.Tensor]:
    """Return the log-probs of each response under one forward pass over prompt and response."""
    outputs = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=network.device)
            logits = network(input_ids=ids, logits_to_keep=len(sample.response_ids) + 1).logits[0, :-1].float()
            outputs.append(logits.log_softmax(-1).gather(-1, ids[0, -len(sample.response_ids) :, None])[:, 0].cpu())
    return outputs


def compare_logprobs(network: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Compare an engine's log-probs with a teacher-forced forward pass."""
    samples = TransformersEngine(network).generate(prompts, n=2, max_tokens=new_tokens, ignore_eos=True, seed=1)
    expected = torch.cat(teacher_forced(network, samples))
    recorded = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    difference = (expected - recorded).abs()
    return {"tokens": len(difference), "max": float(difference.max()), "mean": float(difference.mean())}


def compare_greedy(network: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Compare greedy tokens with those of `generate`, prompt by prompt.

    Returns:
        The number of prompts, of equal responses, and the largest gap between the two best logits at a first
        difference.
    """
    samples = TransformersEngine(network).generate(prompts, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    equal, gap = 0, 0.0
    with torch.no_grad():
        for prompt, sample in zip(prompts, samples, strict=True):
            ids = torch.tensor([prompt], device=network.device)
            length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            tokens = network.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=2, **length
            )
            expected = tokens[0, len(prompt) :].tolist()
            first = next(
                (i for i, (a, b) in enumerate(zip(expected, sample.response_ids, strict=True)) if a != b), None
            )
            if first is None:
                equal += 1
                continue
            logits = network(input_ids=tokens[:, : len(prompt) + first], logits_to_keep=1).logits[0, -1].float()
            best = logits.topk(2).values
            gap = max(gap, float(best[0] - best[1]))
    return {"prompts": len(prompts), "equal": equal, "largest_gap": gap}


# --- report -----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Add the measurements to `results`, and yield after each part."""
    device = torch.device("cpu" if options.cpu else "cuda")
    network = make_model(options.cpu).to(device)
    vocabulary = network.config.vocab_size
    prompts = drawn(4 if options.cpu else 32, vocabulary, 1)
    rows = len(prompts) * SAMPLES
    count = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    engine, loop = TransformersEngine(network, max_batch_rows=rows), token_by_token(network, rows)
    fixed = {"n": SAMPLES, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    ragged = {"n": SAMPLES, "max_tokens": LONGEST, "stop_token_ids": ends_of(vocabulary)}

    def sampled(samples: list[Any]) -> int:
        return sum(len(sample.response_ids) for sample in samples)

    def plain_ragged() -> int:
        width = max(map(len, prompts))
        response = run_generate(
            network, prompts, device, max_new_tokens=LONGEST, eos_token_id=ragged["stop_token_ids"]
        )[:, width:]
        ended = torch.isin(response, torch.tensor(ragged["stop_token_ids"], device=device)).int()
        return int(((ended.cumsum(1) - ended) == 0).sum())

    cases: dict[str, Callable[[], int]] = {
        "generate, dynamic cache": lambda: run_generate(network, prompts, device, **count).shape[0] * NEW_TOKENS,
        "TransformersEngine, token by token": lambda: sampled(loop.generate(prompts, **fixed)),
        "TransformersEngine": lambda: sampled(engine.generate(prompts, **fixed)),
        "TransformersEngine, top-p 0.95": lambda: sampled(engine.generate(prompts, **fixed, top_p=0.95)),
        "ragged: generate, dynamic cache": plain_ragged,
        "ragged: TransformersEngine": lambda: sampled(engine.generate(prompts, **ragged)),
    }

    def run_static() -> int:
        return run_generate(network, prompts, device, cache_implementation="static", **count).shape[0] * NEW_TOKENS

    # Name, warm-up, and what is timed, once.
    slow: list[tuple[str, Callable[[], Any], Callable[[], int]]] = [
        ("generate, static cache, compiled", run_static, run_static),
        (
            "generate_batch, paged|sdpa",
            lambda: run_generate_batch(network, prompts[:1]),
            lambda: run_generate_batch(network, prompts),
        ),
    ]
    rates: dict[str, list[float]] = {}
    steps: dict[str, float] = {}
    failures: dict[str, str] = {}
    results |= {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "rates": rates,
        "steps": steps,
        "failures": failures,
    }
    for turn in range(options.rounds + 1):  # the first warms up
        for name, function in cases.items():
            elapsed, tokens = seconds(function, device)
            print(name, turn, round(tokens / elapsed), flush=True)
            if turn:
                rates.setdefault(name, []).append(tokens / elapsed)
    yield
    results["bfloat16" if not options.cpu else "float32"] = compare_logprobs(network, prompts[:8], 64)
    results["float32"] = compare_logprobs(network.float(), prompts[:8], 64)
    results["greedy"] = compare_greedy(network, prompts[:4], 64)
    network.to(torch.float32 if options.cpu else torch.bfloat16)
    yield
    if device.type == "cuda":
        results["roofline"] = roofline(network, prompts, device)
        for size in (256, 64, 16, 1):
            steps[f"TransformersEngine, {size} rows"] = engine_step(engine, size, device)
        steps[f"captured, qwen2, written by hand, {rows} rows"] = captured_written_step(network, rows)
        for kind in ("qwen2", "llama", "qwen3"):
            other = network if kind == "qwen2" else shaped_model(kind, options.cpu).to(device)
            for attention, size in (("sdpa", 256), ("grouped", 256), ("grouped", 64)):
                if attention == "sdpa" and kind != "qwen2":
                    continue
                try:
                    steps[f"captured, {kind}, {attention}, {size} rows"] = captured_step(other, attention, size)
                except Exception as error:
                    failures[f"captured, {kind}, {attention}, {size} rows"] = f"{type(error).__name__}: {error}"[:200]
                gc.collect()
                torch.cuda.empty_cache()
            if other is not network:
                own_engine = TransformersEngine(other, max_batch_rows=rows)
                own_engine.generate(prompts, **fixed)
                elapsed, samples = seconds(lambda own_engine=own_engine: own_engine.generate(prompts, **fixed), device)
                rates[f"TransformersEngine, {kind}"] = [sampled(samples) / elapsed]
    yield
    for name, warm_up, function in slow if device.type == "cuda" else ():
        try:
            warm_up()
            elapsed, tokens = seconds(function, device)
            rates[name] = [tokens / elapsed]
            print(name, round(tokens / elapsed), flush=True)
        except Exception as error:
            traceback.print_exc(limit=3)
            failures[name] = f"{type(error).__name__}: {error}"[:200]
    yield


def report(results: dict[str, Any]) -> str:
    rates = {name: statistics.median(values) for name, values in results["rates"].items()}
    base = {True: rates["ragged: generate, dynamic cache"], False: rates["generate, dynamic cache"]}
    lines = [
        "# Generation",
        "",
        f"{results['device']}, torch {results['torch']}, transformers {results['transformers']}, {results['date']}; "
        f"`python -m benchmarks.bench_generation`: 0.5B parameters in bfloat16, 32 prompts of U(64, 512) tokens x 8 "
        f"samples x 256 new tokens, medians of {results['rounds']} rounds after a warm-up round, all in one "
        "process; static cache, `generate_batch` and the models of other shapes: one call after a warm-up.",
        "",
        "| | tokens/s | ratio to `generate` |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {rate:,.0f} | x{rate / base[name.startswith('ragged')]:.2f} |" for name, rate in rates.items()
    ]
    if results["steps"]:
        lines += [
            "",
            "One decode step with sampling; captured ones are replayed without prompts, stop conditions or refilling:",
            "",
            "| | ms | tokens/s |",
            "|---|---|---|",
        ]
    for name, step in results["steps"].items():
        lines.append(f"| {name} | {step * 1e3:.2f} | {int(name.split(', ')[-1].split()[0]) / step:,.0f} |")
    if "roofline" in results:
        bound = results["roofline"]
        lines += [
            "",
            f"Roofline: {bound['weights_gb']:.2f} GB of weights, {bound['cache_gb']:.2f} GB of keys and values and "
            f"{bound['logits_gb']:.2f} GB of logits per step of 256 rows at {bound['bandwidth_tb']:.2f} TB/s (measured "
            f"copy) take {bound['step_ms']:.2f} ms: {bound['tokens_per_second']:,.0f} tokens/s.",
        ]
    lines += ["", "Log-probs of the engine against a teacher-forced forward pass:", ""]
    lines += ["| | tokens | largest difference | mean difference |", "|---|---|---|---|"]
    for name in ("float32", "bfloat16"):
        if name in results:
            row = results[name]
            lines.append(f"| {name} | {row['tokens']} | {row['max']:.2e} | {row['mean']:.2e} |")
    if "greedy" in results:
        greedy = results["greedy"]
        lines += [
            "",
            f"Greedy decoding in float32: {greedy['equal']} of {greedy['prompts']} responses equal those of `generate` "
            f"token for token; largest gap of the two best logits at a first difference: {greedy['largest_gap']:.1e}.",
        ]
    lines += [f"\nNot measured: {name} ({reason})." for name, reason in results["failures"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="try the script out, small")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device (--cpu tries it out)")
    options.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for _ in measure(options, results):  # written after each part, so that a time limit loses only the rest
        (options.results / "generation.json").write_text(json.dumps(results))
        (options.results / "generation.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
