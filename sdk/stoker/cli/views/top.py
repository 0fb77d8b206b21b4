"""``stoker top``: the cluster as it is now, on a whole terminal, again and again."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json, terminal_width
from stoker.cli.views.frame import frame
from stoker.cli.views.screen import Screen
from stoker.cli.views.snapshot import Snapshot, collect
from stoker_wire.errors import StokerError
from stoker_wire.messages.control import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime.net.http import HttpClient

_REFRESH_S = 1.0
_SOONEST_S = 0.5
"""The gcs shows an overview that is as old again."""
_KEY_S = 3600.0
_AGAIN_S = 5.0


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end; as does a pipe.")
@cluster_options
def top(once: bool, address: str | None, token: str | None, as_json: bool) -> None:
    """Show what runs and what is used, again and again: q ends it.

    Resources in use, jobs with their tasks by state, what waits and why, what failed lately, each GPU with
    its holder, and the most loaded nodes first: as much as the terminal has room for. --json prints all of
    it once.
    """
    client = http_client(address, token)
    first = collect(client)
    if as_json:
        print_json(first)
    elif once or not sys.stdout.isatty():
        for line in frame(first, terminal_width(), None):
            echo(line)
    else:
        _show(client, first)


def _show(client: HttpClient, first: Snapshot) -> None:
    screen = Screen()
    feed = Feed(client, first, screen.wake)
    with screen.taken(), contextlib.suppress(KeyboardInterrupt, EOFError):
        feed.start()
        while True:
            screen.draw(frame(feed.seen, *screen.size(), note=feed.trouble))
            if "q" in screen.key(_KEY_S).lower():
                return


class Feed:
    """The newest snapshot, asked for by a thread of its own so that keys are answered at once."""

    def __init__(self, client: HttpClient, first: Snapshot, told: Callable[[], None]) -> None:
        self.seen = first
        self.trouble = ""
        self._client = client
        self._told = told
        self._changed = threading.Event()

    def start(self) -> None:
        """Begin to ask; the threads end with the process."""
        for work in (self._ask, self._listen):
            threading.Thread(target=work, name="stoker-top", daemon=True).start()

    def _ask(self) -> None:
        while True:
            time.sleep(_SOONEST_S)
            self._changed.wait(_REFRESH_S - _SOONEST_S)
            self._changed.clear()
            try:
                self.seen, self.trouble = collect(self._client), ""
            except StokerError as error:
                self.trouble = f"not up to date: {error.one_line or error.code}"
            self._told()

    def _listen(self) -> None:
        """Have what changes be shown at once; where nobody tells, the pace is that of the clock."""
        while True:
            with contextlib.suppress(StokerError):
                for _ in self._client.lines("/v1/changes", item=Event):
                    self._changed.set()
            time.sleep(_AGAIN_S)
