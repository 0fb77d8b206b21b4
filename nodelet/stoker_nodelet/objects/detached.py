"""The detached objects of this node: kept on disk, found again at a start, freed at the gcs's word.

A file on disk has the bytes that shared memory has; they describe themselves. The folder outlives the
nodelet, so that the next one of this machine has its objects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from typing import TYPE_CHECKING

from stoker_wire.arena.extents import SPILL
from stoker_wire.errors import ObjectLostError, StokerError, UnavailableError
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.objects import CLUSTER, ReportDetachedObjects, UnknownObjects

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stoker_nodelet.objects.eviction import ArenaEvictor
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.control import Event

_EVERY_S = 60.0
_REPORT_S = 30.0
FREED = EventKind.OBJECT_FREED

_log = logging.getLogger(__name__)


class DetachedCopies:
    """Copies of detached objects. ``folder`` is for those on disk; it is made when there is one."""

    def __init__(self, evictor: ArenaEvictor, folder: Path, gcs: Client) -> None:
        self._evictor = evictor
        self._objects = evictor.objects
        self._folder = folder
        self._gcs = gcs

    def load(self) -> None:
        """Index what an earlier nodelet of this machine has left on disk."""
        spilled = self._objects.arena.path / SPILL
        for path in sorted(self._folder.glob("o_*")) if self._folder.is_dir() else ():
            if path.suffix == ".tmp":
                path.unlink(missing_ok=True)
                continue
            try:
                _link(path, spilled / path.name)
            except OSError as error:
                _log.warning("detached object %s on disk cannot be used: %s", path.name, error)
            else:
                self._evictor.index_again(spilled / path.name, spilled=True)

    async def keep(self, object_ids: Iterable[str]) -> None:
        """Write objects of this node to disk; return when they are safe. UnavailableError if it is full."""
        for object_id in object_ids:
            try:
                await asyncio.to_thread(self._write, object_id)
            except OSError as error:
                raise UnavailableError(
                    f"{object_id} cannot be kept on disk\nin {self._folder}: {error.strerror}"
                ) from None

    def _write(self, object_id: str) -> None:
        final = self._folder / object_id
        if final.exists():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f"{object_id}.{os.getpid()}.tmp"
        try:
            with open(self._objects.arena.open(object_id), "rb") as source:
                with temporary.open("xb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
                temporary.rename(final)
        except ObjectLostError:
            return  # freed meanwhile
        finally:
            temporary.unlink(missing_ok=True)

    def on_event(self, event: Event) -> None:
        """Free an object that the gcs says is freed."""
        if event.kind == FREED:
            self._free((event.subject,))

    def _free(self, object_ids: Iterable[str]) -> None:
        for object_id in object_ids:
            self._objects.free([object_id])
            with contextlib.suppress(OSError):
                (self._folder / object_id).unlink(missing_ok=True)

    async def report(self) -> None:
        """Tell the gcs what is here; free what it does not know: its event was missed, or its maker died."""
        here = {one.object_id for one in self._objects.of_owner(CLUSTER.peer_id)}
        if not here:
            return
        body = ReportDetachedObjects(object_ids=tuple(here))
        path = f"/v1/nodes/{self._objects.node_id}/detached-objects"
        reply = await self._gcs.call(
            "POST", path, body, reply=UnknownObjects, timeout_s=_REPORT_S, retry=False
        )
        self._free(reply.object_ids)

    async def run(self) -> None:
        """Report from time to time, for as long as the nodelet lives."""
        while True:
            await asyncio.sleep(_EVERY_S)
            with contextlib.suppress(StokerError):
                await self.report()


def _link(path: Path, to: Path) -> None:
    """Give a file a second name; copy it where that is on another file system."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
