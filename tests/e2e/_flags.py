"""Events that tests and the tasks they start tell each other of.

A module of its own, with few imports: a worker imports it when it reads a task's arguments, and a task whose
limit is a second has begun by then.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 40.0


class Flags:
    """Named events between processes of one machine, and what was said with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def raise_(self, name: str, text: object = "") -> None:
        """Make the event happen."""
        part = self.folder / f".{name}.{os.getpid()}"
        part.write_text(str(text))
        part.rename(self.folder / name)

    def is_up(self, name: str) -> bool:
        """Whether it happened."""
        return (self.folder / name).exists()

    def wait(self, name: str, timeout_s: float = WAIT_S) -> str:
        """Wait for the event; return its text."""
        until(lambda: self.is_up(name), timeout_s, f"{name} happens")
        return (self.folder / name).read_text()

    def note(self, name: str, text: object = "x") -> None:
        """Add a line to a list that several processes write."""
        with open(self.folder / name, "a") as file:
            file.write(f"{text}\n")

    def notes(self, name: str) -> list[str]:
        """The lines so far."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []
