"""A node that dies in a pass: its readers are replaced, and what it had in memory is read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.runtime.options.strategies import NodeAffinity
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")
COUNT = 8000


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Apart]:
    """Two nodes; this process is the driver, on the first."""
    with session_root(tmp_path / "s"), apart(tmp_path, nodelets=1, cpus=2) as made:
        stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
        made.add_nodelet(cpus=2)
        try:
            yield made
        finally:
            stoker.shutdown()


def test_records_come_once_and_in_order_though_a_node_dies(pair: Apart, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{n} {'x' * 500}\n" for n in range(COUNT)))
    other = pair.nodes()["n1"]["node_id"]
    with stoker.data.stream(
        path,
        stoker.data.Lines(),
        window=4000,
        piece_nbytes=1 << 18,  # chunks of that size lie on their node
        cache="memory",
        scheduling_strategy=NodeAffinity(node_id=other, soft=True),
    ) as stream:

        def epoch(kill_at: int) -> list[int]:
            got: list[int] = []
            for line in stream:
                got.append(int(line.split()[0]))
                if len(got) == kill_at:
                    pair.nodelets[-1].kill()
            return got

        wanted = list(range(COUNT))
        assert epoch(kill_at=COUNT // 4) == wanted
        assert stream.stats.replaced > 0
        # Part of the epoch lay on the node that is no more.
        opened = stream.stats.opened
        assert epoch(kill_at=0) == wanted
        assert stream.stats.opened > opened
        opened = stream.stats.opened
        assert epoch(kill_at=0) == wanted
        assert stream.stats.opened == opened
