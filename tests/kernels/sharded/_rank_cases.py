"""What the tests of parallelism run on ranks: every case in the life of one process group.

DTensor remembers meshes by their shape, so that a mesh must not outlive its groups.
"""

from __future__ import annotations

import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import stoker_kernels as ours
from stoker.exceptions import BadRequestError
from stoker_train.planning.strategy import Recompute, Strategy
from stoker_train.sharded.parallel import batch_norm, clipping, offload, traffic
from stoker_train.sharded.parallel.apply import micro_batch, parallelize
from stoker_train.sharded.parallel.mesh import DATA, PIPELINE, TENSOR, device_mesh
from tests.kernels.sharded._models import batches, loss_of, make_model, train, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 2


def run_all(rank: int, world: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Run functions of this module in one process group; return results by case, or the text of an error."""
    torch.set_num_threads(1)
    module = import_module("tests.kernels.sharded._rank_cases")  # this function comes without it
    found: dict[str, Any] = {}
    for case, (name, *args) in cases.items():
        try:
            found[case] = getattr(module, name)(*args)
        except Exception:
            found[case] = RuntimeError(f"{case} on rank {rank}: {traceback.format_exc()}")
    return found


def train_all(kind: str, strategies: list[Strategy], steps: int) -> Any:
    """Train by each strategy: losses, whole weights, payload and bytes sent of the last step."""
    found = []
    for strategy in strategies:
        losses, weights, counted = train(kind, strategy, steps, mesh_of(strategy))
        found.append((losses, weights, dict(counted.bytes), dict(counted.sent)))
    return found


@cache
def mesh_of(strategy: Strategy) -> Any:
    return _mesh(strategy.data, strategy.tensor, strategy.pipeline, strategy.pipeline_inside)


@cache
def _mesh(data: int, tensor: int, pipeline: int, inside: bool) -> Any:
    strategy = Strategy(data=data, tensor=tensor, pipeline=pipeline, pipeline_inside=inside)
    return device_mesh(strategy, "cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.full((16,), 1.5))

    def forward(self, x: torch.Tensor, *, slope: float = 1.0) -> torch.Tensor:
        return x + self.down(torch.tanh(slope * self.up(self.norm(x)))) * self.scale


class Anyones(nn.Module):
    """A model that is not ours: tokens (B, S) -> logits (B, S, 64)."""

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)
        if scaled:
            self.head.weight = self.embed.weight
        if not scaled:  # what works on a rank's own tokens must be named under sequence parallelism
            for block in self.blocks:
                block.scale.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, slope=0.5)
        return None, nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


PLAN = {
    "embed": "embedding", "blocks.*.norm": "sequence", "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise", "head": "head",
}  # fmt: skip


def run_steps(
    model: nn.Module,
    strategy: Strategy,
    mesh: Any,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
) -> list[float]:
    """Losses of this rank's part of each batch."""
    losses = []
    for batch in batches(steps):
        x, y = (rows.chunk(strategy.data)[mesh.get_local_rank(DATA)] for rows in batch)
        with micro_batch(model, last=True):
            loss = loss_of(model, x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- the cases -------------------------------------------------------------------------------------


def by_names() -> Any:
    found = []
    for strategy in (
        Strategy(data=2, tensor=2, zero=3),
        Strategy(tensor=4),
        Strategy(data=2, tensor=2, zero=1, sequence=True),
    ):
        mesh = mesh_of(strategy)
        model = Anyones(scaled=not strategy.sequence)
        parallelize(model, strategy, mesh, tensor_plan=PLAN)
        run_steps(model, strategy, mesh, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        found.append((strategy, whole_of(model)))
    return found


def clip() -> Any:
    found = {}
    for strategy in (
        Strategy(data=4, zero=2),
        Strategy(data=2, tensor=2, zero=1, sequence=True),
        Strategy(tensor=4),
    ):
        mesh = mesh_of(strategy)
        model = parallelize(make_model("gpt"), strategy, mesh)
        (batch,) = batches(1)
        x, y = (rows.chunk(strategy.data)[mesh.get_local_rank(DATA)] for rows in batch)
        with micro_batch(model, last=True):
            loss_of(model, x, y).backward()
        measured = clipping.clip_grad_norm_(model.parameters(), float("inf"), mesh)
        norm = clipping.clip_grad_norm_(model.parameters(), 0.01, mesh)
        again = clipping.clip_grad_norm_(model.parameters(), 1e9, mesh)
        found[str(strategy)] = [float(measured), float(norm), float(again)]
    # Two stages of a pipeline, the same weight in both of them, and one that has no gradient.
    strategy = Strategy(data=2, pipeline=2, zero=1, pipeline_inside=True)
    mesh = mesh_of(strategy)
    stage = mesh.get_local_rank(PIPELINE)
    part = parallelize(nn.Linear(8, 8, bias=False), strategy, mesh)
    tied = nn.Parameter(torch.ones(4))
    tied.grad = torch.full((4,), 2.0)
    with micro_batch(part, last=True):
        (part(torch.ones(1, 8)).sum() * (3.0 if stage else 4.0)).backward()
    norm = clipping.clip_grad_norm_(
        [*part.parameters(), tied, nn.Parameter(torch.ones(1))], 1.0, mesh,
        counted_elsewhere=[tied] if stage else (),
    )  # fmt: skip
    found["pipeline"] = [float(norm), float(tied.grad[0])]
    return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "ours": lambda p: ours.AdamW(p, lr=1e-2, weight_decay=1e-2),
    "lamb": lambda p: ours.LAMB(p, lr=1e-2),
}


class Branches(nn.Module):
    """One of two ways for a batch; the base is frozen, and a parameter is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.ways = nn.ModuleList(nn.Linear(4, 4, bias=way == 1) for way in range(2))
        self.choice = nn.ModuleList([_Chosen(), _Chosen()])

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        x = self.base(x)
        for layer in self.choice:
            x = layer(x, way)
        return torch.tanh(self.ways[1](self.ways[0](x))).square().mean()


class _Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.side = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        return self.down(x) + (self.up if int(way) % 2 else self.side)(x)


def branches() -> Any:
    """Losses and norms of steps whose ranks use other parameters, with an evaluation before each update."""
    from stoker_train.sharded.pipelining.executor import Pipeline

    found = []
    x = torch.linspace(-1, 1, 16).view(4, 1, 4)[dist.get_rank()]
    way = torch.tensor([dist.get_rank()])
    for zero in (0, 1, 2, 3):
        strategy = Strategy(data=4, zero=zero)
        mesh = mesh_of(strategy)
        model = parallelize(Branches(), strategy, mesh)
        pipeline = Pipeline(model, strategy, mesh, lambda loss, _: loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        seen = []
        for _ in range(3):
            loss = pipeline.step((x, way))
            same = pipeline.evaluate((x, way))
            norm = clipping.clip_grad_norm_(model.parameters(), 0.1, mesh)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((float(loss), float(same), float(norm)))
        found.append(seen)
    return found


def offloaded(folder: str) -> Any:
    """Bytes of states, and whether weights and states go on as those of an optimizer without it."""
    strategy = Strategy(data=2, tensor=2, zero=1)
    mesh = mesh_of(strategy)
    nbytes = 0
    for name, make in OPTIMIZERS.items():
        models = [parallelize(make_model("llama"), strategy, mesh) for _ in range(2)]
        plain, away = (make(model.parameters()) for model in models)
        offload.offload_optimizer(away, folder, at_a_time_nbytes=5000)
        for model, optimizer in zip(models, (plain, away), strict=True):
            run_steps(model, strategy, mesh, optimizer)
        again = offload.offload_optimizer(make(models[1].parameters()), folder)
        again.load_state_dict(away.state_dict())
        run_steps(models[0], strategy, mesh, plain)
        run_steps(models[1], strategy, mesh, again)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), name
        for a, b in zip(plain.state.values(), again.state.values(), strict=True):
            assert torch.equal(a["exp_avg_sq"].to_local(), b["exp_avg_sq"].to_local()), name
            assert b["exp_avg"].placements == a["exp_avg"].placements
        nbytes = offload.state_nbytes(away)
    assert not list(Path(folder).iterdir()), "files have no names"
    return nbytes


def mixed() -> Any:
    found = []
    for strategy in (
        Strategy(data=4),
        Strategy(data=4, zero=3),
        Strategy(data=2, tensor=2, zero=1, sequence=True),
    ):
        mesh = mesh_of(strategy)
        model = parallelize(make_model("llama"), strategy, mesh, precision="bf16")
        seen = set()
        for layer in model.layers:  # type: ignore[union-attr]
            layer.mlp.register_forward_pre_hook(
                lambda m, args, seen=seen: seen.add((args[0].dtype, m.down.weight.dtype))
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = run_steps(model, strategy, mesh, optimizer)
        kept = {(p.dtype, p.to_local().dtype) for p in model.parameters()}
        total = torch.tensor(losses)
        dist.all_reduce(total)
        found.append((seen, kept, (total / dist.get_world_size()).tolist()))
    return found


def recomputed() -> Any:
    """Gradients and how often each layer ran, for every kind; with dropout, by one seed."""
    found = {}
    for cut in ({"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 4, "sequence": True}):
        kinds = []
        for kind in Recompute:
            strategy = Strategy(**cut, zero=0 if "tensor" in cut else 3, recompute=kind)
            mesh = mesh_of(strategy)
            model = parallelize(make_model("gpt", dropout=0.2), strategy, mesh)
            runs = []
            for layer in model.layers:  # type: ignore[union-attr]
                layer.attention.register_forward_pre_hook(lambda *_, r=runs: r.append(1))
            (batch,) = batches(1)
            torch.manual_seed(11)
            with micro_batch(model, last=True):
                loss = loss_of(model, *batch)
                loss.backward()
            drawn = torch.rand(())
            gradients = [p.grad.to_local().clone() for p in model.parameters()]
            kinds.append((loss.item(), gradients, len(runs), float(drawn)))
        found[str(cut)] = kinds
    return found


ROWS = ((0, 1), (1, 4), (4, 4), (4, 10))
"""Of the whole batch, for each rank: uneven, and none for one."""


def batch_of(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    shape = (10, 3, *(4,) * dims)
    x = torch.randn(shape, generator=drawn) + torch.tensor([0.0, 50.0, -3.0]).view(
        1, 3, *(1,) * dims
    )
    return x, torch.randn(shape, generator=drawn)


BATCH_NORMS = (
    (lambda: nn.BatchNorm2d(3), 2),
    (lambda: nn.BatchNorm1d(3, momentum=None, affine=False), 0),
    (lambda: nn.BatchNorm1d(3, track_running_stats=False), 1),
)


def normalize() -> Any:
    mesh = mesh_of(Strategy(data=4))
    found = []
    for make, dims in BATCH_NORMS:
        model = batch_norm.synchronize(make(), mesh)
        x, factor = (t[slice(*ROWS[dist.get_rank()])] for t in batch_of(dims))
        x = x.clone().requires_grad_()
        y = model(x)
        (y * factor).sum().backward()
        model.eval()
        found.append(
            (y.detach(), x.grad, [p.grad for p in model.parameters()], dict(model.named_buffers()),
             model(x).detach())
        )  # fmt: skip
    return found


def refused() -> list[tuple[str | None, str]]:
    meshes = {
        strategy: mesh_of(strategy)
        for strategy in (Strategy(tensor=4), Strategy(data=2, tensor=2, sequence=True))
    }

    def cut(model: nn.Module, plan: Any = None, sequence: bool = False) -> nn.Module:
        strategy = next(one for one in meshes if one.sequence is sequence)
        return parallelize(model, strategy, meshes[strategy], tensor_plan=plan)

    def long() -> None:
        model = cut(make_model("gpt"), sequence=True)
        loss_of(model, torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64))

    clip_mesh = meshes[Strategy(tensor=4)]
    attempts: list[Callable[[], Any]] = [
        lambda: device_mesh(Strategy(data=8), "cpu"),
        lambda: device_mesh(Strategy(data=4, expert=2), "cpu"),
        lambda: cut(make_model("gpt", heads=2)),
        lambda: cut(make_model("grouped")),
        lambda: cut(make_model("gpt", hidden=30)),
        lambda: cut(make_model("gpt", vocab_size=63)),
        lambda: cut(Anyones()),
        lambda: cut(Anyones(), {"nothing.*": "colwise"}),
        lambda: cut(Anyones(), {"head": "sideways"}),
        lambda: cut(Anyones(), {"head": "head"}),
        lambda: cut(Anyones(), {"blocks.0": "colwise"}),
        long,
        lambda: parallelize(Anyones(), Strategy(data=4, zero=4), clip_mesh),
        lambda: parallelize(Anyones(), Strategy(tensor=1, sequence=True), clip_mesh),
        lambda: parallelize(Anyones(), Strategy(), clip_mesh, precision="fp16"),
        lambda: parallelize(nn.Linear(2, 2), Strategy(recompute=Recompute.FULL), clip_mesh),
        lambda: clipping.clip_grad_norm_([], 0.0, clip_mesh),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except BadRequestError as error:
            found.append((error.field, str(error)))
        else:
            found.append((None, "nothing was raised"))
    return found


def places() -> Any:
    found = []
    for inside in (False, True):
        strategy = Strategy(data=2, pipeline=2, pipeline_inside=inside)
        mesh = mesh_of(strategy)
        at = [mesh.get_local_rank(dim) for dim in (DATA, TENSOR, PIPELINE)]
        with traffic.count() as counted:
            dist.all_reduce(torch.ones(6), group=mesh.get_group(PIPELINE))
        found.append((at, dict(counted.bytes)))
    return found
