"""``stoker train checkpoints`` and ``export``: what a sharded job has saved, and its model as safetensors.

Folders are read here, where the command runs. The rules are ``stoker_train``'s, which is built on this
package: loaded when they are asked for; only an export loads torch.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import click

from stoker.cli.options import json_option
from stoker.cli.output import duration, echo, print_json, print_table
from stoker.cli.tables import Column, Row
from stoker.exceptions import NotFoundError

COLUMNS = (
    Column("step", "step"),
    Column("saved", "ago"),
    Column("ranks", "ranks"),
    Column("plan", "plan", shrink=20),
    Column("size", "size"),
    Column("attempt", "attempt", drop=2),
    Column("name", "name", drop=1),
)
_FILES = Column("files", "files", shrink=10)
_LAYOUT = "stoker_train.sharded.checkpoints.layout"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read all files, and compare their checksums.")
@json_option
def checkpoints(folder: Path, verify: bool, as_json: bool) -> None:
    """List the checkpoints of a sharded job in FOLDER that count, the oldest first; or the one that it is.

    With --verify, ends with status 1 where a file of one is missing, torn or changed.
    """
    layout = importlib.import_module(_LAYOUT)
    if not folder.is_dir():
        raise NotFoundError(
            f"folder {folder} is not there\ngive the folder that a sharded job writes to",
            field="folder",
        )
    found = layout.checkpoints_in(folder)
    if (folder / layout.MANIFEST).exists():
        found = [layout.one_checkpoint(folder)]
    problems = {one.path.name: layout.verify(one) for one in found} if verify else {}
    if as_json:
        print_json([_json_of(one, problems.get(one.path.name)) for one in found])
    else:
        columns = (*COLUMNS, _FILES) if verify else COLUMNS
        rows = [_row_of(one, problems) for one in found]
        print_table(rows, columns, empty=f"no checkpoint in {folder}")
    if any(problems.values()):
        sys.exit(1)


def _json_of(one: Any, problem: str | None) -> dict[str, Any]:
    manifest = one.manifest
    made = {
        "name": one.path.name,
        "step": manifest.step,
        "at_s": manifest.at_s,
        "ranks": manifest.ranks,
        "nbytes": manifest.nbytes,
        "owner": manifest.owner,
        "attempt": manifest.attempt,
        "meta": manifest.meta,
    }
    return made if problem is None else {**made, "problem": problem}


def _row_of(one: Any, problems: dict[str, str]) -> Row:
    manifest = one.manifest
    ago = f"{duration(max(0.0, time.time() - manifest.at_s))} ago" if manifest.at_s else "-"
    return {
        "step": str(manifest.step),
        "ago": ago,
        "ranks": str(manifest.ranks),
        "plan": str(manifest.meta.get("plan", "-")),
        "size": f"{manifest.nbytes / 1e6:,.1f} MB",
        "attempt": str(manifest.attempt),
        "name": one.path.name,
        "files": problems.get(one.path.name) or "whole",
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("to", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Of this step.  [default: the newest]")
@click.option("--model", default="model", show_default=True, help="Its name in the saved state.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: as saved]")
@click.option(
    "--max-file-gb", type=float, default=5.0, show_default=True, help="Size of a file at most."
)
def export(
    folder: Path, to: Path, step: int | None, model: str, dtype: str | None, max_file_gb: float
) -> None:
    """Write the model of a checkpoint in FOLDER as safetensors: to a file OUT.safetensors, or a folder."""
    torch = importlib.import_module("torch")
    files = importlib.import_module("stoker_train.sharded.checkpoints.safetensors_files")
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    kind = None if dtype is None else names[dtype]
    written = files.export(folder, to, step=step, model=model, dtype=kind, max_file_gb=max_file_gb)
    for path in written:
        echo(f"{path}  {path.stat().st_size / 1e6:,.1f} MB")
