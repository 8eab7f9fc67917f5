"""Vision through the maker: each prompt with its own images, pre-processed once, in every layout; and it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook import Experiences
from rollbook.algorithms import losses
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.core.media import load_image
from rollbook.core.wire import decode, encode
from rollbook.models import Actor, Critic
from rollbook.rewards.types import RewardInput
from rollbook.rollout import Prompt
from tests import tiny
from tests.maker_records import make_records
from tests.models.batches import native_batch

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
PROMPTS = ["no picture", "<image>one", "<image><image>two"]
IMAGES = [None, tiny.picture(RED), [tiny.picture(GREEN), tiny.picture(BLUE)]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 5}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counting:
    """A processor that counts the pictures it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.pictures = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, images: Any = None, **options: Any) -> Any:
        self.pictures += _count(images)
        return self.inner(*args, images=images, **options)


def _count(images: Any) -> int:
    if images is None:
        return 0
    return sum(map(_count, images)) if isinstance(images, (list, tuple)) else 1


def policy(seed: int = 0) -> tuple[Actor, Counting]:
    model, processor = tiny.llava(seed=seed)
    counting = Counting(processor)
    return Actor(model, processor=counting), counting


def maker(actor: Actor, kind: type[NaiveExperienceMaker] = NaiveExperienceMaker, **config: Any) -> NaiveExperienceMaker:
    settings: dict[str, Any] = {"n_samples_per_prompt": 3, "seed": 5, "advantage_estimator": "group_norm"} | config
    return kind(
        actor,
        None,
        None,
        actor.reference(),
        tiny.bytes_(),
        64,
        0.01,
        reward_fn=lambda response_ids: float(response_ids[0] % 5),
        config=MakerConfig(**settings),
    )


def test_each_prompt_has_its_own_images_processed_once() -> None:
    actor, counting = policy()
    (batch,) = maker(actor).make_experience_list(PROMPTS, all_images=IMAGES, **OPTIONS)
    assert counting.pictures == 3  # one and two, whatever the number of samples
    rows = [item.pixel_values for item in _items(batch)]
    assert [0 if row is None else len(row) for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    red, green, blue = (
        counting.inner.image_processor(tiny.picture(colour), return_tensors="pt")["pixel_values"]
        for colour in (RED, GREEN, BLUE)
    )
    assert torch.equal(rows[3], red) and torch.equal(rows[8], torch.cat([green, blue]))
    assert batch.raw_images is not None and [0 if images is None else len(images) for images in batch.raw_images][
        ::3
    ] == [
        0,
        1,
        2,
    ]


def _items(batch: Any) -> Any:
    from rollbook.compat.lightrft.replay_buffer import split_experience_batch

    return split_experience_batch(batch)


def test_log_probs_are_those_of_each_sample_alone() -> None:
    actor, _ = policy()
    (batch,) = maker(actor).make_experience_list(PROMPTS, all_images=IMAGES, **OPTIONS)
    image = tiny.SPECIAL.index("<image>")
    for item, logprobs, engine in zip(
        _items(batch), batch.pack().action_log_probs, batch.pack().extras["logprobs"], strict=True
    ):
        ids = batch_ids(item)
        media = {} if item.pixel_values is None or not len(item.pixel_values) else {"pixel_values": item.pixel_values}
        with torch.no_grad():
            logits = actor.model(torch.tensor([ids]), **media).logits[0]
        logits[:, image] = -torch.inf  # never sampled
        spread = torch.log_softmax(logits, -1)
        expected = [spread[t - 1, ids[t]].item() for t in range(len(ids) - len(logprobs), len(ids))]
        assert logprobs.tolist() == pytest.approx(expected, abs=2e-5)
        assert engine.tolist() == pytest.approx(expected, abs=2e-5)


def batch_ids(item: Any) -> list[int]:
    attended = item.attention_mask.bool()
    return item.sequences[attended].tolist()


@pytest.mark.parametrize("size", [1, 4])
def test_packed_or_cut_it_is_the_same(size: int) -> None:
    actor, _ = policy()
    together = maker(actor).make_experience_list(PROMPTS, all_images=IMAGES, **OPTIONS)
    for packing in (False, True):
        parts = maker(actor, packing_samples=packing, micro_rollout_batch_size=size).make_experience_list(
            PROMPTS, all_images=IMAGES, **OPTIONS
        )
        assert sum(map(len, parts)) == 9
        for name in ("advantages", "action_log_probs", "base_action_log_probs"):
            for row, other in zip(
                RolloutBatches(together).rows(name) or (), RolloutBatches(parts).rows(name) or (), strict=True
            ):
                assert torch.equal(row, other)
        pictures = [item.pixel_values for part in parts for item in _items(part)]
        assert [0 if images is None else len(images) for images in pictures] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_same_picture_is_kept_once() -> None:
    actor, _ = policy()
    pictures = [IMAGES[1], tiny.picture(RED)]
    (samples,) = maker(actor).generate_samples(["<image>a", "<image>b"], all_images=pictures, **OPTIONS)
    media = [rollout.media["pixel_values"] for rollout in samples.rollouts or () if rollout.media]
    assert len(media) == 6 and len({id(rollout) for rollout in media}) == 1


def test_a_picture_that_is_none_is_its_prompts_error() -> None:
    actor, _ = policy()
    (batch,) = maker(actor).make_experience_list(
        ["<image>a", "<image>b"], all_images=[b"no picture", IMAGES[1]], **OPTIONS
    )
    assert batch.info["finish_reason"][:3] == ["error"] * 3 and "error" not in batch.info["finish_reason"][3:]
    assert batch.info["reward"].isnan().tolist() == [True] * 3 + [False] * 3
    with pytest.raises(ValueError, match="all_images: got 1 entries, expected 2, one for each prompt"):
        maker(actor).make_experience_list(["<image>a", "<image>b"], all_images=[None])


def test_it_trains_and_evaluates() -> None:
    """Two colours, two answers: policy gradients through images move what the model says of each."""
    actor, _ = policy(seed=2)
    tokenizer = tiny.bytes_()
    references = {RED: tokenizer("r", add_special_tokens=False)["input_ids"][0]}
    references[BLUE] = tokenizer("b", add_special_tokens=False)["input_ids"][0]
    prompts = [
        Prompt(text="<image>colour?", images=[tiny.picture(colour)], reference=references[colour])
        for colour in references
    ]

    def reward(response_ids: list[int], reference: int) -> float:
        return -abs(response_ids[0] - reference) / 100  # dense: near is better

    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, tokenizer, 64, None, reward_fn=reward,
        config=MakerConfig(n_samples_per_prompt=32, seed=1, advantage_estimator="group_norm"),
    )  # fmt: skip
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    seen = []
    for _ in range(12):
        (batch,) = experience_maker.make_experience_list(prompts, max_new_tokens=1)
        seen.append(batch.info["reward"].mean().item())
        log_probs = actor.token_stats(native_batch(batch)).logprobs
        loss = losses.ppo(log_probs, batch.action_log_probs, batch.advantages, batch.action_mask).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(seen[-3:]) / 3 > sum(seen[:3]) / 3 + 0.1, seen


def test_a_critic_sees_the_images_too() -> None:
    actor, _ = policy()
    model, _ = tiny.llava(seed=9)
    critic = Critic(model, value_head="normal")
    experience_maker = NaiveExperienceMaker(
        actor, critic, None, None, tiny.bytes_(), 64, None, reward_fn=lambda response: 1.0,
        config=MakerConfig(n_samples_per_prompt=2, seed=5, advantage_estimator="gae"),
    )  # fmt: skip
    prompts = [Prompt(text="<image>same", images=[tiny.picture(colour)]) for colour in (RED, BLUE)]
    (batch,) = experience_maker.make_experience_list(prompts, **OPTIONS)
    assert batch.values[0, 0].item() != batch.values[2, 0].item()


# --- videos, by a model with positions in space ----------------------------------------------------------------


def clip(frames: int, height: int, width: int, token: int, seed: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """A prompt with one picture (or video) of so many patches, and its tensors."""
    pixels = torch.randn(
        frames * height * width, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(seed)
    )  # two frames to a patch
    grid = torch.tensor([[frames, height, width]])
    ids = [5 + seed, tiny.START, *[token] * (frames * height * width // 4), tiny.END, 7]
    names = ("pixel_values", "image_grid_thw") if token == tiny.IMAGE else ("pixel_values_videos", "video_grid_thw")
    return ids, dict(zip(names, (pixels, grid), strict=True))


@pytest.mark.parametrize("packing", [False, True])
def test_videos_beside_images_and_text(packing: bool) -> None:
    model = tiny.qwen_vl()
    actor = Actor(model)
    video_ids, video = clip(2, 2, 4, tiny.VIDEO, 1)
    image_ids, image = clip(1, 4, 2, tiny.IMAGE, 2)
    prompts = [
        Prompt(token_ids=video_ids, videos=video),
        Prompt(token_ids=image_ids, images=image),
        Prompt(token_ids=[9, 8, 7]),
    ]
    experience_maker = NaiveExperienceMaker(
        actor, None, None, None, None, 64, None, reward_fn=lambda response_ids: float(response_ids[0] % 3),
        config=MakerConfig(n_samples_per_prompt=2, seed=3, packing_samples=packing, advantage_estimator="group_norm"),
    )  # fmt: skip
    (batch,) = experience_maker.make_experience_list(prompts, max_new_tokens=5)
    assert "error" not in batch.info, batch.info["error"]
    items = _items(batch)
    assert [sample.pixel_values_videos is not None and len(sample.pixel_values_videos) for sample in items][:2] == [
        16,
        16,
    ]
    assert [sample.pixel_values is not None and len(sample.pixel_values) for sample in items][2:4] == [8, 8]
    packed = batch if packing else batch.pack()
    for i, logprobs in enumerate(packed.action_log_probs):
        ids = packed.sequences[i].tolist()
        media = [video, video, image, image, {}, {}][i]
        kinds = torch.tensor([[{tiny.IMAGE: 1, tiny.VIDEO: 2}.get(token, 0) for token in ids]])
        inputs = {**media, "mm_token_type_ids": kinds} if media else {}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), **inputs).logits[0]
        logits[:, list(actor.suppress)] = -torch.inf
        spread = torch.log_softmax(logits, -1)
        expected = [spread[t - 1, ids[t]].item() for t in range(len(ids) - len(logprobs), len(ids))]
        assert logprobs.tolist() == pytest.approx(expected, abs=5e-5)
        assert packed.extras["logprobs"][i].tolist() == pytest.approx(expected, abs=5e-5)


def test_records_keep_the_pictures_and_batches_do_not_change(tmp_path: Path) -> None:
    actor, _ = policy()
    file = tmp_path / "blue.png"
    tiny.picture(BLUE).save(file)
    images = [None, tiny.picture(RED), [str(file), file.read_bytes()]]
    experience_maker = maker(actor)
    (batch,) = experience_maker.make_experience_list(PROMPTS, all_images=images, **OPTIONS)
    assert batch.info is not None and "info" not in batch.info  # they are in raw_images, as they were given
    assert batch.raw_images is not None and batch.raw_images[-1] == images[-1]
    records = make_records(maker(actor), PROMPTS, all_images=images, **OPTIONS)
    assert [len(row.info.get("images", ())) for row in records] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert records[8].info["images"] == [file.read_bytes()] * 2
    assert load_image("image", records[3].info["images"][0]).getpixel((0, 0)) == RED
    with_pictures, without_pictures = (
        from_experiences(records),
        from_experiences(Experiences([row.replace(info={}) for row in records])),
    )
    assert torch.equal(with_pictures.sequences, without_pictures.sequences) and torch.equal(
        with_pictures.pixel_values, without_pictures.pixel_values
    )
    item_images = [(item.info.get("info") or {}).get("images") for item in _items(from_experiences(records))]
    assert item_images == [row.info.get("images") for row in records]
    assert decode(encode(records)) == records
    assert [len(RewardInput.of(row, tiny.bytes_()).images) for row in records][::3] == [0, 1, 2]


def test_samples_are_made_records_of_once() -> None:
    """And a subclass that does something of its own to them gets the same."""

    class Counted(NaiveExperienceMaker):
        def make_experience(self, samples: Any) -> Any:
            batch = super().make_experience(samples)
            for rollout in samples.rollouts:
                rollout.metrics["seen"] = 1.0
            return batch

    actor, _ = policy()
    plain = maker(actor)
    records = make_records(plain, PROMPTS, all_images=IMAGES, **OPTIONS)
    assert plain._rollout is None
    again = make_records(maker(actor), PROMPTS, all_images=IMAGES, **OPTIONS)
    assert records == again
    counted = make_records(
        maker(actor, kind=Counted, micro_rollout_batch_size=4), PROMPTS, all_images=IMAGES, **OPTIONS
    )
    assert [row.metrics["seen"] for row in counted] == [1.0] * 9
    for counted_record, record in zip(counted, records, strict=True):
        assert torch.equal(counted_record.tokens, record.tokens) and counted_record.info == record.info
        assert torch.equal(counted_record.advantages, record.advantages)
