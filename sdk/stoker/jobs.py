"""Job submission: submit, list, follow and stop jobs from any Python program, outside of the cluster.

``JobSubmissionClient`` speaks HTTP with the standard library alone, synchronously; the CLI's ``stoker
job`` is made of it. To run tasks from this process, use ``stoker.init()`` instead.

    client = JobSubmissionClient("http://127.0.0.1:7600")
    job_id = client.submit_job(entrypoint="python train.py", runtime_env={"working_dir": "."})
    for line in client.tail_job_logs(job_id):
        print(line.text)
    assert client.wait(job_id).exit_code == 0
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tarfile
import time
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from stoker.local.address import resolve
from stoker.runtime.net.http import HttpClient
from stoker.runtime.options.checks import checked_tolerations
from stoker.runtime.options.runtime_env import make_runtime_env
from stoker.runtime.options.uploads import uploader
from stoker.runtime.process.notebook import html_table, shown_records
from stoker.runtime.process.tracing.context import TRACES
from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.http.trace_context import of_variables, variables
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.control import Explanation, LogLine, LogStream, Page
from stoker_wire.messages.schedules import (
    HISTORY_LIMIT,
    ChangeSchedule,
    Concurrency,
    CreateSchedule,
    MissedRuns,
    Schedule,
)
from stoker_wire.messages.work import (
    RETRY_DELAY_S,
    After,
    Dependency,
    JobArray,
    JobAttempt,
    JobOutput,
    JobState,
    OnePerNode,
    SubmitJob,
)
from stoker_wire.messages.work import Job as JobRecord

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from enum import StrEnum

__all__ = (
    "Job",
    "JobAttempt",
    "JobOutput",
    "JobState",
    "JobSubmissionClient",
    "LogLine",
    "Schedule",
)

E = TypeVar("E", bound="StrEnum")
_FIELDS = ("job_id", "name", "state", "entrypoint", "user", "queue", "attempt", "message")
"""What a notebook shows of a job."""
_LONG_POLL_S = 20.0
_POLL_FIRST_S = 0.02
_POLL_MAX_S = 0.5


class Job(JobRecord):
    """The record of a job, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        return html_table("Job", {name: str(getattr(self, name)) for name in _FIELDS})


def _path(name: str) -> str:
    return f"/v1/schedules/{quote(name, safe='')}"


def _failure(job: Job, attempt: int) -> LogLine:
    """Return the line that says why an attempt of a job failed."""
    over = next(one for one in job.attempts if one.attempt == attempt)
    text = f"attempt {attempt} of {job.max_attempts} failed: {over.cause}"
    return LogLine(
        node_id=over.node_id,
        worker_id="",
        pid=0,
        name="stoker",
        text=text,
        at_s=over.ended_at_s,
        job_id=job.job_id,
        stream=LogStream.STDERR,
    )


def _traced(body: SubmitJob) -> SubmitJob:
    """Return a submission with the trace context of the calling code, unless it names one."""
    env = body.runtime_env
    given = variables(TRACES.now() or of_variables(os.environ))
    if not given or "TRACEPARENT" in env.env_vars:
        return body
    env = msgspec.structs.replace(env, env_vars={**env.env_vars, **given})
    return msgspec.structs.replace(body, runtime_env=env)


def _choice(kind: type[E], value: str, field: str) -> E:
    """Return a value as one of a few; BadRequestError names them."""
    known = [one.value for one in kind]
    if value not in known:
        raise BadRequestError(
            f"{field}: {value!r} is none\nuse one of {', '.join(known)}", field=field
        )
    return kind(value)


class JobSubmissionClient:
    """A client of one cluster. Threads may share it.

    ``address`` defaults to STOKER_ADDRESS, then to the newest cluster of this machine; ``token`` to
    STOKER_TOKEN, STOKER_TOKEN_FILE, then that cluster's own. ``timeout_s`` bounds each call.
    """

    def __init__(
        self, address: str | None = None, token: str | None = None, *, timeout_s: float = 30.0
    ) -> None:
        target = resolve(address, token)
        self.address = target.address
        self.http = HttpClient(target.address, token=target.token, timeout_s=timeout_s)

    def submit_job(
        self,
        *,
        entrypoint: str,
        job_id: str | None = None,
        name: str = "",
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        entrypoint_num_cpus: float = 0.0,
        entrypoint_num_gpus: float = 0.0,
        entrypoint_memory: int = 0,
        entrypoint_resources: Mapping[str, float] | None = None,
        label_selector: Mapping[str, str] | None = None,
        node_filter: str = "",
        tolerations: Sequence[str | Mapping[str, Any]] = (),
        namespace: str | None = None,
        queue: str = "",
        priority: int = 0,
        start_deadline_s: float | None = None,
        timeout_s: float | None = None,
        after: Mapping[str, str] | None = None,
        array: Sequence[int] | None = None,
        array_parallelism: int = 0,
        one_per_node: bool = False,
        retries: int = 0,
        preemptible: bool = False,
        preemption_grace_s: float | None = None,
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> str:
        """Run the shell command ``entrypoint`` as a driver on the cluster; return the job's id.

        ``runtime_env`` as for ``stoker.init``; folders are uploaded once, by content. The
        ``entrypoint_*`` are resources of the driver process itself (default: none; memory in bytes).
        ``node_filter`` is a condition on its node, as ``"labels.rack != 'r7'"``; ``tolerations`` are of
        taints, as ``["dedicated=team-a:NoSchedule"]``.
        ``queue`` and ``priority`` are those of all that the job starts; it fails unless its driver has
        started within ``start_deadline_s``, and if it runs for longer than ``timeout_s``. It starts when
        the jobs in ``after`` have ended: ids, and how they must have (``"any"``, ``"ok"``, ``"failed"``).
        With an ``array`` of indices it is one job for each, ``JOB.INDEX``, which finds its index in
        ``STOKER_ARRAY_INDEX``; ``array_parallelism`` of them run at once (0: all). With ``one_per_node``
        the indices are those of the nodes that live and can run it when it starts. A driver that fails
        (not one that is stopped, or runs into ``timeout_s``) is run again, up to ``retries`` times:
        ``retry_delay_s`` later, then twice as long. The driver of a ``preemptible`` job may be ended for
        work with a better claim, ``preemption_grace_s`` after its notice, and is run again, which uses up
        no retry. NameTakenError if ``job_id`` exists already.
        """
        options = {name: value for name, value in locals().items() if name != "self"}
        body = _traced(self._submission(**options))
        return self.http.call("POST", "/v1/jobs", body, reply=Job).job_id

    def _submission(self, **options: Any) -> SubmitJob:
        """Return the message for options as of ``submit_job``; uploads the folders that they name."""
        take = options.pop
        own = {
            "CPU": take("entrypoint_num_cpus", 0.0),
            "GPU": take("entrypoint_num_gpus", 0.0),
            "memory": float(take("entrypoint_memory", 0)),
        }
        resources = {name: amount for name, amount in own.items() if amount}
        resources |= take("entrypoint_resources", None) or {}
        after = take("after", None) or {}
        indices, parallelism = take("array", None), take("array_parallelism", 0)
        runtime_env = make_runtime_env(take("runtime_env", None), uploader(self.http))
        return SubmitJob(
            runtime_env=runtime_env,
            metadata=dict(take("metadata", None) or {}),
            label_selector=dict(take("label_selector", None) or {}),
            tolerations=checked_tolerations(take("tolerations", ())),
            resources=resources,
            after=tuple(
                Dependency(job_id=one, condition=_choice(After, how, "after"))
                for one, how in after.items()
            ),
            array=None
            if indices is None
            else JobArray(indices=tuple(indices), parallelism=parallelism),
            one_per_node=OnePerNode(parallelism=parallelism)
            if take("one_per_node", False)
            else None,
            **options,
        )

    def list_jobs(self, *, limit: int = 1000, schedule: str = "") -> list[Job]:
        """Return up to ``limit`` jobs, those of drivers included; of one ``schedule``, if it is named."""
        jobs: list[Job] = []
        cursor = ""
        while len(jobs) < limit:
            query = {
                "limit": min(limit - len(jobs), 1000),
                "cursor": cursor or None,
                "schedule": schedule or None,
            }
            page = self.http.call("GET", "/v1/jobs", reply=Page[Job], query=query)
            jobs += page.items
            cursor = page.next_cursor
            if not cursor:
                break
        return shown_records("Jobs", _FIELDS, jobs)

    def get_job(self, job_id: str) -> Job:
        """Return the record of a job; NotFoundError if there is none."""
        return self.http.call("GET", f"/v1/jobs/{job_id}", reply=Job)

    def get_job_status(self, job_id: str) -> JobState:
        """Return the state of a job."""
        return self.get_job(job_id).state

    def explain_job(self, job_id: str) -> Explanation:
        """Return why a job waits, or what became of it."""
        return self.http.call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation)

    def get_job_logs(self, job_id: str, *, attempt: int = 0) -> str:
        """Return the output so far of the job's driver: of this ``attempt``, counted from 1 (0: the last)."""
        query = {"attempt": attempt}
        lines = self.http.lines(f"/v1/jobs/{job_id}/logs", item=LogLine, query=query)
        return "".join(f"{line.text}\n" for line in lines)

    def tail_job_logs(self, job_id: str, *, attempt: int = 0) -> Iterator[LogLine]:
        """Yield the lines of the job's driver from the first one, as they come, until it ends.

        Begins with this ``attempt``, counted from 1 (0: the present one), and goes on with those that
        follow; a line without a ``worker_id`` between two says why the first failed. A broken connection
        is opened again behind the last line seen.
        """
        attempt = attempt or self.get_job(job_id).attempt
        while True:
            yield from self._tail_attempt(job_id, attempt)
            job = self.get_job(job_id)
            if job.attempt <= attempt:
                return
            yield _failure(job, attempt)
            attempt += 1

    def _tail_attempt(self, job_id: str, attempt: int) -> Iterator[LogLine]:
        path = f"/v1/jobs/{job_id}/logs"
        cursor, pause_s = 0, _POLL_FIRST_S
        followed = False
        while True:
            job = self.get_job(job_id)
            ended = job.state.terminal or job.attempt > attempt
            followed = followed or not ended
            query = {"follow": not ended, "since": cursor, "attempt": attempt}
            try:
                for line in self.http.lines(path, item=LogLine, query=query):
                    cursor, pause_s = max(cursor, line.cursor), _POLL_FIRST_S
                    yield line
            except UnavailableError:
                if job.state.terminal and job.attempt == attempt:
                    if followed and self._is_dead(job.node_id):
                        return  # what it had not told is lost with it; how the job ended is known
                    raise
                if ended:  # its node is gone, and the next attempt is elsewhere
                    return
            if ended:  # known before the read, which therefore saw all there is
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _POLL_MAX_S)

    def _is_dead(self, node_id: str) -> bool:
        """Return whether a node was declared dead; False for none."""
        if not node_id:
            return False
        node = self.http.call("GET", f"/v1/nodes/{node_id}", reply=Node)
        return node.state is NodeState.DEAD

    def stop_job(self, job_id: str) -> Job:
        """Ask a job to end: SIGTERM to its driver, SIGKILL 3 s later. Idempotent."""
        return self.http.call("POST", f"/v1/jobs/{job_id}/stop", reply=Job)

    def delete_job(self, job_id: str) -> Job:
        """Remove a job that has ended, with the history of its tasks; its id is not given again.

        Raises ConflictError if it goes on.
        """
        return self.http.call("DELETE", f"/v1/jobs/{job_id}", reply=Job)

    def create_schedule(
        self,
        name: str,
        /,
        *,
        cron: str,
        time_zone: str = "UTC",
        concurrency: str = "Allow",
        missed_runs: str = "skip",
        starting_deadline_s: float | None = None,
        history_limit: int = HISTORY_LIMIT,
        paused: bool = False,
        **submission: Any,
    ) -> Schedule:
        """Submit a job, given as for ``submit_job``, at the times of a cron line in a time zone.

        ``concurrency`` is for runs whose predecessor goes on: "Allow", "Forbid" (it is skipped) or
        "Replace" (the predecessor is stopped). Runs that were missed are skipped, or with "run-once" one
        of them is made up for; none starts more than ``starting_deadline_s`` late. The
        ``history_limit`` last jobs that have ended are kept. NameTakenError if there is one of this name.
        """
        body = CreateSchedule(
            name=name,
            cron=cron,
            job=self._submission(**submission),
            time_zone=time_zone,
            concurrency=_choice(Concurrency, concurrency, "concurrency"),
            missed_runs=_choice(MissedRuns, missed_runs, "missed_runs"),
            starting_deadline_s=starting_deadline_s,
            history_limit=history_limit,
            paused=paused,
        )
        return self.http.call("POST", "/v1/schedules", body, reply=Schedule)

    def list_schedules(self) -> list[Schedule]:
        """Return all schedules, by their names."""
        query = {"limit": 1000, "sort": "id"}
        return list(self.http.call("GET", "/v1/schedules", reply=Page[Schedule], query=query).items)

    def get_schedule(self, name: str) -> Schedule:
        """Return a schedule; NotFoundError if there is none of this name."""
        return self.http.call("GET", _path(name), reply=Schedule)

    def pause_schedule(self, name: str, paused: bool = True) -> Schedule:
        """Submit nothing more for a schedule until it is resumed; what runs goes on."""
        return self.http.call("PATCH", _path(name), ChangeSchedule(paused=paused), reply=Schedule)

    def resume_schedule(self, name: str) -> Schedule:
        """Go on with a schedule that was paused, at its next time."""
        return self.pause_schedule(name, paused=False)

    def delete_schedule(self, name: str) -> Schedule:
        """Remove a schedule; the jobs that it has submitted stay."""
        return self.http.call("DELETE", _path(name), reply=Schedule)

    def get_job_output(self, job_id: str) -> JobOutput:
        """Return where the files are that a job wrote into STOKER_JOB_OUTPUT_DIR, and how many."""
        return self.http.call("GET", f"/v1/jobs/{job_id}/output", reply=JobOutput)

    def download_job_output(self, job_id: str, target: str | Path) -> list[str]:
        """Copy what a job wrote into STOKER_JOB_OUTPUT_DIR, on all nodes, into the folder ``target``.

        Returns the paths of the files below ``target``; one that two nodes wrote is there twice, the
        second time below a folder with the node's id. NotFoundError if the driver's node is gone and
        nothing is left. Wait for the job's end first, to get all.
        """
        output = self.get_job_output(job_id)
        if output.lost and not output.nodes:
            raise NotFoundError(output.lost)
        written: list[str] = []
        for node in output.nodes:
            query = {"node_id": node.node_id}
            with self.http.open_stream(f"/v1/jobs/{job_id}/output.tar", query=query) as archive:
                written += unpack_output(
                    archive, Path(target), node_id=node.node_id, taken=frozenset(written)
                )
        return written

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Wait until the job ended and return it; DeadlineExceededError after ``timeout_s``."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(_LONG_POLL_S, deadline_s - time.monotonic()))
            job = self.http.call(
                "GET", f"/v1/jobs/{job_id}", reply=Job, query={"wait_s": f"{wait_s:.3f}"}
            )
            if job.state.terminal:
                return job
            if time.monotonic() >= deadline_s:
                raise DeadlineExceededError(
                    f"job {job_id} is {job.state} after {timeout_s:g} s",
                    explain=f"/v1/jobs/{job_id}/explain",
                )


def unpack_output(
    archive: Any, target: Path, *, node_id: str = "", taken: Container[str] = ()
) -> list[str]:
    """Unpack what a job wrote on one node, a tar archive, into ``target``; return the paths of its files.

    Paths in ``taken``, and those where a file and a folder meet, go below ``target/node_id``. Files
    that are there already are replaced. BadRequestError for a member that would leave ``target`` or
    cannot be written there, UnavailableError for a cut archive.
    """
    written = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        root = target.resolve()
        with tarfile.open(fileobj=archive, mode="r|") as members:
            for member in members:
                name = PurePosixPath(member.name)
                if (str(name) in taken and not member.isdir()) or _conflicts(root, name, member):
                    name = node_id / name
                if _extract(members, member, root, name):
                    written.append(str(name))
    except (ConnectionError, TimeoutError):  # of the archive on its way
        raise
    except OSError as error:
        raise BadRequestError(
            f"the output of {node_id} cannot be written to {target}\n{error}\nname another folder"
        ) from None
    except tarfile.TarError as error:
        raise UnavailableError(f"the output of {node_id} broke off\n{error}") from None
    return written


def _conflicts(root: Path, name: PurePosixPath, member: tarfile.TarInfo) -> bool:
    """Return whether a folder is where a file is to be, or a file where a folder is to be."""
    path = root / name
    folders = [root / above for above in name.parents]
    if member.isdir():
        folders.append(path)
    elif path.is_dir() and not path.is_symlink():
        return True
    return any(os.path.lexists(folder) and not folder.is_dir() for folder in folders)


def _extract(
    members: tarfile.TarFile, member: tarfile.TarInfo, root: Path, name: PurePosixPath
) -> bool:
    path = root / name
    if not path.parent.resolve().is_relative_to(root) or ".." in name.parts:
        raise BadRequestError(f"the output has a member {member.name!r} that leaves its folder")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    content = members.extractfile(member) if member.isreg() else None
    if content is not None:
        _write(path, content, member.mode)
    elif member.issym() and _stays_inside(path, member.linkname, root):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.symlink_to(member.linkname)
    else:
        return False
    return True


def _write(path: Path, content: IO[bytes], mode: int) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    partial.chmod(mode & 0o777 | 0o600)
    partial.replace(path)


def _stays_inside(path: Path, link: str, root: Path) -> bool:
    return not os.path.isabs(link) and (path.parent / link).resolve().is_relative_to(root)
