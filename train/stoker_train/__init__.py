"""Train jobs that the cluster may grow, shrink and move: what users know as ``stoker.train``.

Imported lazily by ``stoker.train``; torch is imported where it is used, not here.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC: dict[str, str] = {
    "Actions": "stoker_train.elastic.policies",
    "AdaComm": "stoker_train.elastic.sync",
    "AllReduce": "stoker_train.elastic.sync",
    "BatchFromNoise": "stoker_train.elastic.policies",
    "Budget": "stoker_train.elastic.policies",
    "Chain": "stoker_train.sharded.pipelining.splitting",
    "Checkpoint": "stoker_train.elastic.options",
    "CheckpointStore": "stoker_train.elastic.state.checkpoints",
    "ClusterShape": "stoker_train.planning",
    "EarlyGrowth": "stoker_train.elastic.policies",
    "ElasticTrainer": "stoker_train.elastic.trainer",
    "EvenOut": "stoker_train.elastic.policies",
    "Failure": "stoker_train.elastic.options",
    "Hierarchical": "stoker_train.elastic.sync",
    "KVStore": "stoker_train.launch.store",
    "Link": "stoker_train.planning",
    "LocalSGD": "stoker_train.elastic.sync",
    "Metrics": "stoker_train.elastic.policies",
    "ModelShape": "stoker_train.planning",
    "OverlapLocalSGD": "stoker_train.elastic.sync",
    "PackedRow": "stoker_train.finetuning",
    "Pass": "stoker_train.planning.profiles.profile",
    "Plan": "stoker_train.planning",
    "Plans": "stoker_train.planning",
    "Policy": "stoker_train.elastic.policies",
    "PostLocalSGD": "stoker_train.elastic.sync",
    "Profile": "stoker_train.planning.profiles.profile",
    "Recompute": "stoker_train.planning.strategy",
    "Result": "stoker_train.elastic.options",
    "Scaling": "stoker_train.elastic.options",
    "ShardedDataset": "stoker_train.elastic.data.sources",
    "ShardedResult": "stoker_train.sharded.options",
    "ShardedTrainer": "stoker_train.sharded.trainer",
    "Strategy": "stoker_train.planning.strategy",
    "SyncSwitchOnLoss": "stoker_train.elastic.policies",
    "TrainState": "stoker_train.elastic.state.train_state",
    "masked_targets": "stoker_train.finetuning",
    "measure_links": "stoker_train.planning.hardware.links",
    "pack_examples": "stoker_train.finetuning",
    "plan_strategy": "stoker_train.planning",
    "plan_training": "stoker_train.planning",
    "profile_model": "stoker_train.planning.profiles.profiling",
}
"""Each public name, and the module that has it."""

__all__ = tuple(_PUBLIC)


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'stoker_train' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
