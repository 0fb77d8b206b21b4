"""A worker in an interpreter of its own, which shares nothing with a fork server (:mod:`.run_as`).

``python -m stoker_nodelet.workers.exec_worker FD``: the descriptor has what a forked worker finds in its
memory. It runs as the user of the job from its first instruction on.
"""

from __future__ import annotations

import importlib
import sys
import traceback

import msgspec

from stoker_nodelet.workers.forkserver import import_target, run_target
from stoker_wire.errors import StartError
from stoker_wire.messages.node_api import WorkerBoot
from stoker_wire.process.search_path import apply_path

CANNOT_START = 78
"""The exit code of a worker that could not start for a reason that another would have as well."""


class _Start(msgspec.Struct):
    boot: bytes
    socket_fd: int
    target: str
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]


def main() -> None:
    """Run the worker; never returns."""
    with open(int(sys.argv[1]), "rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=_Start)
    del sys.argv[1:]

    def run() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        apply_path(start.sys_path)
        try:
            for module in start.preload:
                importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
            sys.exit(CANNOT_START)
        boot = msgspec.msgpack.decode(start.boot, type=WorkerBoot)
        try:
            import_target(start.target)(msgspec.structs.replace(boot, socket_fd=start.socket_fd))
        except StartError as error:  # a file that this user cannot read, as the key for TLS
            sys.stderr.write(f"{error}\n")
            sys.exit(CANNOT_START)

    run_target(run)


if __name__ == "__main__":
    main()
