"""``stoker.register``: functions that callers outside of the cluster call by name and version, over HTTP."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from stoker import kv
from stoker.api.remote import RemoteFunction
from stoker.exceptions import BadRequestError, ConflictError, NotFoundError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.options.options import TaskOptions
from stoker_wire.http.gateway.calls import RegisteredFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.api.registered import Registration
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.control import Whoami

_DOC = 2000


def register(
    function: Callable[..., Any] | RemoteFunction[..., Any],
    name: str | None = None,
    *,
    version: str = "1",
    namespace: str | None = None,
    replace: bool = False,
) -> RegisteredFunction:
    """Have callers outside of the cluster call a function over HTTP, by ``name`` and ``version``.

    They send JSON, and get JSON (or bytes, where the function returns bytes); each call is a task of
    their own job, with the resources, environment and retries that ``@stoker.remote`` gave the function.
    It stays until :func:`unregister`, also when this job has ended: what it imports must be where its tasks
    run (``runtime_env``). ``name`` is the function's own unless given; ``namespace`` is that of
    ``init(namespace=...)``, else of this job's user.

    ``ConflictError`` if the version has another function already, unless ``replace`` is given.
    """
    from stoker.api.registered import check_name, decode, encode, key_of

    if not isinstance(function, RemoteFunction):
        if isinstance(function, type) or not callable(function):
            raise WrongTypeError(
                f"register() takes a function, not {function!r:.80}\n"
                "the methods of an actor are called by the actor's name: create it with name=...",
                field="function",
            )
        function = RemoteFunction(function, TaskOptions())
    runtime = current.runtime()
    _check_joined(runtime)
    name = check_name(function.function.__name__ if name is None else name, "name")
    check_name(version, "version")
    namespace = namespace or _namespace_of(runtime)
    registration = _registration(runtime, function, name, version)
    key, raw = key_of(name, version), encode(registration)
    if not kv.put(key, raw, namespace=namespace, if_absent=not replace):
        kept = kv.get(key, namespace=namespace)
        if kept is None or decode(kept, key).function != registration.function:
            raise ConflictError(
                f"version {version!r} of {name!r} is registered already, with other code\n"
                "give another version=..., or replace=True to change what its callers get",
                field="version",
            )
        kv.put(key, raw, namespace=namespace)
    return _shown(registration, namespace)


def unregister(name: str, *, version: str = "1", namespace: str | None = None) -> None:
    """Take back a registered function: callers get ``not_found``. ``NotFoundError`` if there is none."""
    from stoker.api.registered import check_name, key_of

    runtime = current.runtime()
    _check_joined(runtime)
    namespace = namespace or _namespace_of(runtime)
    key = key_of(check_name(name, "name"), check_name(version, "version"))
    if not kv.delete(key, namespace=namespace):
        raise NotFoundError(
            f"no version {version!r} of a function {name!r} is registered in namespace {namespace!r}",
            field="name",
        )


def _check_joined(runtime: Runtime) -> None:
    if runtime.inline is not None:
        raise BadRequestError(
            "a driver in local mode has no cluster that others could call\n"
            "call stoker.init() without local_mode",
            field="local_mode",
        )


def _registration(
    runtime: Runtime, remote: RemoteFunction[..., Any], name: str, version: str
) -> Registration:
    from stoker.api.registered import Registration
    from stoker.runtime.options.demands import demand_of
    from stoker.runtime.tasks.functions import pickled, pickled_exception_types
    from stoker.runtime.worker.json_calls import JsonFunction
    from stoker_wire.messages.cluster import LeaseKind

    function, options = remote.function, remote._options
    if options.lifetime is not None or options.cache:
        raise BadRequestError(
            f"register({name!r}): options 'lifetime' and 'cache' have no meaning for callers outside\n"
            "leave them out: an asynchronous call keeps its result for ttl_s",
            field="function",
        )
    strategy = runtime.job.strategy_of(options.scheduling_strategy)
    if strategy.group_id:
        raise BadRequestError(
            f"register({name!r}): its calls cannot run in a placement group, which ends with its job\n"
            "register it with resources of its own",
            field="scheduling_strategy",
        )
    blob, digest, refs = pickled(JsonFunction(function, name), what=f"function {name}")
    if refs:
        raise BadRequestError(
            f"register({name!r}): the function holds an ObjectRef, whose value ends with this job\n"
            "put it with lifetime='detached' and a name, and stoker.get_ref() it in the function",
            field="function",
        )
    demand = demand_of(
        options,
        job_id="",
        kind=LeaseKind.TASK,
        runtime_env=runtime.job.runtime_env_of(options.runtime_env),
        strategy=strategy,
        default_cpus=1.0,
        name=name,
    )
    return Registration(
        name=name,
        version=version,
        function=digest,
        blob=blob,
        demand=demand,
        timeout_s=options.timeout or 0.0,
        start_deadline_s=options.start_deadline,
        max_calls=options.max_calls,
        max_retries=options.max_retries,
        max_oom_retries=options.oom_retries,
        retry_delay_s=options.retry_delay,
        retry_exceptions=pickled_exception_types(options.retry_exceptions),
        history=options.enable_task_events,
        signature=str(remote._signature),
        doc=(inspect.getdoc(function) or "")[:_DOC],
    )


def _namespace_of(runtime: Runtime) -> str:
    """Return the namespace that the job was given, else that of its user."""
    if runtime.job.namespace != runtime.job.job_id:
        return runtime.job.namespace
    from stoker_wire.messages.control import Whoami

    return default_namespace(runtime.job.http.call("GET", "/v1/whoami", reply=Whoami))


def default_namespace(user: Whoami) -> str:
    """Return the namespace of a user who names none: its own, or the first that it may use."""
    from stoker_wire.messages.common import ANY_NAMESPACE

    if user.name in user.namespaces or ANY_NAMESPACE in user.namespaces:
        return user.name
    return next((one for one in user.namespaces if one != user.job_id), user.name)


def _shown(registration: Registration, namespace: str) -> RegisteredFunction:
    return RegisteredFunction(
        name=registration.name,
        version=registration.version,
        namespace=namespace,
        signature=registration.signature,
        doc=registration.doc,
    )
