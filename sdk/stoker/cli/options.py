"""Options that commands share: the cluster, its token, what a node offers, and JSON output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stoker.cli.output import echo
from stoker_wire.amounts import parse_amount

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.jobs import JobSubmissionClient
    from stoker.local.cluster import ClusterSpec
    from stoker.runtime.net.http import HttpClient

    _IntType = click.ParamType[int]
    _AmountsType = click.ParamType[dict[str, float]]
else:
    _AmountsType = click.ParamType
    _IntType = click.ParamType  # generic only in newer versions of click

F = TypeVar("F", bound="Callable[..., Any]")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def cluster_options(command: F) -> F:
    """Add ``--address``, ``--token``, ``--token-file`` and ``--json``."""
    command = json_option(command)
    command = token_options(command)
    return click.option(
        "--address",
        metavar="URL",
        help="URL of the cluster, or of its replicas with commas between. "
        "[default: STOKER_ADDRESS, the newest cluster of this machine]",
    )(command)


def token_options(command: F) -> F:
    """Add ``--token`` and ``--token-file``; :func:`given_token` reads them."""
    command = click.option(
        "--token-file",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        expose_value=False,
        callback=_read_token,
        help="File that holds the token.",
    )(command)
    return click.option(
        "--token",
        metavar="TEXT",
        help="Bearer token; others on this machine see it in `ps`, so prefer --token-file. "
        "[default: STOKER_TOKEN, STOKER_TOKEN_FILE, the local cluster's]",
    )(command)


_TOKEN = "stoker.token"
_TOKEN_FILE = "stoker.token.file"
_WARNED = "stoker.token.warned"


def _read_token(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is None or ctx.resilient_parsing:
        return
    from stoker_wire.http.auth import load_token

    ctx.meta[_TOKEN], ctx.meta[_TOKEN_FILE] = load_token(path), path


def given_token(token: str | None) -> str | None:
    """Return the token of ``--token``, with a warning, or ``--token-file``; a usage error for both."""
    ctx = click.get_current_context(silent=True)
    from_file: str | None = None if ctx is None else ctx.meta.get(_TOKEN)
    if token and from_file:
        raise click.UsageError("give --token or --token-file, not both", ctx=ctx)
    if token and ctx is not None and not ctx.params.get("as_json") and _WARNED not in ctx.meta:
        ctx.meta[_WARNED] = True
        warning = (
            "warning: every user of this machine sees --token in `ps`; give it by --token-file"
        )
        echo(warning, err=True)
    return token or from_file


def given_token_file() -> str:
    """Return the file of ``--token-file``, or nothing."""
    return str(click.get_current_context().meta.get(_TOKEN_FILE, ""))


def node_options(command: F) -> F:
    """Add what a node offers, and where it listens; :func:`cluster_spec` reads it."""
    for option in reversed(
        [
            click.option(
                "--host", metavar="ADDR", help="Address to listen on. [default: 127.0.0.1]"
            ),
            click.option(
                "--port",
                type=click.IntRange(0, 65535),
                help="Port; 0 takes a free one. [default: STOKER_PORT, or 7600 with --head]",
            ),
            click.option("--num-cpus", type=click.FloatRange(0), help="[default: as found]"),
            click.option("--num-gpus", type=click.FloatRange(0), help="[default: as found]"),
            click.option("--memory", type=Bytes(), help="Such as 8GiB. [default: as found]"),
            click.option("--resources", metavar="JSON", help="""Such as '{"disk": 2}'."""),
            click.option("--labels", metavar="JSON", help="""Such as '{"zone": "a"}'."""),
            click.option(
                "--taint",
                "taints",
                multiple=True,
                metavar="KEY=VALUE:EFFECT",
                help="Keep work away that does not tolerate it; repeatable.",
            ),
            click.option(
                "--session-dir",
                metavar="DIR",
                help="Folder for logs, sockets, state. [default: a new one for each start]",
            ),
        ]
    ):
        command = option(command)
    return command


def cluster_spec(
    *, resources: str | None, labels: str | None, taints: Sequence[str] = (), **given: Any
) -> ClusterSpec:
    """Return what :func:`node_options` gave a command; a usage error for what cannot be read."""
    from stoker_wire.constraints.taints import parse_taint

    for text in taints:
        try:
            parse_taint(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--taint") from None
    amounts = {
        "resources": json_mapping(resources, "--resources"),
        "labels": json_mapping(labels, "--labels"),
    }
    return cast("ClusterSpec", {**given, **amounts, "taints": ",".join(taints) or None})


class Bytes(_IntType):
    """A number of bytes, with an optional suffix: 8GiB, 512M, 1e9."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            nbytes = int(parse_amount(value))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write it like 8GiB, 512MiB or 1000000", param, ctx)
        if nbytes < 0:
            self.fail(f"{value!r} is negative", param, ctx)
        return nbytes


class Amounts(_AmountsType):
    """Resources: ``CPU=4,GPU=0.5,memory=8GiB``; an empty text is none."""

    name = "NAME=AMOUNT,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        try:
            return self.read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def read(self, text: str) -> dict[str, float]:
        """Return the amounts by name; a ValueError names the part that cannot be read."""
        amounts: dict[str, float] = {}
        for part in text.split(",") if text.strip() else ():
            name, sign, written = (piece.strip() for piece in part.partition("="))
            if not (name and sign) or name in amounts:
                raise ValueError(f"{part!r} is not NAME=AMOUNT, each name once")
            amounts[name] = parse_amount(written)
        return amounts


def http_client(address: str | None, token: str | None) -> HttpClient:
    """Return a client of the cluster that is meant."""
    from stoker.local.address import resolve
    from stoker.runtime.net.http import HttpClient

    target = resolve(address, given_token(token))
    return HttpClient(target.address, token=target.token)


def job_client(address: str | None, token: str | None) -> JobSubmissionClient:
    """Return a client for jobs of the cluster that is meant."""
    from stoker.jobs import JobSubmissionClient

    return JobSubmissionClient(address, given_token(token))


def pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """Turn ``K=V`` texts into a mapping; a usage error names the one that is none."""
    mapping = {}
    for value in values:
        key, sign, text = value.partition("=")
        if not sign or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=option)
        mapping[key] = text
    return mapping


def json_mapping(text: str | None, option: str) -> dict[str, Any] | None:
    """Read the JSON object of an option; a usage error shows how to write it."""
    import msgspec

    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.BadParameter(
            f"""{text!r} is no JSON object ({error}); write it like '{{"name": 1}}'""",
            param_hint=option,
        ) from None
