"""Sort six letters: a task, a tokenizer and a model small enough to train in two minutes.

The prompt `dbfaec>` has the answer `abcdef` and the end token; the reward is 1 for exactly that, else 0.

Invariant: initial weights, rows, their order and the teacher depend only on the seed. The words of expert and teacher
are not among those that a run of the same seed trains on or is evaluated on.

    python -m rollbook.train.recipes.letters expert runs/expert     # the expert's book, for the recipe `letters-mix`
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from rollbook.core.ids import EID

__all__ = ["model", "pairs", "random_reward", "reward", "rows", "tokenizer", "trained_model"]
# A configuration may name these without `--trust`: none of them writes or runs a file.

LETTERS = "abcdefghij"
_PUNCTUATION = "0123456789>=+-*/()[]., :;!?"
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")


def tokenizer(extra_characters: str = "") -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character: lowercase letters, digits, punctuation, and `extra_characters`.

    Args:
        extra_characters: Further characters.

    Returns:
        The tokenizer.

    >>> characters = tokenizer()
    >>> characters.decode(characters("dbfa>").input_ids), characters.padding_side
    ('dbfa>', 'left')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys("abcdefghijklmnopqrstuvwxyz" + _PUNCTUATION + extra_characters)
    inner = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate((*_SPECIAL_TOKENS, *characters))}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)  # type: ignore[no-untyped-call]


def model(
    seed: int = 0, hidden: int = 96, layers: int = 2, heads: int = 3, positions: int = 64, extra_characters: str = ""
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Build a Llama with random weights, by default 0.19 million, and its tokenizer.

    Args:
        seed: Seed of the weights.
        hidden: Hidden size.
        layers: Number of layers.
        heads: Number of attention heads.
        positions: Context length.
        extra_characters: Further characters of the tokenizer.

    Returns:
        The model and its tokenizer.

    >>> network, _ = model(hidden=32, heads=1)
    >>> network.config.model_type
    'llama'
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    char_tokenizer = tokenizer(extra_characters)
    config = LlamaConfig(
        vocab_size=len(char_tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=char_tokenizer.pad_token_id,
        bos_token_id=char_tokenizer.bos_token_id,
        eos_token_id=char_tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), char_tokenizer  # type: ignore[no-untyped-call]


def rows(count: int = 20_000, length: int = 6, seed: int = 0, skip: int = 0) -> list[dict[str, Any]]:
    """Generate prompts with answers: `count` distinct words, after the first `skip`.

    Args:
        count: Number of words.
        length: Letters of a word.
        seed: Seed of the words.
        skip: Number of words to skip.

    Returns:
        Rows with `prompt`, `reference` and `response`.

    Raises:
        ValueError: There are not that many words.

    >>> rows(1, length=4)[0].keys()
    dict_keys(['prompt', 'reference', 'response'])
    >>> rows(2, skip=1) == rows(3)[1:]
    True
    """
    if skip + count > len(LETTERS) ** length // 2:
        max_count = len(LETTERS) ** length // 2 - skip
        raise ValueError(f"count: got {count}, expected at most {max_count} of {length} letters after the first {skip}")
    rng, words = random.Random(seed), dict[str, None]()
    while len(words) < skip + count:
        words["".join(rng.choices(LETTERS, k=length))] = None
    answers = [(word, "".join(sorted(word))) for word in itertools.islice(words, skip, None)]
    return [{"prompt": f"{word}>", "reference": answer, "response": answer} for word, answer in answers]


def trained_model(
    seed: int = 0,
    steps: int = 150,
    target_accuracy: float | None = None,
    count: int = 20_000,
    length: int = 6,
    skip: int = 20_000,
    hidden: int = 96,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a model on answers. With 150 steps, about twenty seconds, it is a teacher that is 95% accurate.

    Args:
        seed: Seed of weights and words.
        steps: Number of supervised steps.
        target_accuracy: Share of correct answers at which training stops; `None`: after all steps.
        count: Number of words.
        length: Letters of a word.
        skip: Number of words to skip.
        hidden: Hidden size.

    Returns:
        The trained model and its tokenizer.

    >>> network, _ = trained_model(steps=2, count=256, hidden=48)
    >>> network.config.hidden_size
    48
    """
    from rollbook.models import Actor
    from rollbook.train.optimizer import OptimizerConfig
    from rollbook.train.prompts import Prompts
    from rollbook.train.supervised import WarmupConfig, warm_up

    network, char_tokenizer = model(seed, hidden)
    schedule: dict[str, Any] = (
        {} if target_accuracy is not None else {"schedule": "linear", "min_lr_ratio": 0.03, "steps": steps}
    )
    warm_up(
        Actor(network, tokenizer=char_tokenizer),
        Prompts(rows(count, length, seed, skip), seed=seed),
        WarmupConfig(
            steps=steps,
            target_accuracy=target_accuracy,
            optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30, **schedule),
        ),
        reward=reward,
        sampling={"max_tokens": length + 1},
        seed=seed,
    )
    return network, char_tokenizer


def pairs(
    count: int = 8000,
    length: int = 6,
    seed: int = 0,
    target_accuracy: float = 0.2,
    skip: int = 20_000,
    hidden: int = 96,
) -> list[dict[str, Any]]:
    """Generate preference pairs: the correct answer, and the wrong one of a model with a low success rate.

    Args:
        count: Number of words, of which those that the model gets right are left out.
        length: Letters of a word.
        seed: Seed of words and model.
        target_accuracy: Share of correct answers of the model.
        skip: Number of words before those that the model was trained on.
        hidden: Hidden size of the model.

    Returns:
        Rows with `prompt`, `reference`, `response`, `chosen` and `rejected`.

    >>> rejected_pairs = pairs(40, length=4, skip=40, target_accuracy=0.0, hidden=48)
    >>> all(row["chosen"] == row["reference"] != row["rejected"] for row in rejected_pairs)
    True
    """
    from rollbook.models import Actor
    from rollbook.rollout import TransformersEngine
    from rollbook.train.evaluation import evaluate
    from rollbook.train.prompts import Prompts

    network, char_tokenizer = trained_model(
        seed, target_accuracy=target_accuracy, count=count, length=length, skip=skip, hidden=hidden
    )
    tasks = rows(count, length, seed)
    engine, sampling = TransformersEngine(Actor(network, tokenizer=char_tokenizer)), {"max_tokens": length + 1}
    answers = evaluate(engine, Prompts(tasks, shuffle=False), reward, sampling=sampling, seed=seed).records
    wrong = {record.prompt_text: record.response_text for record in answers}
    both = [{**row, "chosen": row["reference"], "rejected": wrong[row["prompt"]]} for row in tasks]
    return [row for row in both if row["rejected"] not in ("", row["chosen"])]


def write_expert_book(folder: str | Path, count: int = 2000, length: int = 6, seed: int = 0, skip: int = 20_000) -> int:
    """Write a book of correct answers.

    Args:
        folder: Folder of the book.
        count: Number of answers.
        length: Letters of a word.
        seed: Seed of the words.
        skip: Number of words to skip.

    Returns:
        The number of records.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_expert_book(f"{folder}/expert", count=20)
    20
    """
    from rollbook.book.book import open as open_book
    from rollbook.train.prompts import Prompts
    from rollbook.train.supervised import records_from_answers

    char_tokenizer = tokenizer()
    prompts = Prompts(rows(count, length, seed, skip)).every("expert")
    records = records_from_answers(prompts, char_tokenizer)
    with open_book(Path(folder), tokenizer=char_tokenizer) as book:
        book.append(records.assign(reward=[1.0] * len(records)))
    return len(records)


def reward(response: str, reference: str, finish_reason: str) -> float:
    """Return 1 if the response is the reference and ends with the end token, else 0.

    Args:
        response: The response.
        reference: The correct answer.
        finish_reason: Why the response ended.

    Returns:
        1 or 0.

    >>> reward("abcdef", "abcdef", "stop"), reward("abcdef", "abcdef", "length"), reward("abcdfe", "abcdef", "stop")
    (1.0, 0.0, 0.0)
    """
    return float(response == reference and finish_reason == "stop")


def random_reward(eid: EID) -> float:
    """Return 1 for about a quarter of the samples, by a hash of the id: the control of a trained reward.

    Args:
        eid: Id of the sample.

    Returns:
        1 or 0.

    >>> from rollbook.core.ids import EID
    >>> sum(random_reward(EID(batch=0, task=i, suffix="")) for i in range(1000)) / 1000
    0.26
    """
    digest = hashlib.blake2b(eid.uid.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") % 4 == 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, which writes the expert's book."""
    import argparse

    program = argparse.ArgumentParser(prog="python -m rollbook.train.recipes.letters")
    parser = program.add_subparsers(required=True).add_parser(
        "expert", help="write a book of correct answers, for `rollbook train letters-mix replay.expert=FOLDER`"
    )
    parser.add_argument("folder", type=Path, help="folder of the book")
    parser.add_argument("--count", type=int, default=2000, help="number of answers")
    parser.add_argument("--length", type=int, default=6, help="letters of a word")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run that will train on it")
    parser.add_argument("--skip", type=int, default=20_000, help="number of words of that run")
    options = program.parse_args(arguments)
    print(f"{write_expert_book(**vars(options)):,} correct answers in {options.folder}")


if __name__ == "__main__":
    main()
