"""``stoker dashboard``: a link into the cluster's web page, logged in as whoever has the token."""

from __future__ import annotations

import html
import os
import sys
from pathlib import Path

import click

from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import duration, echo, print_json
from stoker_wire.http.dashboard.figures import LOGIN_LINKS_PATH, LoginLink

_PAGE = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
    '<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">Stoker</a>\n'
)


@click.command()
@click.option("--open/--no-open", "opens", default=None,
              help="Open it in a browser. [default: where there is a display]")  # fmt: skip
@cluster_options
def dashboard(opens: bool | None, address: str | None, token: str | None, as_json: bool) -> None:
    """Print a link to the dashboard that logs its reader in as you, and open it in a browser.

    Whoever opens the link first, within two minutes, has your rights until they log out, so send it to
    nobody: others need a token of their own (`stoker token create`).
    """
    client = http_client(address, token)
    link = client.call("POST", LOGIN_LINKS_PATH, reply=LoginLink)
    url = client.base_url.partition(",")[0].rstrip("/") + link.path
    if as_json:
        print_json({"url": url, "expires_in_s": link.expires_in_s})
        return
    echo(url)
    echo(f"open it within {duration(link.expires_in_s)}; it logs in as you, once", err=True)
    if opens or (opens is None and _has_display() and sys.stdout.isatty()):
        _open(url)


def _has_display() -> bool:
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open(url: str) -> None:
    """Open a URL in the user's browser, by a file of theirs: a command line would show it to others."""
    import webbrowser

    path = Path("~/.stoker/login.html").expanduser()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(_PAGE.format(url=html.escape(url)))
        opened = webbrowser.open(path.as_uri())
    except (OSError, webbrowser.Error):
        opened = False
    if not opened:
        echo("no browser could be opened: open the link in one yourself", err=True)
