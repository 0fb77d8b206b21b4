"""The blocks of code in the documentation, and what is to be done with each.

A block in one of the languages of ``CHECKED`` is executed, unless a comment right above it says why not, or
which test executes it::

    <!-- not run: it takes 8 GPUs -->
    <!-- run by tests/engine/test_compose.py -->

Its syntax is checked all the same: Python is compiled, a shell reads commands without executing them, and
the options of ``stoker`` are those that exist. What a block takes for granted may be set in a comment above
it, as Python, in lines between ``<!-- first:`` and ``-->``.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from stoker.cli import root

ROOT = Path(__file__).parents[4]
PYTHON = ("python",)
SHELL = ("sh", "bash", "console")
DATA = ("yaml", "toml", "json")
CHECKED = (*PYTHON, *SHELL, *DATA)
# What readers look at, and no test can read.
SHOWN = ("", "text", "js", "ts", "mermaid")
# Pages whose every block a test of their own executes.
RUN_ELSEWHERE = {
    "README.md": "tests/e2e/cli/test_readme.py",
    "docs/calls.md": "tests/e2e/gateway/test_calls_page.py",
    "docs/http-clients.md": "tests/interop/test_generated_clients.py",
}
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*\Z")
_RUN_BY = re.compile(r"<!-- run by (\S+) -->\s*\Z")
_FIRST = re.compile(r"<!-- first:\n(.*?)\n-->\s*\Z", re.DOTALL)
_COMMENT = re.compile(r"(<!--(?:(?!-->).)*-->\s*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code; ``not_run`` and ``run_by`` are empty for one that is executed here."""

    page: str
    line: int
    language: str
    text: str
    first: str = ""
    not_run: str = ""
    run_by: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether a test of this folder executes it."""
        return self.language in (*PYTHON, *SHELL) and not self.not_run and not self.run_by

    @property
    def commands(self) -> str:
        """What a shell would read; of a console without the output."""
        if self.language != "console":
            return self.text
        lines, goes_on = [], False
        for line in self.text.splitlines():
            if goes_on or line.startswith("$ "):
                lines.append(line if goes_on else line[2:])
                goes_on = line.endswith("\\")
        return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return every page that is kept, by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    made = ROOT / "docs/reference"
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted(found)
        if not path.is_relative_to(made)
    }


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    found, end = [], 0
    for fence in _FENCE.finditer(text):
        comment = _COMMENT.search(text, end, fence.start())
        above = comment[1] if comment else ""
        not_run, run_by, first = (
            match[1] if (match := pattern.match(above)) else ""
            for pattern in (_NOT_RUN, _RUN_BY, _FIRST)
        )
        found.append(
            Block(
                page, text.count("\n", 0, fence.start()) + 1, fence[2],
                re.sub(rf"(?m)^{fence[1]}", "", fence[3]), first, not_run,
                RUN_ELSEWHERE.get(page, run_by),
            )
        )  # fmt: skip
        end = fence.end()
    return found


def check_syntax(block: Block) -> None:
    """Raise if a block cannot be read."""
    if block.language in PYTHON:
        compile(block.first + "\n" + block.text, str(block), "exec")
    elif block.language in SHELL:
        read = ["bash", "-n", "-c", block.commands]
        done = subprocess.run(read, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{block}: {done.stderr}"
        for line in block.commands.replace("\\\n", " ").splitlines():
            check_options(line, str(block))
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)


def check_options(line: str, where: str) -> None:
    """Fail if a command of ``stoker`` has an option or a name that does not exist."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # a command that goes on in the next lines
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words[:1] != ["stoker"]:
        return
    command: click.Command = root
    words = words[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        below = command.get_command(click.Context(command), words[0])
        assert below is not None, f"{where}: there is no command {line!r}"
        command, words = below, words[1:]
    try:
        command.make_parser(click.Context(command)).parse_args(list(words))
    except click.UsageError as error:
        raise AssertionError(f"{where}: {line!r}: {error.format_message()}") from None
