"""``stoker train``: how the training of jobs goes, by what it reports; and the proof of what it used.

The ledger's rules are ``stoker_train``'s, which is built on this package: loaded when they are asked for.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import duration, echo, print_json, print_table
from stoker.cli.tables import Column, Row
from stoker.cli.views.training_checkpoints import checkpoints, export
from stoker.cli.views.training_plan import plan
from stoker.exceptions import NotFoundError
from stoker_wire.http.training import TrainingRun
from stoker_wire.messages.control import KvGet, KvReply, Page
from stoker_wire.messages.work import Job

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient
    from stoker_wire.http.training import Number

_NONE = "-"
COLUMNS = (
    Column("job", "job_id"),
    Column("run", "run"),
    Column("step", "step"),
    Column("steps/s", "speed"),
    Column("last report", "ago", drop=1),
    Column("newest values", "newest", shrink=20),
)
EPOCHS = (
    Column("epoch", "epoch"),
    Column("samples", "samples"),
    Column("of", "length"),
    Column("steps", "steps"),
    Column("generations", "generations"),
    Column("batch", "batch"),
)
_CHUNKS_PER_CALL = 100
_NO_LEDGER = (
    "the loop keeps no ledger: none of its samples came from ctx.loader(), or was recorded by an "
    "ElasticSampler in the state"
)


@click.group()
def train() -> None:
    """Plan training, and show how it goes: what was reported, and what an elastic job used."""


train.add_command(plan)
train.add_command(checkpoints)
train.add_command(export)


@train.command()
@click.argument("job_id", metavar="[JOB]", required=False, type=Id("job"))
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Runs at most."
)
@cluster_options
def runs(
    job_id: str | None, limit: int, address: str | None, token: str | None, as_json: bool
) -> None:
    """List runs with their newest values, those that began last first."""
    client = http_client(address, token)
    query = {"job_id": resolve_id(client, job_id)} if job_id else {}
    page = client.call(
        "GET", "/v1/training-runs", reply=Page[TrainingRun], query={**query, "limit": limit}
    )
    if as_json:
        print_json(page)
        return
    print_table(
        [_row_of(one) for one in page.items],
        COLUMNS,
        empty="no runs: a program reports with stoker.train.report(step, loss=loss)",
    )
    for one in page.items:
        if one.note:
            echo(f"{one.job_id} {one.run}: {one.note}", err=True)
    if page.next_cursor:
        echo("there are more: --limit N", err=True)


def _row_of(run: TrainingRun) -> Row:
    return {
        "job_id": run.job_id,
        "run": run.run,
        "step": str(run.newest_step),
        "speed": _NONE if run.steps_per_s is None else f"{run.steps_per_s:.3g}",
        "ago": f"{duration(max(0.0, time.time() - run.newest_at_s))} ago",
        "newest": ", ".join(f"{name} {_text(value)}" for name, value in run.newest.items()),
    }


def _text(value: Number) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@train.command()
@click.argument("job_id", metavar="JOB", type=Id("job"))
@cluster_options
def verify(job_id: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Prove by its ledger that an elastic JOB used each sample of each epoch exactly once.

    Ends with status 1, and what is wrong, where it did not, or nobody knows, as its loop keeps no ledger. A
    job that still runs is checked up to here.
    """
    rules = importlib.import_module("stoker_train.elastic.core.ledger")
    client = http_client(address, token)
    job_id = resolve_id(client, job_id)
    ledger = rules.decode(_ledger_of(client, job_id, rules))
    epochs = rules.use_by_epoch(ledger.entries, ledger.head.lengths)
    problems, exact = ledger.verify(), None
    if epochs or problems:
        exact = not problems
    else:
        problems = [_NO_LEDGER]
    if as_json:
        print_json({"job_id": job_id, "exact": exact, "problems": problems, "epochs": epochs})
    else:
        print_table([_epoch_row(one) for one in epochs], EPOCHS, empty="no step was taken")
        for problem in problems:
            echo(problem, err=True)
        if not problems:
            done = "" if ledger.head.finished else ", up to here"
            echo(f"exactly once: {sum(one.samples for one in epochs)} samples{done}")
    if problems:
        sys.exit(1)


def _ledger_of(client: HttpClient, job_id: str, rules: Any) -> dict[str, bytes]:
    """Return the keys of a job's ledger without what they begin with, and their values."""
    namespace = client.call("GET", f"/v1/jobs/{job_id}", reply=Job).namespace
    prefix = rules.ledger_prefix(job_id)
    fence = importlib.import_module("stoker_train.elastic.fence")

    def values(ends: list[str]) -> dict[str, bytes]:
        body = KvGet(keys=tuple(prefix + end for end in ends))
        reply = client.call("POST", f"/v1/kv/{quote(namespace, safe='')}", body, reply=KvReply)
        return {one.key.removeprefix(prefix): one.value for one in reply.items}

    index = fence.decode_index(values([fence.INDEX]).get(fence.INDEX))
    names: list[str] = fence.chunk_names(index)
    kept: dict[str, bytes] = {}
    for first in range(0, len(names), _CHUNKS_PER_CALL):
        kept |= values(names[first : first + _CHUNKS_PER_CALL])
    found: dict[str, bytes] = fence.read(kept.get, index)
    if not found:
        raise NotFoundError(
            f"job {job_id} has no ledger\ngive a job of stoker.train.ElasticTrainer", field="job_id"
        )
    return found


def _epoch_row(one: Any) -> Row:
    least, largest = one.least_batch, one.largest_batch
    first, last = one.first_generation, one.last_generation
    return {
        "epoch": str(one.epoch),
        "samples": str(one.samples),
        "length": _NONE if one.length is None else str(one.length),
        "steps": str(one.steps),
        "generations": str(first) if first == last else f"{first} to {last}",
        "batch": str(least) if least == largest else f"{least} to {largest}",
    }
