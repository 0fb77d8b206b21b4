"""Keys of an elastic job in the cluster's KV, and what stands under them.

Read by the driver that submits a job (:mod:`.trainer`), its controller, and the command line; what only the
controller writes is in :mod:`.controller.fenced`. All keys are in the job's own namespace, below
``train/{job_id}/``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stoker import kv
from stoker.exceptions import GetTimeoutError, NotFoundError
from stoker_train.elastic.core.ledger import ledger_prefix
from stoker_train.elastic.core.membership import Membership, decode
from stoker_train.elastic.fence import INDEX, decode_index, read
from stoker_train.elastic.options import Checkpoint, Failure, Result, Scaling

__all__ = ("KeptResult", "KvStore", "Records", "Spec")

_CHUNK_NBYTES = 512 << 10
_READS = 5
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Spec:
    """All that a controller needs; ``loop``, ``config``, ``sync`` and ``policies`` are pickles."""

    name: str
    loop: bytes
    config: bytes
    sync: bytes
    policies: bytes
    scaling: Scaling
    checkpoint: Checkpoint
    failure: Failure
    seed: int
    code_hash: str = ""
    """Under which measurements are kept; empty where the user does not allow that."""


@dataclass(frozen=True)
class KeptResult:
    """The outcome of a job, as the controller of one attempt of it has written it."""

    attempt: int
    result: Result


class KvStore:
    """Keys of the cluster's KV below ``prefix``: the store of :mod:`stoker_train.elastic.fence`."""

    def __init__(self, prefix: str, namespace: str | None = None) -> None:
        self._prefix, self._namespace = prefix, namespace

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""
        return kv.get(self._prefix + name, namespace=self._namespace)

    def put(self, name: str, data: bytes, *, over: bytes | None) -> bool:
        """Write a value if the present one is ``over`` (None: if there is none); whether it was."""
        condition: dict[str, Any] = {"if_absent": True} if over is None else {"if_value": over}
        return kv.put(self._prefix + name, data, namespace=self._namespace, **condition)

    def put_new(self, name: str, data: bytes) -> None:
        """Write a value under a name that its writer alone has."""
        kv.put(self._prefix + name, data, namespace=self._namespace)

    def delete(self, name: str) -> None:
        """Remove a key, if it is there."""
        kv.delete(self._prefix + name, namespace=self._namespace)


class Records:
    """The keys of one job, in a namespace (default: this process's own)."""

    def __init__(self, job_id: str, namespace: str | None = None) -> None:
        self.job_id, self.namespace = job_id, namespace
        self._prefix = f"train/{job_id}/"

    def put_spec(self, spec: Spec) -> None:
        """Keep what the job runs; SerializationError if it cannot be pickled."""
        import cloudpickle

        data = bytes(cloudpickle.dumps(spec))
        chunks = [data[n : n + _CHUNK_NBYTES] for n in range(0, len(data), _CHUNK_NBYTES)]
        for number, chunk in enumerate(chunks):
            self._put(f"spec/{number:06d}", chunk)
        self._put("spec/count", str(len(chunks)).encode())

    def spec(self) -> Spec:
        """Return what the job runs. NotFoundError if this is no elastic trainer's job."""
        import cloudpickle

        count = self._get("spec/count")
        if count is None:
            raise NotFoundError(
                f"job {self.job_id} is none of an ElasticTrainer\ngive the name or id of one that is"
            )
        parts = [self._get(f"spec/{number:06d}") or b"" for number in range(int(count))]
        spec: Spec = cloudpickle.loads(b"".join(parts))
        return spec

    def drop_spec(self) -> None:
        """Remove what the job has run: it is over."""
        kv.delete_prefix(f"{self._prefix}spec/", namespace=self.namespace)

    def membership(self) -> Membership | None:
        """Return the newest membership; None before the first."""
        data = self._get("membership")
        return None if data is None else decode(data)

    def ledger(self) -> dict[str, bytes]:
        """Return the ledger's keys and values, see :func:`stoker_train.elastic.core.ledger.decode`."""
        store = KvStore(ledger_prefix(self.job_id), self.namespace)
        found: dict[str, bytes] = {}
        for _ in range(_READS):
            index = decode_index(store.get(INDEX))
            found = read(store.get, index)
            if len(found) == len(index.chunks) + (index.head is not None):
                break  # else a chunk was written anew meanwhile
        return found

    def progress(self) -> dict[str, Any]:
        """Return how the job is; empty before it has begun."""
        data = self._get("progress")
        return {} if data is None else dict(json.loads(data))

    def result(self, timeout_s: float = 0.0) -> Result | None:
        """Return what became of the job; None if it goes on for ``timeout_s``."""
        import cloudpickle

        until_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                sign = kv.wait(f"{self._prefix}result", timeout=left_s, namespace=self.namespace)
            except GetTimeoutError:
                return None
            # One that came back after another had taken over may have written it: that does not count.
            counts = decode_index(self._get(f"ledger/{INDEX}")).result
            # Results of a former release stand under the key that is only a sign now.
            data = (self._get(f"result/{counts}") or sign) if counts else b""
            if data:
                kept: KeptResult = cloudpickle.loads(data)
                if kept.attempt == counts:
                    return kept.result
            if time.monotonic() >= until_s:
                return None
            time.sleep(min(_PAUSE_S, left_s))

    def ask(self, what: str, **values: Any) -> None:
        """Ask the controller for something; it is done at a batch boundary."""
        number = kv.add(f"{self._prefix}asked", namespace=self.namespace)
        self._put(f"ask/{number:08d}", json.dumps({"what": what, **values}).encode())

    def take_asks(self) -> Iterator[dict[str, Any]]:
        """Yield what was asked for, in order, and remove each then."""
        for key in kv.keys(f"{self._prefix}ask/", namespace=self.namespace):
            data = kv.get(key, namespace=self.namespace)
            if data is not None:
                yield dict(json.loads(data))
            kv.delete(key, namespace=self.namespace)

    def watch_asks(self) -> kv.Watch:
        """Return the changes of what is asked for."""
        return kv.watch(f"{self._prefix}ask/", namespace=self.namespace, timeout=1.0)

    def _put(self, name: str, data: bytes) -> None:
        kv.put(f"{self._prefix}{name}", data, namespace=self.namespace)

    def _get(self, name: str) -> bytes | None:
        return kv.get(f"{self._prefix}{name}", namespace=self.namespace)
