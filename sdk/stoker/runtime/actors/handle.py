"""Actors: remote classes, handles to their instances, and the methods of those handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from stoker.api.options import ActorOptions, MethodOptions, TaskOptions, check_options, merged
from stoker.api.parameters import Parameters, parameters_of
from stoker.exceptions import BadRequestError
from stoker.runtime.session import maybe_runtime, runtime

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.tasks.task_spec import FunctionSpec

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
_METHOD_OPTIONS = "__stoker_method__"


def method(**options: Any) -> Callable[[F], F]:
    """Give a method of a remote class options: ``@stoker.method(num_returns=2)``."""
    checked = check_options(MethodOptions, options, what="@stoker.method")

    def mark(function: F) -> F:
        setattr(function, _METHOD_OPTIONS, checked)
        return function

    return mark


def exit_actor() -> NoReturn:
    """End the actor whose code calls this, for good: it is not restarted. Does not return.

    No further call of it begins. Those that run in other threads or coroutines have 10 s to finish.
    Then ``__stoker_shutdown__`` of its class (a plain or an ``async`` method) and its process's
    ``atexit`` handlers run; all of it may take 30 s. This call, those that wait, and all later ones raise
    ``ActorDiedError``: "it ended itself". ``sys.exit()`` in a method does the same; with another code than
    0 it is a failure, after which ``max_restarts`` applies.
    ``BadRequestError`` outside of actors.
    """
    found = maybe_runtime()
    host = found.execution.actor if found is not None and found.execution is not None else None
    if host is None:
        raise BadRequestError(
            "exit_actor() ends the actor whose code calls it, and this code runs in no actor\n"
            "call it in a method of a remote class, or end an actor from outside with "
            "stoker.kill(handle)"
        )
    from stoker.runtime.worker.actor_exit import left_by, whereabouts

    host.end.begin(left_by(f"exit_actor() in {whereabouts()}"))
    raise SystemExit(0)


class ActorClass(Generic[C]):
    """A class whose instances live in workers of their own. Made by ``@stoker.remote``."""

    def __init__(self, cls: type[C], options: ActorOptions) -> None:
        self._cls = cls
        self._options = options
        self.__name__ = cls.__name__
        self.__qualname__ = cls.__qualname__
        self.__doc__ = cls.__doc__
        self.__module__ = cls.__module__
        if options.concurrency_groups is not None:
            checked_groups(cls, options)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        name = self._cls.__qualname__
        raise TypeError(
            f"{name} is a remote class, which has no subclasses: derive from {name}.cls, and "
            "decorate the new class"
        )

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle[C]:
        """Start an actor; returns a handle at once, calls to it wait until it is up.

        A name that is taken raises ``NameTakenError`` here (unless ``get_if_exists``).
        """
        try:
            signature = inspect.signature(self._cls)
        except ValueError:  # a class written in C that does not tell
            signature = None
        if signature is not None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name = self._cls.__qualname__
                raise TypeError(f"{name}.remote(): {error}; it takes {signature}") from None
        from stoker.runtime.actors.create import create_actor

        return create_actor(runtime(), self._cls, self._options, args, kwargs)

    def options(self, **options: Any) -> ActorClass[C]:
        """Return this class with other options; unknown ones are errors."""
        what = f"remote class {self._cls.__qualname__}"
        return ActorClass(self._cls, merged(self._options, options, what=what))

    def __call__(self, *args: Any, **kwargs: Any) -> C:
        name = self._cls.__qualname__
        raise TypeError(
            f"{name} is a remote class: start an actor with {name}.remote(...), or make a plain "
            f"instance with {name}.cls(...)"
        )

    @property
    def cls(self) -> type[C]:
        """The plain class."""
        return self._cls

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the plain class: a constant, a static or class method."""
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self._cls, name)
        except AttributeError:
            raise AttributeError(
                f"remote class {self._cls.__qualname__} has no attribute {name!r}"
            ) from None

    def __repr__(self) -> str:
        return f"<stoker.remote class {self.__qualname__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorClass, (self._cls, self._options)


class MethodInfo(NamedTuple):
    """What a handle must know of a method. ``parameters`` is None where any arguments may fit."""

    options: MethodOptions
    generates: bool
    parameters: Parameters | None = None


_SYSTEM_METHODS = {
    "__stoker_ready__": MethodInfo(MethodOptions(), generates=False),
    "__stoker_terminate__": MethodInfo(MethodOptions(), generates=False),
    "__stoker_call__": MethodInfo(MethodOptions(), generates=False),
}
"""What every actor has, whatever its class."""


class HandleInfo:
    """What a handle needs, wherever it is: names of methods and their options. Picklable."""

    __slots__ = (
        "actor_id",
        "class_name",
        "groups",
        "job_id",
        "max_pending_calls",
        "max_task_retries",
        "methods",
        "unordered",
    )

    def __init__(
        self,
        actor_id: str,
        class_name: str,
        methods: dict[str, MethodInfo],
        max_task_retries: int,
        max_pending_calls: int,
        groups: tuple[str, ...] = (),
        job_id: str = "",
        unordered: tuple[str, ...] = (),
    ) -> None:
        self.actor_id = actor_id
        self.class_name = class_name
        self.methods = methods
        self.max_task_retries = max_task_retries
        self.max_pending_calls = max_pending_calls
        self.groups = groups
        self.job_id = job_id
        self.unordered = unordered
        """The concurrency groups ('' is the default one) in which calls may start out of order."""

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleInfo, (
            self.actor_id,
            self.class_name,
            self.methods,
            self.max_task_retries,
            self.max_pending_calls,
            self.groups,
            self.job_id,
            self.unordered,
        )


def methods_of(cls: type) -> dict[str, MethodInfo]:
    """Return the callable names of a class, with what a handle must know of each."""
    found: dict[str, MethodInfo] = {}
    for name, member in inspect.getmembers(cls, callable):
        if name.startswith("__") and name != "__call__":
            continue
        generates = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
        options = getattr(member, _METHOD_OPTIONS, MethodOptions())
        found[name] = MethodInfo(options, generates, parameters_of(cls, name))
    return found


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

    def __init__(self, info: HandleInfo, alive: ObjectRef[None] | None = None) -> None:
        self._info = info
        self._alive = alive
        """The actor lives while a ref to this object of its owner does; None: it outlives handles."""
        # Specs and not methods: a method holds its handle, and a cycle would outlive the last ref.
        self._specs: dict[str, tuple[FunctionSpec, Runtime]] = {}

    @property
    def actor_id(self) -> str:
        """The actor's id, as the HTTP API shows it."""
        return self._info.actor_id

    def __getattr__(self, name: str) -> ActorMethod:
        if name == "_info":  # a handle that is not made yet
            raise AttributeError(name)
        found = self._info.methods.get(name) or _SYSTEM_METHODS.get(name)
        if found is not None:
            return ActorMethod(self, name, found, self._specs)
        if name == "ready":
            return _Ready(self, "__stoker_ready__", _SYSTEM_METHODS["__stoker_ready__"], {})
        if name.startswith("_"):
            raise AttributeError(name)
        from stoker_wire.suggestions import suggestion

        raise AttributeError(
            f"actor {self._info.class_name} has no method {name!r}; "
            f"{suggestion(name, self._info.methods)}"
        )

    def __repr__(self) -> str:
        return f"Actor({self._info.class_name}, {self._info.actor_id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other.actor_id == self.actor_id

    def __hash__(self) -> int:
        return hash(self._info.actor_id)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._alive is not None:
            from stoker.runtime.serialization.pickling import is_packing

            if not is_packing():  # nobody counts where this goes
                runtime().actors.keep(self._alive)
        return ActorHandle, (self._info, self._alive)

    def __del__(self) -> None:
        found = maybe_runtime()
        if getattr(self, "_alive", None) is not None and found is not None and found.running:
            self._specs, self._alive = {}, None  # their refs go before the loop thread looks
            found.wake()


class ActorMethod:
    """One method of one actor. Keeps the actor's handle alive; travels as the handle does."""

    def __init__(
        self,
        handle: ActorHandle[Any],
        name: str,
        info: MethodInfo,
        specs: dict[str, tuple[FunctionSpec, Runtime]],
    ) -> None:
        self._handle = handle
        self._name = name
        self._info = info
        self._specs = specs
        """Where calls with the same options find what they share, with the runtime it is for."""

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call the method and return its ref at once.

        Calls of one caller start in order where one runs at a time (an actor, or a concurrency
        group, with ``max_concurrency=1``). One that is tried again comes when it comes.
        Arguments that the method does not take are a ``TypeError`` here.
        """
        parameters = self._info.parameters
        if parameters is not None and (
            kwargs or not parameters.fewest <= len(args) <= parameters.most
        ):
            parameters.check(args, kwargs, f"{self._handle._info.class_name}.{self._name}.remote()")
        found = runtime()
        spec, spec_of = self._specs.get(self._name, (None, None))
        if spec is None or spec_of is not found:
            spec = self._make_spec(found)
            self._specs[self._name] = spec, found
        link = found.actors.link(self._handle._info)
        return found.actors.submit(link, spec, args, kwargs)  # type: ignore[no-any-return]

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

    def _make_spec(self, found: Runtime) -> FunctionSpec:
        from stoker.api.remote import TEMPLATE_NUMBERS, pickled_kinds
        from stoker.runtime.tasks.task_spec import FunctionSpec
        from stoker_wire.messages.cluster import Demand
        from stoker_wire.messages.data import Template

        options, info = self._info.options, self._handle._info
        returns = options.num_returns
        if returns is None:
            returns = "streaming" if self._info.generates else 1
        name = options.name or f"{info.class_name}.{self._name}"
        retries = options.max_task_retries
        return FunctionSpec(
            function=self._name,
            blob=b"",
            name=name,
            template=Template(
                number=next(TEMPLATE_NUMBERS),
                function=self._name,
                name=name,
                num_returns=0 if returns == "streaming" else int(returns),
                streaming=returns == "streaming",
                timeout_s=options.timeout or 0.0,
                group=options.concurrency_group,
                retry_exceptions=pickled_kinds(options.retry_exceptions),
                history=options.enable_task_events,
            ),
            options=TaskOptions(max_retries=info.max_task_retries if retries is None else retries),
            demand=Demand(job_id=found.job_id, resources={}),
            actor_id=info.actor_id,
            refs=() if self._handle._alive is None else (self._handle._alive,),
        )


class _Ready(ActorMethod):
    """``handle.ready()``, of a class that has no such method."""

    def __call__(self) -> ObjectRef[None]:
        return self.remote()


def checked_groups(cls: type, options: ActorOptions) -> dict[str, int]:
    """Return the concurrency groups of a class; a method's unknown group is an error."""
    groups = dict(options.concurrency_groups or {})
    for name, info in methods_of(cls).items():
        check_group(f"method {cls.__qualname__}.{name}", info.options, groups)
    return groups


def unordered_groups(
    cls: type, options: ActorOptions, groups: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the concurrency groups ('' is the default one) in which calls may start out of order.

    Unless the options say so, those in which several run at once.
    """
    every = {"": options.max_concurrency or (2 if is_async(cls) else 1), **groups}
    wanted = options.allow_out_of_order_execution
    return tuple(name for name, n in every.items() if (n > 1 if wanted is None else wanted))


def is_async(cls: type) -> bool:
    """Return whether instances run on an event loop: one method is a coroutine or async generator."""
    return any(
        inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m)
        for _, m in inspect.getmembers(cls, inspect.isfunction)
    )


def check_group(what: str, options: MethodOptions, groups: Iterable[str]) -> None:
    """Raise if a method names a concurrency group that its class does not have."""
    group, known = options.concurrency_group, sorted(groups)
    if group and group not in known:
        raise BadRequestError(
            f"{what} names the concurrency group {group!r}, which the class does not have\n"
            f"it has {known or 'none'}",
            field="concurrency_groups",
        )
