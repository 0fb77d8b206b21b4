"""``python -m stoker.gateway.calls``: one caller, which the gateway starts and tells on its input what to be.

It ends with that input, so with the gateway.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from stoker.exceptions import StokerError
from stoker.gateway.calls.service import CallerService
from stoker.gateway.calls.spec import CallerSpec
from stoker_wire.process import log
from stoker_wire.process.files import umask
from stoker_wire.settings import Settings

_READY = b"ready\n"


def main() -> int:
    """Serve until the input ends, a signal comes, or nobody needs it."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    settings = Settings.from_env()
    log.configure(settings.log_level, settings.log_format)
    umask.restrict()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=CallerSpec)
    sys.argv = [f"calls by HTTP of {spec.user.role} {spec.user.name or spec.user.job_id}"]
    caller = CallerService(spec, settings)
    try:
        caller.start(stopping.set)
    except StokerError as error:
        os.write(1, msgspec.json.encode({"code": error.code, "message": error.message}) + b"\n")
        return 1
    os.write(1, _READY)

    def until_input_ends() -> None:
        sys.stdin.buffer.read()
        stopping.set()

    threading.Thread(target=until_input_ends, name="gateway", daemon=True).start()
    stopping.wait()
    caller.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
