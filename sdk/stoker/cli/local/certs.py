"""``stoker certs``: a CA for a cluster and the certificates that it signs, as files (docs/tls.md)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stoker.cli.options import json_option
from stoker.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.local.certificates import CertificateInfo

F = TypeVar("F", bound="Callable[..., Any]")
_DIR = "~/.stoker/certs"
_DAYS = click.IntRange(1, 36_500)


def _folder_options(command: F) -> F:
    """Add --dir, as a path, and --json."""

    @json_option
    @click.option("--dir", "folder", default=_DIR, show_default=True, help="Folder of the files.")
    @functools.wraps(command)
    def with_folder(folder: str, **given: Any) -> Any:
        return command(folder=Path(folder).expanduser(), **given)

    return cast("F", with_folder)


@click.group()
def certs() -> None:
    """Make certificates for TLS: a CA, and those that it signs."""


@certs.command("init")
@click.option("--name", default="Stoker CA", show_default=True, help="Name of the CA.")
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Its validity.")
@_folder_options
def init(name: str, days: int, folder: Path, as_json: bool) -> None:
    """Make a CA: ca.pem, which everybody may have, and ca.key, which signs and stays here."""
    from stoker.local import certificates

    _print([certificates.init(folder, name=name, days=days)], as_json, made=True)


@certs.command("issue")
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="DNS name or address by which it is reached; repeatable. [default: this machine's]",
)
@click.option("--client", is_flag=True, help="For a client alone: a driver, the CLI, curl.")
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Validity.")
@_folder_options
def issue(
    name: str, hosts: tuple[str, ...], client: bool, days: int, folder: Path, as_json: bool
) -> None:
    """Make NAME.pem and NAME.key, signed by the folder's CA.

    For a node unless --client is given: for its services, and for its processes as clients of others.
    """
    from stoker.local import certificates

    if client and hosts:
        raise click.UsageError(
            "give --host or --client, not both", ctx=click.get_current_context(silent=True)
        )
    names = hosts or (() if client else certificates.own_names())
    made = certificates.issue(folder, name, names, client=client, days=days)
    _print([made], as_json, made=True)


@certs.command("renew")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Validity from now on.")
@click.option("--new-key", is_flag=True, help="Make a new private key as well.")
@_folder_options
def renew(names: tuple[str, ...], days: int, new_key: bool, folder: Path, as_json: bool) -> None:
    """Sign certificates again, with the names that they have. Services take them without a restart."""
    from stoker.local import certificates

    made = [certificates.renew(folder, name, days=days, new_key=new_key) for name in names]
    _print(made, as_json, made=True)


@certs.command("show")
@click.argument("names", metavar="[NAME|FILE]...", nargs=-1)
@_folder_options
def show(names: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """Show subject, hosts, validity and fingerprint of certificates; all of the folder by default."""
    from stoker.local import certificates

    chosen = names or certificates.names_in(folder)
    infos = [certificates.read(_path_of(name, folder)) for name in chosen]
    _print(infos, as_json, empty=f"no certificates in {folder}: make a CA with `stoker certs init`")


def _path_of(name: str, folder: Path) -> Path:
    is_path = "/" in name or name.endswith(".pem")
    return Path(name) if is_path else folder / f"{name}.pem"


def _print(
    infos: Sequence[CertificateInfo], as_json: bool, *, made: bool = False, empty: str = ""
) -> None:
    if as_json:
        from stoker.cli.output import print_json

        print_json(infos)
        return
    if not infos:
        echo(empty)
    for info in infos:
        echo(f"{'Made ' if made else ''}{info.path}")
        what = "CA" if info.is_ca else " and ".join(info.usages) or "no purpose"
        validity = "has expired" if info.days_left < 0 else f"{info.days_left} days left"
        echo(f"  subject      {info.subject} ({what})")
        if not info.is_ca:
            echo(f"  issuer       {info.issuer}")
        if info.hosts:
            echo(f"  hosts        {', '.join(info.hosts)}")
        echo(f"  valid        {info.not_before} to {info.not_after} ({validity})")
        echo(f"  fingerprint  {info.fingerprint}")
        if info.is_ca:
            echo(f"  public key   {info.public_key_hash}")
