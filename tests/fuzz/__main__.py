"""``make fuzz``: the live API by its own documents, and every decoder by damaged inputs."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.fuzz.api import fuzz_api
from tests.fuzz.decoders import DECODERS
from tests.fuzz.decoding import fuzz_decoders
from tests.fuzz.findings import table

CASES = 10_000
INPUTS = 100_000
SERVICES = ("gcs", "scheduler", "nodelet")


def main() -> int:
    """Fuzz; return 1 if there were findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=CASES, help="cases of the API, of all services"
    )
    parser.add_argument("--inputs", type=int, default=INPUTS, help="inputs of each decoder")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--operation", default="", help="one operation, as 'POST /v1/jobs'")
    parser.add_argument("--seed", type=int, help="of all inputs and cases (default: a random one)")
    targets = (*SERVICES, *DECODERS)
    parser.add_argument(
        "--only", nargs="+", choices=targets, metavar="TARGET", help=", ".join(targets)
    )
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    chosen = options.only or targets
    began_s = time.monotonic()
    outcomes = fuzz_decoders(chosen, seed=seed, inputs=options.inputs, first=options.first)
    services = [name for name in SERVICES if name in chosen]
    if services:
        outcomes += fuzz_api(services, seed=seed, cases=options.cases, operation=options.operation)
    print(table(outcomes))
    found = sum(len(outcome.findings) for outcome in outcomes)
    print(f"\n{found} findings in {time.monotonic() - began_s:.0f} s, seed {seed}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
