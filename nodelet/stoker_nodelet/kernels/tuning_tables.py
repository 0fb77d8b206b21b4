"""Measured configurations of kernels: read from the gcs, handed to workers as a file.

They are read only for environments that name kernels, so that other workers start without delay. The
table is a convenience: while the gcs does not answer, the one known last is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote

import msgspec

from stoker_nodelet.kernels.cache import KernelCache
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.control import KvEntry, Page
from stoker_wire.messages.kernels import DIGEST_LENGTH, TUNING_NAMESPACE, TunedKernel, device_prefix
from stoker_wire.version import VERSION

_CALL_S = 5.0
_PATH = f"/v1/kv/{TUNING_NAMESPACE}"
_log = logging.getLogger(__name__)


@cache
def triton_version() -> str:
    """Return the version of the node's Triton, without importing it; empty without one."""
    from importlib.metadata import (  # 10 ms that a start need not spend
        PackageNotFoundError,
        version,
    )

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@dataclass(slots=True)
class TuningTables:
    """The tables of the devices that were asked for: device -> key -> (revision, value)."""

    gcs: Client
    cache: KernelCache
    _known: dict[str, dict[str, tuple[int, bytes]]] = field(default_factory=dict)

    async def file(self, device: str) -> str:
        """Return the path of the table of ``device``; empty while nothing was measured there."""
        try:
            known = await self._refreshed(device)
        except StokerError as error:
            _log.warning("the measured configurations of %s cannot be read: %s", device, error)
            known = self._known.get(device, {})
        triton = await asyncio.to_thread(triton_version)
        records = []
        for key, (_, value) in sorted(known.items()):
            try:
                record = msgspec.json.decode(value, type=TunedKernel)
            except msgspec.MsgspecError as error:
                _log.warning("%s/%s is no measurement: %s", TUNING_NAMESPACE, key, error)
                continue
            # A configuration that another Triton measured may be slow here, or not fit at all.
            if record.version == VERSION and record.triton in ("", triton):
                # Without times: a new measurement with the same outcome changes nothing.
                records.append(
                    {"kernel": record.kernel, "key": record.key, "config": record.config}
                )
        if not records:
            return ""
        content = msgspec.json.encode(records, order="sorted")
        name = hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
        try:
            return str(await asyncio.to_thread(self.cache.table, name, content))
        except OSError as error:
            _log.warning("the measured configurations cannot be written: %s", error)
            return ""

    async def _refreshed(self, device: str) -> dict[str, tuple[int, bytes]]:
        before = self._known.get(device, {})
        now: dict[str, tuple[int, bytes]] = {}
        cursor = ""
        while True:
            query = {"prefix": device_prefix(device), "limit": 1000, "cursor": cursor or None}
            page = await self.gcs.call(
                "GET", _PATH, reply=Page[KvEntry], query=query, timeout_s=_CALL_S
            )
            for entry in page.items:
                cached = before.get(entry.key)
                if cached is not None and cached[0] == entry.revision:
                    now[entry.key] = cached
                    continue
                try:
                    value = await self.gcs.call(
                        "GET", f"{_PATH}/{quote(entry.key)}", raw=True, timeout_s=_CALL_S
                    )
                except NotFoundError:  # deleted meanwhile
                    continue
                now[entry.key] = entry.revision, value
            cursor = page.next_cursor
            if not cursor:
                break
        self._known[device] = now
        return now
