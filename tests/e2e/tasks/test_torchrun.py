"""``stoker.train.env`` and ``run``: torchrun's variables, and a process group made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
import stoker.train
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    stoker.init(num_cpus=2, log_to_driver=False)
    yield
    stoker.shutdown()


def test_a_group_is_made_of_the_variables() -> None:
    def add(x: float) -> Any:
        import os

        import torch
        import torch.distributed as dist
        import torch.distributed.nn.functional  # see rendezvous.py

        dist.init_process_group("gloo")
        value = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]

    found = stoker.train.run(add, 1.5, workers=2)
    assert found == [(4.0, "0", "2"), (4.0, "1", "2")]


def test_the_first_error_ends_all() -> None:
    def fail() -> None:
        import os
        import time

        if os.environ["RANK"] == "1":
            raise KeyError("rank 1 is out")
        time.sleep(60)

    with pytest.raises(KeyError, match="rank 1 is out"):
        stoker.train.run(fail, workers=2)
    until(
        lambda: stoker.available_resources() == stoker.cluster_resources(),
        40.0,
        "the places are given back",
    )


def test_missing_and_double_ranks_are_named() -> None:
    @stoker.remote
    def join(rank: int, world: int, name: str) -> dict[str, str]:
        return stoker.train.env(rank, world, name=name, timeout_s=1.0)

    with pytest.raises(GetTimeoutError, match=r"ranks \[1\] did not come"):
        stoker.get(join.remote(0, 2, "half"), timeout=40)
    with pytest.raises(ConflictError, match="rank 0 of group 'half'"):
        stoker.get(join.remote(0, 2, "half"), timeout=40)
    alone = stoker.get(join.remote(0, 1, "alone"), timeout=40)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    for wrong in (lambda: stoker.train.env(2, 2), lambda: stoker.train.run(print, workers=0)):
        with pytest.raises(BadRequestError):
            wrong()
