"""Migrates the database of a gcs, and writes and reads backups of it.

``upgrade`` brings any older schema to this version's, ``check`` says whether that is needed (exit
status 1), ``history`` lists the revisions: what operators run before a new version, and containers at
start. ``backup FILE`` writes the database, of a live gcs, to a file; ``restore FILE`` fills an empty database
from one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_gcs.state.schema import REVISION
from stoker_migrations.backup import backup, restore
from stoker_migrations.command import revision_of, scripts, upgrade
from stoker_migrations.report import progress, report
from stoker_wire.errors import StokerError
from stoker_wire.process.files.secret_files import with_password
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    url = argparse.ArgumentParser(add_help=False)
    url.add_argument("--database-url", help="default: STOKER_DATABASE_URL")
    parser = argparse.ArgumentParser(
        prog="python -m stoker_migrations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("upgrade", "check", "history"):
        commands.add_parser(name, parents=[url])
    for name in ("backup", "restore"):
        command = commands.add_parser(name, parents=[url])
        command.add_argument("file", type=Path)
        command.add_argument("--json", action="store_true", help="print JSON")
        if name == "restore":
            command.add_argument("--force", action="store_true", help="delete first what is there")
    chosen = parser.parse_args(arguments)
    if chosen.command == "history":
        for revision in reversed(list(scripts().walk_revisions())):
            sys.stdout.write(f"{revision.revision}  {revision.doc}\n")
        return 0
    settings = Settings.from_env(database_url=chosen.database_url)
    if not settings.database_url:
        parser.error("name the database: --database-url URL, or STOKER_DATABASE_URL")
    try:
        chosen.database_url = with_password(settings.database_url, settings.database_password_file)
        return _run(chosen)
    except (StokerError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _run(chosen: argparse.Namespace) -> int:
    url, out = chosen.database_url, sys.stdout.write
    match chosen.command:
        case "upgrade":
            upgrade(url)
            out(f"the database is at {REVISION}\n")
            return 0
        case "backup":
            made = backup(url, chosen.file, progress(chosen.json))
            report(
                made, f"{chosen.file}: {chosen.file.stat().st_size:,} bytes", as_json=chosen.json
            )
            return 0
        case "restore":
            shown = progress(chosen.json)
            made = restore(chosen.file, url, force=chosen.force, progress=shown)
            report(made, f"restored from {chosen.file}", as_json=chosen.json)
            return 0
    found = revision_of(url)
    if found == REVISION:
        out(f"the database is at {REVISION}: nothing to do\n")
        return 0
    out(
        f"the database is at {found or 'no revision'}, this version needs {REVISION}: run upgrade\n"
    )
    return 1
