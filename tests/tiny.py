"""Real tokenizers and real models that are small enough to run in a test: nothing here is a mock.

`words()` is a word-level tokenizer made from text, `bytes_()` a byte-level one; both have a chat template. `llama`,
`qwen3`, `gpt2`, `llava` and `qwen_vl` are transformers models with seeded random weights.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = """the quick brown fox jumps over the lazy dog and asks what two plus three is . the answer is five , not six !
a user calls a tool and the tool gives a number . think first , then answer : yes or no ?"""

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<image>"]
"""In this order they are ids 0 to 8 of both tokenizers; `<|end|>` (2) ends a turn and a response."""


def _wrapped(inner: Tokenizer, **more: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[4:],
        padding_side="left",
        **more,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@functools.cache
def words() -> PreTrainedTokenizerFast:
    """One token for each word or mark of `TEXT`; others are `<unk>`."""
    seen = dict.fromkeys(SPECIAL + TEXT.split())
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(seen)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(inner)


@functools.cache
def bytes_() -> PreTrainedTokenizerFast:
    """One token for each byte: every text goes there and back, and one character may take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return _wrapped(inner)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Logits are spread enough (range 0.2) for temperature and truncation to matter."""


def _seeded(make: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype).eval()


def llama(vocab: int = 300, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(**{"vocab_size": vocab, **SIZES, **config})
    return _seeded(lambda: LlamaForCausalLM(settings), seed, dtype)


def qwen3(vocab: int = 300, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen3 of two layers, with tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=vocab, head_dim=8, tie_word_embeddings=True, **SIZES)
    return _seeded(lambda: Qwen3ForCausalLM(config), seed, dtype)


def gpt2(vocab: int = 300, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A GPT-2 of two layers: learned positions, which left padding must not shift."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return _seeded(lambda: GPT2LMHeadModel(config), seed, dtype)


def llava(vocab: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A Llava (CLIP of one layer on 16 x 16 images in 8 x 8 patches, a Llama of two) and its processor."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = bytes_()
    text = LlamaConfig(vocab_size=vocab or len(tokenizer), **SIZES)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=32,
        initializer_range=0.2,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=SPECIAL.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=4,
        pad_token_id=0,
    )
    images = CLIPImageProcessorPil(
        size={"height": 16, "width": 16}, crop_size={"height": 16, "width": 16}, do_center_crop=False
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.chat_template = TEMPLATE
    return _seeded(lambda: LlavaForConditionalGeneration(config), seed, dtype), processor


IMAGE, VIDEO, START, END = 100, 101, 102, 103
"""The placeholders of `qwen_vl`, which its prompts hold expanded: one for each 2 x 2 patches of 14 x 14."""


def qwen_vl(seed: int = 0) -> Any:
    """A Qwen2.5-VL of two layers, whose images and videos have positions in space, with weights by which they count."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 120,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = _seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), seed, torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


def picture(colour: tuple[int, int, int] = (255, 0, 0), size: int = 16) -> Any:
    """A plain PIL image."""
    from PIL import Image

    return Image.new("RGB", (size, size), colour)
