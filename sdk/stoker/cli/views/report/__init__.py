"""``stoker report``: one file that tells of a job, to send to somebody who has no access to the cluster."""

from __future__ import annotations

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, nbytes, print_json


@click.command()
@click.argument("job_id", metavar="JOB", type=Id("job"))
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False), metavar="FILE",
              help="File to write; - for stdout. [default: JOB.html]")  # fmt: skip
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@cluster_options
def report(
    job_id: str,
    path: str | None,
    force: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Write what is known of a job into one HTML file, to be sent on.

    Its facts, failures with their causes, attempts, the times of its functions, what its workers ran when,
    its story, and the last lines of its driver. It needs no network and no script, and has no values of
    environment variables; whatever the job itself printed is in it. --json prints where it is.
    """
    from stoker.cli.views.report.facts import collect
    from stoker.cli.views.report.page import page

    if path == "-" and as_json:
        raise click.UsageError("--json says where the file is; give a file, or leave it out")
    client = http_client(address, token)
    job_id = resolve_id(client, job_id)
    target = path or f"{job_id}.html"
    text = page(collect(client, job_id))
    if target == "-":
        echo(text.removesuffix("\n"))
        return
    _write(target, text, force=force)
    size = len(text.encode())
    if as_json:
        print_json({"file": target, "nbytes": size})
    else:
        echo(f"{target} ({nbytes(size)}); open it in a browser")


def _write(path: str, text: str, *, force: bool) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.ClickException(
            f"{path} is there already; write over it with --force, or name another with -o"
        ) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
