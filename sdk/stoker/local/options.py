"""The command line of the head and node processes, which ``spawn_local`` writes and ``launch`` reads.

Not the CLI that people type: that is ``stoker.cli``, and it ends up here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from stoker_wire.errors import BadRequestError


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m stoker.launch``."""
    root = argparse.ArgumentParser(prog="python -m stoker.launch")
    modes = root.add_subparsers(dest="mode", required=True)
    for mode in ("head", "node"):
        each = modes.add_parser(mode)
        each.add_argument("--host")
        each.add_argument("--port", type=int)
        each.add_argument("--num-cpus", type=float)
        each.add_argument("--num-gpus", type=float)
        each.add_argument("--memory", type=int, help="bytes")
        each.add_argument("--resources", help="JSON object: name -> amount, or @ and its file")
        each.add_argument("--labels", help="JSON object: name -> value, or @ and its file")
        each.add_argument("--taints", help="key=value:Effect, separated by commas")
        each.add_argument("--session-dir", type=Path)
        each.add_argument("--ready-fd", type=int, help="where to write one JSON line when ready")
        each.add_argument("--lifeline-fd", type=int, help="stop when this reaches its end")
        if mode == "head":
            each.add_argument("--gateway-port", type=int, help="port of a gateway; 0: a free one")
        if mode == "node":
            each.add_argument("--address", required=True, help="URL of the gcs to join")
    return root


def json_object(name: str, text: str | None) -> dict[str, Any] | None:
    """Read ``text``, or the file that it names after an @.

    A BadRequestError names the option and shows how to write it.
    """
    if text is None:
        return None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"--{name} {text} cannot be read\n{error}", field=name) from None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadRequestError(
            f"--{name} {text!r} is not a JSON object\n{error}\n"
            f"""write it like --{name} '{{"name": 1}}'""",
            field=name,
        ) from None
