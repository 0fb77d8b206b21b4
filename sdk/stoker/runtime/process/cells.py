"""The notebook's cell that calls are of: what they print, and what their own calls print, is shown there.

Nothing of it travels, and no call costs more than a look at one attribute, where there is no notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.runtime.process.current_task import current_task

if TYPE_CHECKING:
    from collections.abc import Callable


class Cells:
    """The cells of this process's calls."""

    def __init__(self) -> None:
        self.of_caller: Callable[[], str] | None = None
        """Returns the cell that the calling code runs in or for; None until a notebook is known of."""
        self.of_actor = ""
        """The cell that made the actor of this process."""

    def now(self) -> str:
        """Return the cell of the calling code, '' where there is none."""
        return self.of_caller() if self.of_caller is not None else ""

    def of_output(self, otherwise: str) -> str:
        """Return the cell to which belongs what the calling code prints."""
        info = current_task.get()
        return info.cell if info is not None else self.of_actor or otherwise

    def follow_tasks(self) -> None:
        """Let calls of tasks be of the cell that their task is of."""
        self.of_caller = self._of_task

    def enter_actor(self, cell: str) -> None:
        """Become the process of an actor that was made in a cell."""
        if cell:
            self.of_actor = cell
            self.follow_tasks()

    def _of_task(self) -> str:
        return self.of_output("")


CELLS = Cells()
