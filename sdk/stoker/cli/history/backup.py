"""``stoker backup`` and ``stoker restore``: the database of the gcs, to a file and from it.

They name the database and run ``python -m stoker_migrations``, which works where no gcs runs as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

_database = click.option(
    "--database-url",
    metavar="URL",
    help="sqlite:///PATH or postgresql://...; default: STOKER_DATABASE_URL, or this machine's.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_database
@_json
def backup(file: Path, database_url: str | None, as_json: bool) -> None:
    """Write the database of the gcs to FILE: jobs, actors, keys, events, tasks, all of one moment.

    The cluster goes on meanwhile. FILE appears when it is whole.
    """
    _run("backup", file, database_url, *(["--json"] if as_json else []))


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_database
@click.option("--force", is_flag=True, help="Delete first what the database has.")
@_json
def restore(file: Path, database_url: str | None, force: bool, as_json: bool) -> None:
    """Fill an empty database of a gcs, of either kind, from FILE. No gcs may run on it meanwhile."""
    more = (["--force"] if force else []) + (["--json"] if as_json else [])
    _run("restore", file, database_url, *more)


def _run(command: str, file: Path, database_url: str | None, *more: str) -> None:
    arguments = [sys.executable, "-m", "stoker_migrations", command, str(file), *more]
    # Not among the arguments: others can read those, and a URL may have a password.
    done = subprocess.run(
        arguments, env={**os.environ, "STOKER_DATABASE_URL": _url(database_url)}, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)


def _url(given: str | None) -> str:
    """Return the URL of the database; a UsageError says how to name it."""
    from stoker.local.sessions import DATABASE_NAME, LATEST, session_root
    from stoker_wire.settings import Settings

    url = given or Settings.from_env().database_url
    if url:
        return url
    path = (session_root() / LATEST / DATABASE_NAME).resolve()
    if not path.exists():
        raise click.UsageError("name the database: --database-url URL, or STOKER_DATABASE_URL")
    return f"sqlite:///{path}"
