"""The choice of a store by its database URL; imports only the driver that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.errors import DatabaseError

if TYPE_CHECKING:
    from stoker_gcs.store.protocol import Store


def open_store(database_url: str) -> Store:
    """Return the store of ``database_url``, not yet started.

    Known are ``sqlite:///PATH`` (also ``sqlite+aiosqlite``), ``postgresql://`` (also
    ``postgresql+asyncpg``) and ``memory://``.
    """
    scheme, _, rest = database_url.partition("://")
    dialect = scheme.partition("+")[0]
    if dialect == "memory":
        from stoker_gcs.store.memory import MemoryStore

        return MemoryStore()
    if dialect == "sqlite":
        from stoker_gcs.store.sqlite import SqliteStore

        return SqliteStore(rest.removeprefix("/") or ":memory:", url=database_url)
    if dialect in ("postgresql", "postgres"):
        try:
            from stoker_gcs.store.postgres import PostgresStore
        except ImportError as error:
            raise DatabaseError(
                f"PostgreSQL needs `pip install stoker[postgres]`\n{error}"
            ) from error
        return PostgresStore(f"postgresql+asyncpg://{rest}")
    raise DatabaseError(
        f"STOKER_DATABASE_URL: {scheme!r} is not a known database\n"
        "use sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME or memory://"
    )
