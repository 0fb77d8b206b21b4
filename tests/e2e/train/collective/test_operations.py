"""``stoker.collective`` between real actors: results, groups at once, objects, and Ray's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker import collective
from stoker.exceptions import BadRequestError
from tests.e2e._cluster import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.train.collective.crew import Crew


def test_each_collective_agrees_with_numpy(crew: Callable[[int], Crew], seed: int) -> None:
    def work(seed: int, kind: str, dtype: str, width: int) -> dict[str, Any]:
        import numpy as np
        import torch

        import stoker

        group = stoker.collective.group()
        mine = np.random.default_rng((seed, group.rank)).integers(1, 5, (group.size * 2, width))

        def fresh() -> Any:
            array = mine.astype(dtype)
            return array if kind == "numpy" else torch.from_numpy(array)

        found: dict[str, Any] = {
            f"all_reduce {op}": group.all_reduce(fresh(), op)
            for op in ("sum", "product", "min", "max")
        }
        found["reduce"] = group.reduce(fresh(), 1, "max")
        found["broadcast"] = group.broadcast(fresh(), 2)
        found["all_gather"] = np.stack([np.asarray(one) for one in group.all_gather(fresh())])
        found["reduce_scatter"] = group.reduce_scatter(fresh())
        found["reduce_scatter list"] = group.reduce_scatter([fresh()] * group.size)
        found["grouped"] = group.grouped_all_reduce([fresh(), fresh()[0]], fusion_nbytes=64)[1]
        if group.rank == 0:
            group.send(fresh(), 2)
        if group.rank == 2:
            found["recv"] = group.recv(fresh(), 0)
        group.barrier()
        assert all(
            isinstance(v, np.ndarray) == (kind == "numpy")
            for k, v in found.items()
            if k != "all_gather"
        )
        return {name: np.asarray(value) for name, value in found.items()}

    three = crew(3)
    three.form()
    # Three columns travel with the headers, 300 by themselves.
    for kind, dtype, width in (
        ("numpy", "float64", 3),
        ("numpy", "float32", 300),
        ("torch", "float64", 300),
        ("torch", "int64", 3),
    ):
        rngs = [np.random.default_rng((seed, rank)) for rank in range(3)]
        given = np.stack([rng.integers(1, 5, (6, width)) for rng in rngs])
        total = given.sum(0)
        for rank, found in enumerate(three.run(work, seed, kind, dtype, width)):
            wanted = {
                "all_reduce sum": total,
                "all_reduce product": given.prod(0),
                "all_reduce min": given.min(0),
                "all_reduce max": given.max(0),
                "reduce": given.max(0) if rank == 1 else given[rank],
                "broadcast": given[2],
                "all_gather": given,
                "reduce_scatter": total[2 * rank : 2 * rank + 2],
                "reduce_scatter list": total,
                "grouped": total[0],
            }
            if rank == 2:
                wanted["recv"] = given[0]
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert np.array_equal(found[name], value), (rank, kind, dtype, name)


def test_groups_and_process_sets_work_at_once_and_torchs_own_group_is_free(
    crew: Callable[[int], Crew],
) -> None:
    def work() -> Any:
        import threading

        import numpy as np
        import torch.distributed as dist

        import stoker

        left, right = (stoker.collective.group(name) for name in ("left", "right"))
        assert not dist.is_initialized()
        stoker.train.init_process_group("own", left.rank, left.size, backend="gloo")
        # The members' order of the two groups differs: they are independent of each other.
        order = [left, right] if left.rank else [right, left]
        done: dict[str, float] = {}

        def reduce(group: Any) -> None:
            for _ in range(20):
                done[group.name] = float(group.all_reduce(np.array([1.0 + group.rank]))[0])

        threads = [threading.Thread(target=reduce, args=(one,)) for one in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pair, last = left.process_set([2, 0]), left.process_set([1])
        members = pair.all_gather_object(left.rank) if pair.included() else None
        alone = last.all_gather_object(left.rank) if last.included() else None
        own = np.ones(1, dtype=np.float32)
        import torch

        dist.all_reduce(torch.from_numpy(own))
        stoker.train.destroy_process_group()
        return done, pair.rank, members, alone, own[0]

    three = crew(3)
    three.form("left")
    collective.init_group(list(reversed(three.members)), name="right", timeout_s=WAIT_S)
    found = three.run(work)
    assert [one[0] for one in found] == [{"left": 6.0, "right": 6.0}] * 3
    assert [one[1] for one in found] == [1, -1, 0]
    assert [one[2] for one in found] == [[2, 0], None, [2, 0]]
    assert [one[3] for one in found] == [None, [1], None]
    assert [one[4] for one in found] == [3.0] * 3


def test_objects_states_and_parameters_come_from_one_member(crew: Callable[[int], Crew]) -> None:
    def work() -> Any:
        import torch

        import stoker

        group = stoker.collective.group()
        torch.manual_seed(group.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (group.rank + 1))
        if group.rank == 1:  # the only one that has a state
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        stoker.collective.broadcast_parameters(model, 1)
        stoker.collective.broadcast_optimizer_state(optimizer, 1)
        moments = [one["exp_avg"].flatten() for one in optimizer.state.values()]
        values = torch.cat([*(p.detach().flatten() for p in model.parameters()), *moments])
        epoch = group.broadcast_object({"epoch": group.rank, "pad": "x" * group.rank}, 1)
        everyone = group.all_gather_object("y" * group.rank)
        return values.tolist(), optimizer.param_groups[0]["lr"], epoch, everyone

    two = crew(2)
    two.form()
    first, second = two.run(work)
    assert first == second
    assert first[1:] == (0.2, {"epoch": 1, "pad": "x"}, ["", "y"])


def test_rays_names_do_what_rays_do(crew: Callable[[int], Crew]) -> None:
    def work() -> Any:
        import numpy as np

        import stoker.ray.util.collective as col
        from stoker.ray.util.collective.types import Backend, ReduceOp

        rank, size = col.get_rank("g"), col.get_collective_group_size("g")
        one = np.full(2, rank + 1.0)
        col.allreduce(one, "g", ReduceOp.MAX)
        gathered = [np.zeros(1) for _ in range(size)]
        col.allgather(gathered, np.array([float(rank)]), "g")
        part = np.zeros(2)
        col.reducescatter(part, [np.full(2, 1.0 + n) for n in range(size)], "g")
        sent = np.full(1, 7.0 * rank)
        col.broadcast(sent, 1, "g")
        summed = np.ones(1)
        col.reduce(summed, 0, "g")
        if rank == 0:
            col.send(np.ones(3), 1, "g")
        else:
            col.recv(three := np.zeros(3), 0, "g")
            assert three.sum() == 3
        col.barrier("g")
        assert (Backend("GLOO"), col.gloo_available()) == ("gloo", True)
        col.destroy_collective_group("g")
        gone = col.is_group_initialized("g"), col.get_rank("g"), col.get_collective_group_size("g")
        return rank, one.tolist(), gathered, part.tolist(), sent[0], summed[0], gone

    def join(rank: int) -> None:
        import stoker.ray.util.collective as col

        col.init_collective_group(2, rank, "gloo", "g", gloo_timeout=40_000)

    import stoker.ray.util.collective as col

    two = crew(2)
    refs = [member.run.remote(join, rank) for rank, member in enumerate(two.members)]
    stoker.get(refs, timeout=WAIT_S)
    gone = (False, -1, -1)
    wanted = [
        (0, [2.0, 2.0], [0.0, 1.0], [2.0, 2.0], 7.0, 2.0, gone),
        (1, [2.0, 2.0], [0.0, 1.0], [4.0, 4.0], 7.0, 1.0, gone),
    ]
    assert two.run(work) == wanted
    col.create_collective_group(two.members, 2, [1, 0], "gloo", "g", gloo_timeout=40_000)
    assert two.run(work) == list(reversed(wanted))
    with pytest.raises(BadRequestError, match="are no group of 2"):
        col.create_collective_group(two.members, 2, [0, 0], "gloo", "g")
