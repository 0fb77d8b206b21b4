"""Output below the cells of a notebook, whichever of them runs: by messages of Jupyter that name the cell.

What a thread prints in a notebook's kernel goes below the cell that runs at that moment, which need not
be the one whose task has printed it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from hashlib import blake2b
from typing import Any

from stoker.runtime.process.notebook import current_shell

_ID_BYTES = 6
_MAX_CELLS = 1000
"""So many of the cells that called last are known; what older ones print goes below the cell that runs."""
_MAX_UNSENT = 1 << 18


class NotebookOutput:
    """The output of one kernel, of ipykernel's kind. One thread writes and flushes; the rest is for any."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._headers: dict[str, dict[str, Any]] = {}
        """The header of the request that ran a cell, by the cell's id."""
        self._last = ("", "")
        """The id of the request that was asked for last, and its cell."""
        self._unsent: list[tuple[str, str, list[str]]] = []
        self._unsent_size = 0

    def cell(self) -> str:
        """Return the id of the cell that the calling code is of, or ''; no two notebooks share one."""
        header = getattr(sys.stdout, "parent_header", None)
        if header is None:  # a cell has put another stream in its place
            header = self._shell.get_parent().get("header", {})
        request, cell = self._last
        if not header or header.get("msg_id") == request:
            return cell if header else ""
        if header.get("msg_type") != "execute_request":
            return ""  # a widget's event, which is no cell
        request = header["msg_id"]
        cell = blake2b(request.encode(), digest_size=_ID_BYTES).hexdigest()
        with self._lock:
            self._headers.pop(cell, None)
            self._headers[cell] = header
            while len(self._headers) > _MAX_CELLS:
                del self._headers[next(iter(self._headers))]
        self._last = (request, cell)
        return cell

    def write(self, cell: str, stream: str, text: str) -> bool:
        """Print below a cell with the next :meth:`flush`; False if it is not known, or reads its stream."""
        if cell not in self._headers or self._reads(cell, stream):
            return False
        unsent = self._unsent
        if not unsent or unsent[-1][:2] != (cell, stream):
            unsent.append((cell, stream, []))
        unsent[-1][2].append(text)
        self._unsent_size += len(text)
        if self._unsent_size > _MAX_UNSENT:
            self.flush()
        return True

    def _reads(self, cell: str, stream: str) -> bool:
        """Return whether the cell runs now, and collects what is printed meanwhile."""
        return not hasattr(getattr(sys, stream), "parent_header") and self.cell() == cell

    def flush(self) -> None:
        """Send what was written, behind what the cells themselves have printed."""
        unsent, self._unsent, self._unsent_size = self._unsent, [], 0
        if unsent:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        for cell, name, texts in unsent:
            content = {"name": name, "text": "".join(texts)}
            self._send("stream", content, cell, f"stream.{name}")

    def show(self, cell: str, display: str, html: str, text: str, *, again: bool) -> bool:
        """Show HTML below a cell, or ``again`` in place of what is shown; False if it is not known."""
        kind = "update_display_data" if again else "display_data"
        data = {"text/html": html, "text/plain": text}
        content = {"data": data, "metadata": {}, "transient": {"display_id": display}}
        return self._send(kind, content, cell, "display_data")

    def _send(self, kind: str, content: dict[str, Any], cell: str, topic: str) -> bool:
        kernel, header = self._shell.kernel, self._headers.get(cell)
        if header is None:
            return False
        ident = topic.encode()
        with contextlib.suppress(
            Exception
        ):  # of whatever kind it is that a kernel raises as it ends
            kernel.session.send(kernel.iopub_socket, kind, content, parent=header, ident=ident)
        return True


def notebook_output() -> NotebookOutput | None:
    """Return the output of the notebook whose kernel this process is; None if it is none."""
    shell = current_shell()
    kernel = getattr(shell, "kernel", None)
    if not hasattr(kernel, "iopub_socket") or not hasattr(shell, "get_parent"):
        return None
    return _output_of(shell, os.getpid())


@functools.lru_cache(maxsize=1)
def _output_of(shell: Any, pid: int) -> NotebookOutput | None:
    return NotebookOutput(shell)
