"""Training on experience: a small, real trainer, and the parts it is made of.

| module | what it holds |
|---|---|
| `algorithm` | `Algorithm`, `PRESETS`: an estimator, a loss and what goes with them, by name |
| `learner`, `train_rows`, `loss`, `optimizing` | from records to new weights: rows, losses, optimizers |
| `trainer`, `intake`, `completing`, `saving` | the loop: make, keep, lease, learn, acknowledge; checkpoints |
| `data`, `rows`, `sources`, `supervised` | prompts from files, with a cursor; records of given answers |
| `episodes` | several turns with tools or games, all runs in lock step |
| `evaluating`, `statistics` | avg@k, pass@k, maj@k with intervals |
| `tracking`, `display` | metrics to the book, TensorBoard, W&B and a terminal |
| `config`, `modelling`, `asking`, `building`, `warming`, `running`, `recipes`, `naming` | `rollbook train` |
| `replaying`, `rebuilding`, `retracing`, `otherwise`, `verdicts` | `rollbook replay` |

Names load when they are first used.

>>> from rollbook.train import Algorithm
>>> Algorithm.of("dapo").loss_options
{'clip_high': 0.28}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook._lazy import lazily

if TYPE_CHECKING:
    from rollbook.train.algorithm import PRESETS as PRESETS
    from rollbook.train.algorithm import Algorithm as Algorithm
    from rollbook.train.completing import complete as complete
    from rollbook.train.completing import maker_config as maker_config
    from rollbook.train.data import Prompts as Prompts
    from rollbook.train.episodes import Environment as Environment
    from rollbook.train.episodes import EpisodeMaker as EpisodeMaker
    from rollbook.train.episodes import Reply as Reply
    from rollbook.train.evaluating import Evaluation as Evaluation
    from rollbook.train.evaluating import difference as difference
    from rollbook.train.evaluating import evaluate as evaluate
    from rollbook.train.evaluating import evaluated as evaluated
    from rollbook.train.intake import Intake as Intake
    from rollbook.train.learner import Batching as Batching
    from rollbook.train.learner import Learner as Learner
    from rollbook.train.learner import NotFinite as NotFinite
    from rollbook.train.learner import UpdateResult as UpdateResult
    from rollbook.train.naming import resolve as resolve
    from rollbook.train.optimizing import Optimizing as Optimizing
    from rollbook.train.replaying import Replayed as Replayed
    from rollbook.train.replaying import replay as replay
    from rollbook.train.statistics import Interval as Interval
    from rollbook.train.supervised import SupervisedMaker as SupervisedMaker
    from rollbook.train.supervised import records_of_rows as records_of_rows
    from rollbook.train.trainer import Exhausted as Exhausted
    from rollbook.train.trainer import Fruitless as Fruitless
    from rollbook.train.trainer import Report as Report
    from rollbook.train.trainer import Trainer as Trainer
    from rollbook.train.warming import WarmUp as WarmUp
    from rollbook.train.warming import warm_up as warm_up

_HOMES = {
    "Algorithm": "algorithm",
    "Batching": "learner",
    "Environment": "episodes",
    "EpisodeMaker": "episodes",
    "Evaluation": "evaluating",
    "Exhausted": "trainer",
    "Fruitless": "trainer",
    "Intake": "intake",
    "Interval": "statistics",
    "Learner": "learner",
    "NotFinite": "learner",
    "Optimizing": "optimizing",
    "PRESETS": "algorithm",
    "Prompts": "data",
    "Replayed": "replaying",
    "Reply": "episodes",
    "Report": "trainer",
    "SupervisedMaker": "supervised",
    "Trainer": "trainer",
    "UpdateResult": "learner",
    "WarmUp": "warming",
    "complete": "completing",
    "difference": "evaluating",
    "evaluate": "evaluating",
    "evaluated": "evaluating",
    "maker_config": "completing",
    "records_of_rows": "supervised",
    "replay": "replaying",
    "resolve": "naming",
    "warm_up": "warming",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
