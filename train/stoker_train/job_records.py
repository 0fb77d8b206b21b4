"""Keys of a trainer's job in the cluster's KV: what it runs, how it is, and what users ask of it.

Base of the records of elastic and of sharded jobs, which add what else they keep. All keys are in the job's
own namespace, below ``train/{job_id}/``. Nothing here decides anything.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from stoker import kv
from stoker.exceptions import GetTimeoutError, NotFoundError, StokerError

__all__ = ("JobRecords", "KvStore")

_log = logging.getLogger("stoker.train.controller")
_CHUNK_NBYTES = 512 << 10
_RETRY_S = 0.2


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


class JobRecords:
    """The keys of one job, in a namespace (default: this process's own).

    ``trainer`` names what has made it.
    """

    trainer = "trainer"

    def __init__(self, job_id: str, namespace: str | None = None) -> None:
        self.job_id, self.namespace = job_id, namespace
        self._prefix = f"train/{job_id}/"

    def put_spec(self, spec: Any) -> None:
        """Keep what the job runs; SerializationError if it cannot be pickled."""
        import cloudpickle

        data = bytes(cloudpickle.dumps(spec))
        chunks = [data[n : n + _CHUNK_NBYTES] for n in range(0, len(data), _CHUNK_NBYTES)]
        for number, chunk in enumerate(chunks):
            self._put(f"spec/{number:06d}", chunk)
        self._put("spec/count", str(len(chunks)).encode())

    def load_spec(self) -> Any:
        """Return what the job runs. NotFoundError if no trainer of this kind has made it."""
        import cloudpickle

        count = self._get("spec/count")
        if count is None:
            raise NotFoundError(
                f"job {self.job_id} is none of {self.trainer}\ngive the name or id of one that is"
            )
        parts = [self._get(f"spec/{number:06d}") or b"" for number in range(int(count))]
        return cloudpickle.loads(b"".join(parts))

    def drop_spec(self) -> None:
        """Remove what the job has run: it is over."""
        kv.delete_prefix(f"{self._prefix}spec/", namespace=self.namespace)

    def progress(self) -> dict[str, Any]:
        """Return how the job is; empty before it has begun."""
        data = self._get("progress")
        return {} if data is None else dict(json.loads(data))

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

    def follow_asks(self, take: Callable[[], object], goes_on: Callable[[], bool]) -> None:
        """Call ``take`` now and at each change of what is asked for, as long as ``goes_on``.

        A gcs that is away is watched anew.
        """
        while goes_on():
            try:
                with self.watch_asks() as changes:
                    take()
                    while goes_on():
                        try:
                            next(changes)
                        except GetTimeoutError:
                            continue
                        take()
            except (StokerError, StopIteration) as error:
                if goes_on():
                    _log.info("asks are watched anew: %s", error)
                    time.sleep(_RETRY_S)

    def _put(self, name: str, data: bytes) -> None:
        kv.put(f"{self._prefix}{name}", data, namespace=self.namespace)

    def _get(self, name: str) -> bytes | None:
        return kv.get(f"{self._prefix}{name}", namespace=self.namespace)
