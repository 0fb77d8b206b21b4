"""Actors: remote classes, handles to their instances, and the methods of those handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker._options import ActorOptions, MethodOptions, TaskOptions, check_options, merged
from stoker._session import maybe_runtime, runtime
from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    from stoker._refs import ObjectRef
    from stoker.runtime.calls import FunctionSpec
    from stoker.runtime.runtime import Runtime

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


class ActorClass(Generic[C]):
    """A class whose instances live in workers of their own. Made by ``@stoker.remote``."""

    def __init__(self, cls: type[C], options: ActorOptions) -> None:
        self._cls = cls
        self._options = options
        self.__name__ = cls.__name__
        self.__qualname__ = cls.__qualname__
        self.__doc__ = cls.__doc__
        self.__module__ = cls.__module__

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
        from stoker.runtime.creation import create_actor

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

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorClass, (self._cls, self._options)


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
    )

    def __init__(
        self,
        actor_id: str,
        class_name: str,
        methods: dict[str, tuple[MethodOptions, bool]],
        max_task_retries: int,
        max_pending_calls: int,
        groups: tuple[str, ...] = (),
        job_id: str = "",
    ) -> None:
        self.actor_id = actor_id
        self.class_name = class_name
        self.methods = methods
        self.max_task_retries = max_task_retries
        self.max_pending_calls = max_pending_calls
        self.groups = groups
        self.job_id = job_id

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleInfo, (
            self.actor_id,
            self.class_name,
            self.methods,
            self.max_task_retries,
            self.max_pending_calls,
            self.groups,
            self.job_id,
        )


def methods_of(cls: type) -> dict[str, tuple[MethodOptions, bool]]:
    """Return the callable names of a class, with their options and whether they generate."""
    found: dict[str, tuple[MethodOptions, bool]] = {}
    for name, member in inspect.getmembers(cls, callable):
        if name.startswith("__") and name != "__call__":
            continue
        generates = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
        found[name] = (getattr(member, _METHOD_OPTIONS, MethodOptions()), generates)
    return found


class ActorHandle(Generic[C]):
    """A living actor: ``handle.method.remote(...)``. Handles can be passed to tasks and actors.

    When the last handle in the process that started the actor goes away, and none was passed on,
    the actor ends once its calls are done (named and detached ones excepted).
    """

    def __init__(self, info: HandleInfo, *, owns: bool = False) -> None:
        self._info = info
        self._owns = owns
        # Specs and not methods: a method holds its handle, and a cycle would outlive the last ref.
        self._specs: dict[str, tuple[FunctionSpec, Runtime]] = {}

    @property
    def actor_id(self) -> str:
        """The actor's id, as the HTTP API shows it."""
        return self._info.actor_id

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("_") and name != "__call__":
            raise AttributeError(name)
        known = self._info.methods
        if name not in known:
            from stoker_wire.nearest import suggestion

            raise AttributeError(
                f"actor {self._info.class_name} has no method {name!r}{suggestion(name, known)}"
            )
        options, generates = known[name]
        return ActorMethod(self, name, options, generates, self._specs)

    def __repr__(self) -> str:
        return f"ActorHandle({self._info.class_name}, {self._info.actor_id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other.actor_id == self.actor_id

    def __hash__(self) -> int:
        return hash(self._info.actor_id)

    def __reduce__(self) -> tuple[Any, ...]:
        self._owns = False  # others may call it now: it lives until its job ends or it is killed
        return ActorHandle, (self._info,)

    def __del__(self) -> None:
        found = maybe_runtime()
        if self._owns and found is not None and found.running:
            found.call_soon(found.actors.handle_dropped, self._info.actor_id)


class ActorMethod:
    """One method of one actor. Keeps the actor's handle alive."""

    def __init__(
        self,
        handle: ActorHandle[Any],
        name: str,
        options: MethodOptions,
        generates: bool,
        specs: dict[str, tuple[FunctionSpec, Runtime]],
    ) -> None:
        self._handle = handle
        self._name = name
        self._options = options
        self._generates = generates
        self._specs = specs
        """Where calls with the same options find what they share, with the runtime it is for."""

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call the method and return its ref at once. Calls of one caller run in order."""
        found = runtime()
        spec, spec_of = self._specs.get(self._name, (None, None))
        if spec is None or spec_of is not found:
            spec = self._make_spec(found)
            self._specs[self._name] = spec, found
        info = self._handle._info
        link = found.actors.link(
            info.actor_id, info.class_name, info.max_pending_calls, job_id=info.job_id
        )
        return found.actors.submit(link, spec, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Any) -> ActorMethod:
        """Return this method with other options; unknown ones are errors."""
        what = f"method {self._handle._info.class_name}.{self._name}"
        changed = merged(self._options, options, what=what)
        check_group(what, changed, self._handle._info.groups)
        return ActorMethod(self._handle, self._name, changed, self._generates, {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._name} is a method of an actor: call .{self._name}.remote(...) and "
            "stoker.get() its result"
        )

    def _make_spec(self, found: Runtime) -> FunctionSpec:
        from stoker._remote import TEMPLATE_NUMBERS, pickled_kinds
        from stoker.runtime.calls import FunctionSpec
        from stoker_wire.messages.cluster import Demand
        from stoker_wire.messages.data import Template

        options, info = self._options, self._handle._info
        returns = options.num_returns
        if returns is None:
            returns = "streaming" if self._generates else 1
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
            ),
            options=TaskOptions(max_retries=info.max_task_retries if retries is None else retries),
            demand=Demand(job_id=found.job_id, resources={}),
            actor_id=info.actor_id,
        )


def checked_groups(cls: type, options: ActorOptions) -> dict[str, int]:
    """Return the concurrency groups of a class; a method's unknown group is an error."""
    groups = dict(options.concurrency_groups or {})
    for name, (method_options, _) in methods_of(cls).items():
        check_group(f"method {cls.__qualname__}.{name}", method_options, groups)
    return groups


def check_group(what: str, options: MethodOptions, groups: Iterable[str]) -> None:
    """Raise if a method names a concurrency group that its class does not have."""
    group, known = options.concurrency_group, sorted(groups)
    if group and group not in known:
        raise BadRequestError(
            f"{what} names the concurrency group {group!r}, which the class does not have (it has "
            f"{known or 'none'})",
            field="concurrency_groups",
        )
