"""Keys of an elastic job in the cluster's KV, and what stands under them.

Read by the driver that submits a job (:mod:`.trainer`), its controller, and the command line; what only the
controller writes is in :mod:`.controller.fenced`. All keys are in the job's own namespace, below
``train/{job_id}/``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from stoker import kv
from stoker.exceptions import GetTimeoutError
from stoker_train.elastic.core.ledger import ledger_prefix
from stoker_train.elastic.core.membership import Membership, decode
from stoker_train.elastic.fence import INDEX, decode_index, read
from stoker_train.elastic.options import Checkpoint, Failure, Result, Scaling
from stoker_train.job_records import JobRecords, KvStore

__all__ = ("KeptResult", "Records", "Spec")

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


class Records(JobRecords):
    """The keys of one elastic job, in a namespace (default: this process's own)."""

    trainer = "an ElasticTrainer"

    def spec(self) -> Spec:
        """Return what the job runs. NotFoundError if this is no elastic trainer's job."""
        spec: Spec = self.load_spec()
        return spec

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
