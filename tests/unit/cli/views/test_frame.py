"""A frame of ``stoker top``: what fits where, and that nothing wraps."""

from __future__ import annotations

import random

import click
import pytest

from stoker.cli.tables import cells_of
from stoker.cli.views.frame import Section, frame, share
from stoker.cli.views.snapshot import GpuNow, JobNow, NodeNow, Snapshot
from stoker_wire.http.dashboard.figures import Failure, GpuUse, Overview, ResourceUse, WaitingDemand


def seen(
    *, nodes: int = 3, gpus: int = 4, jobs: int = 2, waiting: int = 1, failures: int = 1
) -> Snapshot:
    now_s = 1000.0
    overview = Overview(
        seq=1,
        at_s=now_s,
        nodes={"ALIVE": nodes},
        resources={
            "disk": ResourceUse(total=5.0, used=0.0),
            "CPU": ResourceUse(total=8.0 * nodes, used=4.0),
            "GPU": ResourceUse(total=float(gpus), used=1.0),
            "memory": ResourceUse(total=2.0**34, used=2.0**33),
        },
        gpus=GpuUse(count=gpus, used=1.0, utilisation=0.5, memory_total_bytes=2.0**34),
        jobs={"RUNNING": jobs},
        actors={},
        groups={},
        tasks={"RUNNING": 5, "FINISHED": 10},
        waiting=tuple(
            WaitingDemand(
                job_id=f"job_{i:016x}", name="训练" * 9, queue="q", count=3, resources={"GPU": 1.0},
                since_s=now_s - 60, cause="needs 1 GPU, " * 9,
            )
            for i in range(waiting)
        ),
        failures=tuple(
            Failure(
                kind="task", id="t_1", job_id="job_1", name="f\x1b[2Jg", at_s=now_s, code="task_failed",
                message="ValueError: no\nmore", count=i + 1,
            )
            for i in range(failures)
        ),
    )  # fmt: skip
    return Snapshot(
        address="http://127.0.0.1:7600",
        overview=overview,
        nodes=[
            NodeNow(f"n_{i:016x}", f"host-{i}", "ALIVE", {"CPU": 8.0}, {"CPU": 8.0}, 50.0, 2.0**30)
            for i in range(nodes)
        ],
        gpus=[
            GpuNow(f"n_{i:016x}", i, "NVIDIA H100", 1.0, ["A of job_1"], 90.0, 2.0**30, 2.0**33)
            for i in range(gpus)
        ],
        jobs=[
            JobNow(f"job_{i:016x}", "train", "RUNNING", "me", "default", 900.0, {"RUNNING": 1})
            for i in range(jobs)
        ],
    )


def plain(lines: list[str]) -> list[str]:
    return [click.unstyle(line) for line in lines]


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
@pytest.mark.parametrize("height", [5, 10, 24, 60])
def test_a_frame_is_within_its_width_and_height(width: int, height: int) -> None:
    for some in (seen(), seen(nodes=200, gpus=1600, jobs=10, waiting=10, failures=20)):
        lines = frame(some, width, height)
        assert len(lines) <= height
        assert max(cells_of(line) for line in plain(lines)) <= width
        assert not any("\n" in line or "\x1b[2J" in line for line in lines)


def test_two_hundred_nodes_leave_room_for_all_else() -> None:
    text = "\n".join(plain(frame(seen(nodes=200, gpus=1600, jobs=10, failures=20), 120, 50)))
    for title in ("Jobs", "Waiting", "Failures", "GPUs", "Nodes"):
        assert f"\n{title}\n" in text
    assert "nodes: 200 alive" in text
    assert "and 2" not in text.split("\nWaiting\n")[1].split("\nFailures\n")[0]
    shown = sum("host-" in line for line in text.splitlines())
    assert 0 < shown < 200 and f"and {200 - shown} more" in text


def test_a_pipe_has_no_height_and_a_bounded_number_of_rows() -> None:
    lines = plain(frame(seen(nodes=200), None, None))
    assert sum(line.startswith("n_") for line in lines) == 20 + 4  # nodes, and the GPUs
    assert "and 180 more" in lines


def test_resources_that_all_have_come_first_and_what_is_missing_is_said() -> None:
    lines = plain(frame(seen(), 100, 40, note="not up to date: no answer"))
    bars = [line for line in lines if "|" in line]
    assert [line.split()[0] for line in bars] == ["CPU", "GPU", "memory", "disk"]
    assert "4/24" in bars[0] and "50% busy" in bars[1] and bars[2].count("#") == 10
    assert "3.0 GiB in use by processes" in bars[2]
    assert "not up to date: no answer" in lines[2]


def test_a_small_cluster_shows_no_empty_sections() -> None:
    text = "\n".join(plain(frame(seen(gpus=0, jobs=0, waiting=0, failures=0), 100, 40)))
    assert "Nodes" in text and "GPUs" not in text and "Failures" not in text


@pytest.mark.parametrize("seed", range(20))
def test_any_sections_share_any_height(seed: int) -> None:
    rng = random.Random(seed)
    sections = [
        Section(f"s{i}", (), [{}] * rng.randint(1, 40), more=rng.choice((0, 0, 7)))
        for i in range(rng.randint(1, 6))
    ]
    height = rng.randint(0, 80)
    share(sections, height)
    used = sum(one.height(one.shown) for one in sections if one.shown)
    assert used <= height
    # What is left would not do for one more row of any.
    for one in sections:
        more = one.height(one.shown + 1) - (one.height(one.shown) if one.shown else 0)
        assert one.shown == len(one.rows) or used + more > height
