"""Training on experience: a small, real trainer, and the parts it is made of.

| module | what it holds |
|---|---|
| `algorithm` | `AlgorithmConfig`, `PRESETS`: an estimator, a loss and their settings, by name |
| `pipeline`, `metrics` | from prompts to training records: `generate`, `score`, `annotate`, `estimate` |
| `learner`, `train_rows`, `loss`, `optimizing` | from records to new weights: rows, losses, optimizers |
| `trainer`, `intake`, `saving` | the loop: roll out, append, lease, update, acknowledge; checkpoints |
| `data`, `rows`, `sources`, `supervised` | prompts from files, with a cursor; records of given answers |
| `evaluating`, `statistics` | avg@k, pass@k, maj@k with intervals |
| `tracking`, `display` | metrics to the book, TensorBoard, W&B and a terminal |
| `config`, `modelling`, `asking`, `building`, `warming`, `running`, `recipes`, `naming` | `rollbook train` |
| `replaying`, `rebuilding`, `retracing`, `otherwise`, `verdicts` | `rollbook replay` |

Names load when they are first used.

>>> from rollbook.train import AlgorithmConfig
>>> AlgorithmConfig.preset("dapo").loss_options
{'clip_high': 0.28}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.train.algorithm import PRESETS as PRESETS
    from rollbook.train.algorithm import AlgorithmConfig as AlgorithmConfig
    from rollbook.train.data import Prompts as Prompts
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
    from rollbook.train.pipeline import Models as Models
    from rollbook.train.replaying import Replayed as Replayed
    from rollbook.train.replaying import replay as replay
    from rollbook.train.statistics import Interval as Interval
    from rollbook.train.supervised import records_from_answers as records_from_answers
    from rollbook.train.trainer import Exhausted as Exhausted
    from rollbook.train.trainer import Fruitless as Fruitless
    from rollbook.train.trainer import Report as Report
    from rollbook.train.trainer import Trainer as Trainer
    from rollbook.train.warming import WarmUp as WarmUp
    from rollbook.train.warming import warm_up as warm_up

_HOMES = {
    "AlgorithmConfig": "rollbook.train.algorithm",
    "Batching": "rollbook.train.learner",
    "Evaluation": "rollbook.train.evaluating",
    "Exhausted": "rollbook.train.trainer",
    "Fruitless": "rollbook.train.trainer",
    "Intake": "rollbook.train.intake",
    "Interval": "rollbook.train.statistics",
    "Learner": "rollbook.train.learner",
    "Models": "rollbook.train.pipeline",
    "NotFinite": "rollbook.train.learner",
    "Optimizing": "rollbook.train.optimizing",
    "PRESETS": "rollbook.train.algorithm",
    "Prompts": "rollbook.train.data",
    "Replayed": "rollbook.train.replaying",
    "Report": "rollbook.train.trainer",
    "Trainer": "rollbook.train.trainer",
    "UpdateResult": "rollbook.train.learner",
    "WarmUp": "rollbook.train.warming",
    "difference": "rollbook.train.evaluating",
    "evaluate": "rollbook.train.evaluating",
    "evaluated": "rollbook.train.evaluating",
    "records_from_answers": "rollbook.train.supervised",
    "replay": "rollbook.train.replaying",
    "resolve": "rollbook.train.naming",
    "warm_up": "rollbook.train.warming",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
