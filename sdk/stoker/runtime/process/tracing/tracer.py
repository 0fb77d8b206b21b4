"""The export of this process's spans: added by any thread, encoded and sent by one of its own.

Nothing waits for it. While the collector is away a bounded number of spans waits, further ones are counted
and dropped. It takes the spans of contexts that are sampled, and makes new contexts.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker.runtime.process.tracing.context import (
    RECORDED,
    TRACES,
    is_sampled,
    span_of,
    within,
)
from stoker.runtime.process.tracing.exporter import ExportError, Sender, destination
from stoker.runtime.process.tracing.otlp import CallData, Encoder, Kind, Problem, SpanData
from stoker.runtime.process.tracing.spans import bounded
from stoker_wire.http.trace_context import of_variables
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.tracing.exporter import Destination
    from stoker_wire.messages.data import Failed

MAX_WAITING = 65_536
_BATCH = 4096
_EVERY_S = 0.5
_LONGEST_PAUSE_S = 30.0
_WARN_S = 300.0
_MAX_TEXT = 4096
"""Characters of an error's message, and of its traceback."""

_log = logging.getLogger(__name__)


class Tracer:
    """The spans of this process on their way to a collector."""

    def __init__(self, to: Destination, resource: Mapping[str, Any]) -> None:
        self.to = to
        self.dropped = 0
        self._encoder = Encoder(resource, VERSION)
        self._sender = Sender(to)
        self._waiting: deque[SpanData | CallData] = deque()
        self._ids = itertools.count(random.SystemRandom().getrandbits(64))
        self._wake = threading.Event()
        self._sleeps = True
        """Whether the thread is to be woken."""
        self._last_s = 0.0
        """How long the last spans may take."""
        self._closed = threading.Event()
        self._process: tuple[str, str, str, float, bool] | None = None
        """The span of this process: its context, its id, its name, its start, and whether it is a root."""
        self._pause_s = 0.0
        self._warned_at_s = -_WARN_S
        self._thread = threading.Thread(target=self._run, name="stoker-spans", daemon=True)
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------------

    def called(
        self,
        trace: str,
        task_id: str,
        name: str,
        submitted_at_s: float,
        job_id: str,
        actor_id: str,
        failed: Failed | None,
    ) -> None:
        """Add the span of a call that is settled, at its caller; ``trace`` as it travelled."""
        if trace[0] == RECORDED:
            problem = None if failed is None else _problem_of(failed)
            self._add((
                Kind.CLIENT, trace, task_id, 0, name, submitted_at_s, time.time(), job_id, actor_id,
                problem,
            ))  # fmt: skip

    def ran(
        self,
        trace: str,
        task_id: str,
        attempt: int,
        name: str,
        started_at_s: float,
        ended_at_s: float,
        job_id: str,
        actor_id: str,
        failed: Failed | None,
    ) -> None:
        """Add the span of an attempt that has ended here; ``trace`` as its call carried it."""
        problem = None if failed is None else _problem_of(failed)
        self._add((
            Kind.SERVER, trace, task_id, attempt, name, started_at_s, ended_at_s, job_id, actor_id,
            problem,
        ))  # fmt: skip

    def named(
        self,
        parent: str,
        trace: str,
        name: str,
        started_at_s: float,
        ended_at_s: float,
        attributes: Mapping[str, Any],
        error: BaseException | None,
    ) -> None:
        """Add a span that the user's code has named; ``trace`` is the context within it."""
        problem = None if error is None else Problem(type(error).__qualname__, _text_of(error))
        span_id = span_of(trace)
        self.add(SpanData(
            parent, span_id, name, Kind.INTERNAL, started_at_s, ended_at_s, problem=problem,
            attributes=bounded(attributes),
        ))  # fmt: skip

    def add(self, span: SpanData) -> None:
        """Add another span that has ended."""
        if is_sampled(span.trace):
            self._add(span)

    def _add(self, span: SpanData | CallData) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(span)
        if self._sleeps:
            self._sleeps = False
            self._wake.set()

    def new_id(self) -> str:
        """Return the id of a span that no call has."""
        return f"{next(self._ids) * 0x9E3779B97F4A7C15 & (1 << 64) - 1 or 1:016x}"

    def new_root(self) -> str:
        """Return a context of a new trace, sampled by chance as the configuration says."""
        sampled = self.to.ratio >= 1 or random.random() < self.to.ratio
        return f"00-{os.urandom(16).hex()}-{self.new_id()}-{'01' if sampled else '00'}"

    def begin_request(self, given: str) -> str:
        """Return the context within a request, which may have come with one."""
        return within(given, self.new_id()) if given else self.new_root()

    def end_request(
        self, given: str, trace: str, name: str, began_at_s: float, error: BaseException | None
    ) -> None:
        """Add the span of a request."""
        problem = None if error is None else Problem(type(error).__qualname__, _text_of(error))
        method, _, route = name.partition(" ")
        self.add(SpanData(
            given or trace, span_of(trace), name, Kind.SERVER, began_at_s, time.time(),
            problem=problem, is_root=not given,
            attributes={"http.request.method": method, "http.route": route},
        ))  # fmt: skip

    def begin_process(self, parent: str, name: str) -> str:
        """Begin the span of this process, in its parent's context if there is one; return its context."""
        trace = within(parent, self.new_id()) if parent else self.new_root()
        self._process = (parent or trace, span_of(trace), name, time.time(), not parent)
        return trace

    def _end_process(self) -> None:
        if self._process is not None:
            trace, span_id, name, began_at_s, is_root = self._process
            self._process = None
            self.add(SpanData(
                trace, span_id, name, Kind.INTERNAL, began_at_s, time.time(), is_root=is_root
            ))  # fmt: skip

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._sleeps = True
            if not self._waiting:
                self._wake.wait()
            self._sleeps = False
            self._wake.clear()
            self._closed.wait(max(_EVERY_S, self._pause_s))
            if not self._closed.is_set():
                self._send_all(None)
        self._send_all(self._last_s)
        self._sender.close()

    def _send_all(self, within_s: float | None) -> bool:
        """Send what waits, for at most ``within_s``; return False if some of it has to wait on."""
        until_s = None if within_s is None else time.monotonic() + within_s
        while self._waiting:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            count = min(len(self._waiting), _BATCH)
            batch = [self._waiting.popleft() for _ in range(count)]
            if not self._send(batch, left_s):
                self._waiting.extendleft(reversed(batch))
                return False
        return True

    def _send(self, batch: list[SpanData | CallData], within_s: float | None) -> bool:
        try:
            body = self._encoder.request(batch)
        except Exception as error:  # of one span: the export of later ones goes on
            self._warn(f"{error!r}")
            self.dropped += len(batch)
            return True
        try:
            self._sender.send(body, within_s)
        except ExportError as error:
            self._warn(f"{error}")
            if not error.retry:
                self.dropped += len(batch)
                return True
            self._pause_s = min(max(2 * self._pause_s, 1.0), _LONGEST_PAUSE_S)
            return False
        self._pause_s = 0.0
        return True

    def _warn(self, why: str) -> None:
        if time.monotonic() - self._warned_at_s >= _WARN_S:
            self._warned_at_s = time.monotonic()
            _log.warning(
                "spans are not taken by %s: %s; %d wait, %d were dropped",
                self.to.url, why, len(self._waiting), self.dropped,
            )  # fmt: skip

    def close(self, within_s: float) -> None:
        """Send what waits within some time, and end the thread."""
        self._end_process()
        self._last_s = within_s
        self._closed.set()
        self._wake.set()
        self._thread.join(within_s)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_TEXT]
    except Exception:  # of the user's class
        return ""


def _problem_of(failed: Failed) -> Problem:
    kind = failed.type_name or failed.code
    return Problem(kind, failed.message[:_MAX_TEXT], failed.traceback[-_MAX_TEXT:])


def configure(
    environ: Mapping[str, str], endpoint: str, resource: Mapping[str, Any], *, span: str = ""
) -> None:
    """Export this process's spans from now on, if that is configured; take over its parent's context.

    ``span`` names one that lasts as long as the process is a driver: all that it calls is within it.
    """
    to = destination(environ, endpoint)
    known, tracer = TRACES.tracer, None
    if known is not None and to != known.to:
        TRACES.export_by(None)
        known.close(0.0)
    if to is not None and to.problem:
        _log.warning("no spans are exported: %s", to.problem)
    elif to is not None and TRACES.tracer is None:
        name = environ.get("OTEL_SERVICE_NAME", "")
        named = {"service.name": name or "stoker"}
        tracer = Tracer(to, {**resource, **_given(environ), **named})
        TRACES.export_by(tracer)
    given = of_variables(environ)
    if tracer is not None and span:
        given = tracer.begin_process(given, span)
    TRACES.enter_process(given)


def resource_of(identity: Identity) -> dict[str, Any]:
    """Return the attributes of this process as OpenTelemetry names them."""
    node = identity.node
    return {
        "service.instance.id": identity.peer_id,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "stoker",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": VERSION,
        "stoker.node.id": node.node_id if node is not None else "",
    }


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    pairs = (one.partition("=") for one in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    return {name.strip(): value.strip() for name, is_pair, value in pairs if is_pair}
