"""Files as the tools themselves write them, for `test_files` to open. Each maker writes to a folder; it gives the path.

Where a tool could be run, what it wrote is in `data/`: a log of inspect_ai 0.3.285 and traces of verifiers 0.4.0. The
others are written here as their writers' code does it, with the same keys in the same order.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rollbook import Experience, Experiences
from rollbook.io import formats

DATA = Path(__file__).parent / "data"
TRINITY = Path(__file__).parent.parent / "book" / "data"
EVIL = "<script>alert(1)</script>"


def png(red: int = 0) -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = chunk(b"IHDR", (1).to_bytes(4) + (1).to_bytes(4) + b"\x08\x02\0\0\0")
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes([0, red, 0, 0]))) + chunk(b"IEND", b"")


def data_url(red: int = 0) -> str:
    return "data:image/png;base64," + base64.b64encode(png(red)).decode()


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def verl(folder: Path) -> Path:
    """`rollout_data_dir` of verl 0.5: a file a step, with what the reward function returned beside."""
    for step in (2, 10):
        rows = [
            {
                "input": f"user\n{ask}\nassistant\n",
                "output": answer,
                "gts": "5",
                "score": score,
                "step": step,
                "acc": acc,
            }
            for ask, answer, score, acc in (
                ("2 + 3 ?", "the answer is 5", 1.0, True),
                ("2 + 3 ?", f"six {EVIL}", 0.0, False),
                ("1 + 1 ?", "<think>hm</think>2", float("nan"), False),
            )
        ]
        lines(folder / f"{step}.jsonl", rows)
    return folder


def verl_parquet(folder: Path) -> Path:
    """A batch of verl with ids, as Parquet: prompts padded on the left, responses on the right."""
    path = folder / "step_3.parquet"
    frame = {
        "prompts": [[0, 0, 5, 6], [0, 7, 8, 9]],
        "responses": [[1, 2, 3, 0], [4, 5, 0, 0]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]],
        "response_mask": [[1, 0, 1, 0], [1, 1, 0, 0]],
        "rollout_log_probs": [[-0.1, -0.2, -0.3, 0.0], [-0.4, -0.5, 0.0, 0.0]],
        "old_log_probs": [[-0.1, -0.2, -0.4, 0.0], [-0.4, -0.5, 0.0, 0.0]],
        "token_level_scores": [[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.0]],
        "uid": ["a", "b"],
    }
    pd.DataFrame(frame).to_parquet(path)
    return path


def trl(folder: Path) -> Path:
    """`log_completions` of TRL 0.20: a Parquet file a step."""
    for step in (5, 6):
        frame = {
            "step": [step] * 4,
            "prompt": ["2 + 3 ?"] * 2 + ["1 + 1 ?"] * 2,
            "completion": ["5", f"6 {EVIL}", "2", "two"],
            "accuracy_reward": [1.0, 0.0, 1.0, 0.0],
            "format_reward": [0.5, 0.5, 0.0, float("nan")],
            "advantage": [0.7, -0.7, 0.7, -0.7],
        }
        pd.DataFrame(frame).to_parquet(folder / f"completions_{step:05d}.parquet")
    return folder


def trl_chat(folder: Path) -> Path:
    """The same of conversations, as JSONL."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3 ?"}]
    rows = [
        {"step": 1, "prompt": prompt, "completion": [{"role": "assistant", "content": answer}], "reward": reward}
        for answer, reward in (("<think>hm</think>5", 1.0), ("6", 0.0))
    ]
    return lines(folder / "completions.jsonl", rows)


def openrlhf(folder: Path) -> Path:
    """Batch inference of OpenRLHF 0.8."""
    rows = [{"input": "2 + 3 ?", "output": answer, "reward": reward} for answer, reward in (("5", 1.0), (EVIL, 0.0))]
    return lines(folder / "out.jsonl", rows)


def openrlhf_pairs(folder: Path) -> Path:
    return lines(folder / "pairs.jsonl", [{"prompt": "2 + 3 ?", "chosen": "5", "rejected": f"6 {EVIL}"}])


def verifiers_row(example: int, reward: float, answer: str, **more: Any) -> dict[str, Any]:
    """A row of `results.jsonl` as verifiers 0.1.10 writes it: metrics stand twice."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}
    return {
        "example_id": example,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{example} + 3 ?"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            {"role": "assistant", "content": answer},
        ],
        "answer": "5",
        "task": "sums",
        "reward": reward,
        "timing": {"generation_ms": 12.5, "scoring_ms": 0.1, "total_ms": 12.6},
        "is_completed": True,
        "is_truncated": reward == 0.0,
        "stop_condition": "max_turns_reached" if reward == 0.0 else "no_tools_called",
        "metrics": {"right": reward},
        "oai_tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        "token_usage": {"input_tokens": 30.0, "output_tokens": 7.0},
        "right": reward,
        **more,
    }


def verifiers(folder: Path) -> Path:
    rows = [verifiers_row(e, r, s) for e in (2, 7) for r, s in ((1.0, "5"), (0.0, f"6 {EVIL}"))]
    lines(folder / "results.jsonl", rows)
    (folder / "metadata.json").write_text(json.dumps({"env_id": "sums", "model": "mock", "num_examples": 2}))
    return folder


def prime_rl(folder: Path) -> Path:
    """prime-rl's rollouts with the ids of each turn, and an evaluation beside."""
    first = {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "completion_mask": [1, 1], "prompt_mask": [0, 0, 0]}
    second = {"prompt_ids": [1, 2, 3, 4, 5, 6, 7], "completion_ids": [8, 9], "completion_mask": [1, 1]}
    turns = [
        {"tokens": {**first, "completion_logprobs": [-0.1, -0.2]}, "reward": None},
        {"tokens": {**second, "completion_logprobs": [-0.3, -0.4]}, "reward": None},
    ]
    for step in (0, 1):
        rows = [
            verifiers_row(2, reward, answer, trajectory=turns, advantage=reward - 0.5)
            for reward, answer in ((1.0, "5"), (0.0, EVIL))
        ]
        lines(folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl", rows)
    lines(folder / "rollouts" / "step_1" / "eval_rollouts.jsonl", [verifiers_row(9, 1.0, "12")])
    (folder / "rollouts" / "step_1" / "train_rollouts.bin").write_bytes(b"\x80\x05abc")
    lines(folder / "metrics.jsonl", [{"step": 0, "time": 1.0, "reward/mean": 0.5}])
    return folder


def traces(folder: Path) -> Path:
    """What verifiers 0.4.0 wrote: episodes of two tasks in two steps, with ids and the trainer's numbers."""
    path = folder / "traces.jsonl"
    path.write_bytes((DATA / "verifiers-0.4.0-traces.jsonl").read_bytes())
    return path


def messages(folder: Path) -> Path:
    def row(answer: str, reward: float) -> dict[str, Any]:
        content = [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": data_url()}},
            {"type": "image_url", "image_url": {"url": "https://example.com/secret.png"}},
        ]
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{not json"}}
        return {
            "id": f"run-{answer[:3]}",
            "messages": [
                {"role": "developer", "content": "Look."},
                {"role": "user", "content": content},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a dot"}]},
                {"role": "assistant", "content": answer},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "reward": reward,
            "quality": 0.25,
        }

    return lines(folder / "chats.jsonl", [row("a dot", 1.0), row(EVIL, 0.0)])


def inspect(folder: Path) -> Path:
    """What inspect_ai 0.3.285 wrote: two samples, two epochs, two scorers, tools and a picture."""
    path = folder / "sums.eval"
    path.write_bytes((DATA / "inspect-0.3.285.eval").read_bytes())
    return path


def inspect_json(folder: Path) -> Path:
    """The same as inspect's JSON, which has the header's keys and then the samples."""
    from rollbook.inspect.file_stores import Members

    store = Members(str(DATA / "inspect-0.3.285.eval"), r"samples/[^/]+\.json", ("header.json",))
    samples = [row for _, _, row in store.scan(False)]
    path = folder / "sums.json"
    path.write_text(json.dumps({**store.log, "samples": samples, "reductions": []}, indent=2))
    return path


TOKENS = ["what", " is", " 2+3", "?", "<a>", " fi", "ve", " or", " so", "<end>"]
ENTROPIES = [0.1, 2.0, 0.3, 0.4, 1.5]
"""Of " fi", "ve", " or", " so" and "<end>"."""


def lightrft_row(step: int, reward: float, **more: Any) -> dict[str, Any]:
    """A record as LightRFT's saver makes it: entropy j on the token before the one it is of, only the highest two kept,
    special tokens dropped from texts, padding in the whole."""
    state, high = TOKENS[4:9], sorted(ENTROPIES)[-2:]
    marked = [
        {"text": "" if text.startswith("<") else text, "high_entropy": entropy in high}
        | ({"entropy_score": entropy} if entropy in high else {})
        for text, entropy in zip(state, ENTROPIES, strict=True)
    ]
    return {
        "global_step": step,
        "experience_index": 0,
        "sample_in_exp": 0,
        "full_sequence": "<pad><pad><pad>" + "".join(TOKENS) + "<pad><pad>",
        "generated_text": "".join(TOKENS[5:9]),
        "pure_generated_text": "".join(TOKENS[5:9]),
        "label": "5",
        "reference": None,
        "repeat_score": 0.1,
        "reflection_pattern_score": 0,
        "reflection_pattern_details": {},
        "policy_entropy": 0.7,
        "response_token_count": 4,
        "generated_tokens": marked,
        "pure_generated_tokens": marked[1:],
        "advantages": [0.5, 0.5, 0.5, 0.5, 0.5],
        "return": 0.25,
        "action_log_probs": [-0.1, -0.2, -0.3, -0.4, -0.5],
        "info": {"reward": reward, "reward_metrics": {"accuracy": reward}, "kl": 0.1},
        "has_images": True,
        "num_images": 1,
        "image_paths": ["images/dot.png"],
        **more,
    }


def lightrft(folder: Path) -> Path:
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "dot.png").write_bytes(png(7))
    for step in (20, 100):
        rows = [lightrft_row(step, 1.0), lightrft_row(step, 0.0)]
        (folder / f"trajectories_step_{step}.json").write_text(json.dumps(rows, indent=2))
    return folder


def records() -> list[Experience]:
    return [
        Experience(
            eid={"batch": 7, "task": f"t{i // 2}", "run": i % 2, "suffix": f"s{i}"},
            tokens=[5, 6, 7, 8, 9 + i],
            prompt_length=2,
            logprobs=[-0.1, -0.2, -0.3],
            old_logprobs=[-0.1, -0.25, -0.3],
            reward=float(i % 2),
            metrics={"acc": float(i % 2)},
            prompt_text="hi",
            response_text=f"there {EVIL}",
            policy_versions=3,
            info={"note": EVIL, "odd": (1, np.arange(3))} if i else {},
        )
        for i in range(4)
    ]


def _export(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / f"some.{kind}"
        formats.write(Experiences(records()), path, batch_rows=3)
        return path

    return make


def trinity(folder: Path) -> Path:
    """What Trinity-RFT 0.6.0 wrote."""
    path = folder / "buffer.db"
    path.write_bytes(gzip.decompress((TRINITY / "trinity_0.6.0.db.gz").read_bytes()))
    return path


MAKERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "verl": ("verl", verl),
    "verl-parquet": ("verl", verl_parquet),
    "trl": ("trl", trl),
    "trl-chat": ("trl", trl_chat),
    "openrlhf": ("openrlhf", openrlhf),
    "openrlhf-pairs": ("openrlhf", openrlhf_pairs),
    "verifiers": ("verifiers", verifiers),
    "prime-rl": ("verifiers", prime_rl),
    "traces": ("traces", traces),
    "messages": ("messages", messages),
    "inspect": ("inspect", inspect),
    "inspect-json": ("inspect", inspect_json),
    "lightrft": ("lightrft", lightrft),
    "parquet": ("parquet", _export("parquet")),
    "jsonl": ("jsonl", _export("jsonl")),
    "frames": ("frames", _export("frames")),
    "hf": ("hf", _export("hf")),
    "trxp": ("trxp", _export("trxp")),
    "trinity": ("trinity-sqlite", trinity),
}
"""The family of each, and what writes it."""
