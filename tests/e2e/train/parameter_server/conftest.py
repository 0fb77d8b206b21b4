"""A cluster for each file, and servers that end with each test."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def ps_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with embedded(tmp_path_factory.mktemp("s"), num_cpus=4, num_gpus=0):
            yield


@pytest.fixture
def start(ps_cluster: None) -> Iterator[Callable[..., Any]]:
    """Start servers under a name of their own."""
    started: list[Any] = []

    def make(servers: int = 2, **options: Any) -> Any:
        chosen = {"num_cpus": 0, "timeout_s": 40, **options}
        started.append(stoker.ps.start(servers, name=f"t{uuid.uuid4().hex[:8]}", **chosen))
        return started[-1]

    yield make
    for one in started:
        one.stop()
