"""``stoker token``: tokens of people, by role and namespace, until they expire or are revoked."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options import cluster_options, http_client, json_option
from stoker.cli.output import ago, echo, in_, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_wire.messages.control import Token

    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # generic only in newer versions of click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ROLES = ("user", "admin", "viewer", "join")


class Span(_FloatType):
    """A span of time as seconds: 90, 30m, 12h, 30d."""

    name = "span"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds of a text."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(value).strip())
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is no span of time: write it like 30m, 12h or 30d", param, ctx)
        return float(found[1]) * _UNITS_S[found[2] or "s"]


@click.group()
def token() -> None:
    """Give people tokens of their own, and take them back. For admins.

    A user sees and ends own jobs and what these made, in the namespaces of the token; an admin all; a viewer
    sees all and changes nothing. With a token one can do what `stoker` does, and stoker.init(token=...).
    """


@token.command("create")
@cluster_options
@click.argument("name")
@click.option("--role", type=click.Choice(_ROLES), default="user", show_default=True)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    help="A namespace that it may use, beside those of own jobs; repeatable, * for all. "
    "[default: one named like the user; for others all]",
)
@click.option("--expires-in", type=Span(), metavar="SPAN", help="12h, 30d. [default: never]")
@click.option("--once", is_flag=True, help="Of a join token: it is good for one machine.")
@click.option(
    "--run-as",
    default="",
    metavar="USER",
    help="The Unix user of its jobs' processes, on nodes whose nodelet is root.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="Write it into a new file (mode 0600), for --token-file, and do not print it.",
)
def create(
    name: str,
    role: str,
    namespaces: tuple[str, ...],
    expires_in: float | None,
    once: bool,
    run_as: str,
    output: str | None,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Make a token for NAME. It is shown once.

    One with --role join is for a machine: `stoker start --address URL --join-token-file FILE` gets the
    cluster's secret by it.
    """
    from msgspec.structs import replace

    from stoker_wire.messages.control import CreateToken, PersonRole, Token

    body = CreateToken(
        name=name,
        role=PersonRole(role),
        namespaces=namespaces,
        expires_in_s=expires_in,
        once=once,
        run_as=run_as,
    )
    if output is not None and os.path.exists(output):
        raise click.UsageError(f"{output} is there already: name a new file")
    made = http_client(address, token).call("POST", "/v1/tokens", body, reply=Token)
    if output is not None:
        _write(Path(output), made.secret)
        made = replace(made, secret="")
    if as_json:
        print_json(made)
        return
    until = "never expires" if made.expires_at_s is None else f"expires {in_(made.expires_at_s)}"
    if made.run_as:
        until = f"runs as {made.run_as}, {until}"
    echo(f"{made.token_id} of {made.role} {made.name}, {until}", err=True)
    echo(made.secret if output is None else f"written to {output}")
    if made.role is PersonRole.JOIN:
        from stoker.local.joining import ca_cert_hash
        from stoker_wire.errors import StokerError

        pin = ""
        with contextlib.suppress(StokerError):  # no package to read it by: certs show has it
            pin = f" --ca-cert-hash {found}" if (found := ca_cert_hash()) else ""
        echo(f"on the machine: stoker start --address URL --join-token-file FILE{pin}", err=True)


def _write(path: Path, secret: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{secret}\n")


@token.command("whoami")
@cluster_options
def whoami(address: str | None, token: str | None, as_json: bool) -> None:
    """Show whose the token is that is used here, and what it may."""
    from stoker_wire.messages.control import Whoami

    me = http_client(address, token).call("GET", "/v1/whoami", reply=Whoami)
    if as_json:
        print_json(me)
        return
    until = "never expires" if me.expires_at_s is None else f"expires {in_(me.expires_at_s)}"
    where = f", runs as {me.run_as}" if me.run_as else ""
    echo(f"{me.role} {me.job_id or me.name}, namespaces {', '.join(me.namespaces)}{where}, {until}")


@token.command("list")
@cluster_options
@click.option("--all", "show_all", is_flag=True, help="Also those that are revoked.")
def list_(show_all: bool, address: str | None, token: str | None, as_json: bool) -> None:
    """List tokens, without what they are used by."""
    from msgspec import to_builtins

    from stoker_wire.messages.control import Page, Token

    found = http_client(address, token).items("/v1/tokens", Page[Token])
    tokens = [one for one in found if show_all or not one.revoked]
    if as_json:
        print_json(tokens)
        return
    print_table(
        [to_builtins(one) for one in tokens],
        {
            "ID": "token_id",
            "NAME": "name",
            "ROLE": "role",
            "NAMESPACES": lambda row: ", ".join(row["namespaces"]),
            "RUNS AS": "run_as",
            "MADE": lambda row: ago(row["created_at_s"]),
            "BY": "created_by",
            "EXPIRES": lambda row: "revoked" if row["revoked"] else in_(row["expires_at_s"]),
        },
        empty="no tokens: the cluster's own alone is in use; `stoker token create NAME` makes one",
    )


@token.command("revoke")
@cluster_options
@click.argument("token_id", metavar="TOKEN_ID")
def revoke(token_id: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Refuse a token from now on, on open connections too.

    The drivers that attached with it end; jobs that were submitted with it go on: stop those with
    `stoker job stop`.
    """
    from urllib.parse import quote

    from stoker_wire.messages.control import Token

    path = f"/v1/tokens/{quote(token_id, safe='')}"
    done = http_client(address, token).call("DELETE", path, reply=Token)
    if as_json:
        print_json(done)
    else:
        echo(f"{done.token_id} of {done.role} {done.name} is revoked")


@token.command("rotate")
@json_option
@click.option(
    "--address",
    metavar="URL",
    help="URL of the cluster, or of its replicas with commas between. "
    "[default: STOKER_ADDRESS, the newest cluster of this machine]",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="The file that services read. [default: STOKER_TOKEN_FILE, the local cluster's, ~/.stoker/token]",
)
@click.option("--finish", is_flag=True, help="Refuse the former secret from now on.")
@click.option(
    "--step",
    type=click.Choice(("add", "use", "finish")),
    help="Change only the file of this machine, and ask nobody.",
)
@click.option(
    "--timeout", type=Span(), default="60s", show_default=True, help="For each of the steps."
)
@click.option("--force", is_flag=True, help="Finish although processes would be locked out.")
def rotate(
    address: str | None,
    token_file: str | None,
    finish: bool,
    step: str | None,
    timeout: float,
    force: bool,
    as_json: bool,
) -> None:
    """Give the cluster another secret, without a restart.

    A new one is added to the token file; when every service accepts it, it signs, and the processes of
    running jobs get new tokens. The former one is good until --finish, and with it the tokens of people that
    it signed. On more machines the file must be the same: copy it when this command waits for it, or use
    --step on each. Given again, it goes on where it stopped.
    """
    from stoker.local.address import resolve, token_file_of
    from stoker.local.secret_rotation import ClusterSecrets, SecretFile, Stage

    file = SecretFile(Path(token_file or token_file_of(address)))
    if step is not None:
        {"add": file.add, "use": file.use, "finish": file.finish}[step]()
        _say_rotated(file.path, step, (), as_json)
        return
    target = resolve(address, file.secrets[0])
    cluster = ClusterSecrets(target.address, timeout, lambda line: echo(line, err=True))
    if finish:
        if file.stage is Stage.NONE:
            raise click.ClickException(f"{file.path} has one secret: there is nothing to finish")
        signs, former = file.secrets
        if not force:
            cluster.check_used(signs)
        ending = cluster.people(signs)
        file.finish()
        cluster.until_refused(former, signs)
        _say_rotated(file.path, "finish", ending, as_json)
        return
    if file.stage is Stage.UNKNOWN:
        raise click.ClickException(
            f"{file.path} has two secrets, and does not say which is the next\n"
            "go on with --step use if it is the second, or with --finish if it is the first"
        )
    if file.stage is Stage.NONE:
        cluster.check(file.secrets[0])
        file.add()
        echo(f"added a secret to {file.path}", err=True)
    if file.stage is Stage.NEXT:
        signs, following = file.secrets
        cluster.until_accepted(following, signs)
        file.use()
        echo("all services accept it: it signs now", err=True)
    cluster.until_used(file.secrets[0])
    _say_rotated(file.path, "use", cluster.people(file.secrets[0]), as_json)


def _say_rotated(path: Path, step: str, ending: Sequence[Token], as_json: bool) -> None:
    if as_json:
        print_json({"token_file": str(path), "step": step, "tokens": list(ending)})
        return
    what = {
        "add": f"{path} has a next secret\nput this file on every machine, then: --step use",
        "use": "the new secret signs; the former one is good until `stoker token rotate --finish`",
        "finish": "the former secret is refused",
    }
    echo(what[step])
    if ending:
        verb = "have ended" if step == "finish" else "end with the former secret"
        echo(f"these tokens of people {verb}; make others with `stoker token create`:")
        for one in ending:
            echo(f"  {one.token_id}  {one.role} {one.name}")
