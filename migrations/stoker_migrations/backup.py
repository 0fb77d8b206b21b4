"""Backups of the database of a gcs: one file, of a live cluster, for either kind of database.

A backup is the state at one moment: all is read in one transaction, while the gcs goes on. It holds the rows
of all tables but those that other processes renew by themselves; what Redis has is of that kind, and is not
in it.
The file is gzip over frames, each a length and a msgpack array:

=====================================================  ==========================================
``["stoker", 1, {revision, seq, at_s, version}]``      first; ``revision`` is that of the schema
``["table", name, [column, ...]]``                     then, for each table,
``["rows", [[value, ...], ...]]``                      its rows, in the order in which they came
``["end", {table: rows}, sha256]``                     last; the hash is of all bytes before
=====================================================  ==========================================
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
from sqlalchemy import (
    Connection,
    MetaData,
    Table,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from stoker_gcs.state.numbering import EPOCHS_PER_S, GAP, NUMBERS_PER_S
from stoker_gcs.state.schema import RESIGNED, REVISION, SCHEDULER
from stoker_migrations.command import connected, revision_of, scripts, upgrade
from stoker_wire.errors import BadRequestError, ConflictError, DatabaseError, UnavailableError
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

FORMAT = 1
_MARK = "stoker"
_SKIPPED = ("alembic_version", "facts")
_ARRIVAL = "rowid"
_KEPT = ("blobs", "blob_uses")
"""Functions and packages never change, and processes that still run may need what came after the backup."""
_ROWS = 1000
_HEAD = struct.Struct("!I")
_MAX_FRAME_BYTES = 1 << 30
_LEVEL = 3

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode
Progress = Callable[[str, int], None]


class Manifest(NamedTuple):
    """The facts of a backup: the schema's revision, the last event, when it was, and the rows by table."""

    revision: str
    seq: int
    at_s: float
    version: str
    rows: dict[str, int]


def backup(database_url: str, path: Path, progress: Progress | None = None) -> Manifest:
    """Write a backup to a file, which is there only when it is whole.

    Raises ConflictError if the file exists, UnavailableError if it cannot be written, DatabaseError if the
    database cannot be used or has tables of another version.
    """
    found = revision_of(database_url)
    if found != REVISION:
        raise DatabaseError(
            f"the database is at {found or 'no revision'}, this version needs {REVISION}\n"
            "take the backup with the version that the cluster runs"
        )
    if path.exists():
        raise ConflictError(f"{path} exists\ngive another name, or remove it")
    manifest: list[Manifest] = []
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            connected(database_url, lambda at: manifest.append(_write(at, file, progress)))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return manifest[0]


def _write(connection: Connection, file: BinaryIO, progress: Progress | None) -> Manifest:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    else:
        connection.execute(text("BEGIN"))  # Python's module begins none for what only reads
    tables = _tables(connection)  # the first read: the moment of the backup
    seq = connection.execute(select(func.max(tables["events"].c.seq))).scalar() or 0
    now = time.time()
    counts: dict[str, int] = {}
    with _Writer(file) as out:
        out.add(
            [_MARK, FORMAT, {"revision": REVISION, "seq": seq, "at_s": now, "version": VERSION}]
        )
        for name, table in tables.items():
            columns = [one for one in table.columns if one.name != _ARRIVAL]
            out.add(["table", name, [str(one.name) for one in columns]])
            counts[name] = 0
            query = select(*columns).order_by(literal_column(_order(connection, table)))
            options = {"yield_per": _ROWS}
            for part in connection.execute(query, execution_options=options).partitions(_ROWS):
                out.add(["rows", [list(row) for row in part]])
                counts[name] += len(part)
                if progress is not None:
                    progress(name, counts[name])
        out.finish(counts)
    return Manifest(REVISION, seq, now, VERSION, counts)


def _order(connection: Connection, table: Table) -> str:
    """Return what the rows of a table are ordered by: as they came where it has that, else by their key."""
    clustered = table.dialect_options["sqlite"]["with_rowid"] is False
    if (connection.dialect.name == "sqlite" and not clustered) or _ARRIVAL in table.columns:
        return _ARRIVAL
    return ", ".join(one.name for one in table.primary_key.columns)


def _tables(connection: Connection) -> dict[str, Table]:
    known = MetaData()
    known.reflect(connection)
    return {
        str(name): table for name, table in sorted(known.tables.items()) if name not in _SKIPPED
    }


def restore(
    path: Path, database_url: str, *, force: bool = False, progress: Progress | None = None
) -> Manifest:
    """Fill an empty database from a file, all or nothing, and bring it to this version's schema.

    With ``force`` what it has is deleted first, but functions and packages. No gcs may use it meanwhile.
    Raises BadRequestError for a file that is damaged or of a newer version, ConflictError for a database
    that is not empty.
    """
    with path.open("rb") as file:
        head = _head(_Reader(file).next())
    if head.revision not in {one.revision for one in scripts().walk_revisions()}:
        raise BadRequestError(
            f"{path} is of a newer version of Stoker\n"
            f"its schema is {head.revision} (version {head.version}), this one knows {REVISION}",
            field="file",
        )
    found = revision_of(database_url)
    if found is None:
        upgrade(database_url, head.revision)
    elif found != head.revision:
        raise ConflictError(
            f"the database has tables of another schema\nit is at {found}, the backup at "
            f"{head.revision}: restore into a new database"
        )
    manifest: list[Manifest] = []
    with path.open("rb") as file:
        connected(
            database_url,
            lambda at: manifest.append(_read(at, _Reader(file), force=force, progress=progress)),
        )
    upgrade(database_url)
    return manifest[0]


def _read(
    connection: Connection, reader: _Reader, *, force: bool, progress: Progress | None
) -> Manifest:
    head = _head(reader.next())
    tables = _tables(connection)
    replaced = connection.execute(select(func.max(tables["events"].c.seq))).scalar() or 0
    for name, one in tables.items():
        if force:
            if name not in _KEPT:
                connection.execute(delete(one))
        elif (
            name != "meta"
            and connection.execute(select(literal_column("1")).select_from(one)).first()
        ):
            raise ConflictError(
                "the database is not empty\n"
                f"its table {name} has rows: restore into a new one, or replace what it has by --force"
            )
    connection.execute(delete(tables["meta"]))
    counts: dict[str, int] = {}
    table: Table | None = None
    columns: list[str] = []
    while True:
        frame = reader.next()
        match frame:
            case ["table", str(name), list(names)]:
                if name not in tables:
                    raise _damaged(f"it has a table {name!r}")
                table, columns = tables[name], names
                counts[name] = 0
            case ["rows", list(rows)] if table is not None:
                insert_rows(connection, table, columns, rows)
                counts[table.name] += len(rows)
                if progress is not None:
                    progress(table.name, counts[table.name])
            case ["end", dict(expected), str(digest)]:
                if expected != counts or digest != reader.digest_before:
                    raise _damaged("its checksum is another")
                break
            case _:
                raise _damaged("a part of it is unknown")
    _go_on_beyond(connection, tables, head.seq, max(replaced, head.seq))
    return head._replace(rows=counts)


def _go_on_beyond(
    connection: Connection, tables: dict[str, Table], last: int, highest: int
) -> None:
    """Have events and epochs numbered beyond all that processes of the cluster may have seen.

    They have gone on after the backup, and must see what happens now as new.
    """
    now_s = time.time()
    following = max(highest + 1, int(now_s * NUMBERS_PER_S))
    meta, leaders = tables["meta"], tables["leaders"]
    name = f"{GAP}{last}"
    connection.execute(delete(meta).where(meta.c.name == name))
    connection.execute(insert(meta).values(name=name, value=str(following)))
    if connection.dialect.name == "postgresql":
        connection.execute(
            text("SELECT setval(pg_get_serial_sequence('events', 'seq'), :seq)"),
            {"seq": following - 1},
        )
    else:
        connection.execute(text("DELETE FROM sqlite_sequence WHERE name = 'events'"))
        connection.execute(
            text("INSERT INTO sqlite_sequence (name, seq) VALUES ('events', :seq)"),
            {"seq": following - 1},
        )
    epoch = int(now_s * EPOCHS_PER_S)
    # None of them leads: each begins a term anew, and lists what there is.
    connection.execute(
        update(leaders).values(
            epoch=case((leaders.c.epoch < epoch, epoch), else_=leaders.c.epoch),
            expires_at_s=RESIGNED,
        )
    )
    if not connection.execute(select(leaders).where(leaders.c.name == SCHEDULER)).first():
        row = {"name": SCHEDULER, "holder": "", "url": "", "epoch": epoch}
        connection.execute(insert(leaders).values(**row, expires_at_s=RESIGNED))


def insert_rows(
    connection: Connection, table: Table, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Add rows to a table. PostgreSQL cannot store the character NUL in texts."""
    has_nul = connection.dialect.name == "postgresql"
    dialect = postgresql if has_nul else sqlite
    connection.execute(
        dialect.insert(table).on_conflict_do_nothing() if table.name in _KEPT else insert(table),
        [
            {
                name: value.replace("\0", "\ufffd")
                if has_nul and isinstance(value, str) and "\0" in value
                else value
                for name, value in zip(columns, row, strict=True)
            }
            for row in rows
        ],
    )


def _head(frame: list[Any]) -> Manifest:
    match frame:
        case ["stoker", int(number), dict(facts)] if number <= FORMAT:
            try:
                return Manifest(
                    str(facts["revision"]),
                    int(facts["seq"]),
                    float(facts["at_s"]),
                    str(facts["version"]),
                    {},
                )
            except (KeyError, TypeError, ValueError):
                raise _damaged("its beginning says too little") from None
        case ["stoker", int(number), dict()]:
            raise BadRequestError(
                f"the file has format {number}, this version reads {FORMAT}\n"
                "restore it with the version of Stoker that made it",
                field="file",
            )
    raise _damaged("it does not begin as one")


def _damaged(why: str) -> BadRequestError:
    return BadRequestError(f"the file is no whole backup of Stoker\n{why}", field="file")


class _Writer:
    """The frames of a backup, on their way into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._zipped = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0)
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zipped.close()

    def add(self, frame: list[Any]) -> None:
        body = _encode(frame)
        whole = _HEAD.pack(len(body)) + body
        self._hash.update(whole)
        try:
            self._zipped.write(whole)
        except OSError as error:
            raise UnavailableError(f"the backup cannot be written\n{error}") from None

    def finish(self, counts: dict[str, int]) -> None:
        self.add(["end", counts, self._hash.hexdigest()])


class _Reader:
    """The frames of a backup; ``digest_before`` is the hash of all before the last one that was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._zipped = gzip.GzipFile(fileobj=file, mode="rb")
        self._hash = hashlib.sha256()
        self.digest_before = ""

    def next(self) -> list[Any]:
        """Return the next frame; BadRequestError where there is none."""
        with _readable():
            head = self._zipped.read(_HEAD.size)
            nbytes = _HEAD.unpack(head)[0]
            if nbytes > _MAX_FRAME_BYTES:
                raise ValueError(f"a part of it has {nbytes} bytes")
            body = self._zipped.read(nbytes)
            self.digest_before = self._hash.hexdigest()
            self._hash.update(head + body)
            return _decode(body)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, struct.error, ValueError, msgspec.DecodeError) as error:
        raise _damaged(str(error) or type(error).__name__) from None
