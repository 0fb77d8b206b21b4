"""The table of measured configurations: read once per change, by device and version, and never waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_nodelet.kernels.cache import KernelCache
from stoker_nodelet.kernels.tuning_tables import TuningTables, triton_version
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.control import KvEntry, Page
from stoker_wire.messages.kernels import TunedKernel, tuning_key
from stoker_wire.version import VERSION


class Gcs:
    """As much of the gcs as keys and values need; counts the values that are read."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[int, bytes]] = {}
        self.reads: list[str] = []
        self.away = False
        self._seq = 0

    def keep(
        self,
        device: str,
        block: int,
        *,
        version: str = VERSION,
        triton: str = "",
        seconds: float = 1.0,
    ) -> None:
        record = TunedKernel(
            kernel="k", key={"columns": 4}, config={"BLOCK": block}, device=device,
            version=version, triton=triton, seconds=seconds,
        )  # fmt: skip
        self.put(tuning_key(device, "k", record.key), msgspec.json.encode(record))

    def put(self, key: str, value: bytes) -> None:
        self._seq += 1
        self.values[key] = self._seq, value

    async def call(self, method: str, path: str, *, query: Any = None, **_: Any) -> Any:
        if self.away:
            raise UnavailableError("the gcs is away")
        if query is None:
            key = (
                path.removeprefix("/v1/kv/stoker.kernels/").replace("%20", " ").replace("%3D", "=")
            )
            self.reads.append(key)
            return self.values[key][1]
        found = sorted(key for key in self.values if key.startswith(query["prefix"]))
        found = [key for key in found if key > (query["cursor"] or "")]
        shown = found[:1]  # pages of one
        items = tuple(
            KvEntry(namespace="stoker.kernels", key=key, nbytes=1, revision=self.values[key][0])
            for key in shown
        )
        return Page(items=items, next_cursor=shown[-1] if len(found) > 1 else "")


@pytest.fixture
def gcs() -> Gcs:
    return Gcs()


@pytest.fixture
def tables(gcs: Gcs, tmp_path: Path) -> TuningTables:
    return TuningTables(gcs, KernelCache(tmp_path, tmp_path / "triton", 0))  # type: ignore[arg-type]


def content(path: str) -> Any:
    return json.loads(Path(path).read_text())


async def test_a_file_holds_what_was_measured_on_the_device_by_this_version(
    tables: TuningTables, gcs: Gcs
) -> None:
    assert await tables.file("NVIDIA H200") == ""
    gcs.keep("NVIDIA H200", 8)
    gcs.keep("NVIDIA H200 NVL", 16)
    gcs.keep("A100", 32, version="0.0.1")
    gcs.keep("B200", 32, triton="0.0.1")
    gcs.keep("B300", 64, triton=triton_version())
    gcs.put("NVIDIA H200/k/other", b"nonsense")
    path = await tables.file("NVIDIA H200")
    assert content(path) == [{"kernel": "k", "key": {"columns": 4}, "config": {"BLOCK": 8}}]
    assert await tables.file("A100") == "" == await tables.file("B200")
    assert content(await tables.file("B300"))[0]["config"] == {"BLOCK": 64}


async def test_only_what_changed_is_read_and_a_new_time_changes_no_file(
    tables: TuningTables, gcs: Gcs
) -> None:
    gcs.keep("d", 8)
    first = await tables.file("d")
    assert await tables.file("d") == first and len(gcs.reads) == 1
    gcs.keep("d", 8, seconds=2.0)
    assert await tables.file("d") == first and len(gcs.reads) == 2
    gcs.keep("d", 16)
    second = await tables.file("d")
    assert second != first and content(first) != content(second)
    gcs.values.clear()
    assert await tables.file("d") == ""


async def test_while_the_gcs_is_away_the_last_known_table_is_used(
    tables: TuningTables, gcs: Gcs
) -> None:
    gcs.keep("d", 8)
    known = await tables.file("d")
    gcs.away = True
    assert await tables.file("d") == known
    assert await tables.file("other") == ""
