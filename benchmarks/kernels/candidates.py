"""``python -m benchmarks.kernels.candidates OP``: what each configuration that an autotuner may try takes.

One step, forward and backward, per candidate of each kernel; the launcher's own comes first. With
``--share 2/8`` only every eighth candidate runs: eight processes fill Triton's cache in parallel.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Container
from typing import Any, cast

from benchmarks.kernels.__main__ import _size
from benchmarks.kernels.timing import device_name
from stoker_kernels.measuring import measure_candidates
from stoker_kernels.workloads import workloads


class _Others:
    """The candidates of the other shares."""

    def __init__(self, share: str) -> None:
        number, _, count = share.partition("/")
        self.number, self.count = int(number), int(count)

    def __contains__(self, identity: object) -> bool:
        return zlib.crc32(str(identity).encode()) % self.count != self.number % self.count


def main(argv: list[str] | None = None) -> int:
    """Print a line per candidate, as JSON."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.candidates", description=__doc__
    )
    made.add_argument("op", choices=workloads())
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    made.add_argument("--device", choices=("cuda", "cpu"), default=device_name())
    made.add_argument("--size", action="append", default=[], type=_size, metavar="NAME=N")
    made.add_argument("--seconds", type=float, default=60.0, help="for everything (60)")
    made.add_argument("--share", default="0/1", metavar="I/N", help="every Nth candidate")
    options = made.parse_args(argv)
    others: Container[str] = _Others(options.share)
    trials = measure_candidates(
        options.op, options.dtype, dict(options.size), device=options.device,
        time_limit_s=options.seconds, skip=cast("Any", others),
    )  # fmt: skip
    for trial in trials:
        if trial.state != "begun":
            told = {"ms": round(trial.seconds * 1e3, 4)} if trial.seconds else {"is": trial.note}
            print(json.dumps({"kernel": trial.kernel, **trial.config, **told}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
