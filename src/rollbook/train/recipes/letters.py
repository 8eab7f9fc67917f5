"""Sort six letters: a task, a tokenizer and a model small enough that reinforcement is seen to work in two minutes.

Invariant: everything follows from a seed: the model's first weights, the rows, their order.

`dbfaec>` is to be answered with `abcdef` and the end token: reward 1 if it is all right and ended by itself, else 0.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

LETTERS = "abcdefghij"
_SIGNS = "0123456789>=+-*/()[]., :;!?"
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def tokenizer(signs: str = "") -> Any:
    """A tokenizer of one token for each character: small letters, digits, common signs, and `signs`.

    >>> made = tokenizer()
    >>> made.decode(made("dbfa>").input_ids), made.padding_side
    ('dbfa>', 'left')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys("abcdefghijklmnopqrstuvwxyz" + _SIGNS + signs)
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate((*_SPECIAL, *characters))}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)  # type: ignore[no-untyped-call]


def model(
    seed: int = 0, hidden: int = 96, layers: int = 2, heads: int = 3, positions: int = 64, signs: str = ""
) -> tuple[Any, Any]:
    """A Llama of 0.19 million random weights, and its tokenizer.

    >>> made, _ = model(hidden=32, heads=1)
    >>> made.config.model_type
    'llama'
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer(signs)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), words  # type: ignore[no-untyped-call]


def rows(count: int = 20_000, length: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks: `count` different words of `length` letters, with their answers.

    >>> rows(1, length=4)[0].keys()
    dict_keys(['prompt', 'reference', 'response'])
    """
    if count > len(LETTERS) ** length // 2:
        raise ValueError(f"count: got {count}, expected at most {len(LETTERS) ** length // 2} of {length} letters")
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(rng.choices(LETTERS, k=length))] = None
    answers = [(word, "".join(sorted(word))) for word in found]
    return [{"prompt": f"{word}>", "reference": answer, "response": answer} for word, answer in answers]


def reward(response: str, reference: str, finish_reason: str) -> float:
    """1 if the answer is the reference and ended by itself, else 0.

    >>> reward("abcdef", "abcdef", "stop"), reward("abcdef", "abcdef", "length"), reward("abcdfe", "abcdef", "stop")
    (1.0, 0.0, 0.0)
    """
    return float(response == reference and finish_reason == "stop")


def chance(eid: Any) -> float:
    """A reward that has nothing to do with the answer: the control to measure learning against.

    1 for about a quarter of the samples, by a hash of the sample's id.

    >>> from rollbook.ids import EID
    >>> sum(chance(EID(batch=0, task=i, suffix="")) for i in range(1000)) / 1000
    0.247
    """
    digest = hashlib.blake2b(eid.uid.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") % 4 == 0)
