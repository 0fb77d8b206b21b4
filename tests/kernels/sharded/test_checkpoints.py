"""What one plan saved is, bit for bit, what any other loads; on ranks that are processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.planning.strategy import Strategy
from stoker_train.sharded.checkpoints import safetensors_files
from stoker_train.sharded.checkpoints.full_state import load_full, save_full
from stoker_train.sharded.checkpoints.layout import checkpoints_in
from tests.kernels.sharded._models import make_model
from tests.unit.train.elastic.rank_processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn


pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    preload = ("torch._dynamo", "tests.kernels.sharded._models")
    processes = RankProcesses(4, tmp_path_factory.mktemp("ranks"), preload)
    yield processes
    processes.close()


PLANS = {
    "zero 4": Strategy(data=4, zero=3),
    "zero 2": Strategy(data=2, zero=3),
    "zero 3": Strategy(data=3, zero=2),
    "data 2": Strategy(data=2),
    "tensor 2, zero 2": Strategy(data=2, tensor=2, zero=3),
    "tensor 2": Strategy(tensor=2),
    "pipeline 2": Strategy(pipeline=2),
    "pipeline 2, zero 2": Strategy(data=2, pipeline=2, zero=3),
    "one": Strategy(),
}


WAIT_S = 600.0
"""Of everything that is waited for: processes that start torch on a busy machine take minutes."""
SHAPE = {"dim": 32, "ops": "torch"}
"""Of all models here, whatever the other tests take."""


def _model(kind: str, seed: int, **changes: Any) -> nn.Module:
    return make_model(kind, seed, **{**SHAPE, **changes})


def _parts(kind: str, strategy: Strategy, **changes: Any) -> list[nn.Module]:
    from stoker_train.sharded.parallel.apply import parallelize
    from stoker_train.sharded.parallel.mesh import device_mesh
    from stoker_train.sharded.pipelining.splitting import cut_evenly, split

    model = _model(kind, 3, **changes)
    parts = [model]
    mesh = device_mesh(strategy, "cpu")
    if strategy.pipeline > 1:
        stage = mesh.get_local_rank("pp")
        cuts = cut_evenly(2, strategy.pipeline)
        parts = split(model, cuts, pipeline=strategy.pipeline, rank=stage)
    return [parallelize(part, strategy, mesh) for part in parts]


def _optimizer(name: str, parts: list[nn.Module]) -> torch.optim.Optimizer:
    from stoker.kernels.optim import AdamW

    made = [p for part in parts for p in part.parameters()]
    groups = [
        {"params": [p for p in made if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in made if p.dim() < 2], "lr": 3e-3},
    ]
    if name == "ours":
        return AdamW(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2)


def _turn(
    rank: int, world: int, folder: str, attempt: int, kind: str, plan: str, optimizer: str,
    steps: int, dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Load what there is, train on gradients of this rank's own making, and save."""
    from stoker_train.sharded.checkpoints.pieces import local_of
    from stoker_train.sharded.checkpoints.store import ShardedCheckpoints

    parts = _parts(kind, PLANS[plan])
    for part in parts:
        part.to(dtype)
    chosen = _optimizer(optimizer, parts)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, 2)
    store = ShardedCheckpoints(folder, keep=20, attempt=attempt, timeout_s=WAIT_S)
    state = {"model": parts, "optimizer": chosen, "schedule": schedule, "per_rank": {"rank": rank}}
    loaded = store.load(state)
    step = 0 if loaded is None else loaded.step
    drawn = torch.Generator().manual_seed(attempt * 100)  # alike on replicas, as reduced ones are
    for _ in range(steps):
        step += 1
        for part in parts:
            for p in part.parameters():
                p.grad = torch.zeros_like(p)
                own = local_of(p.grad)
                own.copy_(torch.randn(1, generator=drawn).to(own.dtype) + own)
        chosen.step()
        schedule.step()
    kept = {**state, "cursor": [1, 2]}
    saved = store.save(step + (not steps), kept, meta={"plan": plan}).result(WAIT_S)
    assert not saved.problem, saved.problem
    store.close()
    copied = sum(one.nbytes for one in store._staging._held.values())
    if loaded is None:
        return copied, None
    return copied, (loaded.values["cursor"], loaded.per_rank, chosen.param_groups[1]["lr"])


def _same(folder: str, before: Any, after: Any) -> None:
    (_, one, first), (_, other, second) = before, after
    assert one.keys() == other.keys(), folder
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name
    assert first["state"].keys() == second["state"].keys()
    for name, states in first["state"].items():
        assert states.keys() == second["state"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for state, value in states.items():
            found = second["state"][name][state]
            assert value.dtype == found.dtype and torch.equal(value, found), (name, state)


def _whole_nbytes(state: Any) -> int:
    _, model, optimizer = state
    tensors = {id(one): one for one in model.values()}
    for states in optimizer["state"].values():
        tensors |= {id(one): one for one in states.values() if one.dim()}
    return sum(one.nbytes for one in tensors.values())


TURNS = {
    "gpt": ["zero 4", "zero 2", "zero 3", "one", "pipeline 2, zero 2", "data 2"],
    "llama": ["tensor 2, zero 2", "zero 3", "tensor 2", "pipeline 2", "one"],
    "grouped": ["one", "tensor 2, zero 2", "zero 3", "tensor 2"],
}


@pytest.mark.parametrize(
    ("kind", "optimizer", "dtype"),
    [
        ("gpt", "ours", torch.float32),
        ("llama", "torch", torch.float32),
        ("grouped", "ours", torch.bfloat16),
    ],
)
def test_a_state_goes_from_plan_to_plan_bit_for_bit(
    ranks: RankProcesses, tmp_path: Path, kind: str, optimizer: str, dtype: torch.dtype
) -> None:
    folder = str(tmp_path / "runs")
    before: Any = None
    for attempt, plan in enumerate(TURNS[kind], 1):
        steps = 2 if before is None else 0
        world = PLANS[plan].gpus
        found = ranks.run(_turn, world, folder, attempt, kind, plan, optimizer, steps, dtype)
        after = load_full(folder)
        if before is not None:
            _same(plan, before, after)
            cursor, per_rank, lr = found[0][1]
            assert cursor == [1, 2] and lr == pytest.approx(3e-4)
            was = PLANS[TURNS[kind][attempt - 2]].gpus
            assert per_rank == ({"rank": 0} if was == world else None)
        if PLANS[plan].pipeline == 1:  # each block on one rank, also where several ranks have it
            assert sum(copied for copied, _ in found) == _whole_nbytes(after), plan
        before = after
    wanted = torch.float32 if optimizer == "ours" else dtype
    assert all(one["exp_avg"].dtype == wanted for one in before[2]["state"].values())
    stored = checkpoints_in(folder)
    assert [one.manifest.meta["plan"] for one in stored] == TURNS[kind]
    # torch alone reads it, too.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(stored[-1].path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["model.norm.weight"], before[1]["norm.weight"])


def _files(rank: int, world: int, folder: str, kind: str, plan: str) -> dict[str, torch.Tensor]:
    from tests.kernels.sharded._models import whole_of

    parts = _parts(kind, PLANS[plan])
    for part in parts:
        for p in part.parameters():
            torch.nn.init.zeros_(p)
    safetensors_files.load(folder, parts)
    found = {}
    for part in parts:
        found |= whole_of(part) if len(parts) == 1 and PLANS[plan].pipeline == 1 else {}
    return found


def test_safetensors_go_out_and_into_a_cut_model(ranks: RankProcesses, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = _model("grouped", 5)
    save_full(tmp_path / "runs", 7, model.state_dict(), meta={"plan": "one"})
    files = safetensors_files.export(tmp_path / "runs", tmp_path / "out", max_file_gb=2e-5)
    assert len(files) > 2 and (tmp_path / "out" / "model.safetensors.index.json").exists()
    for plan in ("tensor 2, zero 2", "zero 3"):
        world = PLANS[plan].gpus
        found = ranks.run(_files, world, str(tmp_path / "out"), "grouped", plan)[0]
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter), (plan, name)


def _broken(rank: int, world: int, folder: str, what: str) -> str:
    from stoker_train.sharded.checkpoints.store import ShardedCheckpoints

    parts = _parts("gpt", PLANS["zero 3"], **({"dim": 48} if what == "shape" else {}))
    store = ShardedCheckpoints(folder, timeout_s=WAIT_S)
    if what == "full disk" and rank == 1:
        import errno

        from stoker_train.sharded.checkpoints import saving

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__1_0.distcp")

        before, saving.SummedFile.write = saving.SummedFile.write, full  # type: ignore[assignment]
        try:
            saved = store.save(9, {"model": parts}).result(WAIT_S)
        finally:
            saving.SummedFile.write = before  # type: ignore[method-assign]
        return saved.problem
    if what in ("full disk", "good"):
        return store.save(9, {"model": parts}).result(WAIT_S).problem
    if what == "state":
        odd = torch.optim.SGD(parts[0].parameters(), lr=0.1)
        if rank == 2:  # alone, and the others must not wait for it
            odd.state[next(parts[0].parameters())]["codes"] = torch.zeros(3, 5)
        try:
            return store.save(9, {"model": parts, "optimizer": odd}).result(WAIT_S).problem
        except ValueError as error:
            return str(error)
    try:
        loaded = store.load({"model": parts})
    except ValueError as error:
        return str(error)
    return str(None if loaded is None else loaded.step)


def test_what_is_wrong_is_said_by_all_ranks(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def all_ranks(what: str) -> str:
        found = ranks.run(_broken, 3, folder, what)
        assert len(set(found)) == 1, found
        return found[0]

    assert all_ranks("load") == "None"
    assert all_ranks("good") == ""
    assert "rank 1: the disk of __1_0.distcp is full" in all_ranks("full disk")
    assert "is [64, 32] in the checkpoint and [64, 48] in the model" in all_ranks("shape")
    found = ranks.run(_broken, 3, folder, "state")
    assert all("state codes of embed.weight is [3, 5] on this rank" in one for one in found), found
    assert all_ranks("good") == ""
    assert len(checkpoints_in(folder)) == 2
    newest = checkpoints_in(folder)[-1].path
    data = bytearray((newest / "__2_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__2_0.distcp").write_bytes(data)
    assert all_ranks("load") == "9"  # of the one before
    (checkpoints_in(folder)[0].path / "__1_0.distcp").unlink()
    assert "is whole: " in all_ranks("load") and "damaged" in all_ranks("load")
