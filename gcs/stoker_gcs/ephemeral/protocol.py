"""The contract of an ephemeral store, proved by one suite over memory and Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class EphemeralStore(Protocol):
    """Short-lived entries, by kind and key, each with its own expiry.

    ``put``, ``remove`` and ``announce`` never wait and never fail: what cannot be sent stays in
    memory and is sent when the other side is back.
    """

    @property
    def kind(self) -> str:
        """``memory`` or ``redis``."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other replicas see what is put here, right now."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether a configured server does not answer, so that only this process's entries count."""
        ...

    @property
    def subscribed(self) -> bool:
        """Whether announcements of other replicas arrive here, right now."""
        ...

    async def start(self, on_announce: Callable[[int], None]) -> None:
        """Start; ``on_announce`` is called with the sequence numbers that other replicas announce."""
        ...

    async def stop(self) -> None:
        """Stop; what was put may be lost."""
        ...

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` for ``ttl_s`` seconds."""
        ...

    def remove(self, kind: str, key: str) -> None:
        """Delete an entry."""
        ...

    async def all(self, kind: str) -> dict[str, bytes]:
        """Return all entries of a kind that have not expired, of every replica within reach."""
        ...

    def announce(self, seq: int) -> None:
        """Announce to the other replicas that events up to ``seq`` are committed."""
        ...
