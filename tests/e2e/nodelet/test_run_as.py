"""Jobs run as the Unix user of their token where the nodelet is root, with all that they start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from stoker.jobs import JobSubmissionClient
from stoker.runtime.net.http import Content, HttpClient
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.messages.control import CreateToken, Page, Token
from stoker_wire.messages.node_api import Stacks
from stoker_wire.messages.work import Job
from tests.e2e._cluster import environment, head, http
from tests.e2e.nodelet.unix_users import account, processes, readable_python, user
from tests.services import until

if TYPE_CHECKING:
    import pwd
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

WAIT_S = 90.0
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")


class Place(NamedTuple):
    """A cluster of root's, a folder that all users can enter, and two users of the machine."""

    cluster: LocalCluster
    folder: Path
    alice: pwd.struct_passwd
    bob: pwd.struct_passwd


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="stoker-run-as-", dir="/tmp"))
    folder.chmod(0o755)
    group = f"stk-team-{os.getpid()}"
    account("groupadd", "--system", group)
    try:
        with (
            user("alice", folder, group) as alice,
            user("bob", folder, group) as bob,
            pytest.MonkeyPatch.context() as patch,
        ):
            # The copy of Python that all users can read has no programs beside it.
            patch.setenv("STOKER_PY_SPY", os.path.join(os.path.dirname(sys.executable), "py-spy"))
            patch.setattr(sys, "executable", readable_python(folder))
            patch.setenv("STOKER_JOB_DIR_KEEP_S", "600")
            with head(folder / "sessions", num_cpus=3) as cluster:
                yield Place(cluster, folder, alice, bob)
    finally:
        account("groupdel", group)
        shutil.rmtree(folder)
    assert not list(Path("/tmp").glob(f"stoker-users-{cluster.info.node_id}"))


def token(place: Place, name: str, run_as: str, **more: Any) -> str:
    body = CreateToken(name=name, run_as=run_as, **more)
    return http(place.cluster).call("POST", "/v1/tokens", body, reply=Token).secret


def drive(
    place: Place, program: str, run_as: str, *, name: str = "", uid: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a driver of root's, or of ``uid``, with the token of a user whose jobs run as another."""
    secret = token(place, name or run_as, run_as)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment(place.cluster, STOKER_TOKEN=secret, **more),
        cwd=place.folder,
        user=uid,
        group=uid,
        extra_groups=(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


WHO = """
    import json, os, subprocess, sys
    import numpy
    import stoker
    stoker.init(log_to_driver=False)

    def who():
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        shell = subprocess.run(["id", "-u"], capture_output=True, text=True)
        return {
            "uid": os.getresuid(), "gid": os.getresgid(), "groups": sorted(os.getgroups()),
            "home": os.environ["HOME"], "user": os.environ["USER"], "shell": int(shell.stdout),
            "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
            "no_new_privileges": int(status["NoNewPrivs"]),
            "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                                  if os.path.exists(f"/proc/self/fd/{fd}")),
        }

    @stoker.remote
    def task():
        return who()

    @stoker.remote
    class Actor:
        def who(self):
            return who()

        def nested(self):
            return stoker.get(task.remote())

    actor = Actor.remote()
    detached = Actor.options(name="kept", lifetime="detached").remote()
    asked = [task.remote(), actor.who.remote(), actor.nested.remote(), detached.who.remote(),
             detached.nested.remote()]
    print(json.dumps(stoker.get(asked)))
    stoker.kill(detached)
"""


def test_tasks_actors_and_what_they_start_are_the_users(place: Place) -> None:
    alice = place.alice
    groups = sorted(os.getgrouplist(alice.pw_name, alice.pw_gid))
    assert len(groups) == 2
    for who in told(drive(place, WHO, alice.pw_name)):
        opened = who.pop("descriptors")
        assert who == {
            "uid": [alice.pw_uid] * 3,
            "gid": [alice.pw_gid] * 3,
            "groups": groups,
            "home": alice.pw_dir,
            "user": alice.pw_name,
            "shell": alice.pw_uid,
            "capabilities": 0,
            "no_new_privileges": 1,
        }
        files = [path for path in opened if path.startswith("/") and "/proc/" not in path]
        others = [path for path in files if "worker-" not in path]
        # Where its own handler writes stacks to.
        assert others == ["/dev/null", "/memfd:stoker-stacks (deleted)"], opened


DATA = """
    import json, os
    import numpy
    import stoker
    info = stoker.init(log_to_driver=False)
    big = numpy.arange(700_000, dtype=float)  # 5.6 MB

    @stoker.remote
    def total(values, more):
        return float(values.sum()), float(more.sum())

    @stoker.remote
    def made(n):
        return numpy.ones(n)

    @stoker.remote
    class Keeper:
        def keep(self, values):
            self.ref = stoker.put(values * 2)
            return [self.ref]

        def add(self, refs):
            return float(stoker.get(refs[0]).sum())

    kept = stoker.put(big)
    first, second = Keeper.remote(), Keeper.remote()
    refs = stoker.get(first.keep.remote(kept))
    inner = [stoker.put(big + 1)]  # the worker asks this process for it, and did not lease from it
    results = [made.remote(700_000) for _ in range(4)]
    print(json.dumps([
        stoker.get(total.remote(kept, big)) == (float(big.sum()), float(big.sum())),
        [float(one.sum()) for one in stoker.get(results)],
        float(stoker.get(refs[0])[-1]),
        stoker.get(second.add.remote(refs)) == float(big.sum() * 2),
        stoker.get(second.add.remote(inner)) == float((big + 1).sum()),
        stoker.get(second.add.remote([results[0]])),
        # A generator, and an exception.
        len([stoker.get(one) for one in made_many()]) if (made_many := stoker.remote(
            num_returns="streaming")(lambda: iter(range(3))).remote) else 0,
    ]))
"""


@pytest.mark.parametrize("of_root", [True, False])
def test_large_values_go_between_a_driver_and_the_users_workers(
    place: Place, of_root: bool
) -> None:
    """The driver is root's, or the user's own on this machine."""
    done = drive(place, DATA, place.alice.pw_name, uid=0 if of_root else place.alice.pw_uid)
    assert told(done) == [True, [700_000.0] * 4, 1_399_998.0, True, True, 700_000.0, 3]


PROBE = """
    import json, os, sys
    import stoker
    stoker.init(log_to_driver=False)

    @stoker.remote
    def reach(paths, pids):
        reached = []
        def attempt(what, act):
            try:
                act()
            except OSError:
                return
            reached.append(what)
        for path in paths:
            attempt(f"list {path}", lambda: os.listdir(path))
            attempt(f"read {path}", lambda: open(path, "rb").close())
            attempt(f"write {path}", lambda: open(path, "ab").close())
        for pid in pids:
            attempt(f"environment of {pid}", lambda: open(f"/proc/{pid}/environ", "rb").read())
            attempt(f"memory of {pid}", lambda: open(f"/proc/{pid}/mem", "rb").close())
            attempt(f"signal to {pid}", lambda: os.kill(pid, 0))
        attempt("uid 0", lambda: os.setuid(0))
        return reached

    print(json.dumps(stoker.get(reach.remote(*json.loads(os.environ["REACH"])))))
"""
KEEPS = """
import os, pathlib, sys, time
import stoker

stoker.init()
kept = stoker.put(b"x" * (1 << 20))
out = pathlib.Path(os.environ["STOKER_JOB_OUTPUT_DIR"])
(out / "mine").write_text("secret of one user")
pathlib.Path("written").write_text("in the working_dir")

@stoker.remote(num_cpus=0.1)
def here():
    return os.getcwd(), os.getuid(), os.environ["OF_THE_JOB"]

assert stoker.get(here.remote()) == (os.getcwd(), os.getuid(), "yes"), stoker.get(here.remote())
print("up", os.getuid(), os.getcwd(), out, os.environ["STOKER_TOKEN_FILE"], os.getpid(), flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


def submit(place: Place, run_as: str, entrypoint: str, **more: Any) -> tuple[Any, str]:
    client = JobSubmissionClient(place.cluster.info.gcs_url, token(place, run_as, run_as))
    return client, client.submit_job(entrypoint=entrypoint, entrypoint_num_cpus=0.5, **more)


def test_a_submitted_job_is_the_users_and_nobody_else_reads_what_is_its(
    place: Place, tmp_path: Path
) -> None:
    alice, bob = place.alice, place.bob
    source = tmp_path / "source"
    source.mkdir()
    (source / "keeps.py").write_text(KEEPS)
    end = place.folder / "end"
    client, job = submit(
        place,
        alice.pw_name,
        f"python -u keeps.py {end}",
        runtime_env={"working_dir": str(source), "env_vars": {"OF_THE_JOB": "yes"}},
    )

    def up() -> list[str]:
        state = client.get_job(job)
        assert not state.state.terminal, client.get_job_logs(job)
        return [line for line in client.get_job_logs(job).splitlines() if line.startswith("up ")]

    try:
        _, uid, cwd, out, token_file, pid = until(up, WAIT_S, "the job runs")[0].split()
        assert int(uid) == alice.pw_uid
        assert Path(cwd).stat().st_uid == Path(out, "mine").stat().st_uid == alice.pw_uid
        info = place.cluster.info
        arena, session = Path(info.arena_dir), Path(info.session_dir)
        names = ["/etc/shadow", session / "token", session / "logs", session, arena]
        paths = [*map(str, names), *map(str, arena.rglob("*")), *map(str, session.rglob("*"))]
        of_job = [cwd, f"{cwd}/keeps.py", out, f"{out}/mine", token_file]
        services = [info.pid, *processes("-P", str(info.pid))]
        asked = json.dumps([[*paths, *of_job], [*services, int(pid)]])
        assert told(drive(place, PROBE, bob.pw_name, REACH=asked)) == []
        own = told(
            drive(place, PROBE, alice.pw_name, REACH=json.dumps([[*paths, *of_job], services]))
        )
        assert {one.split()[1] for one in own} == set(of_job), own
    finally:
        end.touch()
    assert client.wait(job, timeout_s=WAIT_S).state == "SUCCEEDED", client.get_job_logs(job)
    end.unlink()
    # What root sends of a user's folder is that user's: no link of the job leads it elsewhere.
    for name, target in (("shadow", "/etc/shadow"), ("folder", "/root")):
        Path(out, name).symlink_to(target)
    with contextlib.suppress(OSError):
        Path(out, "hard").hardlink_to(Path(info.session_dir, "token"))
    fetched = tmp_path / "fetched"
    client.download_job_output(job, fetched)
    assert [path.name for path in fetched.rglob("*") if path.is_file()] == ["mine"]


def test_a_job_of_a_job_has_its_user(place: Place) -> None:
    program = "python -c 'import os; print(os.getuid(), *sorted(os.environ))'"
    stoker = "python -m stoker.cli"
    client, job = submit(
        place,
        place.alice.pw_name,
        f"{stoker} job submit -- {program} && {stoker} token whoami",
    )
    assert client.wait(job, timeout_s=WAIT_S).state == "SUCCEEDED", client.get_job_logs(job)
    said = client.get_job_logs(job)
    assert f"{place.alice.pw_uid} " in said
    assert f"runs as {place.alice.pw_name}" in said
    assert "STOKER_SESSION_DIR" not in said
    records = http(place.cluster).items("/v1/jobs", Page[Job])
    (made,) = [one for one in records if one.parent_job_id == job]
    assert made.run_as == place.alice.pw_name


def test_a_stop_reaches_a_users_processes(place: Place) -> None:
    client, job = submit(place, place.alice.pw_name, "sleep 600 & setsid sleep 601 & wait")

    def asleep() -> int:
        return len(processes("-u", str(place.alice.pw_uid), "sleep"))

    until(lambda: asleep() == 2, WAIT_S, "both sleep")
    client.stop_job(job)
    until(lambda: not asleep(), WAIT_S, "none does")
    assert client.wait(job, timeout_s=WAIT_S).state == "STOPPED"


FAILS = """
    import stoker
    from stoker import exceptions
    stoker.init(log_to_driver=False)

    @stoker.remote
    def task():
        return 1

    @stoker.remote
    class Actor:
        def ping(self):
            return 1

    for call in (task.remote, Actor.remote().ping.remote):
        try:
            stoker.get(call(), timeout=60)
        except Exception as error:
            print(type(error).__name__, str(error).replace(chr(10), " | "))
"""


def test_a_user_whom_the_node_does_not_know_is_named_and_nothing_runs(place: Place) -> None:
    done = drive(place, FAILS, "nobody-knows-me")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line in lines:
        assert (
            f"there is no Unix user 'nobody-knows-me' on node {place.cluster.info.node_id}" in line
        )
        assert "create it there" in line
    client, job = submit(place, "nobody-knows-me", "true")
    ended = client.wait(job, timeout_s=WAIT_S)
    assert ended.state == "FAILED"
    assert "there is no Unix user 'nobody-knows-me'" in ended.message


def test_a_folder_that_the_user_cannot_enter_is_named(place: Place, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    program = FAILS.replace(
        "import stoker\n", f"import os; os.chdir({str(closed)!r}); import stoker\n", 1
    )
    done = drive(place, program, place.alice.pw_name)
    assert f"Unix user '{place.alice.pw_name}' cannot enter {closed}" in done.stdout, done.stdout


def test_no_token_is_for_root(place: Place) -> None:
    for run_as, role, why in (
        ("root", "user", "jobs do not run as root"),
        ("0", "user", "run_as"),
        ("alice", "viewer", "starts no jobs"),
    ):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "stoker.cli",
                "token",
                "create",
                "x",
                "--run-as",
                run_as,
                "--role",
                role,
            ],
            env=environment(place.cluster),
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert why in done.stderr


def test_packages_are_built_and_imported_as_the_user(place: Place, tmp_path: Path) -> None:
    """A source package runs code as it is built, a preload as it is imported: neither as root."""
    wheel = tmp_path / "whose-1.0-py3-none-any.whl"
    info = "whose-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("whose.py", "import os; UID = os.getuid()")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: whose\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    tmp_path.chmod(0o755)
    shared = place.folder / wheel.name
    shutil.copy(wheel, shared)
    program = f"""
        import json, os, sys
        import stoker
        stoker.init(log_to_driver=False)

        @stoker.remote(runtime_env={{"pip": [{str(shared)!r}], "preload": ["whose"]}}, max_retries=0)
        def built():
            import whose
            return whose.UID, os.stat(whose.__file__).st_uid, os.stat(sys.executable).st_uid, os.getuid()

        print(json.dumps(stoker.get(built.remote())))
        try:
            stoker.get(built.options(runtime_env={{"preload": ["no_such_module"]}}).remote(), timeout=60)
        except stoker.exceptions.StokerError as error:
            print(json.dumps(["no_such_module" in str(error), type(error).__name__]))
    """
    done = drive(place, program, place.alice.pw_name)
    assert told(done) == [True, "RuntimeEnvSetupError"], done.stdout
    uids = json.loads(done.stdout.splitlines()[0])
    assert uids[0] == uids[1] == uids[3] == place.alice.pw_uid


def test_the_workers_of_a_user_are_no_other_users(place: Place) -> None:
    program = """
        import json, os
        import stoker
        stoker.init(log_to_driver=False)

        @stoker.remote
        def who():
            return os.getuid(), os.getpid()

        print(json.dumps([stoker.get(who.remote()) for _ in range(3)]))
    """
    alice = told(drive(place, program, place.alice.pw_name))
    bob = told(drive(place, program, place.bob.pw_name))
    root = told(drive(place, program, "", name="root-like"))
    assert {uid for uid, _ in alice} == {place.alice.pw_uid}
    assert {uid for uid, _ in bob} == {place.bob.pw_uid}
    assert {uid for uid, _ in root} == {0}
    assert len({pid for _, pid in alice}) == 1, "the worker of a job serves it again"


def test_the_job_says_as_whom_it_runs(place: Place) -> None:
    client, job = submit(place, place.alice.pw_name, "true")
    client.wait(job, timeout_s=WAIT_S)
    record = http(place.cluster).call("GET", f"/v1/jobs/{job}", reply=Job)
    assert record.run_as == place.alice.pw_name


BUSY = """
    import pathlib, sys, time
    import stoker
    stoker.init(log_to_driver=False)

    @stoker.remote(max_retries=0)
    def turns_in_this_function(end):
        while not pathlib.Path(end).exists():
            sum(range(1000))

    ref = turns_in_this_function.remote(sys.argv[1])
    print(ref.task_id, flush=True)
    stoker.get(ref)
    print("all is well")
"""


def test_a_process_of_another_user_has_stacks_and_profiles(place: Place) -> None:
    end = place.folder / "end-of-profiles"
    secret = token(place, "alice", place.alice.pw_name)
    gcs = HttpClient(place.cluster.info.gcs_url, token=secret)
    program = [sys.executable, "-c", textwrap.dedent(BUSY), str(end)]
    environ = environment(place.cluster, STOKER_TOKEN=secret)
    with subprocess.Popen(program, env=environ, cwd=place.folder, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        task_id = driver.stdout.readline().decode().strip()

        def stacks() -> Stacks | None:
            try:
                return gcs.call("GET", "/v1/stacks", reply=Stacks, query={"target": task_id})
            except (ConflictError, NotFoundError):  # the history does not know yet that it runs
                return None

        try:
            found = until(stacks, WAIT_S, f"{task_id} runs")
            assert found is not None
            process = found.processes[0]
            assert Path(f"/proc/{process.pid}").stat().st_uid == place.alice.pw_uid
            frames = [one.function for thread in process.threads for one in thread.frames]
            assert "turns_in_this_function" in " ".join(frames), process
            assert process.task_ids == (task_id,)
            body = {"target": task_id, "seconds": 1.0, "format": "raw"}
            profile = gcs.call("POST", "/v1/profiles", body, reply=Content, timeout_s=WAIT_S)
            assert b"turns_in_this_function" in profile.data
        finally:
            end.touch()
        assert driver.stdout.read() == b"all is well\n"
