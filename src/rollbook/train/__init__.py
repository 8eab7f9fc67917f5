"""Training on experience: a small, real trainer, and the parts it is made of.

| module | what it holds |
|---|---|
| `algorithm` | `Algorithm`, `PRESETS`: an estimator, a loss and what goes with them, by name |
| `learner`, `objective`, `optimizing` | from records to new weights: minibatches, micro-batches, losses, optimizers |
| `trainer`, `intake`, `saving` | the loop: make, keep, lease, learn, acknowledge; what is taken; checkpoints |
| `data`, `supervised` | prompts from files, with a cursor; records of given answers |
| `episodes` | several turns with tools or games, all runs in lock step |
| `evaluating`, `statistics` | avg@k, pass@k, maj@k with intervals |
| `tracking`, `display` | metrics to the book, TensorBoard, W&B and a terminal |
| `config`, `building`, `running`, `recipes` | `rollbook train` |
| `replaying` | `rollbook replay` |

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
    from rollbook.train.evaluating import evaluate as evaluate
    from rollbook.train.intake import Intake as Intake
    from rollbook.train.learner import Batching as Batching
    from rollbook.train.learner import Learned as Learned
    from rollbook.train.learner import Learner as Learner
    from rollbook.train.learner import NotFinite as NotFinite
    from rollbook.train.optimizing import Optimizing as Optimizing
    from rollbook.train.supervised import SupervisedMaker as SupervisedMaker
    from rollbook.train.supervised import records_of_rows as records_of_rows
    from rollbook.train.trainer import Report as Report
    from rollbook.train.trainer import Trainer as Trainer

_HOMES = {
    "Algorithm": "algorithm",
    "Batching": "learner",
    "Environment": "episodes",
    "EpisodeMaker": "episodes",
    "Evaluation": "evaluating",
    "Intake": "intake",
    "Learned": "learner",
    "Learner": "learner",
    "NotFinite": "learner",
    "Optimizing": "optimizing",
    "PRESETS": "algorithm",
    "Prompts": "data",
    "Reply": "episodes",
    "Report": "trainer",
    "SupervisedMaker": "supervised",
    "Trainer": "trainer",
    "complete": "completing",
    "evaluate": "evaluating",
    "maker_config": "completing",
    "records_of_rows": "supervised",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
