"""Operations on the cluster's KV, for processes that may have no runtime, as a ``torchrun``.

One HTTP request each, by the client of the CLI, so that no event loop and no job are needed. Called by the
store, the rendezvous backend and the agents of ``stoker launch``; it must not import torch. In a program
of the user ``stoker.kv`` is the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from stoker.exceptions import ConflictError, NotFoundError
from stoker.local.address import resolve
from stoker.runtime.current import maybe_runtime
from stoker.runtime.net.http import HttpClient
from stoker_wire.http.auth import Credential
from stoker_wire.messages.control import (
    KvDelete,
    KvEntry,
    KvGet,
    KvItem,
    KvPut,
    KvReply,
    Page,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_wire.messages.control import KvOperation

NAMESPACE = "torchrun"
"""Of processes that belong to no job."""
_CALL_S = 15.0
POLL_S = 20.0
"""One long poll: a longer wait is made of several."""
_KEYS_PER_CALL = 1000


@dataclass(frozen=True, slots=True)
class KvLine:
    """A namespace of the KV of one cluster. For any thread; errors are those of ``stoker.exceptions``."""

    client: HttpClient
    namespace: str = NAMESPACE

    @classmethod
    def of_process(cls, namespace: str | None = None) -> Self:
        """Return the line of this driver or worker, in its job's namespace.

        Without one, that of the cluster that ``STOKER_ADDRESS`` names or this machine has.
        """
        runtime = maybe_runtime()
        if runtime is None:
            return cls.to(None, namespace=namespace)
        return cls(runtime.job.http, runtime.job.namespace if namespace is None else namespace)

    @classmethod
    def to(
        cls, address: str | None, *, token: str | None = None, namespace: str | None = None
    ) -> Self:
        """Return a line to the cluster at ``address`` (None: the usual one); its token is looked up.

        One that is found in a file is read again as its owner replaces it.
        """
        target = resolve(address, token)
        credential = Credential(target.token)
        if target.token_file:
            credential.follow(target.token_file)
        client = HttpClient(target.address, token=credential)
        return cls(client, NAMESPACE if namespace is None else namespace)

    def do(self, operation: KvOperation, wait_s: float = 0.0) -> KvReply:
        """Carry out one operation; one that is sent again, as its answer was lost, counts once."""
        return self.client.call(
            "POST", self._path, operation, reply=KvReply, timeout_s=wait_s + _CALL_S
        )

    def read(self, keys: Iterable[str], wait_s: float = 0.0) -> dict[str, KvItem]:
        """Return the keys that exist, once all do or ``wait_s`` is over (at most a minute)."""
        wanted = tuple(keys)
        if not wanted:
            return {}
        reply = self.do(KvGet(keys=wanted, wait_s=wait_s), wait_s)
        return {item.key: item for item in reply.items}

    def wait(
        self,
        keys: Iterable[str],
        timeout_s: float,
        *,
        check: Callable[[], object] | None = None,
        poll_s: float = POLL_S,
    ) -> tuple[dict[str, KvItem], list[str]]:
        """Wait until all keys were there; return those, and the names of the missing ones at the deadline.

        ``check`` is called at least every ``poll_s`` seconds, and may raise to end the wait.
        """
        wanted = list(dict.fromkeys(keys))
        found: dict[str, KvItem] = {}
        deadline_s = time.monotonic() + timeout_s
        missing = wanted
        while missing:
            if check is not None:
                check()
            left_s = deadline_s - time.monotonic()
            wait_s = max(0.0, min(left_s, poll_s))
            found |= self.read(missing[:_KEYS_PER_CALL], wait_s)
            missing = [key for key in missing if key not in found]
            if left_s <= 0:
                break
        return found, missing

    def put_if(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> int | None:
        """Set a key whose last change is ``revision`` (0: it is absent); return the new one, else None."""
        try:
            reply = self.do(KvPut(key=key, value=value, if_revision=revision, ttl_s=ttl_s))
        except ConflictError:
            return None
        assert reply.entry is not None
        return reply.entry.revision

    def delete(self, key: str, revision: int | None = None) -> bool:
        """Remove a key; False if it was not there, or has changed since ``revision``."""
        try:
            self.do(KvDelete(key=key, if_revision=revision))
        except (NotFoundError, ConflictError):
            return False
        return True

    def entries(self, prefix: str) -> Iterator[KvEntry]:
        """Yield the keys that start with ``prefix``, without values."""
        return self.client.items(self._path, Page[KvEntry], {"prefix": prefix})

    @property
    def _path(self) -> str:
        return f"/v1/kv/{quote(self.namespace, safe='')}"
