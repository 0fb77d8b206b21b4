"""One of the processes of test_parallel: models with our kernels under DDP, FSDP2 and LoRA.

python parallel_worker.py RANK WORKERS INIT_FILE
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # while there is no group: its default arguments would keep it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3]))

from stoker_kernels import apply
from stoker_kernels.models import lora
from tests.kernels.patching._families import batch, build

STEPS = 3


def train(model: Any, padding: str, seed: int, rank: int) -> list[torch.Tensor]:
    """The loss of each step, and the parameters at the end, gathered."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(padding, seed + 10 * step + rank)).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found + [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in trained]


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)


def sharded(seed: int, patched: bool, head: bool) -> torch.nn.Module:
    model: Any = build("llama", seed)
    if patched:
        apply(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(
        model.lm_head, mesh=mesh
    )  # a unit of its own: its weight is whole in its forward alone
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def sharded_t5(seed: int, patched: bool) -> torch.nn.Module:
    """Blocks that use the bias of the first one, whose weights are free by then."""
    model: Any = build("t5", seed)
    if patched:
        assert "attention" in apply(model).replaced["encoder.block.0.layer.0.SelfAttention"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def main() -> None:
    rank, workers, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    seed = int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=workers,
        timeout=timedelta(seconds=240),
    )  # fmt: skip

    models = [DistributedDataParallel(build("gpt2", seed)), build("gpt2", seed)]
    apply(models[1])
    models[1] = DistributedDataParallel(models[1])
    check(train(models[1], "right", seed, rank), train(models[0], "right", seed, rank))

    for head in (False, True):
        check(*(train(sharded(seed, on, head), "left", seed, rank) for on in (True, False)))
    check(*(train(sharded_t5(seed, on), "right", seed, rank) for on in (True, False)))
    late = build("llama", seed)
    fully_shard(late, mesh=init_device_mesh("cpu", (workers,)))
    applied = apply(late)  # the parts have kernels; the model has another class by now
    assert "model.layers.0.mlp" in applied.replaced
    applied.undo()

    adapted = []
    for order in ("apply", "inject", "plain"):
        model = build("llama", seed)
        if order == "apply":
            apply(model)
        torch.manual_seed(seed)
        lora.inject(model, ("q_proj", "v_proj", "gate_proj", "down_proj"), rank=4)
        if order == "inject":
            assert "model.layers.0.mlp" in apply(model).replaced
        adapted.append(train(model, "right", seed, rank))
    check(adapted[0], adapted[2])
    check(adapted[1], adapted[2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
