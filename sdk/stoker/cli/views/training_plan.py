"""``stoker train plan``: how a model would be trained on this cluster, or on one that is only described.

The planner is ``stoker_train``'s, which is built on this package: loaded when it is asked.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json, print_table
from stoker.cli.tables import Column
from stoker.exceptions import BadRequestError
from stoker_wire.messages.control import KvGet, KvReply

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient

_GIGABITS = 1e9 / 8
_KEYS_PER_CALL = 1000
_COLUMNS = (
    Column("plan", "plan", shrink=30),
    *(Column(name, name) for name in ("step", "tokens/s")),
    *(Column(name, name, drop=1) for name in ("of rate", "GB a rank")),
    *(Column(name, name, drop=2) for name in ("compute", "bubble", "exchange", "update")),
)


@click.command()
@click.argument("model")
@click.option(
    "--batch", type=click.IntRange(1), required=True, help="Sequences in a step, over all ranks."
)
@click.option("--seq-len", type=click.IntRange(1), required=True, help="Tokens in a sequence.")
@click.option("--gpus", type=click.IntRange(1), help="Use so many GPUs.  [default: all]")
@click.option(
    "--gpu", metavar="KIND", help="Plan for GPUs of this kind, as H100, in place of the cluster's."
)
@click.option(
    "--nodes", type=click.IntRange(1), default=1, show_default=True, help="With --gpu: nodes."
)
@click.option(
    "--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="With --gpu."
)
@click.option(
    "--network", "gigabits", type=float,
    help="Gbit/s of a node's network.  [default: as stoker.train.measure_links() measured it, else 200]",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True
)
@click.option(
    "--optimizer", default="adamw", show_default=True, help="By which its states are counted."
)
@click.option(
    "--limit", type=click.IntRange(1), default=10, show_default=True, help="Plans at most."
)
@cluster_options
def plan(
    model: str,
    batch: int,
    seq_len: int,
    gpus: int | None,
    gpu: str | None,
    nodes: int,
    gpus_per_node: int,
    gigabits: float | None,
    dtype: str,
    optimizer: str,
    limit: int,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Rank the ways to train MODEL: degrees of parallelism, ZeRO, recomputation, stages, offload.

    MODEL is the name of a published shape (gpt2_small, bert_base, llama2_7b, llama3_8b), a Hugging Face
    config.json, or MODULE:NAME, a config or a model of your own.
    """
    planning = importlib.import_module("stoker_train.planning")
    try:
        between = None if gigabits is None else planning.Link(gigabits * _GIGABITS, 20e-6)
        if gpu is not None:
            cluster = planning.cluster_of_kind(gpu, nodes, gpus_per_node, between)
        else:
            client = http_client(address, token)
            records = _nodes(client)
            cluster = planning.cluster_of(records, between=between, links=_links(client, records))
        found = planning.plan_training(
            _model(model),
            cluster=cluster,
            batch=batch,
            seq_len=seq_len,
            gpus=gpus or 0,
            dtype=dtype,
            optimizer=optimizer,
            limit=limit,
        )
    except (TypeError, ValueError) as error:
        raise BadRequestError(str(error)) from None
    if as_json:
        print_json(found.as_dict())
        return
    print_table(found.rows(), _COLUMNS, empty="no plan fits")
    echo(f"{found.considered} considered; not taken:", err=True)
    for one in found.refusals:
        echo(f"  {one.constraint} ({one.count}): {one.nearest}", err=True)
    if not found.plans:
        raise SystemExit(1)


def _links(client: HttpClient, records: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return the links between nodes that were measured."""
    links = importlib.import_module("stoker_train.planning.hardware.links")
    keys: list[str] = links.keys_of([one["node_id"] for one in records])
    found: dict[str, bytes] = {}
    for first in range(0, len(keys), _KEYS_PER_CALL):
        body = KvGet(keys=tuple(keys[first : first + _KEYS_PER_CALL]))
        path = f"/v1/kv/{quote(links.NAMESPACE, safe='')}"
        reply = client.call("POST", path, body, reply=KvReply)
        found |= {one.key: one.value for one in reply.items}
    known: dict[Any, Any] = links.read_links(found)
    return known


def _nodes(client: HttpClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        query = {"limit": 1000, "cursor": cursor or None}
        page = client.call("GET", "/v1/nodes", reply=dict[str, Any], query=query)
        found += page["items"]
        cursor = page.get("next_cursor", "")
        if not cursor:
            return found


def _model(name: str) -> Any:
    """Return what MODEL names: a published shape, a config, or what a module has."""
    if name.endswith(".json"):
        try:
            config = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadRequestError(f"MODEL: {name} cannot be read\n{error}", field="MODEL") from None
        return SimpleNamespace(**config, to_dict=lambda: config)
    module, _, attribute = name.partition(":")
    if not attribute:
        module, attribute = "stoker_kernels.models.config", name
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        raise BadRequestError(
            f"MODEL {name!r} is not known\n"
            "give gpt2_small, bert_base, llama2_7b, llama3_8b, a config.json, or MODULE:NAME",
            field="MODEL",
        ) from None
    # A function or a class makes the config or the model; a model can be called, too.
    return found() if inspect.isroutine(found) or inspect.isclass(found) else found
