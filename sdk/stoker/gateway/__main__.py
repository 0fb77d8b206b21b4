"""``python -m stoker.gateway``: the gateway of a cluster, configured by ``STOKER_*`` variables.

It needs no token: the gcs checks those of its users.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from functools import partial

from stoker.gateway.service import DEFAULT_PORT, Gateway
from stoker_wire.errors import BadRequestError
from stoker_wire.process.run_service import run_service
from stoker_wire.settings import Settings


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m stoker.gateway", description=__doc__)
    parser.add_argument("--gcs-url", help="URL of the gcs (default: STOKER_GCS_URL)")
    parser.add_argument("--host", help="address to listen on (default: STOKER_HOST)")
    parser.add_argument("--port", type=int, help=f"port to listen on (default: {DEFAULT_PORT})")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = Settings.from_env(gcs_url=given.gcs_url, host=given.host, port=given.port)

    async def start() -> Gateway:
        if not settings.gcs_url:
            raise BadRequestError(
                "the gateway needs to know the gcs\nset STOKER_GCS_URL or pass --gcs-url",
                field="gcs_url",
            )
        gateway = Gateway(settings, gcs_url=settings.gcs_url)
        port = settings.port if given.port is not None else settings.port or DEFAULT_PORT
        await gateway.start(settings.host, port)
        if given.lifeline_fd is not None:
            end = partial(os.kill, os.getpid(), signal.SIGTERM)
            asyncio.get_running_loop().add_reader(given.lifeline_fd, end)
        if given.ready_fd is not None:
            os.write(given.ready_fd, f"{gateway.url}\n".encode())
        return gateway

    run_service(start, settings=settings)


if __name__ == "__main__":
    main()
