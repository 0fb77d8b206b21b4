"""Records of a sharded job: what it runs, how it is, and what became of it.

Written by its controller (:class:`FencedRecords`), read by the program that follows it. Of two controllers
only the one that took over last changes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker import kv
from stoker.exceptions import GetTimeoutError
from stoker_train.elastic.fence import FencedKey
from stoker_train.elastic.options import Checkpoint, Failure
from stoker_train.job_records import JobRecords, KvStore
from stoker_train.planning.strategy import Strategy

if TYPE_CHECKING:
    from stoker_train.sharded.options import ShardedResult

__all__ = ("GROUP", "FencedRecords", "Records", "Spec")

GROUP = "sharded"
"""The name of the process group that a gang forms, below which its rendezvous has its keys."""
_PAUSE_S = 0.5
_RESULT = "result_of_attempt"


@dataclass(frozen=True)
class Spec:
    """All that a controller needs; ``loop`` and ``config`` are pickles.

    ``stages``: the layers [first, end) of each stage of a pipeline, empty where no plan says which.
    """

    name: str
    loop: bytes
    config: bytes
    strategy: Strategy
    stages: tuple[tuple[int, int], ...]
    resources: dict[str, float]
    checkpoint: Checkpoint
    failure: Failure
    seed: int


class Records(JobRecords):
    """The keys of one sharded job, in a namespace (default: this process's own)."""

    trainer = "a ShardedTrainer"

    def spec(self) -> Spec:
        """Return what the job runs. NotFoundError if this is no sharded trainer's job."""
        spec: Spec = self.load_spec()
        return spec

    def result(self, timeout_s: float = 0.0) -> ShardedResult | None:
        """Return what became of the job; None if it goes on for ``timeout_s``."""
        import cloudpickle

        until_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                kv.wait(f"{self._prefix}result", timeout=left_s, namespace=self.namespace)
            except GetTimeoutError:
                return None
            counts = self.progress().get(_RESULT)
            data = self._get(f"result/{counts}") if counts is not None else None
            if data is not None:
                found: ShardedResult = cloudpickle.loads(data)
                return found
            if time.monotonic() >= until_s:
                return None
            time.sleep(min(_PAUSE_S, left_s))


class FencedRecords(Records):
    """The keys of one job for the controller of ``attempt``. FencedError once a later one has taken them."""

    def __init__(self, job_id: str, attempt: int, namespace: str | None = None) -> None:
        super().__init__(job_id, namespace)
        self.attempt = attempt
        self._key = FencedKey(KvStore(f"train/{job_id}/", namespace), "progress", attempt)

    def take(self) -> dict[str, Any]:
        """Take the records over, and return how the job was."""
        known: dict[str, Any] = {}

        def renew(found: bytes | None) -> bytes:
            known.clear()
            known.update({} if found is None else json.loads(found))
            known.pop(_RESULT, None)
            return self._signed(known)

        self._key.take(renew)
        return known

    def write_progress(self, values: Mapping[str, Any]) -> None:
        """Write how the job is, for who follows it."""
        self._key.write(self._signed(values))

    def write_result(self, result: ShardedResult, progress: Mapping[str, Any]) -> None:
        """Write what became of the job; it counts, as nobody has taken the job over before."""
        import cloudpickle

        self._put(f"result/{self.attempt}", bytes(cloudpickle.dumps(result)))
        self.write_progress({**progress, _RESULT: self.attempt})
        self._put("result", b"")  # wakes who waits

    def drop_work(self) -> None:
        """Remove what nobody needs once there is a result: the spec, and keys of gangs that did not form."""
        self.drop_spec()
        kv.delete_prefix(f"{self._prefix}{GROUP}/", namespace=self.namespace)

    def _signed(self, values: Mapping[str, Any]) -> bytes:
        return json.dumps({**values, "attempt": self.attempt}, default=str).encode()
