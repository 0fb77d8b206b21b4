"""The records of a job as its controller writes them: each refused once another controller has taken over.

What others read is in :mod:`stoker_train.elastic.records`, how the fence works in
:mod:`stoker_train.elastic.fence`. The controller takes all records over before it does anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from stoker import kv
from stoker.exceptions import FencedError
from stoker.runtime import current
from stoker_train.elastic.core.ledger import ledger_prefix
from stoker_train.elastic.core.membership import Membership, decode, encode
from stoker_train.elastic.fence import FencedKey, FencedLedger
from stoker_train.elastic.records import KeptResult, Records
from stoker_train.job_records import KvStore
from stoker_wire.messages.elastic import GenerationTurn, ReportGenerationTurn

if TYPE_CHECKING:
    from stoker_train.elastic.options import Result

__all__ = ("FencedRecords",)

_CALL_S = 15.0


class FencedRecords(Records):
    """The keys of one job for the controller of ``attempt``. FencedError once a later one has taken them."""

    def __init__(self, job_id: str, attempt: int, namespace: str | None = None) -> None:
        super().__init__(job_id, namespace)
        self.attempt = attempt
        self._keys = KvStore(f"train/{job_id}/", namespace)
        self._ledger = FencedLedger(KvStore(ledger_prefix(job_id), namespace), attempt)
        self._progress = FencedKey(self._keys, "progress", attempt)
        self._kept: dict[str, bytes] = {}

    def take(self) -> None:
        """Take the records over: what an earlier controller would write from now on is refused."""
        self._kept = self._ledger.take()
        self._take_membership()
        self._progress.take(lambda found: self._signed({} if found is None else json.loads(found)))

    def holds(self) -> bool:
        """Return whether no other controller had taken the records over, a moment ago."""
        return self._ledger.holds()

    def ledger(self) -> dict[str, bytes]:
        """Return the ledger as it was taken over."""
        return self._kept

    def write_ledger(self, changes: Mapping[str, bytes | None]) -> None:
        """Write what has changed of the ledger, see :meth:`Ledger.changes`."""
        self._ledger.write(changes)

    def write_progress(self, values: Mapping[str, Any]) -> None:
        """Write how the job is, for who follows it."""
        self._progress.write(self._signed(values))

    def write_membership(self, membership: Membership, after: int) -> bool:
        """Write the membership over that of generation ``after``; False if another one stands there.

        Or one of a later controller.
        """
        signed = msgspec.structs.replace(membership, attempt=self.attempt)
        data = encode(signed)
        present = self._keys.get("membership")
        if present == data:
            return True
        known = Membership(self.job_id, 0, ()) if present is None else decode(present)
        if known.generation != after or known.attempt > self.attempt:
            return False
        return self._keys.put("membership", data, over=present) or (
            self._keys.get("membership") == data
        )

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

    def write_result(self, result: Result) -> None:
        """Write what became of the job. It counts, as nobody has taken the job over before."""
        import cloudpickle

        self._ledger.close()
        data = bytes(cloudpickle.dumps(KeptResult(self.attempt, result)))
        # Under a key of its own: one that is stopped here and goes on later overwrites no successor's.
        kv.put(f"{self._prefix}result/{self.attempt}", data, namespace=self.namespace)
        kv.put(f"{self._prefix}result", b"", namespace=self.namespace)  # wakes who waits

    def _take_membership(self) -> None:
        while True:
            present = self._keys.get("membership")
            known = Membership(self.job_id, 0, ()) if present is None else decode(present)
            if known.attempt > self.attempt:
                raise FencedError(
                    f"job {self.job_id} is held by attempt {known.attempt}\n"
                    "only the newest attempt goes on"
                )
            mine = encode(msgspec.structs.replace(known, attempt=self.attempt))
            if self._keys.put("membership", mine, over=present):
                return

    def _signed(self, values: Mapping[str, Any]) -> bytes:
        return json.dumps({**values, "attempt": self.attempt}, default=str).encode()
