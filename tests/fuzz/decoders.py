"""Every decoder of bytes that others have sent or stored, with valid inputs and the errors that it documents.

Others are callers of the API, peers on the data path, processes of jobs that share a node's files, and
whoever could write to the disk or the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import json
import socket
import stat
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jwt import api_jws

from stoker_gcs.api.routes import ROUTES as GCS
from stoker_gcs.history import moments
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_gcs.registry.queues.rules import QUEUES
from stoker_gcs.registry.schedules.rules import SCHEDULES
from stoker_gcs.state import records, schema
from stoker_gcs.store import rows, task_merge
from stoker_nodelet.api import ROUTES as NODELET
from stoker_nodelet.environments import environments
from stoker_nodelet.profiles.api import ROUTES as PROFILES
from stoker_nodelet.transfer import ROUTES as TRANSFER
from stoker_scheduler.api import ROUTES as SCHEDULER
from stoker_wire.arena import layout
from stoker_wire.constraints import label_selectors, node_filters, taints
from stoker_wire.data import output_marks, spool
from stoker_wire.data.frame_socket import FrameSocket, length_prefix
from stoker_wire.data.frames import FrameCodec
from stoker_wire.errors import (
    BadRequestError,
    DatabaseError,
    InternalError,
    ObjectLostError,
    RuntimeEnvSetupError,
    UnauthorizedError,
)
from stoker_wire.http import auth
from stoker_wire.http.client.exchange import ReplyReader
from stoker_wire.http.codec import JSON, MSGPACK, Codec
from stoker_wire.http.paging import page_of
from stoker_wire.http.problems import Problem, error_of
from stoker_wire.http.server.request import BoundRoute
from stoker_wire.http.server.tokens import ALGORITHM, AUDIENCE, TokenSigner
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Address, ErrorInfo, Role
from stoker_wire.messages.control import Event, ListQuery, LogStream, Order, Page, Sort
from stoker_wire.messages.data import (
    Borrow,
    Buffer,
    Call,
    Dep,
    Done,
    Failed,
    Hello,
    Inline,
    Item,
    Ref,
    Result,
    Run,
    Stored,
    Template,
)
from stoker_wire.messages.work import Job, TaskRecord, TaskState
from tests.fuzz.examples import example_of

_pack = msgspec.msgpack.encode
SECRET = "a secret of nobody's cluster"
_ADDRESS = Address("p_1", "n_1", "host", "/run/p_1", "http://127.0.0.1:7620")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: valid inputs, the function, and the only errors that may come out of it."""

    samples: Callable[[], list[bytes]]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


# -- the data path -------------------------------------------------------------------------------


def _frames() -> list[bytes]:
    ref = Ref("o_1", _ADDRESS)
    inline = Inline(b"data", (Buffer(b"x" * 100), Buffer(b""), Buffer(b"y" * 65)), (ref,))
    stored = Stored(1 << 20, "n_1", "http://127.0.0.1:7620", (ref,), "o_2")
    failed = Failed(
        "task_failed", "it failed", "ValueError", "Traceback", b"pickle", b"\x80", (ref,)
    )
    template = Template(1, "f" * 64, "square", blob=b"function")
    calls = [Call("t_1", 1, inline, (Dep(ref, stored),)), Call("t_2", 1, Inline(b""))]
    messages: list[list[Any]] = [
        [],
        [Hello(_ADDRESS, "job_1", (1, 0))],
        [Run(calls, [template])],
        [Done([Result("t_1", 0, (inline, stored)), Result("t_2", 0, (failed,))])],
        [Item("t_1", 0, 3, inline), Borrow(1, ["o_1", "o_2"])],
    ]
    return [FrameCodec().encode(one) for one in messages]


def _read_frame(data: bytes) -> None:
    codec = FrameCodec()
    for message in codec.decode(data):
        codec.encode([message])  # what was accepted can be passed on


_LOOP = functools.cache(asyncio.new_event_loop)
_PIECE = 50


def _read_stream(data: bytes) -> None:
    async def read() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            frames = FrameSocket(ours, data[:_PIECE])
            theirs.sendall(data[_PIECE:])
            theirs.shutdown(socket.SHUT_WR)
            while not frames.closed:
                frames.read()

    _LOOP().run_until_complete(read())


def _streams() -> list[bytes]:
    frames = _frames()
    whole = [length_prefix(len(frame)) + frame for frame in frames]
    return [b"".join(whole), *whole]


# -- rows and records of the task history --------------------------------------------------------


@functools.cache
def _records() -> list[TaskRecord]:
    return [
        TaskRecord(task_id="t_1", attempt=0, job_id="job_1", name="square", state=TaskState.QUEUED),
        TaskRecord(
            task_id="t_2", attempt=3, job_id="job_1", state=TaskState.FAILED, name="square",
            node_id="n_1", worker_id="w_1", submitted_at_s=1.5, started_at_s=2.5, ended_at_s=3.5,
            error=ErrorInfo(code="task_failed", message="no", extra={"inferred": True}),
            demand=Demand(job_id="job_1", resources={"CPU": 1}), waiting_for="CPU",
        ),
    ]  # fmt: skip


def _spooled() -> list[bytes]:
    of = [spool.row_of(record) for record in _records()]
    old = (*of[1][:8], _pack(_records()[1]))
    return [spool.frames_of(of, 3), spool.frames_of([old]), spool.frames_of(of[:1]) * 2]


def _read_spool(data: bytes) -> None:
    """Read frames as a nodelet does, who forwards them, and as the gcs."""
    with contextlib.suppress(ValueError):
        whole = data[: spool.whole_frames(data)]
        spool.rows_in_frames(whole)
        if whole:
            spool.halves(whole)
    found, _ = spool.rows_in(data)
    for row in found:
        _stored_row(row)
    task_merge.merge_all(found)


def _stored_row(row: tuple[Any, ...]) -> None:
    named = dict(zip(rows.TASK_ROW, row, strict=True))
    rows.task_of(named)
    rows.times_of(named)


def _read_facts(data: bytes) -> None:
    """Read the packed column of a stored row, which may be damaged, and merge a report into it."""
    valid = spool.row_of(_records()[1])
    row = (*valid[:8], data)
    _stored_row(row)
    task_merge.merge_rows(row, valid)
    task_merge.merge_rows(valid, row)


def _facts() -> list[bytes]:
    return [*(spool.row_of(one)[8] for one in _records()), *map(_pack, _records())]


_TABLES = (ACTORS, GROUPS, JOBS, NODES, OBJECTS, QUEUES, SCHEDULES)


def _stored() -> list[bytes]:
    """Records of every table, each behind the number of its table."""
    types = [table._decoder._type for table in _TABLES]
    samples = [bytes([n]) + _pack(example_of(type_)) for n, type_ in enumerate(types)]
    return [*samples, bytes([len(_TABLES)]) + _pack({"job_id": "job_1", "a": [1, {"b": 2.5}]})]


def _read_record(data: bytes) -> None:
    number = sum(data[:1]) % (len(_TABLES) + 1)
    if number == len(_TABLES):
        rows.event_of({"seq": 1, "at_s": 1.0, "kind": "k", "subject": "s", "payload": data[1:]})
        return
    table = _TABLES[number]
    key = dict.fromkeys(table.table.key, "x")
    table.decode({**key, "version": 1, "record": data[1:]})


# -- the arena -----------------------------------------------------------------------------------


def _objects() -> list[bytes]:
    heads = [
        layout.ObjectHead("job_1", "p_1", 1.5, 5, ()),
        layout.ObjectHead("job_1", "p_1", 1.5, 7, (100, 0, 65)),
    ]
    return [_object(head) for head in heads]


def _object(head: layout.ObjectHead) -> bytes:
    start, total = layout.pack_head("o_1234567890abcdef.0", head)
    whole = bytearray(total)
    for offset, part in layout.parts_of(
        start, b"d" * head.data_nbytes, [memoryview(b"b" * n) for n in head.buffers_nbytes]
    ):
        whole[offset : offset + len(part)] = part
    return bytes(whole)


def _read_object(data: bytes) -> None:
    layout.id_of(data)
    head, begin, total = layout.read_head(data)
    try:
        found, buffers = layout.split(memoryview(data))
    except ObjectLostError:
        return
    lengths = (found.nbytes, *(view.nbytes for view in buffers))
    assert lengths == (head.data_nbytes, *head.buffers_nbytes), (
        "views of other lengths than announced"
    )
    assert begin <= len(data) and 0 <= total < 1 << 63


# -- HTTP ----------------------------------------------------------------------------------------


@functools.cache
def _bodies_of() -> tuple[Codec[Any], ...]:
    routes = (*GCS, *SCHEDULER, *NODELET, *PROFILES, *TRANSFER)
    types = {repr(body): body for route in routes if (body := getattr(route, "body", None))}
    return tuple(Codec(type_) for type_ in types.values())


def _bodies() -> list[bytes]:
    """Bodies of every request, behind the number of its type and whether it is JSON."""
    samples = []
    for number, codec in enumerate(_bodies_of()):
        example = example_of(codec.type)
        samples.append(bytes([number, 0]) + _pack(example))
        samples.append(bytes([number, 1]) + msgspec.json.encode(example))
    return samples


def _read_body(data: bytes) -> None:
    codec = _bodies_of()[sum(data[:1]) % len(_bodies_of())]
    codec.decode(data[2:], JSON if data[1:2] == b"\1" else MSGPACK, newer=data[1:2] == b"\2")


@functools.cache
def _queries_of() -> tuple[BoundRoute, ...]:
    queries = {
        r.query: r
        for r in (*GCS, *SCHEDULER, *NODELET, *PROFILES, *TRANSFER)
        if r.query is not None
    }
    return tuple(
        BoundRoute("GET", "/", _nothing, summary="", roles=frozenset(), query=query)
        for query in queries
    )


async def _nothing(_: object) -> None: ...


def _queries() -> list[bytes]:
    samples = []
    for number, route in enumerate(_queries_of()):
        members = msgspec.to_builtins(example_of(route.query))
        texts = {k: str(v) for k, v in members.items() if v is not None}
        samples.append(bytes([number]) + json.dumps(texts).encode())
    return samples


def _read_query(data: bytes) -> None:
    try:
        given = json.loads(data[1:])
    except (ValueError, RecursionError):
        given = {"cursor": data[1:].decode(errors="replace")}
    if isinstance(given, dict):
        texts: Any = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        _queries_of()[sum(data[:1]) % len(_queries_of())].decode_query(texts)


_ITEMS = [f"item {n}" for n in range(20)]


def _cursors() -> list[bytes]:
    query = ListQuery(limit=3, sort=Sort.CREATED)
    by_time = page_of(_ITEMS, query, key=str, created=lambda one: len(one) / 3)
    mark = records.CURSOR_MARK
    return [
        by_time.next_cursor.encode(),
        b"item 3",
        b"12",
        f"ns{mark}a key".encode(),
        b"inf x",
        b"nan x",
    ]


def _read_cursor(data: bytes) -> None:
    try:
        query = msgspec.convert({"limit": 5, "cursor": data.decode(errors="replace")}, ListQuery)
    except msgspec.ValidationError:
        return
    for order in Order:
        for created in (None, float(len(data)).__add__):
            asked = msgspec.structs.replace(query, order=order, sort=Sort.CREATED)
            page: Page[float] = page_of(map(float, range(20)), asked, key=str, created=created)
            assert len(page.items) <= query.limit
    cursor = query.cursor
    for table, key in (
        (schema.KV, schema.KV.key), (schema.TASKS, schema.TASKS.key), (schema.NODES, (schema.ARRIVAL,)),
    ):  # fmt: skip
        with contextlib.suppress(BadRequestError):
            values = records._parse_cursor(table, key, cursor)
            assert all(isinstance(v, str) or 0 <= v < 1 << 63 for v in values)


def _replies() -> list[bytes]:
    event = Event(seq=1, at_s=1.5, kind="job.finished", subject="job_1", payload={"a": [1]})
    page = Page(items=(example_of(Job),), next_cursor="x", seq=5)
    problem = Problem(status=404, detail="there is none", code="not_found", extra={"a": [1]})
    values = (Page(items=(event,), seq=3), page, event, problem)
    return [
        bytes([kind, number]) + encode(value)
        for kind, encode in enumerate((_pack, msgspec.json.encode))
        for number, value in enumerate(values)
    ]


_REPLIES: tuple[Any, ...] = (Page[Event], Page[Job], Event)


def _read_reply(data: bytes) -> None:
    """Read what a peer, or whoever listens in its place, has answered."""
    content_type, number, body = (MSGPACK, JSON)[data[:1] == b"\1"], data[1:2], data[2:]
    kind = _REPLIES[sum(number) % len(_REPLIES)]
    error_of(body, status=404, source="GET /")
    _reader().decode(body, content_type, kind, method="GET", url="/")


_reader = functools.cache(ReplyReader)


# -- tokens --------------------------------------------------------------------------------------


@functools.cache
def _signer() -> TokenSigner:
    return TokenSigner(SECRET)


def _tokens() -> list[bytes]:
    signer = _signer()
    tokens = [
        signer.service(Role.NODE, "n_1"),
        signer.job("job_1", "a_1"),
        signer.worker("w_1"),
        SECRET,
    ]
    return [token.encode() for token in tokens]


def _read_token(data: bytes) -> None:
    header = "Bearer " + data.decode(errors="surrogateescape")  # as aiohttp reads one
    str(_signer().verify(auth.bearer(header)))


def _claims() -> list[bytes]:
    claims = [
        {"aud": AUDIENCE, "role": "user", "sub": "alice", "namespaces": ["a"], "jti": "tk_1", "iat": 1,
         "exp": 4e9},
        {"aud": [AUDIENCE], "role": "job", "job": "job_1", "actor": "a_1", "worker": "w_1", "exp": None},
    ]  # fmt: skip
    return [json.dumps(one).encode() for one in claims]


def _read_claims(data: bytes) -> None:
    """Read a token with the cluster's signature, as another version or a tool may have made it."""
    str(_signer().verify(api_jws.encode(data, _signer()._keys[0], ALGORITHM)))


# -- texts with a grammar ------------------------------------------------------------------------

FILTERS = (
    "labels.rack != 'r7' and free.gpu >= 2", "node_id IN ('n_1', 'n_2') or not hostname like 'a%'",
    "(total.memory between '1GiB' and 64e9)", "labels.a is not null", "free.\"a b\" > -1e308",
)  # fmt: skip


def _read_filter(data: bytes) -> None:
    node_filters.check(data.decode(errors="replace"))


def _read_constraint(data: bytes) -> None:
    text = data.decode(errors="replace")
    for parse in (
        functools.partial(label_selectors.parse_value, "zone"), taints.parse_taint, taints.parse_toleration,
        taints.parse_removal,
    ):  # fmt: skip
        with contextlib.suppress(ValueError):
            parse(text)


class _Numbering:
    def skips(self, _: int) -> bool:
        return False


def _read_moment(data: bytes) -> None:
    numbering: Any = _Numbering()
    moments.parse(data.decode(errors="replace"), last=500, now_s=2e9, numbering=numbering)


_MARK_KEY = b"k" * output_marks.KEY_BYTES


def _marks() -> list[bytes]:
    said = [f"{stream}:{name}" for stream in LogStream for name in ("", "square", "a:b")]
    return [one.encode() for one in (*said, "stderr/2f6a:square", "stdout/:/")]


def _read_mark(data: bytes) -> None:
    """Read a mark that has the worker's key: code inside of the worker can find it."""
    digest = output_marks._digest(_MARK_KEY, data)
    output_marks.read_mark(_MARK_KEY, b"%b%b:%b\n" % (output_marks.START, digest, data))
    output_marks.read_mark(_MARK_KEY, output_marks.START + data)


# -- packages ------------------------------------------------------------------------------------


def _packages() -> list[bytes]:
    made = []
    for method in (
        zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2,
    ):  # fmt: skip
        with io.BytesIO() as file:
            with zipfile.ZipFile(file, "w", method) as archive:
                archive.writestr("a.py", "x = 1\n" * 10)
                program = zipfile.ZipInfo("sub/run")
                program.external_attr = (stat.S_IFREG | 0o755) << 16
                archive.writestr(program, b"\0" * 100, method)
            made.append(file.getvalue())
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            link = zipfile.ZipInfo("link")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, "/etc")
            archive.writestr("../out", b"x")
        made.append(file.getvalue())
    return made


@functools.cache
def _packages_folder() -> Path:
    return Path(tempfile.mkdtemp())  # below the folder of the run, which removes it


def _read_package(data: bytes) -> None:
    folder = _packages_folder()
    target = folder / "package"
    digest = hashlib.sha256(data).hexdigest()
    try:
        environments._extract(data, target, digest, 1 << 20)
        assert sum(path.lstat().st_size for path in target.rglob("*")) <= 2 << 20
    finally:
        left = [path.name for path in folder.iterdir() if path != target]
        assert not left, f"files outside of the package: {left}"


DECODERS: dict[str, Decoder] = {
    "frames": Decoder(_frames, _read_frame, (BadRequestError,)),
    "streams": Decoder(_streams, _read_stream, ()),
    "spool": Decoder(_spooled, _read_spool, (BadRequestError,)),
    "rows": Decoder(_facts, _read_facts, ()),
    "records": Decoder(_stored, _read_record, (DatabaseError,)),
    "objects": Decoder(_objects, _read_object, (ValueError,)),
    "bodies": Decoder(_bodies, _read_body, (BadRequestError,)),
    "queries": Decoder(_queries, _read_query, (BadRequestError,)),
    "cursors": Decoder(_cursors, _read_cursor, (BadRequestError,)),
    "replies": Decoder(_replies, _read_reply, (InternalError,)),
    "tokens": Decoder(_tokens, _read_token, (UnauthorizedError,)),
    "claims": Decoder(_claims, _read_claims, (UnauthorizedError,)),
    "filters": Decoder(
        lambda: [text.encode() for text in FILTERS], _read_filter, (BadRequestError,)
    ),
    "constraints": Decoder(
        lambda: [b"in(a, b)", b"!x y", b"gpu=a100:NoSchedule", b"gpu:NoExecute-"],
        _read_constraint,
        (),
    ),
    "moments": Decoder(
        lambda: [b"120", b"2026-05-04T12:00:00Z", b"1800000000.5", b"2026-05-04"],
        _read_moment,
        (BadRequestError,),
    ),
    "marks": Decoder(_marks, _read_mark, ()),
    "packages": Decoder(_packages, _read_package, (RuntimeEnvSetupError,)),
}
