"""The W3C trace context of calls: where it comes from, and what a callee gets of it.

It travels as one text, the ``traceparent`` and, behind a space, the ``tracestate``. A ``+`` before it says
that the caller records a span of the call, of which the callee's is a child. Nothing is looked up, and
nothing travels, before there is a context in this process: :attr:`Traces.of_caller` is None until then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol

from xxhash import xxh3_64_hexdigest

from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker_wire.http.trace_context import PARENT_LENGTH, joined, of_headers, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stoker_wire.messages.data import Failed

OPENTELEMETRY = "opentelemetry.trace"
"""The module that a program with spans of its own has imported."""
RECORDED = "+"
_SPAN = slice(36, 52)
_IDS = (1 << 64) - 1
_ATTEMPTS = 0x1FF


def is_sampled(trace: str) -> bool:
    """Return whether the spans of a context are wanted."""
    return bool(int(trace[53:PARENT_LENGTH], 16) & 1)


def within(trace: str, span_id: str) -> str:
    """Return the context inside a span of it."""
    return f"{trace[: _SPAN.start]}{span_id}{trace[_SPAN.stop :]}"


def span_of(trace: str) -> str:
    """Return the id of the span whose inside a context is."""
    return trace[_SPAN]


# The ids of the spans of a call follow from its task's, so they need not travel.


def call_span_id(task_id: str) -> str:
    """Return the id of the span of a call at its caller."""
    return xxh3_64_hexdigest(task_id.encode())


def run_span_id(task_id: str, attempt: int) -> str:
    """Return the id of the span of an attempt at its worker."""
    return xxh3_64_hexdigest(task_id.encode(), attempt + 1)


class _Destination(Protocol):
    """The place where spans go."""

    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class Tracer(Protocol):
    """The export of spans, as :class:`stoker.runtime.process.tracing.tracer.Tracer` has it."""

    @property
    def to(self) -> _Destination: ...
    def new_id(self) -> str: ...
    def begin_request(self, given: str) -> str: ...
    def end_request(
        self, given: str, trace: str, name: str, began_at_s: float, error: BaseException | None
    ) -> None: ...
    def called(
        self,
        trace: str,
        task_id: str,
        name: str,
        submitted_at_s: float,
        job_id: str,
        actor_id: str,
        failed: Failed | None,
    ) -> None: ...
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
    ) -> None: ...
    def named(
        self,
        parent: str,
        trace: str,
        name: str,
        started_at_s: float,
        ended_at_s: float,
        attributes: Mapping[str, Any],
        error: BaseException | None,
    ) -> None: ...
    def close(self, within_s: float) -> None: ...


class Traces:
    """The trace contexts of this process."""

    def __init__(self) -> None:
        self.of_caller: Callable[[], str] | None = None
        """Returns what a call by the calling code carries, '' for nothing; None until there is a context."""
        self.of_process = ""
        """That of code in no task: a driver, or the constructor of an actor."""
        self.tracer: Tracer | None = None
        """Exports spans, where that is configured."""
        self.in_code: ContextVar[str] = ContextVar("stoker_trace", default="")
        """That of a request, or of a span within a task."""
        self._provided = False
        """Whether the spans of OpenTelemetry's own API are exported too."""
        self._last_task: tuple[TaskInfo | None, str] = (None, "")
        self._last_travels = ("", "")
        """The last context, and how it travels."""
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.export_by(None)  # its thread is the parent's

    def export_by(self, tracer: Tracer | None) -> None:
        """Export spans by ``tracer``, or none."""
        self.tracer = tracer
        self._last_task, self._last_travels = (None, ""), ("", "")

    def enter_process(self, trace: str) -> None:
        """Let what this process does outside of tasks belong to a context."""
        if trace:
            self.of_process = trace
            self.of_caller = self._travels
        elif OPENTELEMETRY in sys.modules:
            self.of_caller = self._travels

    @contextlib.contextmanager
    def request(self, headers: Mapping[str, str], name: str) -> Iterator[None]:
        """Let what a coroutine does for a request belong to that request's context, and to a span of it."""
        given, tracer = of_headers(headers), self.tracer
        trace = given if tracer is None else tracer.begin_request(given)
        if not trace:
            yield
            return
        self.of_caller = self._travels
        token, began_at_s = self.in_code.set(trace), time.time()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.in_code.reset(token)
            if tracer is not None:
                tracer.end_request(given, trace, name, began_at_s, error)

    def begin(self) -> None:
        """Look up the context of each call from now on: one has come."""
        if self.of_caller is None:
            self.of_caller = self._travels

    def of_call(self, call_trace: str, task_id: str, attempt: int) -> str:
        """Return the context in which an attempt runs here, given what its call carries."""
        trace = call_trace.lstrip(RECORDED)
        if not trace or joined(*split(trace)) != trace:
            return ""
        if self.tracer is not None and is_sampled(trace):
            return within(trace, run_span_id(task_id, attempt))
        return within(trace, call_span_id(task_id)) if call_trace[0] == RECORDED else trace

    def of_task(self, info: TaskInfo) -> str:
        """Return the context in which a task runs; the last one is remembered."""
        known, trace = self._last_task
        if known is not info:
            trace = self.of_call(info.trace, info.task_id, info.attempt) if info.trace else ""
            self._last_task = info, trace
        return trace

    def enter_span(self, trace: str) -> tuple[Token[str], Any]:
        """Let what the calling code does belong to a span of it; return what :meth:`leave_span` takes."""
        return self.in_code.set(trace), self.attach(trace)

    def leave_span(self, tokens: tuple[Token[str], Any]) -> None:
        """End what :meth:`enter_span` began; in another context than that there is nothing to end."""
        token, attached = tokens
        with contextlib.suppress(ValueError):
            self.in_code.reset(token)
        if attached is not None:
            self.detach(attached)

    def attach_task(self, info: TaskInfo) -> Any:
        """Make the context of a task OpenTelemetry's own, as :meth:`attach` does."""
        return self.attach(self.of_task(info)) if OPENTELEMETRY in sys.modules else None

    def attach(self, trace: str) -> Any:
        """Make a context OpenTelemetry's own, if the program uses that; return what :meth:`detach` takes."""
        if OPENTELEMETRY not in sys.modules:
            return None
        from stoker.runtime.process.tracing import bridge

        if self.tracer is not None and not self._provided:
            self._provided = True
            bridge.provide(self.tracer.to.url, dict(self.tracer.to.headers))
        return bridge.attach(trace)

    def detach(self, token: Any) -> None:
        """End what :meth:`attach` began."""
        from stoker.runtime.process.tracing import bridge

        bridge.detach(token)

    def close(self, within_s: float) -> None:
        """Send the spans that wait, within some time, and export no more."""
        tracer = self.tracer
        self.export_by(None)
        self.of_process, self.of_caller = "", None
        if tracer is not None:
            tracer.close(within_s)
        if self._provided:
            from stoker.runtime.process.tracing import bridge

            self._provided = False
            bridge.flush(within_s)

    def _of_code(self) -> str:
        if OPENTELEMETRY in sys.modules:
            from stoker.runtime.process.tracing import bridge

            trace = bridge.current()
            if trace:
                return trace
        trace = self.in_code.get()
        if trace:
            return trace
        info = current_task.get()
        return self.of_process if info is None else self.of_task(info)

    def _travels(self) -> str:
        trace = self._of_code()
        known, travels = self._last_travels
        if known != trace:
            recorded = bool(trace) and self.tracer is not None and is_sampled(trace)
            travels = RECORDED + trace if recorded else trace
            self._last_travels = trace, travels
        return travels

    def now(self) -> str:
        """Return the context of the calling code, '' for none."""
        return self._of_code() if self.of_caller is not None else ""


_CONFIGURING = (
    "TRACEPARENT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


def is_configured(environ: Mapping[str, str], endpoint: str) -> bool:
    """Return whether a process has a context from its parent, or may have to export spans."""
    return bool(endpoint) or any(name in environ for name in _CONFIGURING)


TRACES = Traces()
