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


IN_CELLS = """
import time
import stoker
from stoker.jobs import JobSubmissionClient, LogLine
from stoker.runtime.process.cells import CELLS

info = stoker.init(log_to_driver=False)


@stoker.remote(max_retries=1, retry_exceptions=True, retry_delay=0.2)
def say(text):
    print(text)
    if text == "tried" and not stoker.get_runtime_context().attempt:
        raise ValueError


@stoker.remote
def ask(text):
    stoker.get(say.remote(text))


@stoker.remote
class Speaker:
    def __init__(self):
        print("made")
        say.remote("by its constructor")

    async def say(self, text):
        print(text)
        await say.remote("called")


cell = ""
CELLS.of_caller = lambda: cell
stoker.get(say.remote("before"))
cell = "one"
speaker = Speaker.remote()
refs = [ask.remote("nested"), say.remote("tried"), speaker.ready()]
cell = "two"
stoker.get([*refs, say.remote("plain"), speaker.say.remote("method")])
cell = ""
stoker.get([say.remote("after"), speaker.say.remote("nobody's")])
http = JobSubmissionClient(info.address, info.token).http
said = set()
end_s = time.monotonic() + 40
while len(said) < 11 and time.monotonic() < end_s:
    lines = http.lines(f"/v1/jobs/{info.job_id}/worker-logs", item=LogLine)
    said = {f"{line.cell}: {line.text}" for line in lines}
print("\\n".join(sorted(said)))
"""


def test_a_line_names_the_cell_whose_call_printed_it_also_by_other_calls_and_again(
    cluster: LocalCluster,
) -> None:
    done = run_driver(cluster, IN_CELLS)
    assert done.stdout.splitlines() == [
        ": after",
        ": before",
        ": called",
        ": nobody's",
        "one: by its constructor",
        "one: made",
        "one: nested",
        "one: tried",
        "two: called",
        "two: method",
        "two: plain",
    ], done.stderr
