"""The facts of a handle as the gcs keeps them for :func:`stoker.get_actor`: msgpack, checked when read.

Never a pickle: what a driver gets from the gcs, others have put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from stoker.exceptions import SerializationError
from stoker.runtime.actors.info import HandleInfo
from stoker.runtime.tasks.functions import PickledTypes, pickled_exception_types

if TYPE_CHECKING:
    from stoker_wire.messages.work import Actor


def encoded_info(info: HandleInfo) -> bytes:
    """Return the facts as the gcs keeps them.

    The exception types to retry stay a pickle inside, which callers pass on to the actor's worker unread.
    """
    return msgspec.msgpack.encode(_with_exception_types(info, pickled_exception_types))


def decoded_info(actor: Actor) -> HandleInfo:
    """Return the facts that the gcs has of an actor."""
    try:
        info = msgspec.msgpack.decode(actor.handle_info, type=HandleInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SerializationError(
            f"the handle of actor {actor.actor_id} cannot be read\n"
            f"{error}; another version of stoker made it: use that one, or create the actor again"
        ) from None
    if info.actor_id != actor.actor_id:
        raise SerializationError(
            f"the handle of actor {actor.actor_id} is one to {info.actor_id!r}: create the actor again"
        )
    return _with_exception_types(info, _unread)


def _unread(types: Any) -> PickledTypes:
    if not isinstance(types, bytes):
        raise SerializationError(f"retry_exceptions of a method is {types!r:.80}: not a pickle")
    return PickledTypes(types)


def _with_exception_types(info: HandleInfo, change: Callable[[Any], bytes]) -> HandleInfo:
    """Return the facts with the ``retry_exceptions`` of each method changed, where they name any."""
    methods = dict(info.methods)
    for name, method in methods.items():
        types = method.options.retry_exceptions
        if not isinstance(types, bool):
            options = replace(method.options, retry_exceptions=change(types))
            methods[name] = method._replace(options=options)
    return replace(info, methods=methods)
