"""Actors: called as LightRFT's, loaded from what users have, generating in LightRFT's layout; `process_sequences`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from rollbook.compat.lightrft.models import Actor, make_sampling, process_sequences
from rollbook.models import Critic
from rollbook.rewards import ModelReward
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import zoo
from tests.models.zoo import policy_log_probs

# --- called as LightRFT's ---------------------------------------------------------------------------------------------


def padded_call(records: list[Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows in a fresh rollout's layout, by hand."""
    before = max(r.prompt_length for r in records)
    after = max(len(r.tokens) - r.prompt_length for r in records)
    ids, mask = torch.zeros(len(records), before + after, dtype=torch.long), torch.zeros(len(records), before + after)
    for i, r in enumerate(records):
        at = before - r.prompt_length
        ids[i, at : at + len(r.tokens)] = r.tokens.long()
        mask[i, at : at + len(r.tokens)] = 1
    return ids, mask.long(), after


def test_padded_call() -> None:
    model, records = zoo.text("qwen3"), zoo.records([(3, 4), (5, 2), (1, 3)])
    actor = Actor(model, temperature=0.7)
    ids, mask, actions = padded_call(records)
    logprobs, output = actor(ids, actions, mask, return_output=True, entropy=True)
    assert torch.equal(actor(ids, actions, mask), logprobs) and logprobs.shape == (3, 4)
    for i, record in enumerate(records):
        log_probs, entropy = zoo.naive(model, record, 0.7)
        width = len(log_probs)
        torch.testing.assert_close(logprobs[i, :width], log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output["action_entropy"][i, :width], entropy, rtol=1e-5, atol=1e-5)
        assert not logprobs[i, width:].any() and not output["action_entropy"][i, width:].any()
    _, plain = actor(ids, actions, mask, return_output=True)
    assert "action_entropy" not in plain
    full_output = actor(ids, attention_mask=mask, return_output=True)
    assert full_output.logits.shape == (3, ids.shape[1], 300)
    # Rows that are all attended need no mask.
    torch.testing.assert_close(actor(ids[:1, 2:], 4), logprobs[:1], rtol=1e-5, atol=1e-5)


def test_packed_call() -> None:
    model, records = zoo.text("llama"), zoo.records([(3, 4), (5, 2), (1, 3)])
    actor = Actor(model)
    ids = torch.cat([r.tokens.long() for r in records])[None]
    lengths = [len(r.tokens) for r in records]
    number = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None]
    expected = torch.cat([zoo.naive(model, r)[0] for r in records])
    for counts in ([4, 2, 3], torch.tensor([4, 2, 3])):
        logprobs = actor(ids, counts, number, packed_seq_lens=torch.tensor(lengths))
        assert logprobs.shape == (1, 9)
        torch.testing.assert_close(logprobs[0], expected, rtol=1e-5, atol=1e-5)
    full_output = actor(ids, None, number, return_output=True, packed_seq_lens=lengths)
    assert full_output.logits.shape == (1, sum(lengths), 300)
    with pytest.raises(ValueError, match="attention_mask: expected the number of the sample"):
        actor(ids, [4, 2, 3], torch.ones_like(ids), packed_seq_lens=lengths)
    with pytest.raises(ValueError, match=r"num_actions\[1\]: got 9, expected at most its 7 tokens"):
        actor(ids, [4, 9, 3], number, packed_seq_lens=lengths)
    with pytest.raises(ValueError, match=r"packed_seq_lens: got 2 samples with 14 tokens in all"):
        actor(ids, [4, 2], number, packed_seq_lens=lengths[:2])
    with pytest.raises(ValueError, match=r"num_actions: got 2 entries, expected 3"):
        actor(ids, [4, 2], number, packed_seq_lens=lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_actions": None}, "num_actions: got None, expected it, or return_output=True"),
        ({"num_actions": 4}, "num_actions: got 4, expected fewer than the 4 tokens"),
        ({"num_actions": True}, "num_actions: got True"),
        ({"sequences": torch.ones(4, dtype=torch.long)}, r"sequences: got shape \[4\]"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask: got shape \[1, 3\], expected \[1, 4\]"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected a positive number"),
        ({"temperature": "hot"}, "temperature: got 'hot', expected a positive number"),
        ({"sequences": torch.tensor([[1, 2, 3, 4]]), "num_actions": [1]}, "num_actions"),
    ],
)
def test_bad_calls(changes: dict[str, Any], message: str) -> None:
    arguments = {"sequences": torch.tensor([[9, 10, 11, 12]]), "num_actions": 2, **changes}
    with pytest.raises(ValueError, match=message):
        Actor(zoo.text("llama"))(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature: got 0, expected a positive"),
        ({"suppress": [-1]}, r"suppress\[0\]: got -1"),
        ({"trainable": "no"}, "trainable: got 'no'"),
        ({"dtype": "bflat16"}, "dtype: got 'bflat16'"),
        ({"dtype": torch.int64}, "dtype: got torch.int64"),
        ({"model": 7}, "model: got int, expected a module"),
    ],
)
def test_bad_actors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Actor(**{"model": zoo.text("llama"), **options})


# --- process_sequences ------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    ended=st.booleans(),
    shared=st.booleans(),
)
def test_masks_are_those_of_the_lengths(rows: list[tuple[int, int, int]], ended: bool, shared: bool) -> None:
    """Whatever the lengths, and whether padding is the end token or another, if the response ends as it should."""
    eos, pad = 2, 2 if shared else 0
    before, after = max(p for _, p, _ in rows), max(r for _, _, r in rows) + ended
    ids = torch.full((len(rows), before + after), pad)
    expected = torch.zeros_like(ids)
    for i, (_, prompt, response) in enumerate(rows):
        # A response that does not end itself fills its row: padding after it could not be told from its end.
        count = response + 1 if ended else (after if shared else response)
        ids[i, before - prompt : before + count] = 7
        if ended:
            ids[i, before + count - 1] = eos
        expected[i, before - prompt : before + count] = 1
    _, attended, actions = process_sequences(ids, before, eos, pad)
    assert torch.equal(attended, expected) and torch.equal(actions, expected[:, before:].bool())


def test_padding_that_is_an_end_token() -> None:
    ids = torch.tensor([[2, 5, 2, 7, 2, 2, 2], [2, 2, 5, 2, 2, 2, 2], [5, 6, 7, 8, 9, 9, 9], [2, 2, 2, 7, 2, 2, 2]])
    _, attended, actions = process_sequences(ids, 3, [1, 2], 2)
    assert attended.tolist() == [
        [0, 1, 1, 1, 1, 0, 0],  # an end token inside the prompt is the prompt's
        [0, 0, 1, 1, 0, 0, 0],  # ended at once
        [1, 1, 1, 1, 1, 1, 1],  # never ended
        [0, 0, 0, 1, 1, 0, 0],  # a prompt that is all padding
    ]
    assert actions.tolist() == [[bool(x) for x in row[3:]] for row in attended.tolist()]


def test_bad_sequences() -> None:
    with pytest.raises(ValueError, match="input_len: got 9, expected at most the 3"):
        process_sequences(torch.ones(1, 3), 9, 2, 0)
    with pytest.raises(ValueError, match="pad_token_id: got None"):
        process_sequences(torch.ones(1, 3), 1, 2, None)  # type: ignore[arg-type]
    assert process_sequences(torch.ones(0, 3), 1, 2, 0)[2].shape == (0, 2)


# --- loading and saving -----------------------------------------------------------------------------------------------


def test_from_a_folder_a_configuration_a_module(tmp_path: Path) -> None:
    model, records = tiny.llama(), zoo.records([(3, 4)])
    expected = policy_log_probs(Actor(model), records).logprobs[0]
    Actor(model, tokenizer=tiny.words()).save_pretrained(tmp_path)
    loaded = Actor(tmp_path)
    assert loaded.dtype == torch.float32 and torch.equal(policy_log_probs(loaded, records).logprobs[0], expected)
    assert loaded.tokenizer("the quick fox")["input_ids"] == tiny.words()("the quick fox")["input_ids"]
    assert loaded.pad_token_id == 0
    half = Actor(str(tmp_path), dtype="bfloat16", attn_implementation="eager", trainable=False)
    assert half.dtype == torch.bfloat16 and half.config._attn_implementation == "eager"
    assert not any(parameter.requires_grad for parameter in half.parameters()) and not half.training
    untrained = Actor(model.config, dtype=torch.float64)
    assert untrained.dtype == torch.float64 and untrained.tokenizer is None and untrained.device.type == "cpu"
    assert not torch.equal(policy_log_probs(untrained, records).logprobs[0], expected)


def test_vision_models_are_known_by_their_configuration(tmp_path: Path) -> None:
    model, processor = tiny.llava()
    Actor(model, processor=processor).save_pretrained(tmp_path)
    loaded = Actor(tmp_path)
    assert type(loaded.model) is type(model) and type(loaded.processor) is type(processor)
    assert loaded.tokenizer is loaded.processor.tokenizer and loaded.suppress == (8,)
    assert type(Actor(model.config).model) is type(model)


def test_a_processor_that_does_not_load_is_said(tmp_path: Path) -> None:
    model, _ = tiny.llava()
    Actor(model, tokenizer=tiny.bytes_()).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="its processor did not load, so it takes text only"):
        assert Actor(tmp_path).processor is None


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert Actor(tmp_path).tokenizer is None


def test_kernels_that_a_configuration_names_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any depth, in a folder or in memory, of a policy, a critic or a reward model."""

    def load(name: str, **_: Any) -> None:
        raise AssertionError(f"{name} would have been downloaded and run")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", load)
    tiny.llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"attn_implementation": "stranger/kernel",', 1))
    vision = tiny.llava()[0].config
    vision.vision_config._attn_implementation = "stranger/kernel"
    scorer = LlamaConfig(num_labels=1, attn_implementation={"": "stranger/kernel"})
    by_layer = LlamaConfig(layers=[{"attn_implementation": "stranger/kernel"}])
    sources = ((Actor, tmp_path), (Critic, tmp_path), (ModelReward, tmp_path), (Actor, vision), (Critic, scorer))
    for build, source in (*sources, (ModelReward, scorer), (Actor, by_layer)):
        with pytest.raises(ValueError, match="names the kernel .*'stranger/kernel'.*: code from the hub is not run"):
            build(source)


# --- generating -------------------------------------------------------------------------------------------------------


def test_generate_in_lightrfts_layout() -> None:
    actor = Actor(tiny.llama(), tokenizer=tiny.words(), temperature=0.9)
    ids = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6], [0, 4, 0, 3]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    options = {"max_new_tokens": 6, "do_sample": True, "seed": 5, "top_k": -1, "top_p": 1.0, "num_beams": 1}
    sequences, attended, actions = actor.generate(ids, mask, eos_token_id=[2, 150, 151, 152, 153], **options)
    assert torch.equal(sequences[:, :4], ids) and torch.equal(attended[:, :4], mask)
    assert attended.dtype == torch.int64 and actions.dtype == torch.bool and sequences.shape[1] == 4 + actions.shape[1]
    assert torch.equal(attended[:, 4:].bool(), actions) and not sequences[:, 4:][~actions].any()
    again = actor.generate(ids, mask, eos_token_id=[2, 150, 151, 152, 153], **options)
    assert all(torch.equal(a, b) for a, b in zip((sequences, attended, actions), again, strict=True))
    # Without a mask what is padding is told by the pad token; inside a prompt it is none.
    assert torch.equal(actor.generate(ids, eos_token_id=[2, 150, 151, 152, 153], **options)[1], attended)


def test_greedy_generation_is_transformers_own() -> None:
    model = tiny.llama()
    actor = Actor(model, tokenizer=tiny.words())
    ids = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6]])
    mask = (ids != 0).long()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    sequences = actor.generate(ids, mask, max_length=12, do_sample=False, use_cache=True, early_stopping=False)[0]
    assert torch.equal(sequences, expected)
    several, _, actions = actor.generate(ids, mask, max_new_tokens=3, num_return_sequences=2)
    assert torch.equal(several[:, :4], ids.repeat_interleave(2, 0)) and actions.shape == (4, 3)


def test_generation_with_images_made_ready() -> None:
    model, processor = tiny.llava()
    actor = Actor(model, processor=processor)
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 3, 16, 16, generator=draw)
    rows = [[10, 11], [9, 8, 8, 8, 8, 12], [8] * 8 + [13]]
    ids = torch.zeros(3, 9, dtype=torch.long)
    for row, tokens in zip(ids, rows, strict=True):
        row[9 - len(tokens) :] = torch.tensor(tokens)
    mask = (ids != 0).long()
    sequences, attended, _ = actor.generate(ids, mask, pixel_values=pixels, max_new_tokens=4, do_sample=False)
    alone = [(10, None), (9, pixels[:1]), (13, pixels[1:])]
    for i, (tokens, (_, image)) in enumerate(zip(rows, alone, strict=True)):
        prompt = torch.tensor([tokens])
        media = {} if image is None else {"pixel_values": image}
        expected = actor.generate(prompt, torch.ones_like(prompt), max_new_tokens=4, do_sample=False, **media)[0][0]
        assert sequences[i][attended[i] != 0].tolist() == expected.tolist()
    with pytest.raises(ValueError, match="pixel_values: got 2, expected as many images as the prompts' placeholders"):
        actor.generate(ids, mask, pixel_values=pixels[:2], max_new_tokens=4)


def test_what_is_suppressed_is_never_sampled_whoever_asks() -> None:
    model = tiny.llama(vocab=20)
    actor = Actor(model, suppress=tuple(range(4, 20)))
    samples = TransformersEngine(actor).generate([[5, 6]], n=8, max_tokens=8, ignore_eos=True, seed=0)
    assert {token for sample in samples for token in sample.response_ids} <= {0, 1, 2, 3}


def test_a_failure_is_raised() -> None:
    actor = Actor(tiny.llama(), tokenizer=tiny.words())
    with pytest.raises(RuntimeError, match="sample 1 .*: ValueError: prompt"):
        actor.generate(torch.tensor([[5, 6], [7, 299_999]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="repetition_penalty: got 1.2, expected 1.0: not supported"):
        actor.generate(torch.tensor([[5, 6]]), repetition_penalty=1.2)
    with pytest.raises(ValueError, match="unknown option 'max_new_token'; did you mean 'max_new_tokens'"):
        actor.generate(torch.tensor([[5, 6]]), max_new_token=2)
    with pytest.raises(ValueError, match="max_length: got 2, expected an integer >= 3"):
        actor.generate(torch.tensor([[5, 6]]), max_length=2)
    with pytest.raises(ValueError, match=r"input_ids: got shape \[2\]"):
        actor.generate(torch.tensor([5, 6]))


def test_options_of_generate() -> None:
    sampling = make_sampling(
        {"stop_strings": ["."], "min_new_tokens": 2, "temperature": None, "suppress_tokens": [4]}, 3, (8,)
    )
    assert (sampling.stop, sampling.min_tokens, sampling.temperature, sampling.suppress) == ((".",), 2, 1.0, (8, 4))
    assert make_sampling({}, 3, ()).ignore_eos is False


# --- reference and training -------------------------------------------------------------------------------------------


def test_the_reference_is_a_frozen_copy() -> None:
    actor = Actor(tiny.llama(), temperature=0.5, suppress=(3,))
    records = zoo.records([(3, 4)])
    reference = actor.reference()
    expected = policy_log_probs(actor, records).logprobs[0]
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(2)
    assert torch.equal(policy_log_probs(reference, records).logprobs[0], expected)
    assert not torch.equal(policy_log_probs(actor, records).logprobs[0], expected)
    torch.testing.assert_close(reference(records[0].tokens[None].long(), 4)[0], expected, rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(parameter.requires_grad for parameter in actor.parameters())


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = zoo.batch_of(zoo.records([(3, 4), (2, 6)]))
    gradients = []
    for on in (False, True):
        actor = Actor(tiny.llama()).train()
        if on:
            actor.gradient_checkpointing_enable()
            assert actor.model.is_gradient_checkpointing
        actor.token_stats(batch).logprobs.sum().backward()
        gradients.append(actor.model.model.layers[0].self_attn.q_proj.weight.grad)
        actor.gradient_checkpointing_disable()
        assert not actor.model.is_gradient_checkpointing
    torch.testing.assert_close(gradients[0], gradients[1])


def test_records_go_through_in_one_pass_with_gradients() -> None:
    actor, records = Actor(tiny.llama()), zoo.records([(3, 4), (2, 0), (2, 6)])
    for packed in (None, False, True):
        stats = zoo.stats_of(actor, records, packed, entropy=True)
        assert [len(row) for row in stats.logprobs] == [4, 0, 6]
        actor.zero_grad()
        stats.logprobs.values.sum().backward()
        assert actor.model.lm_head.weight.grad.abs().sum() > 0
        for row, record in zip(stats.logprobs, records, strict=True):
            torch.testing.assert_close(row, zoo.naive(actor.model, record)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folder", ["/no/such/folder", "./none", "../none", "a/b/c"])
def test_a_folder_that_does_not_exist(folder: str) -> None:
    with pytest.raises(ValueError, match=f"model: got {folder!r}, which does not exist"):
        Actor(folder)
