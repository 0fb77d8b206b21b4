"""Keys of an elastic job in the cluster's KV, and what stands under them.

Shared by the driver that submits a job (:mod:`.trainer`), its controller, and the command line. All keys are
in the job's own namespace, below ``train/{job_id}/``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker import kv
from stoker.exceptions import NotFoundError
from stoker.runtime import current
from stoker_train.elastic.core.membership import Membership, decode, encode
from stoker_train.elastic.options import Checkpoint, Failure, Result, Scaling
from stoker_wire.messages.elastic import GenerationTurn, ReportGenerationTurn

__all__ = ("Records", "Spec")

_CHUNK_NBYTES = 512 << 10
_CALL_S = 15.0


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

    def write_membership(self, membership: Membership, after: int) -> bool:
        """Write the membership over that of generation ``after``; False if another one stands there."""
        key = f"{self._prefix}membership"
        data = encode(membership)
        present = self._get("membership")
        if present == data:
            return True
        if (decode(present).generation if present is not None else 0) != after:
            return False
        condition: dict[str, Any] = (
            {"if_absent": True} if present is None else {"if_value": present}
        )
        if kv.put(key, data, namespace=self.namespace, **condition):
            return True
        return self._get("membership") == data

    def write_ledger(self, changes: Mapping[str, bytes | None]) -> None:
        """Write what has changed of the ledger, see :meth:`Ledger.changes`."""
        for name, data in changes.items():
            if data is None:
                kv.delete(f"{self._prefix}ledger/{name}", namespace=self.namespace)
            else:
                self._put(f"ledger/{name}", data)

    def ledger(self) -> dict[str, bytes]:
        """Return the ledger's keys and values, see :func:`stoker_train.elastic.core.ledger.decode`."""
        prefix = f"{self._prefix}ledger/"
        found = {}
        for key in kv.keys(prefix, namespace=self.namespace):
            value = kv.get(key, namespace=self.namespace)
            if value is not None:
                found[key.removeprefix(prefix)] = value
        return found

    def write_progress(self, values: Mapping[str, Any]) -> None:
        """Write how the job is, for who follows it."""
        self._put("progress", json.dumps(values, default=str).encode())

    def write_turn(self, turn: ReportGenerationTurn) -> None:
        """Write a turn of the generations into the job's story; only its own controller may."""
        runtime = current.runtime()
        call = runtime.clients.gcs.call(
            "POST",
            f"/v1/jobs/{self.job_id}/turns",
            turn,
            reply=GenerationTurn,
            timeout_s=_CALL_S,
        )
        runtime.io.run(call, _CALL_S + 1)

    def progress(self) -> dict[str, Any]:
        """Return how the job is; empty before it has begun."""
        data = self._get("progress")
        return {} if data is None else dict(json.loads(data))

    def write_result(self, result: Result) -> None:
        """Write what became of the job."""
        import cloudpickle

        self._put("result", bytes(cloudpickle.dumps(result)))

    def result(self, timeout_s: float = 0.0) -> Result | None:
        """Return what became of the job; None if it goes on for ``timeout_s``."""
        import cloudpickle

        from stoker.exceptions import GetTimeoutError

        try:
            data = kv.wait(f"{self._prefix}result", timeout=timeout_s, namespace=self.namespace)
        except GetTimeoutError:
            return None
        result: Result = cloudpickle.loads(data)
        return result

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
