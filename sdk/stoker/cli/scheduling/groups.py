"""``stoker placement-group``: reserve resources from a shell, and give them back.

``stoker list placement-groups`` and ``stoker explain`` show groups, also those that programs made.
"""

from __future__ import annotations

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import Amounts, cluster_options, http_client
from stoker.cli.output import echo, print_json

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@click.group("placement-group")
def placement_group() -> None:
    """Reserve resources together, on one node or on several, and give them back."""


@placement_group.command("create")
@cluster_options
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    required=True,
    type=Amounts(),
    help="Resources on one node: CPU=4,GPU=1,memory=8GiB; repeatable.",
)
@click.option(
    "--count", type=click.IntRange(1), default=1, show_default=True, help="So many of each bundle."
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES, case_sensitive=False),
    default="PACK",
    show_default=True,
    help="How the bundles share nodes.",
)
@click.option(
    "--node-filter",
    default="",
    metavar="CONDITION",
    help="A condition on its nodes: \"labels.rack != 'r7'\".",
)
@click.option("--name", default="", help="A name, by which programs find it.")
@click.option(
    "--namespace", default="default", show_default=True, help="The namespace of the name."
)
def create(
    bundles: tuple[dict[str, float], ...],
    count: int,
    strategy: str,
    node_filter: str,
    name: str,
    namespace: str,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Reserve bundles of resources until they are removed.

    It belongs to no job: programs use it by its name, `stoker.get_placement_group(NAME, NAMESPACE)`.
    """
    from stoker_wire.ids import Prefix, new_id
    from stoker_wire.messages.groups import (
        Bundle,
        CreatePlacementGroup,
        GroupStrategy,
        PlacementGroup,
    )
    from stoker_wire.messages.work import DETACHED_JOB

    one_of_each = [Bundle(resources=bundle, node_filter=node_filter) for bundle in bundles]
    body = CreatePlacementGroup(
        group_id=new_id(Prefix.GROUP),
        job_id=DETACHED_JOB,
        bundles=tuple(one_of_each * count),
        strategy=GroupStrategy(strategy.upper()),
        name=name,
        namespace=namespace,
        detached=True,
    )
    client = http_client(address, token)
    group = client.call("POST", "/v1/placement-groups", body, reply=PlacementGroup)
    if as_json:
        print_json(group)
    else:
        echo(group.group_id)


@placement_group.command("remove")
@cluster_options
@click.argument("id_", metavar="ID", type=Id("placement group"))
def remove(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Give the resources of a group back; tasks and actors in it are ended.

    The beginning of an id will do if no other begins so.
    """
    from stoker_wire.messages.groups import PlacementGroup

    client = http_client(address, token)
    id_ = resolve_id(client, id_)
    group = client.call("DELETE", f"/v1/placement-groups/{id_}", reply=PlacementGroup)
    if as_json:
        print_json(group)
    else:
        echo(f"{group.group_id} is {group.state}")
