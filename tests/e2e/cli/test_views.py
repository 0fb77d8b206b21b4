"""Commands that show a cluster, against a real one: live, added up, as a page."""

from __future__ import annotations

import json
import re
import signal
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from stoker.cli.tables import cells_of
from tests.e2e._cluster import cli, driver, environment, head, http, line_of
from tests.e2e.cli._terminal import plain, terminal
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
STOKER = (sys.executable, "-m", "stoker.cli")
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"

PROGRAM = """
import time, numpy, stoker
info = stoker.init()

def fails():
    raise ValueError("<i>no</i> of <b>")

fails.__name__ = fails.__qualname__ = "<b>"
fails = stoker.remote(max_retries=0)(fails)

@stoker.remote
def works(x):
    return x

@stoker.remote(num_gpus=1)
class Holder:
    def there(self):
        return True

@stoker.remote(num_gpus=1)
def later(): ...

holder = Holder.remote()
stoker.get(holder.there.remote())
stoker.get([works.remote(i) for i in range(5)])
for ref in [fails.remote() for _ in range(3)]:
    try:
        stoker.get(ref)
    except ValueError:
        pass
big = stoker.put(numpy.zeros(1 << 20))
waits = later.remote()
print("ready", info.job_id, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("views"), num_cpus=2, num_gpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job_id(cluster: LocalCluster) -> Iterator[str]:
    """A job that runs, with all that there is to see; the gcs has heard of all of it."""
    with driver(cluster, PROGRAM) as process:
        job_id = line_of(process, "ready ")

        def heard() -> bool:
            shown = as_json(cluster, "summary", "--job", job_id)
            states = {one["key"]: one["states"] for one in shown["items"]}
            return states.get("<b>") == {"FAILED": 3} and states.get("works") == {"FINISHED": 5}

        until(heard, WAIT_S, "the history has all")
        until(lambda: as_json(cluster, "top")["overview"]["waiting"], WAIT_S, "what waits is known")
        yield job_id


def as_json(cluster: LocalCluster, *args: str) -> Any:
    shown = cli(cluster, *args, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def ok(cluster: LocalCluster, *args: str, **environ: str) -> str:
    shown = cli(cluster, *args, **environ)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_top_shows_in_a_pipe_what_runs_waits_failed_and_holds_gpus(
    cluster: LocalCluster, job_id: str
) -> None:
    for args in (("top", "--once"), ("top",)):
        text = ok(cluster, *args)
        assert "\x1b" not in text
        sections = re.split(r"\n\n(\w+)\n", text)
        found = dict(zip(sections[1::2], sections[2::2], strict=True))
        assert job_id in found["Jobs"] and "RUNNING" in found["Jobs"]
        assert "later" in found["Waiting"] and "needs 1 GPU" in found["Waiting"]
        assert "<b> (3 x)" in found["Failures"] and "ValueError" in found["Failures"]
        assert f"Holder of {job_id}" in found["GPUs"]
        assert "nodes: 1 alive" in sections[0] and "1/1" in sections[0]
    seen = as_json(cluster, "top")
    assert seen["gpus"][0]["holders"] == [f"Holder of {job_id}"]
    assert seen["jobs"][0]["tasks"]["FINISHED"] >= 5


def test_top_draws_again_in_the_size_of_the_terminal_and_q_ends_it(
    cluster: LocalCluster, job_id: str
) -> None:
    with terminal([*STOKER, "top"], environment(cluster), columns=70, lines=20) as shown:
        shown.until("Jobs")
        first = len(shown.written)
        shown.until("\x1b[H", since=first)  # another frame
        shown.resize(40, 10)
        size = len(shown.written)
        # A frame of the new size is the last one before the next begins.
        frames = shown.until("\x1b[H", since=size)
        frames = shown.until("\x1b[H", since=size + len(frames))
        shown.type(b"q")
        assert shown.end() == 0
    assert shown.written.startswith(ALTERNATE) and shown.written.rstrip().endswith(BACK)
    drawn = plain(shown.written).split("\x1b[H")[1:]
    for text, (columns, lines) in ((drawn[0], (70, 20)), (drawn[-1], (40, 10))):
        rows = text.replace("\x1b[J", "").replace(BACK, "").replace("\x1b[?25h", "").split("\r\n")
        rows = [row.removesuffix("\x1b[K") for row in rows]
        assert len(rows) <= lines and max(map(cells_of, rows)) <= columns, rows


@pytest.mark.parametrize("ends", [b"\x03", signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_the_terminal_is_as_it_was_however_top_ends(
    cluster: LocalCluster, ends: bytes | signal.Signals
) -> None:
    with terminal([*STOKER, "top"], environment(cluster)) as shown:
        shown.until("CPU")
        if isinstance(ends, bytes):
            shown.type(ends)
        else:
            shown.process.send_signal(ends)
        code = shown.end()
    assert code == (0 if isinstance(ends, bytes) else 128 + ends)
    assert shown.written.rstrip().endswith(f"\x1b[?25h{BACK}")


@pytest.mark.parametrize(
    "command",
    [("status",), ("list", "jobs"), ("list", "nodes"), ("memory",), ("summary",)],
    ids=" ".join,
)
@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_wraps_and_colours_are_for_those_who_want_them(
    cluster: LocalCluster, job_id: str, command: tuple[str, ...], columns: int
) -> None:
    environ = environment(cluster)
    with terminal([*STOKER, *command], environ, columns=columns) as shown:
        assert shown.end() == 0
    assert "\x1b[" in shown.written
    lines = plain(shown.written).split("\r\n")
    assert max(map(cells_of, lines)) <= columns, max(lines, key=cells_of)
    with terminal([*STOKER, *command], {**environ, "NO_COLOR": "1"}) as shown:
        assert shown.end() == 0
    assert "\x1b" not in shown.written


def test_a_summary_has_times_and_causes(cluster: LocalCluster, job_id: str) -> None:
    tasks = {one["key"]: one for one in as_json(cluster, "summary", "tasks")["items"]}
    assert tasks["<b>"]["failures"] == {"task_failed": 3}
    assert tasks["works"]["run_s"]["count"] == 5
    text = ok(cluster, "summary", "--job", job_id[:12])
    assert re.search(r"<b> .* 3 task_failed", text)
    (holder,) = as_json(cluster, "summary", "actors", "--job", job_id)
    assert (holder["class_name"], holder["states"]) == ("Holder", {"ALIVE": 1})
    assert "Holder" in ok(cluster, "summary", "actors")


def test_memory_says_how_full_it_is_and_who_holds_it(cluster: LocalCluster, job_id: str) -> None:
    def told() -> Any:
        found = as_json(cluster, "memory", "--job", job_id)
        there = found["objects"] and found["nodes"][0]["arena_bytes"] >= 8 << 20
        return found if there else None

    found = until(told, WAIT_S, "the node has told of its arena")
    (largest,) = found["objects"]
    assert largest["nbytes"] >= 8 << 20 and largest["where"] == "memory"
    assert largest["holder"].startswith("driver p_")
    assert found["nodes"][0]["arena_limit_bytes"] > found["nodes"][0]["arena_bytes"]
    assert [(one["job_id"], one["objects"]) for one in found["holders"]] == [(job_id, 1)]
    (place,) = as_json(cluster, "summary", "objects", "--job", job_id)
    assert place["nbytes"] == largest["nbytes"]
    text = ok(cluster, "memory", "--node", largest["node_id"])
    assert largest["object_id"] in text and "driver p_" in text


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_one_page_that_loads_nothing(
    cluster: LocalCluster, job_id: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    told = as_json(cluster, "report", job_id[:12], "-o", str(path))
    assert told == {"file": str(path), "nbytes": path.stat().st_size}
    text = path.read_text()
    assert "://" not in text, "nothing outside of it, and not the cluster's address"
    page = Tags(text)
    assert not page.tags & {"b<", "i", "script", "link", "img", "iframe"}
    assert not page.names & {"src", "href"}
    assert "&lt;b&gt;" in text and "<i>no" not in text
    for part in (job_id, "(3 times)", "ValueError: <i>no</i> of <b>", "works", "What workers ran"):
        assert part in page.text
    assert "svg" in page.tags and "rect" in page.tags

    again = cli(cluster, "report", job_id, "-o", str(path))
    assert (again.returncode, again.stderr.count("\n")) == (1, 1) and "--force" in again.stderr
    assert path.read_text() == text
    ok(cluster, "report", job_id, "-o", str(path), "--force")
    assert ok(cluster, "report", job_id, "-o", "-").startswith("<!doctype html>")
    assert cli(cluster, "report", "job_0000000000000000", "-o", str(path)).returncode == 1


def test_a_report_has_what_the_driver_of_a_submitted_job_printed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    program = "echo '<h1>first'; exit 3"
    args = ("--retries", "1", "--retry-delay", "0", "--job-id", "job_reported")
    assert cli(cluster, "job", "submit", *args, "--", program).returncode == 3
    page = Tags(ok(cluster, "report", "job_reported", "-o", "-"))
    assert "<h1>first" in page.text and "Attempts" in page.text and "exit code 3" in page.text


def test_the_dashboards_link_begins_a_session(cluster: LocalCluster) -> None:
    url = ok(cluster, "dashboard", "--no-open").strip()
    base, _, token = url.partition("/#login=")
    assert base == cluster.info.gcs_url
    session = http(cluster).__class__(base, token=token).call("POST", "/v1/session", reply=dict)
    assert session["role"] == "admin"
    told = as_json(cluster, "dashboard")
    assert told["url"].startswith(base) and told["expires_in_s"] > 0


def test_following_a_job_tells_what_a_node_installs_for_it(cluster: LocalCluster) -> None:
    environment = json.dumps({"setup": "sleep 0.5"})
    shown = cli(cluster, "job", "submit", "--runtime-env-json", environment, "--", "sleep 3")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"stoker: node n_\w+ (installs|installed) setup", shown.stderr), shown.stderr
