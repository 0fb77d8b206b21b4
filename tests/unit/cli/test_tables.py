"""Tables at fixed widths: what is shown, what is cut, and what is never cut."""

from __future__ import annotations

import random
import re
from typing import Any

import click
import pytest

from stoker.cli.lists import TABLES, checked_filters
from stoker.cli.scheduling.explain import print_groups
from stoker.cli.tables import GAP, Column, cells_of, cut, render
from stoker.cli.views.status import grouped
from stoker_wire.messages.control import WaitingGroup

JOB, NODE, ACTOR = "job_25791fb9554d8add", "n_e819c9732dc77252", "a_0c3d5ce55ce92d4c"
ERROR = {"message": "ValueError: seven is bad\nand more"}

ROWS: dict[str, dict[str, Any]] = {
    "nodes": {
        "node_id": NODE, "state": "ALIVE", "hostname": "ip-10-0-0-1.internal",
        "resources": {"CPU": 64.0, "GPU": 8.0, "memory": 2.0**40}, "heartbeat_at_s": 1.0,
        "devices": [{"name": "NVIDIA H100 80GB HBM3"}] * 8, "url": "http://10.0.0.1:7620",
    },
    "jobs": {
        "job_id": JOB, "state": "SUCCEEDED", "name": "a long name of a job", "exit_code": 0,
        "entrypoint": "python train.py --lr 0.1 --steps 100000 --layers 12", "created_at_s": 1.0,
        "started_at_s": 1.0, "ended_at_s": 9.0, "queue": "research.vision", "user": "ann",
        "attempt": 2, "retries": 3,
    },
    "placement-groups": {
        "group_id": "pg_0c3d5ce55ce92d4c", "state": "RESCHEDULING", "name": "the ranks of a run",
        "strategy": "STRICT_SPREAD", "bundles": [{"resources": {"CPU": 1.0, "GPU": 1.0}}] * 8,
        "placements": {}, "created_at_s": 1.0, "reason": "8 of 8 x {1 CPU} have no room",
        "job_id": JOB,
    },
    "tasks": {
        "task_id": "t_0c3d5ce55ce92d4c10", "attempt": 0, "state": "CANCELLED", "job_id": JOB,
        "name": "preprocess_a_shard_of_the_data", "node_id": NODE, "submitted_at_s": 1.0,
        "started_at_s": 1.0, "ended_at_s": 99.0, "error": ERROR,
    },
    "actors": {
        "actor_id": ACTOR, "state": "RESTARTING", "class_name": "ParameterServer", "pid": 123456,
        "name": "the parameter server", "job_id": JOB, "node_id": NODE, "restarts": 12,
        "death_cause": ERROR,
    },
    "objects": {
        "object_id": "o_0c3d5ce55ce92d4c10.0", "nbytes": 2**30, "node_id": NODE, "job_id": JOB,
        "owner_id": "p_0c3d5ce55ce92d4c", "created_at_s": 1.0,
    },
    "detached-objects": {
        "object_id": "o_detached_0c3d5ce55ce92d4c", "state": "CREATING", "nbytes": 2**30,
        "name": "the weights of a model", "inline": False, "nodes": [NODE] * 3, "job_id": JOB,
        "namespace": "training", "created_at_s": 1.0,
    },
    "leases": {
        "lease_id": f"l_{JOB}.driver.1.3", "kind": "driver", "job_id": JOB, "node_id": NODE,
        "resources": {"CPU": 1.0, "GPU": 0.5, "memory": 2.0**30}, "gpus": {0: 0.5},
        "owner_id": "p_0c3d5ce55ce92d4c", "granted_at_s": 1.0,
    },
    "workers": {
        "worker_id": "w_0c3d5ce55ce92d4c", "state": "STARTING", "node_id": NODE, "pid": 123456,
        "job_id": JOB, "actor_id": ACTOR, "rss_bytes": 2**30, "started_at_s": 1.0,
    },
    "events": {"seq": 1234567, "at_s": 1.0, "kind": "actor.restarting", "subject": ACTOR},
}  # fmt: skip
_ID = re.compile(r"\b(?:job|n|t|a|o|l|w|p|pg)_[0-9a-z_.]*…?")


def text_of(columns: Any, row: Any, width: int | None) -> list[str]:
    return [GAP.join(line).rstrip() for line in render(columns, [row], width).lines]


@pytest.mark.parametrize("width", [80, 100, 120, 200, None])
@pytest.mark.parametrize("name", TABLES)
def test_a_row_is_one_line_that_fits_with_whole_ids(name: str, width: int | None) -> None:
    table, row = TABLES[name], ROWS[name]
    shown = text_of(table.columns, row, width)
    assert len(shown) == 2, "nothing is folded"
    if width is not None:
        assert max(map(len, shown)) <= width
    ids = {value for value in row.values() if isinstance(value, str) and _ID.fullmatch(value)}
    assert set(_ID.findall(shown[1])) <= ids, "an id is whole or not there"
    own = table.columns[0] if name != "events" else table.columns[3]
    assert own.cell(row) in shown[1]
    left_out = set(render(table.columns, [row], width).left_out)
    headings = {column.heading.upper() for column in table.columns}
    assert set(shown[0].split()) | left_out == headings
    if width is None:
        assert not left_out and "…" not in shown[1]


def test_columns_go_by_their_rank_and_come_back_with_room() -> None:
    columns = (
        Column("id", "id"),
        Column("second", "b", drop=2),
        Column("first", "c", drop=3),
        Column("name", "name", drop=1, shrink=6),
    )
    row = {"id": "t_0123456789", "b": "bbbbbb", "c": "ccccc", "name": "a long name"}
    shown = {width: text_of(columns, row, width)[1] for width in (10, 20, 28, 33, 100)}
    assert shown == {
        10: "t_0123456789",  # too narrow for it, and whole all the same
        20: "t_0123456789  a lon…",
        28: "t_0123456789  bbbbbb  a lon…",
        33: "t_0123456789  bbbbbb  a long name",
        100: "t_0123456789  bbbbbb  ccccc  a long name",
    }


def test_a_column_without_content_goes_before_one_with_some() -> None:
    columns = (Column("id", "id"), Column("empty", "e", drop=1), Column("full", "f", drop=9))
    table = render(columns, [{"id": "t_1", "f": "full"}], 12)
    assert [cell.strip() for cell in table.lines[0]] == ["ID", "FULL"]
    assert table.left_out == (), "nothing is missing"


def test_prose_is_folded_and_wide_characters_count_twice() -> None:
    columns = (Column("node", "n"), Column("detail", "d", prose=True))
    shown = text_of(columns, {"n": NODE, "d": "needs 1 CPU, 0 CPU of 2 CPU is free"}, 46)
    assert shown[1:] == [
        f"{NODE}  needs 1 CPU, 0 CPU of 2",
        f"{' ' * len(NODE)}  CPU is free",
    ]
    assert cells_of("日本") == 4
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 4) == "日…"


def test_names_cannot_move_the_cursor() -> None:
    shown = text_of((Column("name", "name"),), {"name": "a\x1b[2Jb\nc\td\x07"}, 80)
    assert shown[1] == "a\N{REPLACEMENT CHARACTER}[2Jb c d\N{REPLACEMENT CHARACTER}"


def test_any_width_and_any_rows_give_lines_of_one_length(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        columns = [
            Column(f"c{i}", f"c{i}", drop=dice.randrange(4), shrink=dice.choice([0, 0, 5]))
            for i in range(dice.randrange(1, 7))
        ]
        rows = [
            {c.heading: "日x" * dice.randrange(8) for c in columns}
            for _ in range(dice.randrange(4))
        ]
        width = dice.randrange(1, 90)
        lines = render(columns, rows, width).lines
        assert len(lines) == len(rows) + 1
        assert len({sum(map(cells_of, line)) for line in lines}) == 1


@pytest.mark.parametrize(
    ("table", "given", "found"),
    [
        ("tasks", {"job": "job_1", "state": "failed"}, {"job_id": "job_1", "state": "FAILED"}),
        ("tasks", {"name": "f", "STATE": "queued,waiting"}, {"name": "f", "state": "QUEUED,WAITING"}),
        ("actors", {"class": "C"}, {"class_name": "C"}),
        ("leases", {"owner": "p_1"}, {"owner_id": "p_1"}),
        ("events", {"kind": "job."}, {"kind": "job."}),
    ],
)  # fmt: skip
def test_filters_are_called_as_columns_are(
    table: str, given: dict[str, str], found: dict[str, str]
) -> None:
    assert checked_filters(table, given) == found


@pytest.mark.parametrize(
    ("table", "given", "said"),
    [
        ("tasks", {"state": "FINISHEDX"}, "no state of tasks; did you mean FINISHED?"),
        ("jobs", {"state": "RUNNING,XX"}, "'XX' is no state of jobs; there are PENDING, RUNNING"),
        ("jobs", {"name": "x"}, "jobs cannot be filtered by 'name' (filters of jobs: state, names"),
        ("tasks", {"took": "x"}, "tasks cannot be filtered by 'took' (filters of tasks: job_id,"),
        ("tasks", {"jobs": "x"}, "tasks have no 'jobs', did you mean 'job_id'?"),
        ("nodes", {"zzz": "x"}, "nodes have no 'zzz' (filters of nodes: state)"),
    ],
)  # fmt: skip
def test_a_filter_that_is_none_names_those_there_are(
    table: str, given: dict[str, str], said: str
) -> None:
    with pytest.raises(click.BadParameter) as caught:
        checked_filters(table, given)
    assert said in caught.value.message


def test_one_cause_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cause, remedy = "needs 1 CPU, 0 CPU of 2 CPU is free", "leases must end"
    print_groups(
        [
            WaitingGroup(kind="actor", name="Trainer", count=4, cause=cause, example_id=ACTOR,
                         remedy=remedy),
            WaitingGroup(kind="task", name="f", count=1000, cause="waits", example_id="",
                         remedy=remedy, infeasible=True, count_exact=False),
        ]
    )  # fmt: skip
    assert capsys.readouterr().out == (
        f"  4 x actor Trainer: {cause}\n"
        f"      to change that: {remedy}\n"
        f"      more: stoker explain {ACTOR}\n"
        "  1000+ x f: can never run: waits\n"
    )


def test_requests_for_the_same_are_one_group() -> None:
    def entry(name: str, count: int, waiting_s: float, **more: Any) -> dict[str, Any]:
        usual = {"job_id": JOB, "resources": {"CPU": 1.0}, "infeasible": False}
        return {**usual, "name": name, "count": count, "waiting_s": waiting_s, **more}

    found = grouped(
        [entry("f", 2, 1.0), entry("f", 3, 5.0), entry("g", 1, 0.0), entry("f", 1, 0.0, job_id="job_2")]
    )  # fmt: skip
    assert [(g.name, g.count, g.waited_s, g.job_id) for g in found] == [
        ("f", 5, 5.0, JOB),
        ("g", 1, 0.0, JOB),
        ("f", 1, 0.0, "job_2"),
    ]


def test_requests_with_other_conditions_are_another_group_and_lie_where_they_may() -> None:
    def entry(**more: Any) -> dict[str, Any]:
        usual = {"job_id": JOB, "resources": {"CPU": 1.0}, "name": "f"}
        facts = {"count": 1, "waiting_s": 1.0, "infeasible": False}
        return {**usual, **facts, "demand": {**usual, **more}}

    zone = {"zone": "mars"}
    found = grouped(
        [entry(locality={NODE: 5}), entry(label_selector=zone), entry(locality={NODE: 7})]
    )
    assert [(g.count, g.demand.label_selector) for g in found] == [(2, {}), (1, zone)]
