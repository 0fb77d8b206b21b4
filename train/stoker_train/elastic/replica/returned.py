"""The value that a loop returns: for the job's result if it is small, else in a file by the checkpoints.

The replica's actor calls it, on rank 0, as the loop has ended. A result is a record in the cluster's KV,
which holds no large values; nothing that a long training has returned is thrown away for that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.replica.reports import Value

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("MAX_NBYTES", "returned")

MAX_NBYTES = 8 << 20
"""The largest pickle that a result holds."""
_FILE = "returned.pickle"


def returned(worker: int, value: Any, folder: Path) -> Value:
    """Return the report of a loop's value, or of its file in ``folder`` if it is too large."""
    import cloudpickle

    try:
        data = bytes(cloudpickle.dumps(value))
    except Exception as error:
        why = f"what the loop returned cannot be pickled: {error}\nreturn numbers, texts or arrays"
        return Value(worker, b"", why)
    if len(data) <= MAX_NBYTES:
        return Value(worker, data)
    size = f"the loop returned {len(data) / 2**20:.1f} MiB, and a result holds {MAX_NBYTES >> 20}"
    path = (folder / _FILE).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{_FILE}.{os.getpid()}.part")
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        fix = f"write it to a file, and return its name; {path} could not be written: {error}"
        return Value(worker, b"", f"{size}\n{fix}")
    return Value(worker, b"", f"{size}\nit is in a file: pickle.load(open({str(path)!r}, 'rb'))")
