"""``@stoker.remote`` on functions: typed handles whose ``.remote()`` submits a task."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from stoker.runtime import current
from stoker.runtime.actors.parameters import POSITIONAL
from stoker.runtime.options.actor_options import ActorOptions
from stoker.runtime.options.demands import check_options, demand_of, merged
from stoker.runtime.options.documentation import with_options
from stoker.runtime.options.options import TaskOptions
from stoker_wire.messages.cluster import LeaseKind

if TYPE_CHECKING:
    from stoker.api.actors import ActorClass
    from stoker.runtime.actors.graphs import CallNode
    from stoker.runtime.driver.inline import InlineCalls
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.tasks.task_spec import FunctionSpec

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class RemoteFunction(Generic[P, R]):
    """A function that runs as a task. Made by ``@stoker.remote``; call it with ``.remote(...)``."""

    def __init__(self, function: Callable[P, R], options: TaskOptions) -> None:
        self._function = function
        self._options = options
        self._spec: FunctionSpec | None = None
        self._spec_of: Runtime | None = None
        self._captured_by = ""
        """The placement group of the code that called when the spec was made."""
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        """The name of the task in lists and logs."""
        return self._options.name or self._function.__qualname__

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Submit a call and return its ref at once.

        A list of refs, or a generator of them, with ``num_returns`` other than 1. Top-level refs
        among the arguments arrive as their values.
        """
        runtime = current.runtime()
        if runtime.inline is not None:
            return self._run_inline(runtime.inline, args, kwargs)  # type: ignore[no-any-return]
        spec = self._spec
        captured_by = runtime.job.captured_by
        if spec is None or self._spec_of is not runtime or self._captured_by != captured_by:
            spec = self._make_spec(runtime)
        if kwargs or len(args) not in self._positional:
            self._check_signature(args, kwargs)
        return runtime.tasks.submit(spec, args, kwargs)  # type: ignore[no-any-return]

    def _run_inline(self, inline: InlineCalls, args: tuple[Any, ...], kwargs: Any) -> Any:
        from stoker.runtime.tasks.functions import is_generator

        self._check_signature(args, kwargs)
        return inline.call(
            self._function,
            args,
            kwargs,
            name=self.name,
            num_returns=self._options.num_returns,
            generates=is_generator(self._function),
        )

    def bind(self, *args: Any, **kwargs: Any) -> CallNode:
        """Return this call as a node of a graph, which its ``execute()`` makes; arguments may be nodes."""
        from stoker.runtime.actors.graphs import CallNode

        return CallNode(self, args, kwargs)

    def options(self, **options: Any) -> RemoteFunction[P, R]:
        """Return this function with other options; unknown ones are errors."""
        what = f"remote function {self.name}"
        return type(self)(self._function, merged(self._options, options, what=what))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise TypeError(
            f"{self.name} is a remote function: call {self.name}.remote(...) and stoker.get() its "
            f"result, or call the plain function as {self.name}.function(...)"
        )

    @property
    def function(self) -> Callable[P, R]:
        """The plain function."""
        return self._function

    def __repr__(self) -> str:
        return f"<stoker.remote function {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function, self._options)

    def _check_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}.remote(): {error}; it takes {self._signature}") from None

    @functools.cached_property
    def _positional(self) -> range:
        """The numbers of arguments, all of them positional, that are right without a closer look."""
        each = self._signature.parameters.values()
        required = [p for p in each if p.default is p.empty and p.kind not in _REST]
        if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
            return range(0)
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in each):
            return range(len(required), sys.maxsize)
        return range(len(required), sum(p.kind in POSITIONAL for p in each) + 1)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._function)

    def _make_spec(self, runtime: Runtime) -> FunctionSpec:
        from stoker.api.objects import durable
        from stoker.runtime.tasks.functions import (
            DYNAMIC,
            INLINE_NBYTES,
            TEMPLATE_NUMBERS,
            is_generator,
            pickled,
            pickled_exception_types,
            returns_of,
        )
        from stoker.runtime.tasks.task_spec import FunctionSpec
        from stoker_wire.messages.data import Template

        options = self._options
        function = durable(self._function, options, what=f"remote function {self.name}")
        blob, digest, refs = pickled(function, what=f"function {self.name}")
        count, streaming = returns_of(options.num_returns, generates=is_generator(self._function))
        demand = demand_of(
            options,
            job_id=runtime.job.job_id,
            kind=LeaseKind.TASK,
            runtime_env=runtime.job.runtime_env_of(options.runtime_env),
            strategy=runtime.job.strategy_of(options.scheduling_strategy),
            default_cpus=1.0,
            name=self.name,
        )
        template = Template(
            number=next(TEMPLATE_NUMBERS),
            function=digest,
            name=self.name,
            num_returns=count,
            streaming=streaming,
            timeout_s=options.timeout or 0.0,
            max_calls=options.max_calls,
            retry_exceptions=pickled_exception_types(options.retry_exceptions),
            history=options.enable_task_events,
            dynamic=options.num_returns == DYNAMIC,
            blob=blob if len(blob) <= INLINE_NBYTES else b"",
        )
        self._spec = FunctionSpec(
            submitter=runtime.tasks,
            function=digest,
            blob=blob,
            name=self.name,
            template=template,
            options=options,
            demand=demand,
            refs=refs,
        )
        self._spec_of, self._captured_by = runtime, runtime.job.captured_by
        return self._spec


@overload
def remote(function: type[C], /) -> ActorClass[C]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...
@overload
def remote(**options: Any) -> Callable[[Any], Any]: ...


@with_options(TaskOptions, ActorOptions)
def remote(function: Any = None, /, **options: Any) -> Any:
    """Make a function a task, or a class an actor: ``@remote`` or ``@remote(num_gpus=1, ...)``.

    An unknown option raises ``UnknownOptionError``, which names the nearest.
    """
    if function is None:
        return lambda decorated: remote_with(decorated, options)
    return remote_with(function, options)


def remote_with(target: Any, options: dict[str, Any]) -> Any:
    """Return ``target`` as a remote function or class with ``options``."""
    name = getattr(target, "__qualname__", repr(target))
    if isinstance(target, type):
        from stoker.api.actors import ActorClass

        return ActorClass(target, check_options(ActorOptions, options, what=f"remote class {name}"))
    if not callable(target):
        raise TypeError(f"@stoker.remote takes a function or a class, not {type(target).__name__}")
    return RemoteFunction(
        target, check_options(TaskOptions, options, what=f"remote function {name}")
    )
