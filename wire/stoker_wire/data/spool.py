"""Task records on their way from the process that made them to SQL: rows, frames and spool files.

A process appends the rows of one moment as one *frame* to a file of its own in its node's spool
folder, which survives it. The nodelet forwards whole frames as they are; the gcs checks that each row
can be read, for one that cannot would break the lists of all, and stores it as it came. One
:class:`SpoolWriter` per process, used by its loop thread only; it never waits for another process, and
never raises.

Reports of training take the same way, in frames of their own (:mod:`stoker_wire.data.training`).

Not a SQLite file, which would bring its own durability: a row takes 1.9 us here and 10 us there, a
hundred rows 14 and 219 us (WAL, no fsync), and each call writes before its result leaves.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stoker_wire.data.spans import TaskSpans
from stoker_wire.errors import BadRequestError, StokerError
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Amount, Count, ErrorInfo, Id, Int64, Time
from stoker_wire.messages.work import TaskRecord, TaskState
from stoker_wire.process.host_identity import start_time

HEAD = struct.Struct("!III")
"""Before a frame's body: its bytes, its rows, and the rows that its writer dropped before it."""
MAX_FRAME_BYTES = 64 << 20
SEGMENT_BYTES = 1 << 20
MAX_UNWRITTEN_BYTES = 4 << 20
_ROWS_PER_FRAME = 1000
_WARN_S = 10.0
_NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Rank = Annotated[int, msgspec.Meta(ge=0, le=4)]
TaskRow = tuple[Id, Count, Id, str, str, str, str, _Rank, bytes]
"""A row of the table ``tasks``: its columns in order, the last one packed :class:`TaskFacts`."""

INFERRED_RANK = 3
RANKS = {
    TaskState.WAITING: 0,
    TaskState.QUEUED: 1,
    TaskState.RUNNING: 2,
    TaskState.FINISHED: 4,
    TaskState.FAILED: 4,
    TaskState.CANCELLED: 4,
}

_log = logging.getLogger(__name__)


class TaskFacts(msgspec.Struct, array_like=True, frozen=True):
    """The members of ``TaskRecord`` that have no column of their own in a row.

    In the order of their bytes: new ones only at the end, with a default.
    """

    parent_task_id: str = ""
    submitted_at_s: Time | None = None
    started_at_s: Time | None = None
    ended_at_s: Time | None = None
    worker_id: str = ""
    args_nbytes: Int64 = 0
    result_nbytes: Int64 = 0
    error: ErrorInfo | None = None
    demand: Demand | None = None
    waiting_for: str = ""
    owner_id: str = ""
    reconstructs: str = ""
    reconstructions: Count = 0
    lineage_depth: Count = 0
    spans: TaskSpans | None = None
    cpus: Amount = 0.0
    gpus: Amount = 0.0
    group_id: str = ""


UNREADABLE = ErrorInfo(code="internal", message="the record of this attempt cannot be decoded")
"""The error of an attempt whose record is damaged."""

_facts_in = attrgetter(*TaskFacts.__struct_fields__)
_pack = msgspec.msgpack.Encoder().encode
_facts = TolerantDecoder(TaskFacts).decode
_record = TolerantDecoder(TaskRecord).decode
_rows = msgspec.msgpack.Decoder(list[TaskRow]).decode


def rank(record: TaskRecord) -> int:
    """Return how far an attempt has come: 0 to 2 open, 3 ended as inferred, 4 ended as reported."""
    if record.error is not None and record.error.extra.get("inferred"):
        return INFERRED_RANK
    return RANKS[record.state]


def row_of(record: TaskRecord) -> TaskRow:
    """Return a record as it travels and is stored."""
    return (
        record.task_id,
        record.attempt,
        record.job_id,
        record.state.value,
        record.name,
        record.node_id,
        record.actor_id,
        rank(record),
        pack_facts(TaskFacts(*_facts_in(record))),
    )


def pack_facts(facts: TaskFacts) -> bytes:
    """Return the last column of a row."""
    try:
        return _pack(facts)
    except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is no UTF-8
        return _pack(_readable(msgspec.to_builtins(facts)))


def record_of(row: Sequence[object]) -> TaskRecord:
    """Return the record of a row (also of one that the first version stored).

    Facts that cannot be decoded, of a damaged row, are left out: ``error`` is :data:`UNREADABLE` then.
    """
    task_id, attempt, job_id, state, name, node_id, actor_id, _, packed = row
    raw = bytes(packed)  # type: ignore[call-overload]
    try:
        if _is_map(raw):
            return _record(raw)
        facts = _facts(raw)
    except _NOT_DECODED:
        facts = TaskFacts(error=UNREADABLE)
    return TaskRecord(
        task_id=task_id,  # type: ignore[arg-type]
        attempt=attempt,  # type: ignore[arg-type]
        job_id=job_id,  # type: ignore[arg-type]
        state=TaskState(state),  # type: ignore[arg-type]
        name=name,  # type: ignore[arg-type]
        node_id=node_id,  # type: ignore[arg-type]
        actor_id=actor_id,  # type: ignore[arg-type]
        **msgspec.structs.asdict(facts),
    )


def held_in(packed: bytes) -> tuple[float, float, str]:
    """Return the CPUs and GPUs in the last column of a row, and of which placement group they were held."""
    try:
        facts = TaskFacts() if _is_map(packed) else _facts(packed)
    except _NOT_DECODED:
        facts = TaskFacts()
    return facts.cpus, facts.gpus, facts.group_id


def _is_map(packed: bytes) -> bool:
    """Return whether a row has its facts as the first version wrote them."""
    return packed[:1] >= b"\x80" and (packed[0] & 0xF0 == 0x80 or packed[0] == 0xDE)


def _readable(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(k): _readable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(v) for v in value]
    return value


def frames_of(rows: Sequence[TaskRow], dropped: int = 0) -> bytes:
    """Return rows as frames; ``dropped`` is how many their writer lost before them."""
    frames = bytearray()
    for start in range(0, len(rows) or 1, _ROWS_PER_FRAME):
        some = rows[start : start + _ROWS_PER_FRAME]
        try:
            body = _pack(some)
        except UnicodeEncodeError:
            body = _pack([_readable(row) for row in some])
        frames += HEAD.pack(len(body), len(some), 0 if start else dropped) + body
    return bytes(frames)


def whole_frames(data: bytes) -> int:
    """Return how many bytes at the start of ``data`` are whole frames; ValueError if it is none."""
    at = 0
    while at + HEAD.size <= len(data):
        end = at + HEAD.size + frame_nbytes(data, at)
        if end > len(data):
            break
        at = end
    return at


def frame_nbytes(data: bytes, at: int = 0) -> int:
    """Return the bytes of the body of the frame that starts at ``at``; ValueError if none does."""
    nbytes, count, _ = HEAD.unpack_from(data, at)
    if nbytes > MAX_FRAME_BYTES or count > nbytes:
        raise ValueError(f"{nbytes} bytes for {count} rows is no frame of a spool")
    return int(nbytes)


def rows_in_frames(data: bytes) -> int:
    """Return the number of rows in whole frames, which are not decoded."""
    at = rows = 0
    while at < len(data):
        nbytes, count, _ = HEAD.unpack_from(data, at)
        at += HEAD.size + nbytes
        rows += count
    return rows


def halves(data: bytes) -> tuple[bytes, bytes]:
    """Return whole frames in two parts, each of whole frames; the second of a single one is empty."""
    at = HEAD.size + frame_nbytes(data)
    while at < len(data) // 2:
        at += HEAD.size + frame_nbytes(data, at)
    return data[:at], data[at:]


def is_refusal(error: StokerError) -> bool:
    """Return whether the gcs will never take what it answered so: its sender must not try for ever.

    401 and 403 are about the sender, of whom a later token may make another.
    """
    return 400 <= error.status < 500 and error.status not in (401, 403, 429)


def rows_in(data: bytes) -> tuple[list[TaskRow], int]:
    """Return the rows of whole frames, and how many their writers dropped; else BadRequestError."""
    rows: list[TaskRow] = []
    dropped = at = 0
    view = memoryview(data)
    try:
        while at < len(data):
            begin = at + HEAD.size
            at = begin + frame_nbytes(data, at)
            if at > len(data):
                raise ValueError("the last frame is torn")
            if not _is_map(data[begin : begin + 1]):  # a map has reports of training
                rows += _rows(view[begin:at])
            dropped += HEAD.unpack_from(data, begin - HEAD.size)[2]
        for row in rows:
            if row[3] not in RANKS:
                raise ValueError("a row is in no known state")
            (_record if _is_map(row[8]) else _facts)(row[8])
    except (struct.error, ValueError, *_NOT_DECODED) as error:
        raise BadRequestError(f"the body is no spool of task records\n{error}") from None
    return rows, dropped


SPOOL = "spool"
"""The folder of a session in which each node has one."""


def spool_folder(session_dir: str | Path, node_id: str) -> Path:
    """Return where the processes of a node leave their task records."""
    return Path(session_dir) / SPOOL / node_id


class SpoolWriter:
    """An appender of rows to a file that outlives this process; ``dropped`` counts those that it could not.

    While the disk is full up to ``MAX_UNWRITTEN_BYTES`` wait in memory.
    """

    def __init__(self, folder: Path, writer_id: str) -> None:
        self.dropped = 0
        self._folder = folder
        self._stem = f"{writer_id}.{os.getpid()}.{start_time(os.getpid())}"
        self._segment = 0
        self._file = -1
        self._written = 0
        self._unwritten = bytearray()
        self._unreported = 0
        self._warned_at_s = -_WARN_S

    def write(
        self, rows: Sequence[Any], pack: Callable[[Sequence[Any], int], bytes] = frames_of
    ) -> None:
        """Append rows as the frames that ``pack`` makes of them, those of attempts by default.

        They are in the file when this returns, if the disk takes them.
        """
        if self.is_full:
            self.dropped += len(rows)
            self._unreported += len(rows)
        else:
            self._unwritten += pack(rows, self._unreported)
            self._unreported = 0
        self.flush()

    @property
    def is_full(self) -> bool:
        """Whether so much waits in memory that further rows are dropped."""
        return len(self._unwritten) > MAX_UNWRITTEN_BYTES

    @property
    def waits(self) -> bool:
        """Whether rows wait in memory for :meth:`flush`, because the disk refused them."""
        return bool(self._unwritten)

    def flush(self) -> None:
        """Try again to write what is left."""
        try:
            if self._file < 0 and self._unwritten:
                self._open()
            while self._unwritten:
                nbytes = os.write(self._file, self._unwritten)
                self._written += nbytes
                # A partly written frame is finished later: the next must start where it ends.
                del self._unwritten[:nbytes]
        except OSError as error:
            self._warn(error)
            return
        if self._written >= SEGMENT_BYTES:
            self.close()

    def close(self) -> None:
        """Leave the file to the nodelet; the next row begins another."""
        if self._file >= 0 and not self._unwritten:
            os.close(self._file)
            self._file, self._written, self._segment = -1, 0, self._segment + 1

    def _open(self) -> None:
        path = self._folder / f"{self._stem}.{self._segment:08}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except FileNotFoundError:  # another nodelet has removed the folder of a dead one
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)

    def _warn(self, error: OSError) -> None:
        if time.monotonic() - self._warned_at_s < _WARN_S:
            return
        self._warned_at_s = time.monotonic()
        _log.warning(
            "task history cannot be written to %s: %s; %d bytes wait in memory, %d records dropped",
            self._folder,
            error,
            len(self._unwritten),
            self.dropped,
        )


def writer_lives(path: Path) -> bool:
    """Return whether the process that writes a spool file is alive; ValueError for other files."""
    _, pid, started, _ = path.name.rsplit(".", 3)
    return start_time(int(pid)) == int(started)
