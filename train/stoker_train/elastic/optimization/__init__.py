"""Batch, learning rate and speed of an elastic job, from what its steps measure.

Numpy, apart from :mod:`.noise` (which needs torch when made) and :mod:`.measuring` (imported by replicas
alone).
"""

from __future__ import annotations

from stoker_train.elastic.optimization.batch_choice import BatchChoice
from stoker_train.elastic.optimization.learning_rate import LrRule, lr_factor
from stoker_train.elastic.optimization.noise import NoiseScale
from stoker_train.elastic.optimization.priors import Prior, code_hash
from stoker_train.elastic.optimization.profile import StepProfile
from stoker_train.elastic.optimization.stragglers import Slow, Stragglers
from stoker_train.elastic.optimization.table import STEP_FIELDS, StepRow, StepTable

__all__ = (
    "STEP_FIELDS",
    "BatchChoice",
    "LrRule",
    "NoiseScale",
    "Prior",
    "Slow",
    "StepProfile",
    "StepRow",
    "StepTable",
    "Stragglers",
    "code_hash",
    "lr_factor",
)
