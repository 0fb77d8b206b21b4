"""Reports of training on their way to SQL: in frames of the spool, beside the records of attempts.

They take that way, not one of their own, as it loses nothing: what a process has appended to its file
survives it, and waits there for a gcs that is away (:mod:`stoker_wire.data.spool`). The body of such a
frame is a map, that of a frame of attempts a list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from stoker_wire.data.spool import HEAD, frame_nbytes
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.common import Id, Time

MAX_STEP = 10**15
MAX_NAME = 64
"""Characters of the name of a run and of a metric."""
MAX_METRICS = 64
"""Metrics of one run."""
MAX_RUNS = 1000
"""Runs of one job."""
RUN_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:=@-]*$"
METRIC_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./:=@ -]*$"
_REPORTS_PER_FRAME = 500

RunName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=RUN_PATTERN)]
MetricName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=METRIC_PATTERN)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]


class TrainingReport(msgspec.Struct, array_like=True, frozen=True):
    """The values of a step, of a run of a job; ``actor_id`` is that of the actor which reports, if one does.

    Values may be NaN and infinite. In the order of its bytes: new members only at the end, with a default.
    """

    job_id: Id
    actor_id: str
    run: RunName
    step: Step
    at_s: Time
    values: Annotated[dict[MetricName, float], msgspec.Meta(min_length=1, max_length=MAX_METRICS)]


class _Body(msgspec.Struct):
    training: list[TrainingReport]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Body).decode


def report_frames(reports: Sequence[TrainingReport], dropped: int = 0) -> bytes:
    """Return reports as frames; ``dropped`` is how many records their writer lost before them."""
    frames = bytearray()
    for start in range(0, len(reports), _REPORTS_PER_FRAME):
        some = list(reports[start : start + _REPORTS_PER_FRAME])
        body = _pack(_Body(some))
        frames += HEAD.pack(len(body), len(some), 0 if start else dropped) + body
    return bytes(frames)


def has_reports(body: memoryview) -> bool:
    """Return whether the body of a frame has reports of training."""
    return len(body) > 0 and body[0] & 0xF0 == 0x80


def reports_in(data: bytes) -> list[TrainingReport]:
    """Return the reports of training in whole frames; BadRequestError if one cannot be read."""
    reports: list[TrainingReport] = []
    try:
        for body in _bodies(data):
            if has_reports(body):
                reports += _unpack(body).training
    except (struct.error, ValueError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body has no reports of training\n{error}") from None
    return reports


def _bodies(data: bytes) -> Iterator[memoryview]:
    view, at = memoryview(data), 0
    while at < len(data):
        begin = at + HEAD.size
        at = begin + frame_nbytes(data, at)
        yield view[begin:at]
