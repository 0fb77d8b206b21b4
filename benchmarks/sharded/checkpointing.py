"""What a sharded checkpoint costs the training: ``python -m benchmarks.sharded checkpointing``.

A model of 50 million fp32 parameters with AdamW (600 MB in all) on 4 ranks (ZeRO-3, gloo, one thread each):
the time that ``save`` holds the training up, and that until the checkpoint counts; beside
``torch.distributed.checkpoint.async_save`` of the same ranks, and ``torch.save`` of all by one. Each is done
once before it counts, as buffers are made the first time; the median of ``--rounds`` is taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks.results import Row

RANKS, WARM = 4, 1


def run(arguments: list[str]) -> list[Row]:
    """Measure, and return the figures."""
    parser = argparse.ArgumentParser(prog="checkpointing")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk that is measured")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        processes.spawn(
            _rank, (folder, given.width, given.layers, given.rounds), nprocs=RANKS, join=True
        )
        found: dict[str, list[float]] = torch.load(Path(folder) / "found.pt")
    return [
        Row(f"checkpointing, {name}", statistics.median(values) * 1e3, "ms")
        for name, values in found.items()
    ]


def _rank(rank: int, folder: str, width: int, layers: int, rounds: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from stoker_train.sharded.checkpoints.store import ShardedCheckpoints

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found: dict[str, list[float]] = {}

    def note(name: str, began: float, number: int) -> None:
        if number >= WARM:
            found.setdefault(name, []).append(time.perf_counter() - began)

    ours = ShardedCheckpoints(os.path.join(folder, "ours"), keep=2)
    for number in range(WARM + rounds):
        dist.barrier()
        began = time.perf_counter()
        future = ours.save(number, {"model": model, "optimizer": optimizer})
        note("stoker, held up", began, number)
        saved = future.result(600)
        assert not saved.problem, saved.problem
        note("stoker, until it counts", began, number)
    ours.close()
    for number in range(WARM + rounds):
        dist.barrier()
        began = time.perf_counter()
        state, states = get_state_dict(model, optimizer)
        path = os.path.join(folder, f"dcp-{number}")
        waited = dcp.async_save({"model": state, "optimizer": states}, checkpoint_id=path)
        note("dcp.async_save, held up", began, number)
        waited.result()  # type: ignore[union-attr]
        note("dcp.async_save, until it is there", began, number)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
    if rank == 0:
        whole = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        one = torch.optim.AdamW(whole.parameters())
        for parameter in whole.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.step()
        for number in range(WARM + rounds):
            began = time.perf_counter()
            with open(os.path.join(folder, "one.pt"), "wb") as file:
                torch.save({"model": whole.state_dict(), "optimizer": one.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            note("torch.save by one rank", began, number)
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.barrier()
    dist.destroy_process_group()
