"""Graphs of calls: written down once by ``.bind()``, run as often as one likes by ``.execute()``.

::

    with InputNode() as number:
        graph = add.bind(square.bind(number), number)
    print(stoker.get(graph.execute(3)))   # 12

A node is a call that has not been made. Its arguments may hold other nodes, also inside lists, tuples,
sets and mappings; ``execute`` makes each call of the graph once, and passes refs on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stoker.exceptions import BadRequestError, WrongTypeError

if TYPE_CHECKING:
    from typing import Self


class _Remote(Protocol):
    """A remote function, class or method."""

    def remote(self, *args: Any, **kwargs: Any) -> Any: ...


class GraphInput(NamedTuple):
    """The arguments of one ``execute``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def value(self) -> Any:
        """The value of ``InputNode``: the argument, if there is just one; else all of them."""
        return self.args[0] if len(self.args) == 1 and not self.kwargs else self

    def item(self, key: Any) -> Any:
        """Return one of the arguments by its place or name, or an item of the only one."""
        if self.value is not self:
            return self.value[key]
        try:
            return self.args[key] if isinstance(key, int) else self.kwargs[key]
        except LookupError:
            raise _missing(key) from None

    def attribute(self, name: str) -> Any:
        """Return the argument of this name, or an attribute of the only argument."""
        if name in self.kwargs:
            return self.kwargs[name]
        if self.value is self:
            raise _missing(name)
        return getattr(self.value, name)


class _Run:
    """One ``execute``: what each node has become."""

    def __init__(self, given: GraphInput) -> None:
        self.given = given
        self._made: dict[int, Any] = {}

    def value_of(self, node: GraphNode) -> Any:
        """Return what a node becomes, once: a ref, a handle or a plain value."""
        if id(node) not in self._made:
            self._made[id(node)] = node._make(self)
        return self._made[id(node)]

    def filled(self, value: Any) -> Any:
        """Return an argument with the values of the nodes in it."""
        if isinstance(value, GraphNode):
            return self.value_of(value)
        if type(value) in (list, tuple, set):
            return type(value)(self.filled(each) for each in value)
        if type(value) is dict:
            return {self.filled(key): self.filled(each) for key, each in value.items()}
        return value


class GraphNode(ABC):
    """A call that ``execute`` makes; an argument of ``bind`` for other calls."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph that ends here; return what its last call returns: a ref, or a list of refs.

        The arguments are what ``InputNode`` stands for.
        """
        return _Run(GraphInput(args, kwargs)).value_of(self)

    def experimental_compile(self, **_options: Any) -> Self:
        """Return this graph itself: it runs as it is. (Ray's name.)"""
        return self

    def with_tensor_transport(self, *_args: Any, **_options: Any) -> Self:
        """Return this node itself: tensors travel out of band anyway. (Ray's name.)"""
        return self

    async def execute_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, as ``execute`` does; what it returns can be awaited. (Ray's name.)"""
        return self.execute(*args, **kwargs)

    def teardown(self, kill_actors: bool = False) -> None:  # noqa: B027
        """Do nothing: a graph holds nothing between its runs. (Ray's name.)"""

    @abstractmethod
    def _make(self, run: _Run) -> Any:
        """Return what this node becomes in a run."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a node of a graph stays in its process: execute() it and pass the ref on")


class CallNode(GraphNode):
    """A call of a remote function, or of a method of a living actor."""

    def __init__(self, target: _Remote, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._target = target
        self._args = args
        self._kwargs = dict(kwargs)

    def _make(self, run: _Run) -> Any:
        args = [run.filled(each) for each in self._args]
        kwargs = {name: run.filled(each) for name, each in self._kwargs.items()}
        return self._target.remote(*args, **kwargs)


class ActorNode(CallNode):
    """An actor that each ``execute`` starts anew; it is there for as long as the results are used.

    ``node.method.bind(...)`` is a call of it. Calls are made in the order in which they were bound, also
    those that no other node needs.
    """

    def __init__(
        self,
        target: _Remote,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        has_method: Callable[[str], bool],
    ) -> None:
        super().__init__(target, args, kwargs)
        self._has_method = has_method
        self._last: MethodNode | None = None

    def __getattr__(self, name: str) -> BoundMethod:
        if name.startswith("__") or not self._has_method(name):
            raise AttributeError(f"the class of this actor has no method {name!r}")
        return BoundMethod(self, name, {})


class BoundMethod:
    """A method of an actor in a graph, before it is bound."""

    def __init__(self, actor: ActorNode, name: str, options: Mapping[str, Any]) -> None:
        self._actor = actor
        self._name = name
        self._options = dict(options)

    def options(self, **options: Any) -> BoundMethod:
        """Return this method with other options."""
        return BoundMethod(self._actor, self._name, {**self._options, **options})

    def bind(self, *args: Any, **kwargs: Any) -> MethodNode:
        """Return a call of this method, which runs after those that were bound before."""
        node = MethodNode(self._actor, self._name, self._options, args, kwargs)
        self._actor._last = node
        return node


class MethodNode(GraphNode):
    """A call of an actor that the graph starts."""

    def __init__(
        self,
        actor: ActorNode,
        name: str,
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._actor = actor
        self._name = name
        self._options = options
        self._args = args
        self._kwargs = kwargs
        self._before = actor._last

    def _make(self, run: _Run) -> Any:
        if self._before is not None:
            run.value_of(self._before)
        method = getattr(run.value_of(self._actor), self._name)
        if self._options:
            method = method.options(**self._options)
        return CallNode(method, self._args, self._kwargs)._make(run)


class InputNode(GraphNode):
    """The input of ``execute``: ``with InputNode() as given:``, then ``f.bind(given)``.

    ``given[0]`` and ``given.name`` are one of several arguments, or a part of the only one.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _make(self, run: _Run) -> Any:
        if not run.given.args and not run.given.kwargs:
            raise BadRequestError(
                "the graph has an InputNode, and execute() was given nothing for it\n"
                "call execute(value)",
                field="args",
            )
        return run.given.value

    def __getitem__(self, key: Any) -> InputPart:
        return InputPart(lambda given: given.item(key))

    def __getattr__(self, name: str) -> InputPart:
        if name.startswith("_"):
            raise AttributeError(name)
        return InputPart(lambda given: given.attribute(name))


class InputPart(GraphNode):
    """A part of what ``execute`` is given."""

    def __init__(self, choose: Callable[[GraphInput], Any]) -> None:
        self._choose = choose

    def _make(self, run: _Run) -> Any:
        return self._choose(run.given)


class MultiOutputNode(GraphNode):
    """Several ends of one graph: ``execute`` returns a list, in the order of ``nodes``."""

    def __init__(self, nodes: list[GraphNode] | tuple[GraphNode, ...]) -> None:
        for index, node in enumerate(nodes):
            if not isinstance(node, GraphNode):
                raise WrongTypeError(
                    f"MultiOutputNode(): item {index} is a {type(node).__name__}, not a node\n"
                    "give what .bind() returned",
                    field=f"nodes[{index}]",
                )
        self._nodes = tuple(nodes)

    def _make(self, run: _Run) -> Any:
        return [run.value_of(node) for node in self._nodes]


def _missing(key: Any) -> BadRequestError:
    return BadRequestError(
        f"the graph uses the input {key!r}, which execute() was not given", field="args"
    )
