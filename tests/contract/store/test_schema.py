"""Migrating and creating give the same schema, and a database that is not usable says what to run."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

from stoker_gcs.state.schema import JOBS, KV, REVISION, Type
from stoker_gcs.state.schema import TABLES as ALL_TABLES
from stoker_gcs.state.tables import metadata
from stoker_gcs.store.opening import open_store
from stoker_migrations.command import scripts, upgrade
from stoker_migrations.command_line import main
from stoker_wire.errors import DatabaseError
from tests.contract.gcs_support import migrate
from tests.services import ReservedPort

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

INDEXES = "SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'index' ORDER BY name"
TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"


def shape(path: Path) -> dict[str, object]:
    connection = sqlite3.connect(path)
    try:
        tables = [row[0] for row in connection.execute(TABLES)]
        found: dict[str, object] = {
            table: [row[1:] for row in connection.execute(f"PRAGMA table_info({table})")]
            for table in tables
        }
        found["indexes"] = connection.execute(INDEXES).fetchall()
        found["revision"] = connection.execute("SELECT * FROM alembic_version").fetchall()
        return found
    finally:
        connection.close()


async def test_a_created_sqlite_file_is_the_migrated_one(tmp_path: Path) -> None:
    created, migrated = tmp_path / "created", tmp_path / "migrated"
    store = open_store(f"sqlite:///{created}")
    await store.start()
    await store.stop()
    await migrate(f"sqlite:///{migrated}")
    assert shape(created) == shape(migrated)


async def test_postgres_after_the_migrations_is_what_the_tables_say(postgres_url: str) -> None:
    await migrate(postgres_url)

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata()))

    engine = create_async_engine(postgres_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
        compared = await connection.exec_driver_sql(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = 'public' AND collation_name = 'C'"
        )
        assert {tuple(row) for row in compared} == {
            (table.name, column.name)
            for table in ALL_TABLES
            for column in table.columns
            if column.type is Type.TEXT and column.name in (*table.key, *table.searched)
        }, "texts that are searched by their beginning compare as bytes"
    await engine.dispose()


def test_the_newest_revision_is_the_one_the_schema_names() -> None:
    assert scripts().get_current_head() == REVISION


async def test_migrating_twice_and_twice_at_once_is_fine(postgres_url: str) -> None:
    await asyncio.gather(migrate(postgres_url), migrate(postgres_url))
    await migrate(postgres_url)


async def test_rows_of_the_first_schema_are_numbered_and_stay(postgres_url: str) -> None:
    await asyncio.to_thread(upgrade, postgres_url, "0001")
    row = ", ".join(f"('job_{i}', 'RUNNING', '', '', 1, '')" for i in (2, 1, 3))
    engine = create_async_engine(postgres_url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql(f"INSERT INTO jobs VALUES {row}")
    await engine.dispose()
    await migrate(postgres_url)
    store = open_store(postgres_url)
    await store.start()
    rows = await store.select(JOBS, arrival=True, descending=True)
    await store.stop()
    assert [row["job_id"] for row in rows] == ["job_3", "job_1", "job_2"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_keys_of_an_older_schema_stay_and_their_numbers_are_revisions(
    request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    await asyncio.to_thread(upgrade, url, "0005")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("INSERT INTO kv VALUES ('ns', 'k', 1, 7, '1')")
    await engine.dispose()
    await migrate(url)
    store = open_store(url)
    await store.start()
    row = await store.get(KV, {"namespace": "ns", "key": "k"})
    await store.stop()
    assert row is not None and (row["revision"], row["expires_at_s"]) == (7, None)


@pytest.mark.logs(r"alembic_version")
@pytest.mark.parametrize("state", ["empty", "older"])
async def test_an_unmigrated_postgres_names_the_command(postgres_url: str, state: str) -> None:
    if state == "older":
        await migrate(postgres_url)
        engine = create_async_engine(postgres_url)
        async with engine.begin() as connection:
            await connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
        await engine.dispose()
    store = open_store(postgres_url)
    with pytest.raises(DatabaseError, match="python -m stoker_migrations upgrade") as caught:
        await store.start()
    assert f"needs {REVISION}" in str(caught.value)
    assert ":***@" in str(caught.value), "the password must not be shown"


async def test_an_unreachable_postgres_is_named_within_its_deadline() -> None:
    nobody = ReservedPort()
    store = open_store(f"postgresql://u:secret@127.0.0.1:{nobody}/db")
    with pytest.raises(DatabaseError, match="cannot reach the database") as caught:
        async with asyncio.timeout(60):
            await store.start()
    assert "stoker_migrations check" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_foreign_sqlite_file_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (a)")
    connection.close()
    store = open_store(f"sqlite:///{path}")
    with pytest.raises(DatabaseError, match="stoker_migrations upgrade"):
        await store.start()
    await store.stop()
    gone = open_store(f"sqlite:///{tmp_path / 'no' / 'x'}")
    with pytest.raises(DatabaseError, match="does not exist"):
        await gone.start()
    await gone.stop()


def test_an_unknown_database_is_named() -> None:
    with pytest.raises(DatabaseError, match="'mysql' is not a known database"):
        open_store("mysql://x")


def test_the_command_checks_upgrades_and_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"
    assert main(["check", "--database-url", url]) == 1
    assert main(["upgrade", "--database-url", url]) == 0
    assert main(["check", "--database-url", url]) == 0
    assert main(["history"]) == 0
    assert "0001  The first schema" in capsys.readouterr().out
    nobody = ReservedPort()
    wrong = f"postgresql://u:secret@127.0.0.1:{nobody}/db"
    assert main(["check", "--database-url", wrong]) == 1
    shown = capsys.readouterr().err
    assert "cannot use the database" in shown and "secret" not in shown


def test_the_command_takes_the_password_from_a_file(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = urlsplit(postgres_url)
    file = tmp_path / "password"
    file.write_text(f"{url.password}\n")
    file.chmod(0o600)
    without = postgres_url.replace(f":{url.password}@", "@")
    assert without != postgres_url
    monkeypatch.setenv("STOKER_DATABASE_PASSWORD_FILE", str(file))
    monkeypatch.setenv("STOKER_DATABASE_URL", without)
    assert main(["upgrade"]) == 0
    assert main(["check", "--database-url", without]) == 0


def test_serving_on_sqlite_imports_no_heavy_library() -> None:
    code = (
        "import sys, stoker_gcs.service; "
        "print([m for m in ('sqlalchemy', 'alembic', 'redis', 'asyncpg') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout.strip() == "[]"
