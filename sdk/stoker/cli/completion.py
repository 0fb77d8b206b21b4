"""Completion in bash of words that hold an equals sign, such as ``--filter state=F``.

Imported only when a shell completes. click's own function for bash goes by the words of readline, which
ends a word at every ``=``; this one reads the line itself and answers with the rest of the last word.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from click.shell_completion import BashComplete, add_completion_class, split_arg_string

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_FUNCTION = """\
%(complete_func)s() {
    local IFS=$'\\n'
    local completion type value
    for completion in $(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" \
            %(complete_var)s=bash_complete "$1"); do
        IFS=',' read type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            COMPREPLY=()
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
            if [[ $value == *= ]]; then
                compopt -o nospace 2>/dev/null
            fi
        fi
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Bash completion that reads the command line by itself."""

    source_template = _FUNCTION
    _incomplete = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one that is not complete."""
        line = os.environ.get("COMP_LINE")
        if line is None:
            return super().get_completion_args()
        before = line[: int(os.environ.get("COMP_POINT") or len(line))]
        words = split_arg_string(before)[1:]
        whole = not before or before[-1].isspace()
        self._incomplete = "" if whole or not words else words.pop()
        return words, self._incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Return what readline puts in place of the part behind the last equals sign."""
        return f"{item.type},{rest_of(item.value, self._incomplete)}"


def rest_of(value: str, incomplete: str) -> str:
    """Return ``value`` without the part of it that stands before the last equals sign typed."""
    typed = incomplete.rpartition("=")[2]
    starts = [0, *(i + 1 for i, character in enumerate(incomplete) if character == "=")]
    for start in starts:
        known = incomplete[start:]
        if value.startswith(known):
            return value[len(known) - len(typed) :]
    return value


def register() -> None:
    """Have click use :class:`Bash` for bash."""
    add_completion_class(Bash, "bash")
