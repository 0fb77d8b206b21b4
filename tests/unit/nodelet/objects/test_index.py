"""The index of a node's objects: their bytes, and whose end frees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_nodelet.objects.index import ObjectIndex
from stoker_wire.arena import Arena
from stoker_wire.messages.objects import ObjectInfo

if TYPE_CHECKING:
    from pathlib import Path


def test_objects_count_their_bytes_and_go_with_their_job(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    objects = ObjectIndex(Arena(tmp_path), "n_1")
    for index in range(4):
        (tmp_path / f"o_{index}").write_bytes(b"x" * index)
        info = ObjectInfo(
            object_id=f"o_{index}", nbytes=index, job_id=f"j_{index % 2}", owner_id=f"p_{index}"
        )
        objects.seal((info, info))
    assert (objects.nbytes, len(objects)) == (6, 4)
    assert [one.object_id for one in objects.largest(2)] == ["o_3", "o_2"]
    assert objects.free_job("j_1", keep_owners={"p_3"}) == 1
    assert objects.free_owner("p_3") == 1
    assert objects.free(("o_0", "o_0", "o_9")) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["o_2"]
    assert objects.nbytes == 2
    objects.seal((ObjectInfo(object_id="o_none", nbytes=1),))
    assert "o_none" not in objects, "freed by its owner before the report of it came"


def test_an_object_that_is_reported_after_its_job_has_ended_is_freed(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    objects = ObjectIndex(Arena(tmp_path), "n_1")
    objects.has_ended = lambda one: one.job_id == "j_ended"
    for job in ("j_ended", "j_goes_on"):
        (tmp_path / f"o_{job}").write_bytes(b"x")
        objects.seal((ObjectInfo(object_id=f"o_{job}", nbytes=1, job_id=job),))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["o_j_goes_on"]
    assert (objects.nbytes, len(objects)) == (1, 1)
