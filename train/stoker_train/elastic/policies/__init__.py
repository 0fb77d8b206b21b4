"""Adaptation policies: code of the user's, or shipped, that changes training by what it measures."""

from __future__ import annotations

from stoker_train.elastic.policies.policy import Actions, Metrics, Policy, Request
from stoker_train.elastic.policies.shipped import (
    BatchFromNoise,
    Budget,
    EarlyGrowth,
    EvenOut,
    SyncSwitchOnLoss,
)
from stoker_train.elastic.policies.simulation import Simulated, simulate

__all__ = (
    "Actions",
    "BatchFromNoise",
    "Budget",
    "EarlyGrowth",
    "EvenOut",
    "Metrics",
    "Policy",
    "Request",
    "Simulated",
    "SyncSwitchOnLoss",
    "simulate",
)
