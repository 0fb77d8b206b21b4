"""``stoker timeline``: what ran, written as a trace while it is read."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json

if TYPE_CHECKING:
    from stoker.api.tracing.timeline import Event

    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # generic only in newer versions of click

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST = 10_000_000


class Moment(_FloatType):
    """A time: so long ago (10m, 2h), in ISO 8601, or in seconds since the epoch."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        if span := _SPAN.fullmatch(value):
            return time.time() - float(span[1]) * _UNITS[span[2]]
        try:
            at_s = float(value) if value[:1].isdigit() and "-" not in value else _iso(value)
        except (ValueError, OverflowError):
            at_s = -1.0
        if not 0 <= at_s <= 1e11:
            self.fail(
                f"{value!r} is no time; write it like 10m (ago), 2026-05-04T12:00:00 (here) or "
                "1777896000",
                param,
                ctx,
            )
        return at_s


def _iso(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@click.command()
@click.argument("job", required=False, metavar="[JOB]", type=Id("job"))
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False), default="timeline.json",
              show_default=True, help="File to write; - for stdout.")  # fmt: skip
@click.option("--job", "job_id", metavar="ID", type=Id("job"), help="The same as JOB.")
@click.option("--since", type=Moment(), help="Only what ran after it: 10m (ago), or a time.")
@click.option("--until", type=Moment(), help="Only what ran before it.")
@click.option(
    "--limit", type=click.IntRange(1, _MOST), default=100_000, show_default=True,
    help="Attempts that are read at most, the newest.",
)  # fmt: skip
@cluster_options
def timeline(
    path: str,
    job: str | None,
    job_id: str | None,
    since: float | None,
    until: float | None,
    limit: int,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Write what ran where and when as Chrome trace events, of JOB or of all that you may see.

    Open the file in Perfetto (ui.perfetto.dev) or in chrome://tracing: a row per worker and per actor, with
    arrows from callers to what they called, your own spans, transfers and spills. --json prints where it is,
    and what is not in it.
    """
    from stoker.api.tracing.reading import TimelineReader

    client = http_client(address, token)
    if job is not None and job_id is not None:
        raise click.UsageError("give JOB or --job, one of both")
    named = job or job_id
    reader = TimelineReader(
        client,
        resolve_id(client, named) if named else "",
        limit=limit,
        since_s=since or 0.0,
        until_s=until,
    )
    if path == "-":
        _write(sys.stdout.buffer, reader.events())
        count = 0
    else:
        try:
            with _replaced(path) as file:
                count = _write(file, reader.events())
        except OSError as error:
            raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    notes = reader.notes()
    if as_json and path != "-":
        print_json(
            {"file": path, "attempts": reader.timeline.attempts, "events": count, "notes": notes}
        )
        return
    if path != "-":
        echo(
            f"{reader.timeline.attempts} attempts in {path}; open it in Perfetto or chrome://tracing"
        )
    for note in notes:
        echo(note, err=True)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of another once it is whole."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _write(file: IO[bytes], events: Iterator[Event]) -> int:
    """Write events as a JSON array, one by one; return how many."""
    import msgspec

    encode, count = msgspec.json.Encoder().encode, 0
    for event in events:
        file.write(b",\n" if count else b"[\n")
        file.write(encode(event))
        count += 1
    file.write(b"\n]\n" if count else b"[]\n")
    return count
