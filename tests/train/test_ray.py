"""Training on a Ray cluster of three raylets, with faults: short versions of `tests.train.ray_trials`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbook
from rollbook.book.rollouts import open_rollouts, publish_weights, read_rollouts, set_limit, suspend_rollouts
from rollbook.train.builders import build_rollouts, build_worker, load_prompts
from rollbook.train.config import Config, load_config
from rollbook.train.config.values import ConfigError
from rollbook.train.ray import TrainerRank, train_on_ray
from rollbook.train.worker import pack_weights, trained_weights
from tests.book.postgres import CARELESS, Server
from tests.train import ray_trials
from tests.train.ray_trials import Machines, Setting, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    with Machines(folder) as machines, Server(settings=CARELESS) as server:
        yield Setting(machines, server, folder)


def small(folder: Path, *changes: str) -> Config:
    return load_config("letters", [*ray_trials.SMALL, *changes, f"out={folder / 'run'}"])


# --- errors before actors start ---------------------------------------------------------------------------------------


def test_a_rank_reports_its_output_and_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rank = TrainerRank(str(tmp_path))
    assert rank.poll("run") == ("", -1)
    (tmp_path / "run/checkpoints/step-000004").mkdir(parents=True)
    print("step 4", file=rank._output)
    assert rank.poll("run") == ("step 4\n", 4)
    assert rank.poll("run") == ("", 4)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import ray` fail, also where a test would connect by mistake."""
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        (["rollout.workers=0"], 1, "rollout.workers: got 0, expected the number of rollout workers"),
        ([], 2, "distributed: got 'none' with 2 ranks"),
        (["book=ray://x"], 1, "book: got 'ray://x' with --ray, expected a folder or postgresql://..."),
        ([], 1, r"--ray: needs ray: install it with `pip install 'rollbook\[ray\]'`"),
    ],
)
def test_wrong_configurations_end_before_actors_start(
    tmp_path: Path, no_ray: None, changes: list[str], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_on_ray(small(tmp_path, *changes), "local", ranks=ranks)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["rollout.worker_resources", "rollout.trainer_resources"])
def test_wrong_resources_end_before_actors_start(tmp_path: Path, key: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=rf"{key}\.num_cpu: unknown key; did you mean 'num_cpus'\?"):
        small(tmp_path, f"{key}={{num_cpu: 1}}")
    for resources in ("{num_cpus: two}", "{num_cpus: -1}", "{memory: much}", "{resources: 3}"):
        with pytest.raises(ConfigError, match=rf"{key}\.\w+: got .*") as raised:
            train_on_ray(small(tmp_path, f"{key}={resources}"), "local")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_wrong_address_is_one_line(setting: Setting) -> None:
    ray_trials.wrong_address(setting)


# --- a trainer that starts again -------------------------------------------------------------------------------------


def test_a_worker_does_not_wait_for_weights_of_a_version_that_was_rewound(tmp_path: Path) -> None:
    """Its claims are of version 3, whose weights died with their trainer; the next trainer continues at version 0."""
    config = small(tmp_path, "rewards=rollbook.train.recipes.letters:random_reward", "rollout.claim_seconds=1")
    settings = {**build_rollouts(config, load_prompts(config)[0]).settings, "consumer": "train"}
    with rollbook.open("memory:") as book:
        worker = build_worker(config, book, settings, "worker-0")
        book.checkpoint("begin")
        book.announce(3)
        open_rollouts(book, settings, next=0)
        set_limit(book, 2)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        try:
            wait_until(lambda: len(read_rollouts(book).in_flight) == 2, "no claims", 30)
            suspend_rollouts(book, settings)
            book.rewind("begin", later="drop")
            open_rollouts(book, settings, next=0)
            publish_weights(book, 0, pack_weights(trained_weights(worker.actor)), {})
            set_limit(book, 2)
            wait_until(lambda: worker.result.groups == 2, "the worker waits for weights that were lost", 30)
        finally:
            worker.stop()
            thread.join(30)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_faults_of_two_ranks_over_postgresql(setting: Setting) -> None:
    ray_trials.killed_driver_and_database(setting)


def test_killed_and_paused_actors_and_a_lost_node(setting: Setting) -> None:
    ray_trials.several_faults(setting)


def test_a_slow_disk(setting: Setting) -> None:
    ray_trials.slow_disk(setting, seconds=8)


def test_a_full_object_store(setting: Setting) -> None:
    ray_trials.full_store(setting)
