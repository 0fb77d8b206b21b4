"""``stoker.profile``: names a part of a driver, a task or an actor's call, for its timeline and its story."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.exceptions import WrongTypeError
from stoker.runtime.process.tracing.context import TRACES, within
from stoker.runtime.process.tracing.spans import MAX_TEXT, SPANS

if TYPE_CHECKING:
    from types import TracebackType

F = TypeVar("F", bound=Callable[..., Any])


class profile:
    """Name the code in a ``with`` block, or a function::

        with stoker.profile("load", rows=1000):
            ...

        @stoker.profile("step")
        async def step(): ...

    The span is recorded with the attempt of the task or actor's call in which it is, with its attributes
    (texts, numbers, booleans; up to 16). ``stoker timeline`` and the task's story show it, and it is exported
    where OTLP is configured. Up to 256 spans of an attempt are kept; what is beyond is counted.
    """

    __slots__ = ("_attributes", "_name", "_outer", "_started_at_s", "_trace")

    def __init__(self, name: str, /, **attributes: Any) -> None:
        if type(name) is not str:
            raise WrongTypeError(
                f"profile() takes a name, not {type(name).__name__}\n"
                'write stoker.profile("name"), also where it decorates a function',
                field="name",
            )
        self._name = name if len(name) <= MAX_TEXT else name[:MAX_TEXT]
        self._attributes = attributes
        self._trace = ""

    def __enter__(self) -> profile:
        if TRACES.tracer is not None:
            self._enter_trace()
        self._started_at_s = time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ended_at_s = time()
        if self._trace:
            self._leave_trace(ended_at_s, error)
        SPANS.add(
            self._name,
            self._started_at_s,
            ended_at_s,
            self._attributes,
            "" if kind is None else kind.__name__,
        )

    def __call__(self, function: F) -> F:
        name, attributes = self._name, self._attributes
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise WrongTypeError(
                f"profile() decorates no generator, and {function.__qualname__} is one\n"
                "use it as a with block around the parts of the generator",
                field="function",
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with profile(name, **attributes):
                    return await function(*args, **kwargs)

            return call_async  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with profile(name, **attributes):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    def _enter_trace(self) -> None:
        parent = TRACES.now()
        if parent and TRACES.tracer is not None:
            self._trace = parent
            self._outer = TRACES.enter_span(within(parent, TRACES.tracer.new_id()))

    def _leave_trace(self, ended_at_s: float, error: BaseException | None) -> None:
        trace, parent, self._trace = TRACES.now(), self._trace, ""
        TRACES.leave_span(self._outer)
        if TRACES.tracer is not None and trace:
            TRACES.tracer.named(
                parent,
                trace,
                self._name,
                self._started_at_s,
                ended_at_s,
                self._attributes,
                error,
            )
