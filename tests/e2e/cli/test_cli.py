"""The ``stoker`` command as people type it, against a cluster that it started itself."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from stoker.jobs import JobState, JobSubmissionClient
from stoker.local.sessions import read_info
from stoker_wire.errors import ConflictError, DeadlineExceededError, NotFoundError
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalInfo

WAIT_S = 40.0
STOKER = (sys.executable, "-m", "stoker.cli")

Completed = subprocess.CompletedProcess[str]


def clean_environ(root: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    kept |= {k: v for k, v in os.environ.items() if k.startswith("STOKER_TEST_")}
    return {**kept, "STOKER_SESSION_ROOT": str(root), "HOME": str(root)}


class Shell:
    """Runs ``stoker`` with one session root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = clean_environ(root)

    def __call__(self, *args: str, cwd: Path | None = None, **environ: str) -> Completed:
        return subprocess.run(
            [*STOKER, *args],
            env={**self.environ, **environ},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def json(self, *args: str) -> Any:
        shown = self(*args, "--json")
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """A command that is still running; its stdout is a pipe."""
        return subprocess.Popen(
            [*STOKER, *args],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def stoker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell beside a running cluster of 2 CPUs."""
    shell = Shell(tmp_path_factory.mktemp("cli"))
    # What can never run waits for as long as tests look at it, not for 10 s.
    started = shell(
        "start", "--head", "--num-cpus", "2", "--num-gpus", "0", "--port", "0",
        STOKER_INFEASIBLE_GRACE_S="600",
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    url = started.stdout.partition("\n")[0].rpartition(" ")[2]
    assert f"dashboard  {url}/ (log in with `stoker dashboard`)" in started.stdout
    yield shell
    shell("stop")


@pytest.fixture
def info(stoker: Shell) -> LocalInfo:
    found = read_info(stoker.root / "latest")
    assert found is not None
    return found


@pytest.fixture
def client(info: LocalInfo) -> JobSubmissionClient:
    return JobSubmissionClient(info.gcs_url, Path(info.token_file).read_text().strip())


def test_a_job_prints_and_ends_with_its_own_exit_code(stoker: Shell) -> None:
    program = "import sys; print('hello'); print('oh', file=sys.stderr); sys.exit(3)"
    shown = stoker("job", "submit", "--", sys.executable, "-c", program)
    assert (shown.returncode, set(shown.stdout.split())) == (3, {"hello", "oh"})
    assert "FAILED" in shown.stderr
    shown = stoker("job", "submit", "--", "echo", "two words")
    assert (shown.returncode, shown.stdout) == (0, "two words\n")


def test_every_line_arrives_once_and_in_order(stoker: Shell) -> None:
    shown = stoker("job", "submit", "--", sys.executable, "-c", "for i in range(5000): print(i)")
    assert shown.stdout.split() == [str(i) for i in range(5000)]


def test_a_working_dir_travels_and_env_and_modules_with_it(stoker: Shell, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "pkg" / "__init__.py").write_text("NAME = 'pkg'")
    (project / "secret.log").write_text("not sent")
    (project / ".stokerignore").write_text("*.log\n")
    (project / "train.py").write_text(
        "import os, sys, lib, pkg\n"
        "print(pkg.NAME, lib.NAME, os.environ['LR'], *sys.argv[1:], os.path.exists('secret.log'))"
    )
    (tmp_path / "lib.py").write_text("NAME = 'lib'")
    options = ["--working-dir", str(project), "--env", "LR=0.1"]
    options += ["--py-module", str(tmp_path / "lib.py")]
    args = ["job", "submit", *options, "--", sys.executable, "train.py", "--x", "a b"]
    shown = stoker(*args)
    assert shown.stdout == "pkg lib 0.1 --x a b False\n", shown.stderr
    assert stoker(*args).stdout == shown.stdout, "the second time nothing is uploaded"


def test_a_submitted_driver_runs_its_tasks_on_the_cluster_it_was_submitted_to(
    stoker: Shell, tmp_path: Path
) -> None:
    (tmp_path / "drive.py").write_text(
        "import stoker\n"
        "info = stoker.init()\n"
        "square = stoker.remote(lambda x: x * x)\n"
        "print(info.job_id, stoker.get([square.remote(i) for i in range(3)]))\n"
    )
    shown = stoker(
        "job", "submit", "--working-dir", str(tmp_path), "--", sys.executable, "drive.py"
    )
    (job,) = [row for row in stoker.json("list", "jobs") if "drive.py" in row["entrypoint"]]
    assert shown.stdout == f"{job['job_id']} [0, 1, 4]\n", shown.stderr
    assert (shown.returncode, job["state"]) == (0, "SUCCEEDED")


def test_ctrl_c_stops_following_and_not_the_job(stoker: Shell) -> None:
    following = stoker.start("job", "submit", "--name", "long", "--", "echo begun; exec sleep 60")
    assert following.stdout is not None
    assert following.stdout.readline() == "begun\n"
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=WAIT_S)
    assert following.returncode == 130
    (job,) = [row for row in stoker.json("list", "jobs") if row["name"] == "long"]
    assert job["state"] == "RUNNING"
    follow, stop = said.rstrip().splitlines()[-2:]
    assert follow.strip() == f"follow it again:  stoker job logs -f {job['job_id']}"
    assert stop.strip() == f"stop it:          stoker job stop {job['job_id']}"
    assert stoker("job", "stop", job["job_id"]).stdout == f"{job['job_id']} STOPPED\n"
    assert stoker("job", "logs", job["job_id"]).stdout == "begun\n"


def test_a_stopped_jobs_children_are_gone(stoker: Shell) -> None:
    marker = f"61.{os.getpid()}"  # another run on this machine has sleepers of its own
    job_id = stoker("job", "submit", "--no-wait", "--", f"sleep {marker} & sleep {marker}").stdout

    def sleepers() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == ["sleep", marker]:
                    found.append(process.pid)
        return found

    until(lambda: len(sleepers()) == 2, WAIT_S, "both run")
    assert stoker("job", "stop", job_id.strip()).returncode == 0
    until(lambda: not sleepers(), 40, "both are gone")


def test_what_waits_says_why_in_explain_and_status(stoker: Shell) -> None:
    job_id = stoker("job", "submit", "--no-wait", "--num-cpus", "100", "--", "true").stdout.strip()
    until(
        lambda: stoker.json("explain", job_id)["verdicts"], WAIT_S, "the scheduler has seen the job"
    )
    told = stoker("explain", job_id).stdout
    assert f"{job_id} is PENDING" in told
    assert "needs 100 CPU, the node has 2 CPU in all" in told
    assert "to change that:" in told
    assert "CPU 0/2" in stoker("status").stdout
    # The gcs asks for the job's place again and again; between two times nothing waits.
    shown = until(
        lambda: next((s for s in [stoker("status").stdout] if f"of {job_id}" in s), None),
        WAIT_S,
        "the status shows the demand",
    )
    assert "can never run" in shown
    stoker("job", "stop", job_id)


@pytest.mark.parametrize(
    "table", ["nodes", "jobs", "tasks", "actors", "objects", "leases", "workers", "events"]
)
def test_every_table_is_listed_for_people_and_for_programs(stoker: Shell, table: str) -> None:
    def agree() -> bool:
        shown = stoker("list", table)
        assert shown.returncode == 0, shown.stderr
        rows = stoker.json("list", table)
        return len(rows) + 1 == len(shown.stdout.splitlines()) or "no " in shown.stdout

    until(agree, WAIT_S, "both show as many: leases and workers come and go between the two")


def test_rows_are_filtered_and_limited(stoker: Shell) -> None:
    stoker("job", "submit", "--", "true")
    stoker("job", "submit", "--", "true")
    assert len(stoker.json("list", "jobs", "--limit", "1")) == 1
    states = {row["state"] for row in stoker.json("list", "jobs", "--filter", "state=SUCCEEDED")}
    assert states == {"SUCCEEDED"}
    wrong = stoker("list", "jobs", "--filter", "stat=SUCCEEDED")
    assert wrong.returncode == 2
    assert "did you mean 'state'?" in wrong.stderr
    newest = stoker.json("list", "jobs")
    assert [row["created_at_s"] for row in newest] == sorted(
        (row["created_at_s"] for row in newest), reverse=True
    )
    shown = stoker("list", "jobs", "--limit", "1")
    assert newest[0]["job_id"] in shown.stdout
    assert f"1 of {len(newest)} jobs, the newest first; more: --limit N, or --all" in shown.stderr
    events = stoker.json("list", "events", "--limit", "5")
    seqs = [event["seq"] for event in events]
    assert seqs == sorted(seqs, reverse=True) and seqs[-1] > 5, "the newest ones"
    assert stoker.json("list", "events", "--all")[-1]["seq"] == 1


def test_get_shows_one_record_and_unknown_ids_are_one_line(stoker: Shell, info: LocalInfo) -> None:
    assert stoker.json("get", info.node_id)["node_id"] == info.node_id
    assert "ALIVE" in stoker("get", info.node_id).stdout
    for command in ("get", "explain", "logs", "story"):
        unknown = stoker(command, "job_0000000000000000")
        assert unknown.returncode == 1
        assert unknown.stderr.startswith("error: ")
        assert unknown.stderr.count("\n") == 1
        as_json = stoker(command, "job_0000000000000000", "--json")
        assert (as_json.returncode, as_json.stdout) == (1, "")
        assert json.loads(as_json.stderr)["code"] == "not_found"


DIES_ONCE = """
import os, pathlib, signal, stoker
stoker.init()

@stoker.remote(max_retries=1)
def dies_once(mark):
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

stoker.get(dies_once.remote(pathlib.Path(MARK)))
"""


def test_a_story_tells_in_order_what_happened_and_why(stoker: Shell, tmp_path: Path) -> None:
    program = DIES_ONCE.replace("MARK", repr(str(tmp_path / "mark")))
    job_id = stoker(
        "job", "submit", "--no-wait", "--", sys.executable, "-c", program
    ).stdout.strip()
    until(
        lambda: "SUCCEEDED" in stoker("job", "status", job_id).stdout, WAIT_S, "the job has ended"
    )

    def told() -> list[str] | None:
        tasks = stoker.json("list", "tasks", "--filter", f"job_id={job_id}")
        ids = {task["task_id"] for task in tasks if task["name"] == "dies_once"}
        lines = stoker.json("story", ids.pop())["lines"] if len(ids) == 1 else []
        found = [f"{line['text']} [{line['why']}]" for line in lines]
        return found if any("is FINISHED" in line for line in found) else None

    lines = until(told, WAIT_S, "the history has both attempts")
    parts = ("attempt 0", "is FAILED", "attempt 1", "began on node n_", "is FINISHED")
    positions = [next(i for i, line in enumerate(lines) if part in line) for part in parts]
    assert positions == sorted(positions), lines
    exits = [line for line in lines if line.startswith("worker w_")]
    assert any("ended with signal 9 [killed by SIGKILL" in line for line in exits), lines
    shown = stoker("story", job_id[:14]).stdout
    assert shown.startswith(f"job {job_id} (")
    for part in ("was submitted", "started on node n_", "is FAILED", "why: ", "is SUCCEEDED"):
        assert part in shown, shown


def test_an_id_is_meant_by_its_beginning_and_completed(stoker: Shell) -> None:
    for name in ("job_xy12", "job_xy13"):
        stoker("job", "submit", "--job-id", name, "--", f"echo of {name}")
    assert stoker.json("get", "job_xy12")["job_id"] == "job_xy12"
    assert stoker("job", "status", "job_xy13").stdout.startswith("job_xy13  SUCCEEDED")
    (other,) = [row["job_id"] for row in stoker.json("list", "jobs", "--limit", "1")]
    assert other == "job_xy13"
    unique = stoker("job", "submit", "--no-wait", "--", "echo unique; sleep 0.1").stdout.strip()
    begin = unique[:12]
    assert stoker("logs", "-f", begin).stdout == "unique\n"
    assert stoker("explain", begin).stdout.startswith(f"{unique} is ")
    assert stoker("job", "logs", begin).stdout == "unique\n"
    assert stoker.json("job", "output", begin)["job_id"] == unique
    assert stoker("job", "stop", begin).stdout.startswith(unique)
    for command in (("get",), ("explain",), ("logs",), ("job", "stop"), ("job", "output")):
        two = stoker(*command, "job_xy1")
        assert two.returncode == 1
        assert "several ids begin with job_xy1; job_xy12, job_xy13; give more" in two.stderr

    def completed(*words: str) -> set[str]:
        line = ("stoker", *words)
        asked = {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(words))}
        found = stoker(_STOKER_COMPLETE="bash_complete", **asked)
        assert found.stderr == ""
        return {line.partition(",")[2] for line in found.stdout.split("\n") if line}

    assert completed("logs", "job_xy") == {"job_xy12", "job_xy13"}
    assert completed("job", "stop", "job_xy12") == {"job_xy12"}
    assert unique in completed("explain", "j")
    assert completed("list", "tasks", "--filter", "job_id=job_xy") == {
        "job_id=job_xy12", "job_id=job_xy13",
    }  # fmt: skip


def test_following_a_job_ends_with_its_code_by_either_command(stoker: Shell) -> None:
    submitted = stoker("job", "submit", "--no-wait", "--", "echo out; exit 3").stdout.strip()
    for command in (
        ("logs", "-f"), ("job", "logs", "-f"), ("logs", "-f", "--tail", "1"),
        ("logs", "-f", "--workers"),
    ):  # fmt: skip
        shown = stoker(*command, submitted)
        assert (shown.returncode, "FAILED" in shown.stderr) == (3, True), command
    assert stoker("logs", submitted).returncode == 0
    for command in (("logs",), ("job", "logs"), ("logs", "-f"), ("job", "logs", "-f")):
        (line,) = stoker(*command, submitted, "--json").stdout.splitlines()
        assert json.loads(line)["text"] == "out"
        assert "at_s" in json.loads(line)


WAITING = """
import stoker, time
stoker.init()
@stoker.remote(num_cpus=100, on_infeasible="wait")
class Trainer:
    def step(self): ...
@stoker.remote(num_cpus=0)
def first(x): time.sleep(600)
@stoker.remote(num_cpus=0)
def second(x): ...
@stoker.remote(label_selector={"zone": "mars"}, on_infeasible="wait")
def lost(): ...
trainers = [Trainer.remote() for _ in range(4)]
steps = [trainer.step.remote() for trainer in trainers]
made = first.remote(1)
late = [second.remote(made) for _ in range(3)]
nowhere = [lost.remote() for _ in range(2)]
print("ready", flush=True)
time.sleep(600)
"""


def test_a_job_explains_what_of_it_waits(stoker: Shell) -> None:
    submitted = stoker("job", "submit", "--no-wait", "--", sys.executable, "-c", WAITING)
    job_id = submitted.stdout.strip()

    def groups() -> dict[str, dict[str, Any]] | None:
        told = stoker.json("explain", job_id)["waiting"]
        found = {group["name"]: group for group in told}
        whole = {"Trainer": 4, "Trainer.step": 4, "second": 3, "lost": 2}
        counts = {name: group["count"] for name, group in found.items()}
        return found if counts == whole else None

    found = until(groups, WAIT_S, "all that waits is known")
    told = stoker("explain", job_id).stdout
    assert "4 x actor Trainer: can never run: needs 100 CPU, the node has 2 CPU in all" in told
    assert "4 x Trainer.step: waits for actor Trainer" in told
    assert "3 x second: waits for its argument o_" in told
    late = stoker("explain", found["second"]["example_id"]).stdout
    assert "(first) makes; that is RUNNING" in late
    assert "waits for it waits" not in told + late and "asks for -" not in told + late
    # They ask again and again, each for itself; between two times one does not wait.
    status = until(
        lambda: next(
            (s for s in [stoker("status").stdout] if "4 x Trainer:" in s and "2 x lost:" in s), None
        ),
        WAIT_S,
        "the status shows all that waits",
    )
    assert status.count("needs 100 CPU, the node has 2 CPU in all") == 1, status
    for shown in (told, status):
        assert "2 x lost: can never run: label_selector needs zone=mars" in shown
    shown = stoker("summary", "--job", job_id[:-2])
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == [
        "Trainer.step", "second", "lost", "first",
    ]  # fmt: skip
    stoker("job", "stop", job_id)


@pytest.mark.parametrize(
    "args",
    [("status",), ("summary",), ("version",), ("config",), ("job", "list"), ("kernels", "list"),
     ("list", "nodes", "--all"), ("list", "events", "--limit", "1")],
    ids=" ".join,
)  # fmt: skip
def test_json_of_every_read_command_is_json(stoker: Shell, args: tuple[str, ...]) -> None:
    stoker.json(*args)


def test_a_terminal_of_80_columns_shows_whole_ids(stoker: Shell) -> None:
    stoker("job", "submit", "--", "true")
    (job,) = stoker.json("list", "jobs", "--limit", "1")
    for width in (80, 100):
        leading, following = pty.openpty()
        environ = {**stoker.environ, "COLUMNS": str(width), "TERM": "xterm"}
        subprocess.run(
            [*STOKER, "list", "jobs", "--limit", "1"], env=environ, stdout=following, check=True,
            stderr=subprocess.DEVNULL, timeout=WAIT_S,
        )  # fmt: skip
        os.close(following)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(leading, 65536).decode()).splitlines()
        os.close(leading)
        assert len(shown) == 2 and max(map(len, shown)) <= width
        assert job["job_id"] in shown[1]


def test_the_address_and_the_token_may_be_given_in_each_way(stoker: Shell, info: LocalInfo) -> None:
    token = Path(info.token_file).read_text().strip()
    elsewhere = Shell(stoker.root / "elsewhere")
    ways: list[tuple[list[str], dict[str, str]]] = [
        (["--address", info.gcs_url, "--token", token], {}),
        (["--address", info.gcs_url, "--token-file", info.token_file], {}),
        ([], {"STOKER_ADDRESS": info.gcs_url, "STOKER_TOKEN": token}),
        ([], {"STOKER_ADDRESS": info.gcs_url, "STOKER_TOKEN_FILE": info.token_file}),
    ]
    for args, environ in ways:
        assert elsewhere("list", "nodes", *args, **environ).returncode == 0
    wrong = elsewhere("list", "nodes", "--address", info.gcs_url, "--token", "wrong")
    assert wrong.returncode == 1
    assert "token" in wrong.stderr


def test_a_node_joins_and_leaves(stoker: Shell, info: LocalInfo) -> None:
    joined = stoker.json("start", "--address", info.gcs_url, "--num-cpus", "5", "--num-gpus", "0")
    assert joined["role"] == "node"
    by_id = {row["node_id"]: row for row in stoker.json("list", "nodes")}
    assert by_id[joined["node_id"]]["resources"]["CPU"] == 5.0
    shown = stoker("job", "submit", "--num-cpus", "4", "--", "echo there")
    assert shown.stdout == "there\n", shown.stderr
    os.kill(joined["pid"], signal.SIGTERM)
    until(
        lambda: stoker.json("get", joined["node_id"])["state"] == "DEAD",
        WAIT_S,
        "the node has left",
    )
    usual = stoker("list", "nodes")
    assert joined["node_id"] not in usual.stdout
    assert "1 dead node not shown; see: stoker list nodes --all" in usual.stderr
    assert joined["node_id"] not in stoker("status").stdout
    assert "(1 alive, 1 dead; see: stoker list nodes --all)" in stoker("status").stdout
    for args in (("--all",), ("--filter", "state=DEAD")):
        assert joined["node_id"] in stoker("list", "nodes", *args).stdout


def test_starting_again_on_the_same_port_names_it(stoker: Shell, info: LocalInfo) -> None:
    port = info.gcs_url.rpartition(":")[2]
    again = stoker("start", "--head", "--port", port)
    assert again.returncode == 1
    assert port in again.stderr
    assert again.stderr.count("\n") == 1
    # It is not "another program": it says which of our own it is, and what to do.
    for word in (f"pid {info.pid}", info.session_dir, "stoker status", "stoker stop", "--port 0"):
        assert word in again.stderr


def test_stop_leaves_nothing_and_is_repeatable(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    started = shell.json("start", "--head", "--num-cpus", "1", "--num-gpus", "0", "--port", "0")
    assert started["token"] == ""
    stopped = shell.json("stop")
    assert [(row["pid"], row["killed"]) for row in stopped] == [(started["pid"], False)]
    assert not Path(started["arena_dir"]).exists()
    assert shell.json("stop") == []
    assert shell("status").returncode == 1


def test_block_stays_until_ctrl_c(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    blocking = shell.start(
        "start", "--head", "--block", "--port", "0", "--num-cpus", "1", "--num-gpus", "0", "--json"
    )
    assert blocking.stdout is not None
    until(lambda: read_info(tmp_path / "latest"), WAIT_S, "the head is ready")
    assert blocking.stdout.readline() == "{\n"
    assert shell("status").returncode == 0
    blocking.send_signal(signal.SIGINT)
    blocking.communicate(timeout=WAIT_S)
    assert blocking.returncode == 0
    assert shell("status").returncode == 1


# The same from Python.


def test_jobs_from_python(client: JobSubmissionClient) -> None:
    job_id = client.submit_job(entrypoint="echo from python", metadata={"by": "test"})
    assert [line.text for line in client.tail_job_logs(job_id)] == ["from python"]
    ended = client.wait(job_id, timeout_s=WAIT_S)
    assert (ended.state, ended.exit_code, ended.metadata) == (
        JobState.SUCCEEDED, 0, {"by": "test"},
    )  # fmt: skip
    assert client.get_job_logs(job_id) == "from python\n"
    assert job_id in {job.job_id for job in client.list_jobs()}


def test_an_id_of_ones_own_is_taken_once(client: JobSubmissionClient) -> None:
    assert client.submit_job(entrypoint="true", job_id="job_mine") == "job_mine"
    with pytest.raises(ConflictError, match="job_mine"):
        client.submit_job(entrypoint="true", job_id="job_mine")


def test_waiting_is_bounded_and_unknown_jobs_are_not_found(client: JobSubmissionClient) -> None:
    job_id = client.submit_job(entrypoint="sleep 60")
    with pytest.raises(DeadlineExceededError, match=r"after 0\.2 s"):
        client.wait(job_id, timeout_s=0.2)
    client.stop_job(job_id)
    client.stop_job(job_id)
    assert client.wait(job_id, timeout_s=WAIT_S).state is JobState.STOPPED
    with pytest.raises(NotFoundError):
        client.get_job("job_nothing")
