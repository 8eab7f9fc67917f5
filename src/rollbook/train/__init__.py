"""Training on experience: the trainer and its parts.

| module | contents |
|---|---|
| `algorithm` | `AlgorithmConfig`, `PRESETS`: an estimator, a loss and their settings, by name |
| `pipeline` | from prompts to training records: `generate`, `score`, `annotate`, `estimate` |
| `learner`, `rows`, `optimizer` | from records to new weights |
| `trainer`, `replay_config`, `checkpoint` | the loop: roll out, append, lease, update, acknowledge |
| `distributed` | the same on several ranks |
| `prompts`, `supervised` | prompts from files, with a cursor; records of given answers |
| `evaluation`, `statistics` | avg@k, pass@k, maj@k with intervals |
| `tracker` | metrics to the book, JSONL, TensorBoard, W&B and a terminal |
| `config`, `builders`, `user_code`, `run`, `recipes` | `rollbook train` |
| `step_replay` | `rollbook replay` |

Names load when they are first used.

>>> from rollbook.train import AlgorithmConfig
>>> AlgorithmConfig.preset("dapo").loss_options
{'clip_high': 0.28}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.train.algorithm import PRESETS as PRESETS
    from rollbook.train.algorithm import AlgorithmConfig as AlgorithmConfig
    from rollbook.train.checkpoint import CheckpointConfig as CheckpointConfig
    from rollbook.train.evaluation import AllSamplesFailedError as AllSamplesFailedError
    from rollbook.train.evaluation import Evaluation as Evaluation
    from rollbook.train.evaluation import Interval as Interval
    from rollbook.train.evaluation import compare_evaluations as compare_evaluations
    from rollbook.train.evaluation import evaluate as evaluate
    from rollbook.train.evaluation import evaluate_records as evaluate_records
    from rollbook.train.learner import Learner as Learner
    from rollbook.train.learner import MinibatchConfig as MinibatchConfig
    from rollbook.train.learner import NonFiniteLossError as NonFiniteLossError
    from rollbook.train.learner import UpdateResult as UpdateResult
    from rollbook.train.optimizer import OptimizerConfig as OptimizerConfig
    from rollbook.train.pipeline import Models as Models
    from rollbook.train.prompts import Prompts as Prompts
    from rollbook.train.replay_config import ReplayConfig as ReplayConfig
    from rollbook.train.step_replay import ReplayResult as ReplayResult
    from rollbook.train.step_replay import replay as replay
    from rollbook.train.supervised import WarmupConfig as WarmupConfig
    from rollbook.train.supervised import records_from_answers as records_from_answers
    from rollbook.train.supervised import warm_up as warm_up
    from rollbook.train.trainer import OutOfDataError as OutOfDataError
    from rollbook.train.trainer import StepReport as StepReport
    from rollbook.train.trainer import Trainer as Trainer
    from rollbook.train.user_code import resolve as resolve

_HOMES = {
    "AlgorithmConfig": "rollbook.train.algorithm",
    "CheckpointConfig": "rollbook.train.checkpoint",
    "MinibatchConfig": "rollbook.train.learner",
    "Evaluation": "rollbook.train.evaluation",
    "OutOfDataError": "rollbook.train.trainer",
    "AllSamplesFailedError": "rollbook.train.evaluation",
    "ReplayConfig": "rollbook.train.replay_config",
    "Interval": "rollbook.train.evaluation",
    "Learner": "rollbook.train.learner",
    "Models": "rollbook.train.pipeline",
    "NonFiniteLossError": "rollbook.train.learner",
    "OptimizerConfig": "rollbook.train.optimizer",
    "PRESETS": "rollbook.train.algorithm",
    "Prompts": "rollbook.train.prompts",
    "ReplayResult": "rollbook.train.step_replay",
    "StepReport": "rollbook.train.trainer",
    "Trainer": "rollbook.train.trainer",
    "UpdateResult": "rollbook.train.learner",
    "WarmupConfig": "rollbook.train.supervised",
    "compare_evaluations": "rollbook.train.evaluation",
    "evaluate": "rollbook.train.evaluation",
    "evaluate_records": "rollbook.train.evaluation",
    "records_from_answers": "rollbook.train.supervised",
    "replay": "rollbook.train.step_replay",
    "resolve": "rollbook.train.user_code",
    "warm_up": "rollbook.train.supervised",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
