"""Objects that outlive their maker: ``put(lifetime="detached")``, ``get_ref`` and ``free``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.objects.refs import ObjectRef

if TYPE_CHECKING:
    from stoker.runtime.objects.detached import Durability
    from stoker.runtime.options.options import TaskOptions

T = TypeVar("T")
DETACHED, CLUSTER_CACHE = "detached", "cluster"


def put_detached(
    value: T,
    lifetime: object,
    *,
    name: str,
    namespace: str | None,
    copies: int,
    disk: bool,
    path: str,
) -> ObjectRef[T]:
    """Store a value that the cluster owns, for :func:`stoker.put`, which says what each argument is."""
    if lifetime != DETACHED:
        raise BadRequestError(
            f"put(): lifetime={lifetime!r} is not known\ngive 'detached', or leave it out",
            field="lifetime",
        )
    if isinstance(value, ObjectRef):
        raise WrongTypeError(
            "put(lifetime='detached') takes no ObjectRef\n"
            "put the value, stoker.get(ref): a ref names what its owner has",
            field="value",
        )
    _check_text("put", "name", name)
    if namespace is not None:
        _check_text("put", "namespace", namespace, empty=False)
    durability = _durability(copies, disk, path)
    detached = current.runtime().objects.detached
    return detached.put(value, name=name, namespace=namespace, durability=durability)


def durable(function: Callable[..., Any], options: TaskOptions, *, what: str) -> Callable[..., Any]:
    """Return the function that a worker runs: its results are detached objects, where options say so."""
    if options.cache_key is not None and options.cache != CLUSTER_CACHE:
        raise BadRequestError(
            f"option 'cache_key' of {what} is for results that all jobs share\n"
            "give cache='cluster' as well",
            field="cache_key",
        )
    if options.lifetime is None and options.cache != CLUSTER_CACHE:
        if options.durability is not None:
            raise BadRequestError(
                f"option 'durability' of {what} is for results that the cluster keeps\n"
                "give lifetime='detached' or cache='cluster' as well",
                field="durability",
            )
        return function
    from stoker.runtime.tasks.functions import is_generator  # it brings cloudpickle

    if options.num_returns not in (None, 1) or is_generator(function):
        raise BadRequestError(
            f"options 'lifetime' and 'cache' of {what} need one result that is no generator",
            field="num_returns",
        )
    from stoker.api.durable_results import CachedFunction, DetachedFunction, checked_key

    places: dict[Any, Any] = options.durability or {}
    durability = _durability(
        places.get("copies", 1), places.get("disk", False), places.get("path", "")
    )
    if options.lifetime is not None:
        return DetachedFunction(function, options.name or "", durability)
    key = options.cache_key
    if key is not None and not callable(key):
        checked_key(key)
    return CachedFunction(function, durability, key)


def _durability(copies: Any, disk: Any, path: Any) -> Durability:
    from stoker.runtime.objects.detached import Durability
    from stoker_wire.messages.objects import MAX_COPIES

    if isinstance(copies, bool) or not isinstance(copies, int):
        raise WrongTypeError(f"put(): copies={copies!r} is no whole number", field="copies")
    if not 1 <= copies <= MAX_COPIES:
        raise BadRequestError(
            f"put(): copies={copies} must be between 1 and {MAX_COPIES}", field="copies"
        )
    if not isinstance(disk, bool):
        raise WrongTypeError(f"put(): disk={disk!r} is neither True nor False", field="disk")
    if not isinstance(path, (str, os.PathLike)):
        raise WrongTypeError(
            f"put(): path={path!r} is no path\ngive a file, as '/mnt/x.pkl' or 's3://bucket/x.pkl'",
            field="path",
        )
    return Durability(copies=copies, disk=disk, path=os.fspath(path))


def _check_text(function: str, field: str, text: Any, *, empty: bool = True) -> None:
    if not isinstance(text, str):
        raise WrongTypeError(f"{function}(): {field}={text!r} is no text", field=field)
    if not empty and not text.strip():
        raise BadRequestError(f"{function}(): {field}={text!r} is empty", field=field)


def get_ref(name: str, *, namespace: str | None = None) -> ObjectRef[Any]:
    """Return a ref to the detached object of this name, in this job's namespace unless another is given.

    ``NotFoundError`` (a ``ValueError`` and a ``LookupError``) if there is none.
    """
    _check_text("get_ref", "name", name, empty=False)
    if namespace is not None:
        _check_text("get_ref", "namespace", namespace, empty=False)
    return current.runtime().objects.detached.get_ref(name, namespace)


def free(refs: ObjectRef[Any] | Iterable[ObjectRef[Any]]) -> None:
    """Free the values of refs now: detached ones, or others that this process owns.

    Whoever reads one of them afterwards gets ``ObjectFreedError``; who has a view of its memory keeps that.
    The file at a detached object's ``path`` stays.
    """
    chosen = [refs] if isinstance(refs, ObjectRef) else list(refs)
    for index, ref in enumerate(chosen):
        if not isinstance(ref, ObjectRef):
            raise WrongTypeError(
                f"free(): item {index} is a {type(ref).__name__}, not an ObjectRef",
                field=f"refs[{index}]",
            )
    objects = current.runtime().objects
    for ref in chosen:
        objects.free_now(ref)
