"""``@stoker.remote`` on classes: actors are made, their methods get options, and they end themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from stoker.exceptions import BadRequestError
from stoker.runtime import current
from stoker.runtime.actors.info import METHOD_OPTIONS, check_hooks, checked_groups, methods_of
from stoker.runtime.options.actor_options import ActorOptions, MethodOptions
from stoker.runtime.options.demands import check_options, merged
from stoker.runtime.options.documentation import with_options
from stoker.runtime.process.current_task import current_task

if TYPE_CHECKING:
    from stoker.runtime.actors.graphs import ActorNode
    from stoker.runtime.actors.handle import ActorHandle

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


@with_options(MethodOptions)
def method(**options: Any) -> Callable[[F], F]:
    """Give a method of a remote class options: ``@stoker.method(num_returns=2)``."""
    checked = check_options(MethodOptions, options, what="@stoker.method")

    def mark(function: F) -> F:
        setattr(function, METHOD_OPTIONS, checked)
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
    runtime = current.maybe_runtime()
    host = runtime.worker.actor if runtime is not None and runtime.worker is not None else None
    task = current_task.get()
    if runtime is not None and runtime.inline is not None and task is not None and task.actor_id:
        raise SystemExit(0)
    if host is None:
        raise BadRequestError(
            "exit_actor() ends the actor whose code calls it, and this code runs in no actor\n"
            "call it in a method of a remote class, or end an actor from outside with "
            "stoker.kill(handle)"
        )
    from stoker.runtime.worker.actor_exit import calling_code, self_exit_reason

    host.exit.begin(self_exit_reason(f"exit_actor() in {calling_code()}"))
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
        check_hooks(cls)
        if options.concurrency_groups is not None:
            checked_groups(cls, options)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        name = self._cls.__qualname__
        raise TypeError(
            f"{name} is a remote class, which has no subclasses: derive from {name}.cls, and "
            "decorate the new class"
        )

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle[C]:
        """Start an actor and return a handle at once; calls wait until it is up.

        A name that is taken raises ``NameTakenError`` here (unless ``get_if_exists``).
        """
        self._check_name()
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
        runtime = current.runtime()
        if runtime.inline is not None:
            return runtime.inline.create(self._cls, self._options, args, kwargs)
        return runtime.actor_creator.create(self._cls, self._options, args, kwargs)

    def _check_name(self) -> None:
        """Raise BadRequestError for options that name no actor, or no namespace."""
        cls = self._cls.__qualname__
        if self._options.namespace == "":
            raise BadRequestError(
                f"option 'namespace' of remote class {cls} is empty\ngive a name, or leave it out",
                field="namespace",
            )
        if self._options.get_if_exists and not self._options.name:
            raise BadRequestError(
                f"get_if_exists of remote class {cls} asks for an actor without a name\n"
                "give name= as well",
                field="get_if_exists",
            )

    def bind(self, *args: Any, **kwargs: Any) -> ActorNode:
        """Return an actor of this class as a node of a graph: each ``execute()`` starts one."""
        from stoker.runtime.actors.graphs import ActorNode

        has_method = methods_of(self._cls).__contains__
        return ActorNode(self, args, kwargs, has_method)

    def options(self, **options: Any) -> ActorClass[C]:
        """Return this class with other options; unknown ones are errors."""
        what = f"remote class {self._cls.__qualname__}"
        return type(self)(self._cls, merged(self._options, options, what=what))

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
        return type(self), (self._cls, self._options)
