"""``python -m stoker_gcs``: a gcs on its own, configured by ``STOKER_*`` variables."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stoker_gcs.service import DEFAULT_PORT, Running, serve
from stoker_wire.http.auth import private_dir
from stoker_wire.http.cluster_secret import find_secret
from stoker_wire.http.server.service import run_service
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.process.files.secret_files import with_password
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m stoker_gcs", description=__doc__)
    parser.add_argument("--database-url", help="default: STOKER_DATABASE_URL, else a SQLite file")
    parser.add_argument("--redis-url", help="default: STOKER_REDIS_URL, else this process's memory")
    parser.add_argument("--host", help="address to listen on (default: STOKER_HOST)")
    parser.add_argument("--port", type=int, help=f"port to listen on (default: {DEFAULT_PORT})")
    given = parser.parse_args()
    settings = Settings.from_env(
        database_url=given.database_url,
        redis_url=given.redis_url,
        host=given.host,
        port=given.port,
    )

    async def start() -> Running:
        database_url = with_password(settings.database_url, settings.database_password_file)
        if not database_url:
            folder: Path = private_dir(settings.session_root)
            database_url = f"sqlite:///{folder / 'gcs.sqlite3'}"
        return await serve(
            settings,
            token=TokenSigner(find_secret(settings, host=settings.host)),
            database_url=database_url,
            redis_url=with_password(settings.redis_url, settings.redis_password_file) or None,
            host=settings.host,
            port=settings.port if given.port is not None else settings.port or DEFAULT_PORT,
        )

    run_service(start, settings=settings)


if __name__ == "__main__":
    main()
