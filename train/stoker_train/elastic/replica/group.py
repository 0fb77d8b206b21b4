"""The process group of one generation: formed by its ranks, left in a bounded time whatever is broken.

The replica's engine calls it in the loop's thread. It decides nothing about who is in.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import stoker.train

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Membership
    from stoker_train.elastic.options import Failure

_log = logging.getLogger(__name__)
_LEAVE_S = 20.0
_FORM_S = 300.0
"""A newcomer waits so long for survivors to reach their batch boundary; it is told when to stop earlier."""


def form(
    membership: Membership,
    rank: int,
    device: torch.device,
    failure: Failure,
    abandoned: threading.Event,
) -> None:
    """Form the default process group of this generation; CPU tensors always go by gloo.

    ConflictError once ``abandoned`` is set, and what torch raises if a rank is lost meanwhile.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    stoker.train.init_process_group(
        "elastic",
        rank,
        membership.world_size,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout_s=failure.collective_timeout_s,
        rendezvous_timeout_s=_FORM_S,
        attempt=membership.generation,
        abandoned=abandoned,
    )


def leave(*, broken: bool = False) -> None:
    """Leave the default group and all that were made from it.

    A group that cannot be left ends this process: the others take it for lost, which it is.
    """
    if not dist.is_initialized():
        return
    left = threading.Event()

    def go() -> None:
        try:
            if broken:
                # Closes all connections, whoever holds the group: so ranks that wait for this one hear of it.
                dist.distributed_c10d._abort_process_group()
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:  # of a group that is broken already
            _log.info("the old group ended with %s", error)
        left.set()

    thread = threading.Thread(target=go, name="leave-group", daemon=True)
    thread.start()
    if not left.wait(_LEAVE_S):
        _log.error("the process group cannot be left within %g s: this replica ends", _LEAVE_S)
        os._exit(70)
