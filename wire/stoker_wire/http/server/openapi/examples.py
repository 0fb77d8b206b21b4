"""Examples in the document: bodies as a person would write them, and ids."""

from __future__ import annotations

from typing import Any

from stoker_wire.http.gateway.calls import CallRequest, CancelCall, WaitRefs
from stoker_wire.ids import Prefix
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.control import CreateToken, KvOperation
from stoker_wire.messages.queues import CreateQueue
from stoker_wire.messages.schedules import ChangeSchedule, CreateSchedule
from stoker_wire.messages.work import SubmitJob

_DIGITS = "5f0c2d9e8b7a4c31"
_JOB = {
    "entrypoint": "python train.py --epochs 3",
    "name": "train",
    "resources": {"CPU": 2, "GPU": 1},
    "runtime_env": {"env_vars": {"SEED": "7"}},
    "retries": 2,
    "timeout_s": 3600,
}
BODIES: dict[Any, dict[str, Any]] = {
    SubmitJob: _JOB,
    CreateSchedule: {"name": "nightly", "cron": "0 3 * * *", "job": _JOB},
    ChangeSchedule: {"paused": True},
    CreateToken: {"name": "ada", "role": "user", "expires_in_s": 86_400},
    CreateQueue: {"name": "research", "quota": {"GPU": 8}},
    KvOperation: {"op": "add", "key": "arrived", "amount": 1},
    Demand: {"job_id": f"{Prefix.JOB}_{_DIGITS}", "resources": {"GPU": 1}},
    CallRequest: {"function": "square", "version": "1", "args": [3]},
    CancelCall: {"ref": f"{Prefix.OBJECT}_{_DIGITS}"},
    WaitRefs: {"refs": [f"{Prefix.OBJECT}_{_DIGITS}"], "timeout_s": 20},
}
"""By the type of the body."""

PARAMETERS = {
    "job_id": f"{Prefix.JOB}_{_DIGITS}",
    "task_id": f"{Prefix.TASK}_{_DIGITS}1",
    "actor_id": f"{Prefix.ACTOR}_{_DIGITS}",
    "node_id": f"{Prefix.NODE}_{_DIGITS}",
    "worker_id": f"{Prefix.WORKER}_{_DIGITS}",
    "group_id": f"{Prefix.GROUP}_{_DIGITS}",
    "lease_id": f"{Prefix.LEASE}_{_DIGITS}",
    "ref": f"{Prefix.OBJECT}_{_DIGITS}",
    "submission_id": "my-run",
}
"""By the name of a part of a path, or of a member of a query."""
