"""Migrations of the database of a gcs, by Alembic. The gcs itself never migrates: it refuses to start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from stoker_wire.errors import DatabaseError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_TIMEOUT_S = 10.0
_UPGRADE_LOCK = 7310578


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the database to :data:`REVISION`; several at once wait for each other (PostgreSQL).

    An earlier ``revision`` stops there (for tests of what comes after it).
    """

    def run(connection: Connection) -> None:
        config = _config()
        config.attributes["connection"] = connection
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK})"))
        command.upgrade(config, revision)

    connected(database_url, run)


def revision_of(database_url: str) -> str | None:
    """Return the revision that the database is at, or None when it was never migrated."""
    found: list[str | None] = []

    def run(connection: Connection) -> None:
        found.append(MigrationContext.configure(connection).get_current_revision())

    connected(database_url, run)
    return found[0]


def scripts() -> ScriptDirectory:
    """The revisions, oldest to newest by their links."""
    return ScriptDirectory.from_config(_config())


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


def connected(database_url: str, work: Callable[[Connection], object]) -> None:
    """Do work in one transaction of a database; DatabaseError, which names the fix, if it cannot be used."""

    async def run() -> None:
        engine = create_async_engine(async_url(database_url))
        shown = engine.url.render_as_string(hide_password=True)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await engine.connect()
            try:
                await connection.run_sync(work)
                await connection.commit()
            finally:
                await connection.close()
        except StokerError:
            raise  # of the work; some are OSErrors too
        except (OSError, TimeoutError, SQLAlchemyError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DatabaseError(
                f"cannot use the database {shown}\n"
                f"{why}\n"
                "start the server or correct --database-url (or STOKER_DATABASE_URL)"
            ) from error
        finally:
            await engine.dispose()

    asyncio.run(run())


def async_url(url: str) -> str:
    """Name the asyncio driver in a URL that names none: ``sqlite:///x``, ``postgresql://...``."""
    scheme, mark, rest = url.partition("://")
    dialect = scheme.partition("+")[0]
    drivers = {
        "sqlite": "sqlite+aiosqlite",
        "postgresql": "postgresql+asyncpg",
        "postgres": "postgresql+asyncpg",
    }
    if not mark or dialect not in drivers:
        raise DatabaseError(
            f"{url!r} is not a database URL\nuse sqlite:///PATH or postgresql://..."
        )
    return f"{drivers[dialect]}://{rest}"
