"""``stoker.collective.DistributedOptimizer`` between real actors, and the timeline of its exchanges."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

import stoker
from tests.e2e.train.collective.crew import Crew

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_an_optimizer_of_many_members_is_one_with_the_whole_batch(
    crew: Callable[[int], Crew], seed: int
) -> None:
    def train(seed: int, share: tuple[int, int], passes: int, options: Any) -> Any:
        import torch

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
