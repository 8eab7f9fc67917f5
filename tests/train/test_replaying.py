"""Replay: an untouched step is the same to the last bit, what was planted is found where it lies, and choices show."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rollbook
from rollbook.cli.parser import main
from rollbook.train import checkpoint, step_replay
from rollbook.train.config import Config, dump_config, load_config
from rollbook.train.run import run
from rollbook.train.step_replay import ReplayResult, split_changes, trace_step
from rollbook.train.step_replay import replay as replay_untrusted

SMALL = (
    *(
        "warmup.steps=0",
        "warmup.target_accuracy=null",
        "data.held_out=0",
        "batch.prompts_per_step=3",
        "algorithm.group_size=3",
    ),
    *("model.options.hidden=32", "model.options.heads=1", "tracking.display=false", "tracking.jsonl=false"),
    *("batch.minibatches=2", "batch.token_budget=60", "algorithm.kl_coef=0.05", "threads=1"),
)
ROWS = "data.options.count=40"
REWARD = """
def reward(response_ids):
    return (sum(response_ids) % 7) / 7


def build(seed, hidden, heads):
    from rollbook.models import Actor
    from rollbook.train.recipes import letters

    model, words = letters.model(seed, hidden, heads=heads)
    return Actor(model, tokenizer=words, attn_implementation="eager", suppress=[7, 8])


class Game:
    def __init__(self, prompt):
        self.turns = 0

    def begin(self):
        return None

    def respond(self, text):
        from rollbook.rollout.environment import Reply

        self.turns += 1
        return Reply("ok", reward=len(set(text)) / 4, done=self.turns > 1)
"""
Make = Callable[..., Path]
replay = functools.partial(replay_untrusted, trust=True)
"""Of runs whose rewards are a file beside them."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Trains a small run; the same changes give the same folder."""
    home = tmp_path_factory.mktemp("runs")
    (home / "scores.py").write_text(REWARD)
    folders: dict[tuple[str, ...], Path] = {}

    def trained(*changes: str, steps: int = 2, every: int = 1, rows: str = ROWS) -> Path:
        key = (*changes, str(steps), str(every))
        if key not in folders:
            out = home / f"run-{len(folders)}"
            arguments = [*SMALL, rows, f"rewards={home / 'scores.py'}:reward", *changes]
            arguments = [argument.replace("HOME", str(home)) for argument in arguments if argument]
            run(
                load_config("letters", [*arguments, f"steps={steps}", f"checkpoint.interval={every}", f"out={out}"]),
                stream=io.StringIO(),
            )
            folders[key] = out
        return folders[key]

    return trained


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    """A run of four steps, saved at 0, 3 and 4, to be tampered with."""
    return Path(shutil.copytree(make(steps=4, every=3), tmp_path / "run"))


def by_name(replayed: ReplayResult) -> dict[str, str]:
    """Verdicts by what they are of."""
    return {check.quantity: check.verdict for check in replayed.checks}


def untouched(replayed: ReplayResult, *missing: str) -> None:
    """All is the same to the last bit, but what cannot be compared."""
    changed = {quantity: verdict for quantity, verdict in by_name(replayed).items() if verdict != step_replay.SAME}
    assert changed == dict.fromkeys(missing, step_replay.NOT_COMPARED)
    assert replayed.agrees


def digest(folder: Path) -> dict[str, str]:
    """The content of every file, but for those that SQLite has beside a database that somebody looks at."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(("-shm", "-wal")))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --- the same again ---------------------------------------------------------------------------------------------------


def test_an_untouched_step_is_the_same_and_nothing_is_written(make: Make) -> None:
    folder = make(steps=4, every=3)
    before, threads, random = digest(folder), torch.get_num_threads(), torch.get_rng_state()
    replayed = replay(folder, 4)
    untouched(replayed)
    kinds = {
        "rewards",
        "policy log-probs",
        "reference log-probs",
        "advantages",
        "plan: minibatches",
        "plan: micro-batches",
    }
    assert kinds | {"loss", "grad_norm", "kl", "lr", "new weights"} <= by_name(replayed).keys()
    assert (replayed.records, replayed.checkpoint, replayed.notes) == (9, "step-000003", [])
    assert digest(folder) == before
    modes = {file.stat().st_mode & 0o777 for file in (folder, *folder.rglob("*"))}
    assert modes == {0o700, 0o600}, "checkpoints and book are their owner's"
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)


def test_steps_between_checkpoints_are_replayed_through(make: Make) -> None:
    replayed = replay(make(steps=4, every=3), 3)
    untouched(replayed)
    assert replayed.checkpoint == "step-000000"
    assert "loss of steps 1 to 2" in by_name(replayed)
    assert any("replayed steps 1 to 2 first" in note for note in replayed.notes)
    assert "new weights" in by_name(replayed)  # three steps from the first weights are those of step-000003


@pytest.mark.parametrize(
    "changes",
    [
        ("algorithm.preset=ppo", "algorithm.group_size=2", "algorithm.kl_in=reward", "batch.epochs=2"),
        (
            "algorithm.preset=dapo",
            "algorithm.group_size=2",
            "algorithm.drop_constant_groups=true",
            "algorithm.refill=2",
        ),
        ("algorithm=reinforce++",),
        ("algorithm.preset=sft",),
        ("environment.function=HOME/scores.py:Game", "environment.max_turns=2", "environment.on_truncation=respond"),
    ],
    ids=["ppo", "dapo", "reinforce++", "sft", "episodes"],
)
def test_other_algorithms_are_the_same_too(make: Make, changes: Sequence[str]) -> None:
    replayed = replay(make(*changes), 2)
    played = "environment" in changes[0]
    untouched(replayed, *(["rewards: environment"] if played else []))
    names = by_name(replayed)
    assert ("values" in names, "critic/value_loss" in names, "new weights: critic" in names) == (
        ("ppo" in changes[0],) * 3
    )
    assert ("advantages" in names) == ("sft" not in changes[0])


def test_pairs_and_an_experts_rows_are_the_same_too(make: Make, tmp_path: Path) -> None:
    lines = [{"prompt": f"{word}>", "chosen": "abc", "rejected": word} for word in ("cba", "bca", "cab", "bac", "acb")]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps(line) for line in lines))
    changes = ("algorithm.preset=dpo", "algorithm.group_size=1", "algorithm.kl_coef=0", f"data.path={pairs}")
    untouched(replay(make(*changes, rows=""), 2))
    expert = make(steps=4, every=3) / "book"
    replayed = replay(make("algorithm.preset=mix", f"replay.expert={expert}", "replay.expert_share=0.3"), 2)
    untouched(replayed)
    assert "policy/expert/sft_loss" in by_name(replayed)


def test_a_replay_of_old_records_says_what_cannot_be_compared(make: Make) -> None:
    folder = make("replay.kind=replay", "replay.reuse=3", "replay.rollout_interval=2")
    untouched(replay(folder, 2), "policy log-probs")


def test_weights_of_a_sampler_are_in_the_ledger(make: Make) -> None:
    folder = make("replay.kind=replay", "replay.sampler=proportional", "replay.sampler_options={key: reward}", every=2)
    for step in (1, 2):
        assert by_name(replay(folder, step))["loss"] == step_replay.SAME


def test_a_run_in_bfloat16_differs_by_rounding(make: Make) -> None:
    replayed = replay(make("model.precision=bfloat16"), 2)
    names = by_name(replayed)
    assert replayed.agrees and replayed.tolerance is step_replay.GPU_TOLERANCE
    assert names["loss"] == names["policy log-probs"] == step_replay.ROUNDING
    assert names["rewards"] == names["advantages"] == names["plan: minibatches"] == step_replay.SAME
    assert "replayed in float32" in replayed.notes[0]


def test_what_a_rewind_voided_is_not_of_the_step(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / checkpoint.checkpoint_name(4))
    run(load_config(copy / "config.yaml", [f"out={copy}"]), stream=io.StringIO())
    with rollbook.open(copy / "book", mode="r") as book:
        events = book.sql(
            "select kind, count(*) n from events where step = 4 and kind in ('trained', 'voided') group by 1"
        )
        assert dict(events.rows()) == {"trained": 18, "voided": 9}
        assert len(trace_step(book, 4).uids) == 9
    untouched(replay(copy, 4))


# --- what was planted is found ----------------------------------------------------------------------------------------


def test_a_revised_reward_is_found(copy: Path) -> None:
    with rollbook.open(copy / "book") as book:
        uid = trace_step(book, 4).uids[0]
        book.revise(uid, reward=0.9, author="ana")
    replayed = replay(copy, 4)
    names = by_name(replayed)
    assert not replayed.agrees
    assert names["rewards"] == names["advantages"] == step_replay.DIFFERS
    assert names["policy log-probs"] == names["loss"] == names["new weights"] == step_replay.SAME
    assert any("ana" in note and uid in note for note in replayed.notes)


def test_revised_advantages_change_the_loss(copy: Path) -> None:
    with rollbook.open(copy / "book") as book:
        rows = book.get(trace_step(book, 4).uids)
        uid, old = next(
            (row.eid.uid, row.advantages) for row in rows if row.advantages is not None and row.advantages.any()
        )
        book.revise(uid, advantages=(-old).tolist(), author="ana")
    names = by_name(replay(copy, 4))
    assert names["rewards"] == names["policy log-probs"] == step_replay.SAME
    assert names["advantages"] == names["loss"] == names["new weights"] == step_replay.DIFFERS


def test_tampered_weights_are_found(copy: Path) -> None:
    path = copy / "checkpoints" / checkpoint.checkpoint_name(3) / "model" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "q_proj" in name or "embed" in name)
    weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, path, metadata={"format": "pt"})
    names = by_name(replay(copy, 4))
    assert names["policy log-probs"] == names["new weights"] == step_replay.DIFFERS
    assert names["rewards"] == names["advantages"] == names["reference log-probs"] == step_replay.SAME


def test_another_learning_rate_is_found(copy: Path) -> None:
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("  lr: 0.0005", "  lr: 0.0006"))
    names = by_name(replay(copy, 4))
    assert names["lr"] == names["new weights"] == step_replay.DIFFERS
    assert names["advantages"] == names["plan: minibatches"] == step_replay.SAME


def test_another_seed_is_another_plan(copy: Path) -> None:
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0", "\nseed: 1"))
    assert by_name(replay(copy, 4))["plan: minibatches"] == step_replay.DIFFERS


# --- another choice ---------------------------------------------------------------------------------------------------


def test_another_estimator_is_computed_beside_what_was_trained(make: Make) -> None:
    folder = make(steps=4, every=3)
    replayed = replay(folder, 4, ["algorithm.estimator=dr_grpo"])
    untouched(replayed)
    changed = replayed.changed
    assert changed is not None
    assert changed.changes == ['algorithm.estimator: "dr_grpo", was "grpo"']
    with rollbook.open(folder / "book", mode="r") as book:
        records = book.get(trace_step(book, 4).uids)
    rewards = np.array(records.values("reward")).reshape(3, 3)
    expected = rewards - rewards.mean(1, keepdims=True)
    moved = {record.uid: record for record in changed.moved}
    for uid, value in zip([eid.uid for eid in records.eids()], expected.reshape(-1), strict=True):
        if uid in moved:
            assert moved[uid].advantage[1] == pytest.approx(value, abs=1e-6)
            assert moved[uid].prompt.endswith(">")
    assert changed.numbers["mean |advantage|"][1] == pytest.approx(np.abs(expected).mean(), abs=1e-6)
    assert (changed.rows, changed.signs) == (9, 0)
    assert changed.correlation is not None and changed.correlation > 0.5
    assert changed.cosine is not None and 0.5 < changed.cosine < 0.9999
    old, new = changed.numbers["grad_norm"]
    assert old is not None and new is not None and new < old


def test_choices_that_change_the_cut_the_reward_and_the_optimizer(make: Make) -> None:
    folder = make(steps=4, every=3)
    single_batch = replay(folder, 4, ["batch.minibatches=1"]).changed
    assert single_batch is not None and single_batch.numbers["updates"] == (2.0, 1.0) and not single_batch.moved
    reward = replay(folder, 4, ["rewards.0.function=length", "rewards.0.options={target: 1, per_unit: 0.1}"]).changed
    assert reward is not None and reward.moved and reward.moved[0].reward[1] < 0 <= reward.moved[0].reward[0]
    mover = replay(folder, 4, ["optimizer.name=sgd", "algorithm.group_size=8"]).changed
    assert mover is not None and mover.numbers["loss"][0] is not None
    betas = replay(folder, 4, ["optimizer.betas=[0.1, 0.2]"]).changed
    assert betas is not None and betas.cosine is not None and betas.cosine < 0.99 and not betas.notes
    assert any("sgd" in note for note in mover.notes) and any("algorithm.group_size" in note for note in mover.notes)


def test_the_same_choice_from_the_same_beginning_is_the_same_update(make: Make) -> None:
    """What a change of one option does is not mixed up with what the first pass left behind."""
    clip = replay(make(steps=4, every=3), 4, ["algorithm.loss_options.clip_high=5.0"]).changed
    assert clip is not None
    assert clip.numbers["policy/pg_clipfrac"] == (0.0, 0.0)
    assert clip.cosine == pytest.approx(1.0)
    assert clip.numbers["norm of the update"][0] == clip.numbers["norm of the update"][1]


def test_choices_that_cannot_be_replayed_are_refused(make: Make) -> None:
    folder = make(steps=4, every=3)
    for change, message in (
        ("seed=3", "seed: cannot change in a replay"),
        ("batch.prompts_per_step=7", "batch.prompts_per_step: cannot change in a replay"),
        ("sampling.temperature=2", "sampling.temperature: cannot change in a replay"),
        ("algorithm.group_size=8", "changes nothing"),
        ("algorithm.estimator=grpo", "the run's own values"),
        ("algorithm.estimator=ppo", "needs a critic, and the run has none"),
        ("algorithm.estimator=rlo", "did you mean 'rloo'"),
    ):
        with pytest.raises(ValueError, match=message):
            replay(folder, 4, [change])
    config = load_config(folder / "config.yaml")
    assert split_changes(config, load_config(folder / "config.yaml", ["batch.epochs=2"])) == (
        ["batch.epochs: 2, was 1"],
        [],
    )


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step: got 9, and the run has steps 1 to 4"):
        replay(copy, 9)
    with pytest.raises(ValueError, match=r"got no config\.yaml, expected the folder of a run"):
        replay(copy / "book", 1)
    with rollbook.open(copy / "book") as book:
        uid = trace_step(book, 2).uids[0]
        book.delete(uid, author="ana")
        book.compact()
    with pytest.raises(ValueError, match="step 2: a record cannot be read.*data was removed"):
        replay(copy, 2)
    with pytest.raises(ValueError, match="step 2: a record cannot be read"):
        replay(copy, 3)  # by way of step 2
    for saved in checkpoint.list_checkpoints(copy)[:2]:
        shutil.rmtree(saved.path)
    with pytest.raises(ValueError, match="got no checkpoint before step 4"):
        replay(copy, 4)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"got no config\.yaml"):
        replay(empty, 1)


def test_records_of_another_trainer_have_no_places() -> None:
    assert [
        comparison.verdict
        for comparison in step_replay.compare_plans([{}], [{"minibatch": 0, "micro_batch": 0, "weight": 1.0}])
    ] == [step_replay.NOT_COMPARED]
    moved = step_replay.compare_plans(
        [{"excluded": "zero advantage"}], [{"minibatch": 0, "micro_batch": 0, "weight": 1.0}]
    )
    assert moved[0].verdict == step_replay.DIFFERS


def test_numbers_that_are_none_agree_with_themselves_alone() -> None:
    nan, inf = float("nan"), float("inf")
    assert step_replay.compare_rows("x", [nan, inf], [nan, inf], step_replay.CPU_TOLERANCE).verdict == step_replay.SAME
    assert step_replay.compare_rows("x", [nan], [0.0], step_replay.GPU_TOLERANCE).verdict == step_replay.DIFFERS
    assert step_replay.compare_rows("x", [inf], [1.0], step_replay.GPU_TOLERANCE).verdict == step_replay.DIFFERS
    assert step_replay.compare_tokens("x", [[1.0]], [[1.0, 2.0]], 1.0).verdict == step_replay.DIFFERS


# --- runs of strangers ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_without_its_builder(make: Make, tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(
            make("model.builder=HOME/scores.py:build", "model.options={hidden: 32, heads: 1}"), tmp_path / "run"
        )
    )
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("scores.py:build", "gone.py:build"))
    untouched(replay(folder, 2))


def hostile(copy: Path, canary: Path) -> dict[str, str]:
    """Have everything that a run's configuration can name leave a canary; the keys that were changed."""
    evil = copy / "evil.py"
    evil.write_text(f"open({str(canary)!r}, 'w')\n\n\ndef leave(**_):\n    return 0.0\n")
    named = {
        "model.builder": "os:system",
        "data.function": "rollbook.cli.parser:os.system",
        "evaluation.function": "rollbook.core.vocabulary:module_of_file",
        "environment.function": f"{evil}:leave",
        "rewards.0.function": f"{evil}:leave",
        "rewards.1.options.functions.sly": f"{evil}:leave",
        "rewards.2.function": "code_match",
        "replay.expert": "postgresql://nobody.invalid/db",
        "tracking.trackers.0": f"{evil}:Leave",
        "model.attention": "stranger/kernel",
        "critic.config.attn_implementation": "stranger/kernel@main:flash",
        "critic.config.text_config.auto_map.AutoModel": "stranger/model--evil.Evil",
        "critic.config.trust_remote_code": "True",
        "teacher.config.parts.0._attn_implementation.vision_config": "paged|stranger/kernel",
        "teacher.config._experts_implementation_internal": "stranger/kernel",
        "engine.options.engine_args.model": "evil-org/model",
        "engine.options.engine_args.trust_remote_code": "True",
        "engine.options.engine_args.reasoning_parser_plugin": str(evil),
        "engine.options.engine_args.max_num_seqs": "{'a': 1}",
    }
    settings = load_config(copy / "config.yaml").to_dict()
    settings["model"] |= {"builder": named["model.builder"], "options": {"command": f"touch {canary}"}}
    settings["data"] |= {"function": named["data.function"], "options": {"command": f"touch {canary}"}}
    settings["evaluation"] |= {"function": named["evaluation.function"], "options": {"path": str(evil)}}
    settings["environment"] |= {"function": named["environment.function"]}
    settings["rewards"] = [
        {"function": f"{evil}:leave"},
        {"recipe": {"a": [["sly", 1.0]]}, "options": {"functions": {"sly": f"{evil}:leave"}}},
        {"function": "code_match"},
    ]
    settings["tracking"] |= {"trackers": [named["tracking.trackers.0"]]}
    settings["model"] |= {"attention": named["model.attention"]}
    settings["critic"] |= {
        "config": {
            "model_type": "llama",
            "name_or_path": "org/harmless",
            "experts_implementation": "grouped_mm",
            "attn_implementation": "stranger/kernel@main:flash",
            "trust_remote_code": True,
            "text_config": {"auto_map": {"AutoModel": "stranger/model--evil.Evil"}},
        }
    }
    settings["teacher"] |= {
        "config": {
            "model_type": "llama",
            "parts": [{"_attn_implementation": {"vision_config": "paged|stranger/kernel"}}],
            "_experts_implementation_internal": "stranger/kernel",
        }
    }
    plain = {"enforce_eager": True, "max_model_len": 64, "dtype": "float32"}
    loads = {"model": "evil-org/model", "trust_remote_code": True, "reasoning_parser_plugin": str(evil)}
    engine_args = {**plain, **loads, "max_num_seqs": {"a": 1}}
    settings["engine"] |= {"kind": "vllm", "options": {"engine_args": engine_args}}
    settings["replay"] |= {"expert": named["replay.expert"], "expert_share": 0.5}
    (copy / "config.yaml").write_text(dump_config(Config.from_dict(settings)))
    return named


def test_what_a_strangers_configuration_names_is_listed_and_not_run(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    named = hostile(copy, canary)
    assert main(["replay", str(copy), "--step", "4"]) == 2
    printed = capsys.readouterr().err
    assert all(f"{path}: {value}" in printed for path, value in named.items()) and "--trust" in printed
    assert not any(name in printed for name in ("enforce_eager", "max_model_len", "dtype", "grouped_mm", "harmless"))
    assert main(["eval", str(copy)]) == 2
    printed = capsys.readouterr().err
    assert all(f"{path}: {value}" in printed for path, value in named.items()) and "--trust" in printed
    for command in (
        *(["ls", str(copy)], ["show", str(copy)], ["doctor", str(copy)], ["diff", str(copy)], ["check", str(copy)]),
        ["sql", str(copy), "select count(*) from experiences"],
        ["export", str(copy), str(tmp_path / "out.html"), "--where", "reward >= 0"],
    ):
        assert main(command) in (0, 1), command
    assert not canary.exists()


class Leave:
    """Pickled, it calls something where it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> object:
        return open, (self.canary, "w")


@pytest.mark.parametrize("part", ["state", "weights", "model", "tokenizer"])
def test_a_strangers_checkpoint_runs_nothing(
    make: Make, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(make("rewards=rollbook.train.recipes.letters:random_reward"), tmp_path / "run"))
    canary = tmp_path / "canary"
    for saved in checkpoint.list_checkpoints(folder):
        if part == "state":
            torch.save({"learner": Leave(canary), "random": {}}, saved.path / "state.pt")
        elif part == "weights":
            (saved.model / "model.safetensors").unlink()
            torch.save({"lm_head.weight": Leave(canary)}, saved.model / "pytorch_model.bin")
        else:
            file = saved.model / ("config.json" if part == "model" else "tokenizer_config.json")
            classes = {
                "AutoConfig": "evil.Evil",
                "AutoModelForCausalLM": "evil.Evil",
                "AutoTokenizer": ["evil.Evil"] * 2,
            }
            manifest = json.loads(file.read_text()) | {
                "auto_map": classes,
                "model_type": "evil",
                "tokenizer_class": "Evil",
            }
            file.write_text(json.dumps(manifest))
            (saved.model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    assert main(["replay", str(folder), "--step", "2"]) == 2
    assert f"step-00000{1 if part == 'state' else 0}" in capsys.readouterr().err
    assert not canary.exists()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_it_and_ends_with_its_status(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--trust", str(copy), "--step", "4", "algorithm.estimator=rloo"]) == 0
    text = capsys.readouterr().out
    assert "All values match." in text and "differs" not in text.split("- tolerance")[0]
    assert 'with algorithm.estimator: "rloo", was "grpo"' in text and "cosine" in text
    assert main(["replay", "--trust", str(copy), "--step", "9"]) == 2
    assert "the run has steps 1 to 4" in capsys.readouterr().err
    with rollbook.open(copy / "book") as book:
        book.revise(trace_step(book, 4).uids[0], reward=5.0, author="ana")
    assert main(["replay", "--trust", str(copy), "--step", "4", "--color", "always"]) == 1
    assert "\x1b[1;31mdiffers\x1b[0m" in capsys.readouterr().out
    # Without colors again, also for later tests: the mode is global.
    assert main(["replay", "--trust", str(copy), "--step", "4", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["agrees"], report["changed"]) == (4, False, None)
    assert {compared["quantity"] for compared in report["checks"] if compared["verdict"] == "differs"} == {
        "rewards",
        "advantages",
        "returns",
    }
