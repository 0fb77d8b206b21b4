"""``stoker.train.warm``: have every GPU node compile kernels before a job needs them.

The command ``stoker kernels warm`` submits ``python -m stoker.train.warming``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from stoker.api.calls import get, nodes
from stoker.api.remote import remote
from stoker.exceptions import StokerError
from stoker.runtime.options.kernel_specs import kernel_specs
from stoker.runtime.options.strategies import NodeAffinity

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("warm",)

SHARE = 0.01
"""The part of a GPU that makes its node compile for it, beside whatever runs there."""


def warm(kernels: Iterable[Any], *, timeout: float = 900.0) -> dict[str, str]:
    """Compile ``kernels`` (entries of ``runtime_env["kernels"]``) on every living node with GPUs.

    Return node id -> why it failed there, empty where it is done. Waits ``timeout`` seconds at most.
    """
    entries = kernel_specs(kernels)
    task = remote(num_cpus=0, num_gpus=SHARE, max_retries=0, name="warm kernels")(_noop)
    refs = {
        node["node_id"]: task.options(
            scheduling_strategy=NodeAffinity(node_id=node["node_id"]),
            runtime_env={"kernels": entries},
        ).remote()
        for node in nodes()
        if node["state"] == "ALIVE" and node["resources"].get("GPU", 0) > 0
    }
    end_s = time.monotonic() + timeout
    failures = {}
    for node_id, ref in refs.items():
        try:
            get(ref, timeout=max(0.0, end_s - time.monotonic()))
            failures[node_id] = ""
        except StokerError as error:
            failures[node_id] = str(error)
    return failures


def _noop() -> None:
    """Do nothing: the environment of this task is what compiles."""


def main() -> int:
    """Run the command line; return its exit code."""
    from stoker.api.init import init

    parser = argparse.ArgumentParser(prog="python -m stoker.train.warming")
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    init()
    specs = [json.loads(text) if text.startswith("{") else text for text in options.specs]
    failures = warm(specs, timeout=options.timeout)
    if options.json:
        sys.stdout.write(json.dumps(failures) + "\n")
    else:
        for node_id, failure in failures.items():
            sys.stdout.write(f"{node_id}  {failure or 'warm'}\n")
        if not failures:
            sys.stdout.write("no node has GPUs\n")
    return 1 if any(failures.values()) or not failures else 0


if __name__ == "__main__":
    sys.exit(main())
