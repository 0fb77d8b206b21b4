"""The contract of a hot store, proved by one suite over memory and Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class HotStore(Protocol):
    """Short-lived facts, by kind and key, each with its own expiry.

    ``put``, ``remove`` and ``announce`` never wait and never fail: what cannot be sent is kept in
    memory and sent when the other side is back.
    """

    @property
    def shared(self) -> bool:
        """Whether other replicas see what is put here, right now."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether a configured server does not answer, so that only this process's facts count."""
        ...

    @property
    def hears(self) -> bool:
        """Whether what other replicas announce arrives here, right now."""
        ...

    async def start(self, on_news: Callable[[int], None]) -> None:
        """Begin; ``on_news`` is called with sequence numbers that other replicas announce."""
        ...

    async def stop(self) -> None:
        """End; what was put may be lost."""
        ...

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        """Keep ``value`` for ``ttl_s`` seconds."""
        ...

    def remove(self, kind: str, key: str) -> None:
        """Forget a fact."""
        ...

    async def all(self, kind: str) -> dict[str, bytes]:
        """All facts of a kind that have not expired, from every replica that can be heard."""
        ...

    def announce(self, seq: int) -> None:
        """Tell the other replicas that events up to ``seq`` are committed."""
        ...
