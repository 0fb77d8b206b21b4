"""``stoker.collective`` between real actors: results, what does not match, members that die, hang or leave.

The actors of the module's cluster are lent to one test after the other: importing torch is what costs.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker import collective
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from tests.e2e._cluster import WAIT_S, caught, embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ERRORS = collective.CollectiveError


@stoker.remote(num_cpus=0, max_concurrency=4)
class Member:
    """Runs what a test sends it."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


class Crew:
    """Some members, and what they are told to do."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members

    def start(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [member.run.remote(function, *args) for member in self.members]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank."""
        return stoker.get(self.start(function, *args), timeout=2 * WAIT_S)

    def form(self, name: str = "default", **options: Any) -> None:
        collective.init_group(self.members, name=name, **{"timeout_s": WAIT_S, **options})

    def pids(self) -> list[int]:
        return stoker.get([member.pid.remote() for member in self.members], timeout=WAIT_S)


class Pool:
    """The living actors of the module."""

    def __init__(self) -> None:
        self.free: list[Any] = []

    def take(self, count: int) -> list[Any]:
        while len(self.free) < count:
            self.free.append(Member.remote())
        taken, self.free = self.free[:count], self.free[count:]
        return taken


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with embedded(tmp_path_factory.mktemp("s"), num_cpus=2):
            yield Pool()


@pytest.fixture
def crew(pool: Pool) -> Iterator[Callable[[int], Crew]]:
    """So many actors, in no group; a test that kills one takes it out of ``members``."""
    lent: list[Crew] = []

    def take(count: int) -> Crew:
        lent.append(Crew(pool.take(count)))
        return lent[-1]

    yield take
    for one in lent:
        one.run(leave_all)
        pool.free += one.members


def leave_all() -> None:
    from stoker_train.collective import joining

    for name in list(joining._GROUPS._by_name):
        joining.destroy_group(name=name)


def by_value(*functions: Callable[..., Any]) -> None:
    """Have functions of this module, which no worker can import, travel as they are."""
    for function in functions:
        function.__module__ = "__main__"


def outcome() -> tuple[str, str, list[int]]:
    """What a reduction of one member ends with."""
    import numpy as np

    import stoker

    try:
        stoker.collective.group().all_reduce(np.ones(1000), name="grad")
    except stoker.collective.CollectiveError as error:
        return type(error).__name__, str(error), error.extra.get("ranks", [])
    return "", "", []


by_value(leave_all, outcome)


def until_waiting(crew: Crew, *ranks: int) -> None:
    """Return once those ranks are in a collective."""

    def waiting() -> bool:
        from stoker_train.collective import joining

        found = joining.group()
        return any(lane.current is not None for lane in found._lanes)

    by_value(waiting)
    for rank in ranks:
        until(
            lambda rank=rank: stoker.get(crew.members[rank].run.remote(waiting), timeout=WAIT_S),
            WAIT_S,
            f"rank {rank} is in a collective",
        )


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


def test_what_does_not_match_is_named_by_all_and_the_group_goes_on(
    crew: Callable[[int], Crew],
) -> None:
    def work() -> list[str]:
        import numpy as np

        import stoker

        group = stoker.collective.group()
        odd = group.rank == 1
        said = []
        for call in (
            lambda: group.all_reduce(np.ones(4 + odd), name="grad"),
            lambda: group.all_reduce(np.ones(4, dtype="f4" if odd else "f8")),
            lambda: group.all_reduce(np.ones(4), "max" if odd else "sum"),
            lambda: group.broadcast(np.ones(4), 1) if odd else group.barrier(),
            lambda: group.send(np.ones(2), 1) if not odd else group.recv(np.ones(3), 0),
        ):
            try:
                call()
            except stoker.collective.MismatchError as error:
                said.append(str(error))
        assert group.all_reduce(np.ones(1))[0] == 2
        return said

    two = crew(2)
    two.form()
    first, second = two.run(work)
    assert first == second
    assert len(first) == 5
    assert "rank 0 at #2: all_reduce sum float64 (4,) 'grad'" in first[0]
    assert "rank 1 at #2: all_reduce sum float64 (5,) 'grad'" in first[0]
    assert ["float32" in first[1], "max" in first[2], "barrier" in first[3]] == [True] * 3
    assert "rank 1 at #1: send float64 (3,)" in first[4]


def test_a_member_killed_in_a_collective_fails_all_others_and_they_can_form_anew(
    crew: Callable[[int], Crew],
) -> None:
    def threads() -> int:
        import threading

        return sum(one.name == "collective-all" for one in threading.enumerate())

    four = crew(4)
    four.form()
    collective.init_group(four.members[:3], name="spared", timeout_s=WAIT_S)
    victim, pid = four.members[3], four.pids()[3]
    refs = [member.run.remote(outcome) for member in four.members[:3]]
    until_waiting(four, 0, 1, 2)
    os.kill(pid, signal.SIGKILL)
    for kind, text, ranks in stoker.get(refs, timeout=WAIT_S):
        assert (kind, ranks) == ("MemberLostError", [3])
        assert victim.actor_id in text
        assert f"pid {pid}" in text
    four.members.remove(victim)
    again = four.run(outcome)
    assert [(kind, ranks) for kind, _, ranks in again] == [("MemberLostError", [3])] * 3
    # What hung in the connections ends as they close, one member after the other.
    until(lambda: four.run(threads) == [1] * 3, WAIT_S, "only the lane of the other group is left")

    def spared() -> list[int]:
        import stoker

        return list(stoker.collective.group("spared").all_gather_object(1))

    assert four.run(spared) == [[1, 1, 1]] * 3
    four.form()  # under the same name: the failed one gives way
    assert four.run(outcome) == [("", "", [])] * 3


def test_a_member_that_is_stopped_is_named_when_its_time_is_over(
    crew: Callable[[int], Crew],
) -> None:
    three = crew(3)
    three.form(timeout_s=6.0)
    pid = three.pids()[0]  # rank 0, who serves the store of the group
    os.kill(pid, signal.SIGSTOP)
    try:
        refs = [member.run.remote(outcome) for member in three.members[1:]]
        for kind, text, ranks in stoker.get(refs, timeout=WAIT_S):
            assert (kind, ranks) == ("CollectiveTimeoutError", [0])
            assert text.startswith("rank 0 of group 'default' did not come within 6 s")
            assert f"pid {pid}) does not answer" in text
    finally:
        os.kill(pid, signal.SIGCONT)
    # What the others had sent before may still arrive, so that one call succeeds.
    until(
        lambda: stoker.get(three.members[0].run.remote(outcome), timeout=WAIT_S)[0],
        WAIT_S,
        "the one that was stopped hears that the group is over",
    )


def test_a_stall_is_reported_with_who_has_not_come(crew: Callable[[int], Crew]) -> None:
    def stalled() -> list[str]:
        import stoker

        return stoker.collective.group().stalled()

    three = crew(3)
    three.form(stall_s=0.5)
    refs = [member.run.remote(outcome) for member in three.members[:2]]

    def named() -> str | None:
        (text, *_) = stoker.get(three.members[0].run.remote(stalled), timeout=WAIT_S) or [""]
        return text if "rank 2" in text and "does not answer" not in text else None

    text = until(named, WAIT_S, "rank 2 is known not to have come")
    assert text is not None
    assert "all_reduce sum float64 (1000,) 'grad' is #2 of the group" in text
    assert "has begun 1 of them and is in no collective" in text
    assert "rank 1 (" not in text
    assert (
        stoker.get([*refs, three.members[2].run.remote(outcome)], timeout=WAIT_S)
        == [("", "", [])] * 3
    )
    assert stoker.get(three.members[0].run.remote(stalled), timeout=WAIT_S) == []


def test_an_abort_and_a_leave_end_the_waits_of_others(crew: Callable[[int], Crew]) -> None:
    def abort() -> None:
        import stoker

        stoker.collective.group().abort("the loss is NaN")

    def leave() -> None:
        import stoker

        stoker.collective.destroy_group()

    by_value(abort, leave)
    two = crew(2)
    for end, text in ((abort, "aborted by rank 1"), (leave, "rank 1 has left group 'default'")):
        two.form()
        ref = two.members[0].run.remote(outcome)
        until_waiting(two, 0)
        stoker.get(two.members[1].run.remote(end), timeout=WAIT_S)
        kind, said, ranks = stoker.get(ref, timeout=WAIT_S)
        assert (kind, ranks) == ("CollectiveError", [1])
        assert text in said


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


def test_an_optimizer_of_many_members_is_one_with_the_whole_batch(
    crew: Callable[[int], Crew], seed: int
) -> None:
    def train(seed: int, share: tuple[int, int], passes: int, options: Any) -> Any:
        import torch

        import stoker

        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()
        unused = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        data = torch.randn(20, 8, 4, dtype=torch.float64)
        goal = data.sum(-1, keepdim=True)
        own = torch.optim.SGD([*model.parameters(), unused], lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.95)
        optimizer: Any = own
        if options is not None:
            named = [*model.named_parameters(), ("unused", unused)]
            optimizer = stoker.collective.DistributedOptimizer(
                own, named, backward_passes_per_step=passes, bucket_nbytes=100, **options
            )
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        first, count = share
        for step in range(20):
            optimizer.zero_grad()
            for part in range(passes):
                rows = slice(first + part * count, first + (part + 1) * count)
                loss = ((model(data[step, rows]) - goal[step, rows]) ** 2).mean() / passes
                loss.backward()
            if options is not None and step % 2:
                optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                assert norm > 0
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                if step % 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            schedule.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    def rank_train(seed: int, passes: int, count: int, options: Any) -> Any:
        import stoker

        rank = stoker.collective.group().rank
        return train(seed, (rank * passes * count, count), passes, options)

    two = crew(2)
    two.form()
    (whole,) = Crew(two.members[:1]).run(train, seed, (0, 8), 1, None)
    for passes in (1, 2):
        first, second = two.run(rank_train, seed, passes, 4 // passes, {})
        assert np.array_equal(first, second)
        assert np.allclose(first, whole, rtol=1e-8, atol=1e-10)
    first, second = two.run(rank_train, seed, 1, 4, {"compression": "fp16"})
    assert np.array_equal(first, second)
    assert np.allclose(first, whole, rtol=0.05, atol=0.02)
    for options in ({"compression": "topk"}, {"compression": "powersgd"}, {"op": "adasum"}):
        first, second = two.run(rank_train, seed, 1, 4, options)
        assert np.array_equal(first, second), options


def test_gradients_are_exchanged_while_the_backward_pass_goes_on(
    crew: Callable[[int], Crew],
) -> None:
    def work() -> Any:
        import torch

        import stoker

        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        optimizer = stoker.collective.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), bucket_nbytes=1, op="sum"
        )
        started: list[int] = []
        model[0].weight.register_hook(lambda _: started.append(len(optimizer._handles)))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.synchronize()
        return started, model[2].bias.grad.tolist()

    two = crew(2)
    two.form()
    for started, gradient in two.run(work):
        assert started[0] >= 4  # of six buckets: those of the later layers
        assert gradient == [2.0] * 4


def test_misuse_of_the_optimizer_is_named(crew: Callable[[int], Crew]) -> None:
    def work() -> list[str]:
        import torch

        import stoker

        group = stoker.collective.group()
        layer = torch.nn.Linear(2, 2)
        own = torch.optim.SGD(layer.parameters(), lr=0.1)
        wrap = stoker.collective.DistributedOptimizer
        named = list(layer.named_parameters())

        def twice() -> None:
            optimizer = wrap(own, named)
            try:
                layer(torch.ones(1, 2)).sum().backward()
                layer(torch.ones(1, 2)).sum().backward()
            finally:
                optimizer.synchronize()
                optimizer.detach()

        def early() -> None:
            optimizer = wrap(own, named)
            layer(torch.ones(1, 2)).sum().backward()
            try:
                optimizer.zero_grad()
            finally:
                optimizer.step()
                optimizer.detach()

        said = []
        for wrong in (
            lambda: wrap(own, named, op="xor"),
            lambda: wrap(own, named[:1]),
            lambda: wrap(own, [named[0], named[0]]),
            lambda: wrap(own, named, compression="zip"),
            lambda: wrap(own, named, backward_passes_per_step=0),
            twice,
            early,
        ):
            try:
                wrong()
            except stoker.exceptions.BadRequestError as error:
                said.append(error.field)
        assert group.size == 1
        return said

    one = crew(1)
    one.form()
    assert one.run(work) == [
        [
            "op",
            *("named_parameters", "named_parameters"),
            "compression",
            *("backward_passes_per_step", "backward_passes_per_step"),
            "zero_grad",
        ]
    ]


def test_a_timeline_has_the_phases_of_each_tensor(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    def work(folder: str) -> None:
        import numpy as np

        import stoker

        group = stoker.collective.group()
        group.start_timeline(f"{folder}/{{rank}}.json")
        group.all_reduce(np.ones(2), name="grad")
        group.process_set([0, 1]).barrier()
        group.stop_timeline()
        group.barrier()

    two = crew(2)
    two.form()
    two.run(work, str(tmp_path))
    for rank in range(2):
        events = [one for one in json.loads((tmp_path / f"{rank}.json").read_text()) if one]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        phases = [(rows[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
        for row in ("grad", "barrier"):
            assert [name for at, name in phases if at == row] == ["QUEUE", "NEGOTIATE", "EXCHANGE"]
        negotiated = [e["args"] for e in events if e["name"] == "NEGOTIATE"]
        assert all(one["last_rank"] in (0, 1) for one in negotiated)


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


def test_who_is_missing_or_there_twice_is_named(crew: Callable[[int], Crew]) -> None:
    def join(rank: int, attempt: int, timeout_s: float) -> None:
        import stoker

        stoker.collective.join(
            "half", rank=rank, world_size=2, attempt=attempt, join_timeout_s=timeout_s
        )

    def find() -> None:
        import stoker

        stoker.collective.group("half")

    two = crew(2)
    one, other = two.members
    alone = caught(
        lambda: stoker.get(one.run.remote(join, 0, 0, 1.0), timeout=WAIT_S), GetTimeoutError
    )
    assert "ranks [1] did not come" in str(alone)
    with pytest.raises(NotFoundError, match="in no group 'half'"):
        stoker.get(one.run.remote(find), timeout=WAIT_S)
    with pytest.raises(BadRequestError, match="has no rank 2"):
        stoker.get(one.run.remote(join, 2, 0, 1.0), timeout=WAIT_S)
    # What the rank that waited in vain had announced is gone: the same attempt can be made again.
    both = [one.run.remote(join, 0, 0, WAIT_S), other.run.remote(join, 1, 0, WAIT_S)]
    stoker.get(both, timeout=2 * WAIT_S)
    with pytest.raises(ConflictError, match="is in a group 'half' already"):
        stoker.get(one.run.remote(join, 0, 1, 1.0), timeout=WAIT_S)
    for wrong in ([], [one, one]):
        with pytest.raises(BadRequestError, match="give one or more, each once"):
            collective.init_group(wrong)
