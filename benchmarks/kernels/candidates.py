"""``python -m benchmarks.kernels.candidates OP``: what each configuration that an autotuner may try takes.

One step, forward and backward, per candidate of each kernel; the launcher's own comes first. With
``--share 2/8`` only every eighth candidate runs: eight processes fill Triton's cache in parallel.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from typing import NamedTuple

from benchmarks.kernels.__main__ import parse_size
from benchmarks.kernels.timing import device_name
from stoker_kernels.measuring import measure_candidates
from stoker_kernels.workloads import workloads


class Share(NamedTuple):
    """Every ``count``-th candidate; it contains the identities of all others, which are skipped."""

    number: int
    count: int

    def __contains__(self, identity: object) -> bool:
        return zlib.crc32(str(identity).encode()) % self.count != self.number


def _share(text: str) -> Share:
    """Parse ``2/8``."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I below N, for example 0/8")
    return Share(int(number), int(count))


def main(argv: list[str] | None = None) -> int:
    """Print a line per candidate, as JSON."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.candidates", description=__doc__
    )
    made.add_argument("op", choices=workloads())
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    made.add_argument("--device", choices=("cuda", "cpu"), default=device_name())
    made.add_argument("--size", action="append", default=[], type=parse_size, metavar="NAME=N")
    made.add_argument("--seconds", type=float, default=60.0, help="for everything (60)")
    made.add_argument(
        "--share", type=_share, default=Share(0, 1), metavar="I/N", help="every Nth candidate"
    )
    options = made.parse_args(argv)
    trials = measure_candidates(
        options.op, options.dtype, dict(options.size), device=options.device,
        time_limit_s=options.seconds, skip=options.share,
    )  # fmt: skip
    try:
        for trial in trials:
            if trial.state != "begun":
                told = {"ms": trial.seconds * 1e3} if trial.seconds else {"is": trial.note}
                print(json.dumps({"kernel": trial.kernel, **trial.config, **told}), flush=True)
    except ValueError as error:
        made.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
