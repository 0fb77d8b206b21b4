"""torchrun's variables, of which Lightning, accelerate and transformers make their process group.

``run`` starts the workers as well: it is ``torchrun --nproc-per-node`` over a cluster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from stoker import kv
from stoker.api.calls import get, kill
from stoker.api.placement_groups import placement_group, remove_placement_group
from stoker.api.remote import remote
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError
from stoker.runtime import current
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker.train.rendezvous import advertised_host

R = TypeVar("R")
_KEPT_S = 3600.0


def env(
    rank: int,
    world: int,
    *,
    name: str = "default",
    attempt: int = 0,
    timeout_s: float = 60.0,
) -> dict[str, str]:
    """Set torchrun's variables in this process, as ``rank`` of ``world``, and return them.

    Call it in each worker before the library is set up; ``torch.distributed.init_process_group()``
    without arguments works then, and so do Lightning's ``Trainer`` and ``accelerate``. Returns when all
    ranks are there: rank 0 chooses a free port of its machine for ``MASTER_PORT``. ``name`` is the
    group's within the job; one that is formed again after a failure must use another ``attempt``.

    ``GetTimeoutError`` names the ranks that are missing after ``timeout_s`` seconds.
    """
    if not 0 <= rank < world:
        raise BadRequestError(f"env(): rank {rank} is not in 0..{world - 1}", field="rank")
    base = f"train/{current.runtime().job.job_id}/{name}/{attempt}/env/"
    host = advertised_host()
    said = f"{host} {_free_port(host) if rank == 0 else 0} {_machine()} {os.getpid()}"
    key = f"{base}{rank}"
    if not kv.put(key, said, if_absent=True, ttl_s=_KEPT_S):
        raise ConflictError(
            f"env(): rank {rank} of group {name!r} (attempt {attempt}) is taken\n"
            "give every worker a rank of its own, and a group that is formed again another attempt"
        )
    keys = [f"{base}{other}" for other in range(world)]
    try:
        found = kv.wait(keys, timeout=timeout_s)
    except GetTimeoutError:
        there = set(kv.keys(base))
        missing = [other for other, one in enumerate(keys) if one not in there]
        raise GetTimeoutError(
            f"env(): rank {rank} of group {name!r} waited {timeout_s:g} s\nranks {missing} did not come",
            extra={"missing_ranks": missing},
        ) from None
    rows = [found[one].decode().split() for one in keys]
    machines = [row[2] for row in rows]
    nodes = list(dict.fromkeys(machines))
    mine = machines[rank]
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": machines[:rank].count(mine),
        "LOCAL_WORLD_SIZE": machines.count(mine),
        "GROUP_RANK": nodes.index(mine),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": rows[0][0],
        "MASTER_PORT": rows[0][1],
        "TORCHELASTIC_RUN_ID": f"{name}-{attempt}",
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    if len(_visible_gpus()) == 1:
        variables["LOCAL_RANK"] = 0  # this process sees its own GPU alone, as device 0
    texts = {key: str(value) for key, value in variables.items()}
    os.environ.update(texts)
    return texts


def run(
    fn: Callable[..., R],
    *args: Any,
    workers: int,
    timeout_s: float = 60.0,
    resources: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[R]:
    """Run ``fn(*args, **kwargs)`` in ``workers`` processes that form a group; return their results by rank.

    ::

        def train(): ...                       # Lightning, accelerate, transformers, plain torch
        stoker.train.run(train, workers=4, resources={"num_gpus": 1})

    Each has torchrun's variables (:func:`env`) before ``fn`` begins; the process group is made by
    ``fn`` or its library. ``resources`` are options of the workers, as of ``@stoker.remote`` on a
    class; each has a CPU unless they say otherwise. All get their places at once, or none. The first
    error of any ends all, and is raised as its own type; so does Ctrl-C. ``timeout_s`` bounds the
    rendezvous, not the run.
    """
    if workers < 1:
        raise BadRequestError(f"workers={workers!r} is none\ngive a number from 1", field="workers")
    options: dict[str, Any] = {"num_cpus": 1, **(resources or {})}
    bundle = {"CPU": float(options["num_cpus"])}
    if options.get("num_gpus"):
        bundle["GPU"] = float(options["num_gpus"])
    bundle |= {name: float(amount) for name, amount in options.get("resources", {}).items()}
    group = placement_group([bundle] * workers, strategy="PACK")
    name = f"run-{group.id}"
    actors: list[Any] = []
    try:
        for rank in range(workers):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            worker = remote(**options, scheduling_strategy=strategy)(_Worker)
            actors.append(worker.remote(rank, workers, name, timeout_s))
        results: list[R] = get([actor.run.remote(fn, args, kwargs) for actor in actors])
        return results
    finally:
        for actor in actors:
            kill(actor)
        remove_placement_group(group)


class _Worker:
    """A process of ``run``."""

    def __init__(self, rank: int, world: int, name: str, timeout_s: float) -> None:
        self._place = rank, world, name, timeout_s

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rank, world, name, timeout_s = self._place
        env(rank, world, name=name, timeout_s=timeout_s)
        return fn(*args, **kwargs)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def _machine() -> str:
    """Return what tells the machine of this process from others: processes there share GPUs by number."""
    return current.runtime().channels.address.host_id


def _visible_gpus() -> list[str]:
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
