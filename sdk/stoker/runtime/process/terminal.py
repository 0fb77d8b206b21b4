"""Text of other programs, as it may go to a terminal: it can colour itself and do nothing else there.

Names, messages and output come from users' jobs. A control sequence in them can set a terminal's title or
clipboard, have it type, or write over what others have printed. All that prints such text asks here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_wire.messages.control import LogLine

_DROPPED = r"""
    (?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])                      # OSC, DCS, APC, PM, SOS ...
        (?:[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c))?  # ... with their text, if it has an end
  | (?:\x1b\[|\x9b)[0-?]*[\ -/]*[@-~]?                        # CSI
  | \x1b[\ -/]*[0-~]?                                         # other escapes
  | [\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]                     # C0 and C1
"""
_COLOUR = r"\x1b\[[0-9;:]*m"
_PROSE = re.compile(rf"({_COLOUR}) | \r | {_DROPPED}", re.VERBOSE)
_OF_MANY = re.compile(rf"({_COLOUR} | \x1b\[[0-9]*K) | {_DROPPED}", re.VERBOSE)
_OF_ONE = re.compile(rf"({_COLOUR} | \x1b\[[0-9]*[AK]) | {_DROPPED}", re.VERBOSE)
_RESET = "\x1b[0m"


def printable(text: str) -> str:
    """Return a name as one line without any control character, for a terminal, a pipe or a file."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def clean(text: str) -> str:
    """Return prose with its lines, tabs and colours, and without all other control sequences."""
    return _cleaned(_PROSE, text)


def clean_output(text: str) -> str:
    """Return the output of one process for a terminal; progress bars go back and up to draw again."""
    return _cleaned(_OF_ONE, text)


def speaker(line: LogLine) -> str:
    """Return whose output a line is: the name of its task, and its process; of what is no output the name."""
    return f"({line.name or 'worker'} pid={line.pid})" if line.worker_id else f"({line.name})"


def line_of(who: str, text: str, *, is_terminal: bool) -> str:
    """Return a line of one of many processes behind the name of its own; in a pipe its text is unchanged.

    On a terminal it stays in its line: where it goes back to the beginning its name comes again, so that it
    can neither stand there as another's, nor write over what others have printed.
    """
    who = printable(who)
    if not is_terminal:
        return f"{who} {text}"
    shown = f"{_RESET}\x1b[36m{who}{_RESET} "
    text = _cleaned(_OF_MANY, text)
    reset = _RESET if "\x1b" in text else ""
    return shown + text.replace("\r", f"\r{shown}") + reset


def _cleaned(pattern: re.Pattern[str], text: str) -> str:
    return text if text.isprintable() else pattern.sub(r"\1", text)
