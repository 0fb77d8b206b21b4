"""What workers print arrives at the driver: all of it, on the right stream, and says when."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import cli, head, run_driver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

LINES = 150
PRINTING = f"""
import sys
import stoker

@stoker.remote
def say(number):
    print("line", number)
    print("oops", number, file=sys.stderr)
    sys.stdout.buffer.write(b"raw %d\\n" % number)
    return number

@stoker.remote
def rest():
    print("unfinished", end="")

def run():
    stoker.init()
    assert len(stoker.get([say.remote(n) for n in range({LINES})])) == {LINES}
    stoker.get(rest.remote())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("s"), num_cpus=2) as made:
        yield made


def numbers(text: str, word: str) -> list[int]:
    """The numbers after a word of the tasks, sorted."""
    words = [line.split() for line in text.splitlines()]
    return sorted(int(w[w.index(word) + 1]) for w in words if word in w)


ENDS = {
    "at its end": "run()",
    "shutdown": "run(); stoker.shutdown()",
    "sys.exit": "run(); sys.exit(3)",
    "exception": "run(); raise ValueError('the end')",
}


@pytest.mark.parametrize("how", ["shutdown", "exception"])
def test_no_line_of_a_worker_is_lost_at_the_end_of_a_driver(
    cluster: LocalCluster, how: str
) -> None:
    done = run_driver(cluster, PRINTING + ENDS[how])
    everything = list(range(LINES))
    for word in ("line", "raw"):
        assert numbers(done.stdout, word) == everything, (word, done.stdout, done.stderr)
    assert "unfinished\n" in done.stdout
    assert numbers(done.stderr, "oops") == everything, done.stderr
    assert "oops" not in done.stdout
    assert ") line " not in done.stderr


@pytest.mark.parametrize("how", ["at its end", "sys.exit"])
def test_no_line_of_a_worker_is_lost_at_the_end_of_a_submitted_job(
    cluster: LocalCluster, how: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PRINTING + ENDS[how])
    done = cli(cluster, "job", "submit", "--", sys.executable, str(program))
    assert done.returncode == {"sys.exit": 3, "exception": 1}.get(how, 0)
    for word in ("line", "raw", "oops"):
        assert numbers(done.stdout, word) == list(range(LINES)), (word, done.stdout, done.stderr)
    assert "unfinished\n" in done.stdout


LEAVING = """
import asyncio
import stoker
from stoker.runtime.current import runtime
from stoker_wire.data.channel import PATH, UPGRADE
from stoker_wire.http.auth import channel_authorization

stoker.init()


async def leave_in_the_handshake():
    me = runtime().identity
    shown = channel_authorization(me.token, me.peer_id)
    reader, writer = await asyncio.open_unix_connection(runtime().identity.socket_path)
    writer.write(
        f"GET {PATH} HTTP/1.1\\r\\nHost: driver\\r\\nAuthorization: {shown}\\r\\n"
        f"Connection: Upgrade\\r\\nUpgrade: {UPGRADE}\\r\\n\\r\\n".encode()
    )
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.close()


asyncio.run(leave_in_the_handshake())
print(stoker.get(stoker.remote(lambda: "goes on").remote()))
"""


def test_a_worker_that_ends_as_it_connects_leaves_no_word_at_the_driver(
    cluster: LocalCluster,
) -> None:
    done = run_driver(cluster, LEAVING)
    assert (done.stdout, done.stderr) == ("goes on\n", "")
