"""Handles to actors, and their methods: what ``Class.remote()`` returns, and how it is pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from stoker.runtime.actors.info import (
    RAY_NAMES,
    SYSTEM_METHODS,
    HandleInfo,
    MethodInfo,
    check_group,
)
from stoker.runtime.options.demands import merged
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.process.current_runtime import CurrentRuntime
from stoker.runtime.process.notebook import html_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.runtime.actors.calls import ActorCalls
    from stoker.runtime.actors.graphs import CallNode
    from stoker.runtime.job import JobContext
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.task_spec import FunctionSpec

C = TypeVar("C")


class _Inline(Protocol):
    """The actors of a driver in local mode."""

    def call_method(
        self,
        handle: HandleInfo,
        name: str,
        method: MethodInfo,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any: ...


class _Runtime(Protocol):
    """The parts of this process's runtime that handles use."""

    io: IoThread
    job: JobContext
    actors: ActorCalls

    @property
    def inline(self) -> _Inline | None: ...


CURRENT: CurrentRuntime[_Runtime] = CurrentRuntime()


class ActorHandle(Generic[C]):
    """A living actor: ``handle.method.remote(...)``. Handles can be passed to tasks and actors.

    Besides the methods of its class, every actor has three: ``handle.ready()`` returns a ref that is
    there once the constructor has returned (a class with a ``ready`` of its own keeps that; then and
    everywhere, ``handle.__stoker_ready__.remote()`` does the same). ``__stoker_terminate__.remote()``
    ends the actor after the calls before it, with its hooks, like ``exit_actor()``.
    ``__stoker_call__.remote(function, ...)`` calls ``function(instance, ...)`` in the actor.

    When no process has a handle any more, the actor ends once its calls are done; so it does when the
    process that started it ends. Named actors outlive their handles, detached ones both. A handle
    that you pickle yourself keeps its actor as long as the process lives that pickled it.
    """

    def __init__(self, info: HandleInfo, mark: ObjectRef[None] | None = None) -> None:
        self._info = info
        self._mark = mark
        """A ref to a mark of its owner: the actor lives while such refs do. None: it outlives handles."""
        # Specs and not methods: a method holds its handle, and a cycle would outlive the last ref.
        self._specs: dict[str, tuple[FunctionSpec, _Runtime]] = {}

    @property
    def actor_id(self) -> str:
        """The actor's id, as the HTTP API shows it."""
        return self._info.actor_id

    def __getattr__(self, name: str) -> ActorMethod:
        if name == "_info":  # asked while the handle is unpickled
            raise AttributeError(name)
        name = RAY_NAMES.get(name, name)
        method = self._info.methods.get(name) or SYSTEM_METHODS.get(name)
        if method is not None:
            return ActorMethod(self, name, method, self._specs)
        if name == "ready":
            return _Ready(self, "__stoker_ready__", SYSTEM_METHODS["__stoker_ready__"], {})
        if name.startswith("_"):
            raise AttributeError(name)
        from stoker_wire.suggestions import suggestion

        raise AttributeError(
            f"actor {self._info.class_name} has no method {name!r}; "
            f"{suggestion(name, self._info.methods)}"
        )

    def __repr__(self) -> str:
        return f"Actor({self._info.class_name}, {self._info.actor_id})"

    def _repr_html_(self) -> str:
        methods = ", ".join(name for name in self._info.methods if not name.startswith("_"))
        rows = {"class": self._info.class_name, "id": self._info.actor_id, "methods": methods}
        return html_table("Actor", rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other.actor_id == self.actor_id

    def __hash__(self) -> int:
        return hash(self._info.actor_id)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mark is not None:
            from stoker.runtime.serialization.pickling import is_packing

            if not is_packing():  # nobody counts the copies of these bytes
                CURRENT.get().actors.pin(self._mark)
        return ActorHandle, (self._info, self._mark)

    def __del__(self) -> None:
        runtime = CURRENT.runtime
        if getattr(self, "_mark", None) is None or runtime is None or not runtime.io.running:
            return
        self._specs, self._mark = {}, None  # their refs go before the loop thread looks
        runtime.io.wake()


class ActorMethod:
    """One method of one actor. Keeps the actor's handle alive; travels as the handle does."""

    def __init__(
        self,
        handle: ActorHandle[Any],
        name: str,
        info: MethodInfo,
        specs: dict[str, tuple[FunctionSpec, _Runtime]],
    ) -> None:
        self._handle = handle
        self._name = name
        self._info = info
        self._specs = specs
        """The specs that calls with the same options share, each with the runtime that it is for."""

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call the method and return its ref at once.

        Calls of one caller start in order where one runs at a time (an actor, or a concurrency
        group, with ``max_concurrency=1``). A retry keeps no order.
        Arguments that the method does not take are a ``TypeError`` here.
        """
        parameters = self._info.parameters
        if parameters is not None and (
            kwargs or not parameters.min_positional <= len(args) <= parameters.max_positional
        ):
            parameters.check(args, kwargs, f"{self._handle._info.class_name}.{self._name}.remote()")
        runtime = CURRENT.get()
        if runtime.inline is not None:
            call = self._handle._info, self._name, self._info, args, kwargs
            return runtime.inline.call_method(*call)  # type: ignore[no-any-return]
        spec, spec_of = self._specs.get(self._name, (None, None))
        if spec is None or spec_of is not runtime:
            spec = self._make_spec(runtime)
            self._specs[self._name] = spec, runtime
        connection = runtime.actors.connection_to(self._handle._info)
        return runtime.actors.submit(connection, spec, args, kwargs)  # type: ignore[no-any-return]

    def bind(self, *args: Any, **kwargs: Any) -> CallNode:
        """Return this call as a node of a graph, which its ``execute()`` makes; arguments may be nodes."""
        from stoker.runtime.actors.graphs import CallNode

        return CallNode(self, args, kwargs)

    def options(self, **options: Any) -> ActorMethod:
        """Return this method with other options; unknown ones are errors."""
        what = f"method {self._handle._info.class_name}.{self._name}"
        changed = merged(self._info.options, options, what=what)
        check_group(what, changed, self._handle._info.groups)
        return ActorMethod(self._handle, self._name, self._info._replace(options=changed), {})

    def __repr__(self) -> str:
        info = self._handle._info
        return f"<stoker.remote method {info.class_name}.{self._name} of {info.actor_id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMethod, (self._handle, self._name, self._info, {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._name} is a method of an actor: call .{self._name}.remote(...) and "
            "stoker.get() its result"
        )

    def _make_spec(self, runtime: _Runtime) -> FunctionSpec:
        from stoker.runtime.tasks.functions import (
            DYNAMIC,
            TEMPLATE_NUMBERS,
            pickled_exception_types,
            returns_of,
        )
        from stoker.runtime.tasks.task_spec import FunctionSpec
        from stoker_wire.messages.cluster import Demand
        from stoker_wire.messages.data import Template

        options, info = self._info.options, self._handle._info
        count, streaming = returns_of(options.num_returns, generates=self._info.generates)
        name = options.name or f"{info.class_name}.{self._name}"
        retries = options.max_task_retries
        retries = info.max_task_retries if retries is None else retries
        oom_retries = options.max_oom_retries
        return FunctionSpec(
            submitter=runtime.actors,
            function=self._name,
            blob=b"",
            name=name,
            template=Template(
                number=next(TEMPLATE_NUMBERS),
                function=self._name,
                name=name,
                num_returns=count,
                streaming=streaming,
                timeout_s=options.timeout or 0.0,
                group=options.concurrency_group,
                retry_exceptions=pickled_exception_types(options.retry_exceptions),
                history=options.enable_task_events,
                dynamic=options.num_returns == DYNAMIC,
            ),
            options=TaskOptions(
                max_retries=retries,
                max_oom_retries=retries if oom_retries is None else oom_retries,
                retry_delay=options.retry_delay,
            ),
            demand=Demand(job_id=runtime.job.job_id, resources={}),
            actor_id=info.actor_id,
            refs=() if self._handle._mark is None else (self._handle._mark,),
        )


class _Ready(ActorMethod):
    """The method ``handle.ready()``, of a class that has none of that name."""

    def __call__(self) -> ObjectRef[None]:
        return self.remote()
