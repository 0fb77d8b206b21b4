"""``python -m stoker_scheduler``: a scheduler on its own, configured by ``STOKER_*`` variables."""

from __future__ import annotations

import argparse

from stoker_scheduler.service import DEFAULT_PORT, SchedulerService, serve
from stoker_wire.errors import BadRequestError
from stoker_wire.http.cluster_secret import find_secret
from stoker_wire.http.server.service import run_service
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.settings import Settings


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m stoker_scheduler", description=__doc__)
    parser.add_argument("--gcs-url", help="URL of the gcs (default: STOKER_GCS_URL)")
    parser.add_argument("--host", help="address to listen on (default: STOKER_HOST)")
    parser.add_argument("--port", type=int, help=f"port to listen on (default: {DEFAULT_PORT})")
    given = parser.parse_args()
    settings = Settings.from_env(gcs_url=given.gcs_url, host=given.host, port=given.port)

    async def start() -> SchedulerService:
        if not settings.gcs_url:
            raise BadRequestError(
                "the scheduler needs to know the gcs\nset STOKER_GCS_URL or pass --gcs-url",
                field="gcs_url",
            )
        token = TokenSigner(find_secret(settings, host=settings.host))
        port = settings.port if given.port is not None else settings.port or DEFAULT_PORT
        return await serve(
            settings, token=token, gcs_url=settings.gcs_url, host=settings.host, port=port
        )

    run_service(start, settings=settings)


if __name__ == "__main__":
    main()
