"""The results of calls with ``cache=True``, by function and arguments: the last thousand (LRU)."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

from stoker_wire.messages.data import Failed

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker_wire.messages.data import Inline

_RESULTS = 1000


class ResultCache:
    """The cached refs, which keep the results alive. Any thread."""

    def __init__(self) -> None:
        self._refs: dict[tuple[str, bytes], ObjectRef[Any]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._refs)

    @staticmethod
    def key(function: str, args: Inline) -> tuple[str, bytes]:
        """Return the key of a call: arguments are equal if they pickle to equal bytes."""
        digest = hashlib.sha256(args.data)
        for buffer in args.buffers:
            digest.update(buffer.view)
        return function, digest.digest()

    def get(self, key: tuple[str, bytes]) -> ObjectRef[Any] | None:
        """Return the ref of an equal call that did not fail, if there was one."""
        with self._lock:
            ref = self._refs.pop(key, None)
            if ref is None or isinstance(ref._entry.location, Failed):
                return None
            self._refs[key] = ref  # the last used is evicted last
            return ref

    def put(self, key: tuple[str, bytes], ref: ObjectRef[Any]) -> None:
        """Add a call; evict the least recently used one if the cache is full."""
        with self._lock:
            if len(self._refs) >= _RESULTS:
                del self._refs[next(iter(self._refs))]
            self._refs[key] = ref
