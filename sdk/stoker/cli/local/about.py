"""``stoker config`` and ``stoker version``: what this installation is, asking no cluster."""

from __future__ import annotations

import click

from stoker.cli.options import json_option
from stoker.cli.output import echo, print_json, print_table


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the version and the protocol."""
    from stoker_wire.version import PROTOCOL_TEXT, VERSION

    if as_json:
        print_json({"version": VERSION, "protocol": PROTOCOL_TEXT})
    else:
        echo(f"stoker {VERSION} (protocol {PROTOCOL_TEXT})")


@click.command()
@click.option("--changed", is_flag=True, help="Only what differs from the default.")
@json_option
def config(changed: bool, as_json: bool) -> None:
    """Show every setting, its value and where that comes from."""
    import logging

    import msgspec

    from stoker_wire.settings import Settings
    from stoker_wire.suggestions import suggestion

    log = logging.getLogger("stoker_wire.settings")
    log.disabled = True  # what it would say is said below
    try:
        settings = Settings.from_env()
    finally:
        log.disabled = False
    known = [info.variable for info in settings.describe()]
    rows = [msgspec.to_builtins(info) for info in settings.describe()]
    if changed:
        rows = [row for row in rows if row["source"] != "default"]
    if as_json:
        print_json(rows)
        return
    columns = {"variable": "variable", "value": "value", "source": "source", "meaning": "meaning"}
    print_table(rows, columns, empty="every setting has its default")
    for variable in settings.unknown:
        hint = suggestion(variable, known)
        echo(f"warning: {variable} names no setting; {hint}", err=True)
