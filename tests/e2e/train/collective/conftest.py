"""The actors that the tests of a file lend to one another: importing torch is what costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import embedded
from tests.e2e.train.collective.crew import Crew, Pool, leave_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
