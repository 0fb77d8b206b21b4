"""The errors of collectives, and the record by which a whole group learns why it failed.

Raised by all of :mod:`stoker_train.collective`; nothing here talks to anybody.
"""

from __future__ import annotations

import msgspec

from stoker.exceptions import StokerError


class CollectiveError(StokerError, RuntimeError):
    """A collective failed, and with it its group: no later one of the group can succeed.

    ``extra`` has ``ranks``: those at fault, in the group.
    """

    code = "collective_failed"


class MemberLostError(CollectiveError, ConnectionError):
    """A member of the group died, or its connections broke; ``extra`` has ``ranks`` and ``actors``."""

    code = "collective_member_lost"
    status = 503


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not come to a collective in time; ``extra["ranks"]`` are those."""

    code = "collective_timeout"
    status = 504


class MismatchError(CollectiveError, ValueError):
    """The members called different things: another operation, shape, dtype or name.

    It is raised on all of them, nothing was exchanged, and the group can be used further.
    """

    code = "collective_mismatch"
    status = 409


_CLASSES: dict[str, type[CollectiveError]] = {
    one.code: one
    for one in (CollectiveError, MemberLostError, CollectiveTimeoutError, MismatchError)
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a group failed, as its members tell each other. ``code`` is that of the error."""

    code: str
    text: str
    ranks: tuple[int, ...] = ()
    actors: tuple[str, ...] = ()

    def error(self) -> CollectiveError:
        """Return a new error for one who waits, or calls later."""
        cls = _CLASSES.get(self.code, CollectiveError)
        return cls(self.text, extra={"ranks": list(self.ranks), "actors": list(self.actors)})
