"""``stoker.kv``: small raw values by key, kept by the control store for every process of a cluster.

For rendezvous, flags and settings; large values belong in ``stoker.put``. Keys live in a namespace
(by default the job's own) until they are deleted. Every call is one HTTP request and blocks the
calling thread, so coroutines should make it in a thread.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from stoker.runtime import current

__all__ = ("delete", "get", "keys", "put", "wait")

_CALL_S = 15.0
_POLL_S = 20.0
"""One long poll: a longer wait is made of several, so that no proxy cuts it."""


def put(
    key: str, value: bytes | str, *, namespace: str | None = None, if_absent: bool = False
) -> bool:
    """Set ``key``. With ``if_absent``, leave a key that exists and return False."""
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise BadRequestError(
            f"kv.put({key!r}): the value is a {type(value).__name__}\n"
            "give bytes or str, or keep objects with stoker.put()",
            field="value",
        )
    runtime, path = current.runtime(), _path(key, namespace)
    query = {"if_absent": True if if_absent else None}
    try:
        runtime.io.run(
            runtime.clients.gcs.call("PUT", path, value, query=query, timeout_s=_CALL_S),
            _CALL_S + 1,
        )
    except ConflictError:
        if not if_absent:
            raise
        return False
    return True


def get(key: str, *, namespace: str | None = None) -> bytes | None:
    """Return the value of ``key``, or None if it is not there."""
    try:
        return _get(_path(key, namespace), 0.0)
    except NotFoundError:
        return None


def wait(key: str, *, timeout: float, namespace: str | None = None) -> bytes:
    """Return the value of ``key`` as soon as it exists.

    Raises ``GetTimeoutError`` if it does not within ``timeout`` seconds.
    """
    path, deadline_s = _path(key, namespace), time.monotonic() + timeout
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return _get(path, min(left_s, _POLL_S))
        except NotFoundError:
            if time.monotonic() >= deadline_s:
                raise GetTimeoutError(
                    f"nobody set the key {key!r} within {timeout:g} s", field="key"
                ) from None


def delete(key: str, *, namespace: str | None = None) -> bool:
    """Remove ``key``; False if it was not there."""
    runtime, path = current.runtime(), _path(key, namespace)
    try:
        runtime.io.run(runtime.clients.gcs.call("DELETE", path, timeout_s=_CALL_S), _CALL_S + 1)
    except NotFoundError:
        return False
    return True


def keys(prefix: str = "", *, namespace: str | None = None) -> list[str]:
    """Return the keys that start with ``prefix``, sorted."""
    runtime, path = current.runtime(), f"/v1/kv/{_namespace(namespace)}"
    names: list[str] = []
    cursor = ""
    while True:
        query = {"prefix": prefix, "limit": 1000, "cursor": cursor or None}
        page = runtime.io.run(
            runtime.clients.gcs.call(
                "GET", path, reply=dict[str, Any], query=query, timeout_s=_CALL_S
            ),
            _CALL_S + 1,
        )
        names += [entry["key"] for entry in page["items"]]
        cursor = page.get("next_cursor", "")
        if not cursor:
            return sorted(names)


def _get(path: str, wait_s: float) -> bytes:
    runtime = current.runtime()
    query = {"wait_s": wait_s or None}
    timeout_s = wait_s + _CALL_S
    return runtime.io.run(
        runtime.clients.gcs.call("GET", path, raw=True, query=query, timeout_s=timeout_s),
        timeout_s + 1,
    )


def _path(key: str, namespace: str | None) -> str:
    if not key:
        raise BadRequestError("a key of stoker.kv is a text of at least one character", field="key")
    return f"/v1/kv/{_namespace(namespace)}/{quote(key)}"


def _namespace(namespace: str | None) -> str:
    if namespace is None:
        namespace = current.runtime().job.namespace
    return quote(namespace, safe="")
