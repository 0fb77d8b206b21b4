"""``stoker docs``: the page of an error code in the terminal, from what is installed, asking nobody."""

from __future__ import annotations

import re

import click

from stoker.cli.options import json_option
from stoker.cli.output import echo, print_json, print_table


@click.command()
@click.argument("code", required=False)
@json_option
def docs(code: str | None, as_json: bool) -> None:
    """Explain an error by its CODE: meaning, cause, fix, example. Without one, list the codes."""
    from stoker_wire.http.error_pages.page import PAGES, page_of, summary_of
    from stoker_wire.suggestions import suggestion

    if code is None:
        rows = [{"code": each, "meaning": summary_of(each)} for each in PAGES]
        if as_json:
            print_json(rows)
        else:
            print_table(rows, {"code": "code", "meaning": "meaning"}, empty="there are no codes")
        return
    if code not in PAGES:
        raise click.UsageError(f"no error has the code {code!r}; {suggestion(code, PAGES)}")
    if as_json:
        print_json({"code": code, "page": page_of(code)})
    else:
        echo(_plain(page_of(code)))


def _plain(page: str) -> str:
    """Return a page without what only a renderer of Markdown reads: comments, fences, links, stars."""
    lines = [line for line in page.splitlines() if not line.startswith(("<!--", "```"))]
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1", "\n".join(lines))
    return text.replace("**", "")
