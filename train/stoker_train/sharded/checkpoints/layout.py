"""The folder of checkpoints: names, manifests, which of them count, and whether one is whole.

    FOLDER/claim-000002.json                       who may write, and what counted when it took over
    FOLDER/checkpoint-0000000300-000002-0001/      step 300, the first save under claim 2
        .metadata, __0_0.distcp, __1_0.distcp ...  torch.distributed.checkpoint's
        plain.pt                                   all that is no sharded tensor
        manifest.json                              written last: sizes and checksums of the others

A checkpoint is there when its manifest is. Called by the store, the full state and ``stoker train
checkpoints``; it must not import torch, which the command line does not load.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from stoker.exceptions import BadRequestError, NotFoundError
from stoker_train.durable import file_sum

__all__ = (
    "MANIFEST",
    "PLAIN",
    "Claim",
    "Damaged",
    "Manifest",
    "Stored",
    "checkpoints_in",
    "claims_in",
    "newest_claim",
    "one_checkpoint",
    "remove",
    "remove_abandoned",
    "stem",
    "verify",
)

MANIFEST, PLAIN = "manifest.json", "plain.pt"
_CHECKPOINT = re.compile(r"checkpoint-(\d{10})-(\d{6})-(\d{4,})")
_CLAIM = re.compile(r"claim-(\d{6})\.json")
_LISTINGS = 100
_ABANDONED_S = 600.0
"""A folder without a manifest that nobody has written to for so long was left by a gang that died."""


class Damaged(BadRequestError):
    """A checkpoint has a file that is missing, torn or changed; the text names it."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A gang's right to write: those before it, and what they write from then on, count no more.

    ``counted``: the checkpoints that counted when it was made.
    """

    serial: int
    owner: str = ""
    attempt: int = 0
    counted: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint. ``files``: size and checksum (XXH3, 128 bits) of each, by name."""

    step: int
    serial: int
    ranks: int
    at_s: float
    """Seconds since 1970."""
    owner: str = ""
    attempt: int = 0
    meta: dict[str, Any] = {}
    files: dict[str, tuple[int, str]] = {}
    version: int = 1

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(nbytes for nbytes, _ in self.files.values())


class Stored(msgspec.Struct, frozen=True):
    """A checkpoint that is there."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step that it was made after."""
        return self.manifest.step


def stem(step: int, serial: int, number: int) -> str:
    """Return the name of the checkpoint of ``step``: save ``number`` under claim ``serial``."""
    return f"checkpoint-{step:010d}-{serial:06d}-{number:04d}"


def claims_in(folder: Path) -> list[int]:
    """Return the serial numbers of the claims in a folder, ascending."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (_CLAIM.fullmatch(name) for name in names)
    return sorted(int(one[1]) for one in found if one)


def newest_claim(folder: Path) -> Claim:
    """Return the claim that holds now; the empty claim 0 where there is none."""
    data, serial = b"", 0
    for _ in range(_LISTINGS):
        serials = claims_in(folder)
        if not serials:
            return Claim(serial=0)
        serial = serials[-1]
        # One that is gone was removed after a newer one was made: they are listed again.
        with contextlib.suppress(FileNotFoundError):
            data = (folder / f"claim-{serial:06d}.json").read_bytes()
            break
    try:
        return msgspec.json.decode(data, type=Claim)
    except msgspec.MsgspecError as error:
        raise BadRequestError(
            f"claim-{serial:06d}.json in {folder} cannot be read\n"
            f"remove it once no job writes there, and the claim before it holds: {error}",
            field="folder",
        ) from None


def checkpoints_in(folder: str | os.PathLike[str], *, claim: Claim | None = None) -> list[Stored]:
    """Return the checkpoints that count, the oldest first, by their manifests alone.

    ``claim`` in place of the newest of the folder. The oldest is the one that was written first, whatever
    its step: what was written after going back to an earlier step replaces what came after that.
    """
    path = Path(folder)
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    holds = newest_claim(path) if claim is None else claim
    counted = frozenset(holds.counted)
    found = []
    for name in names:
        if not (parts := _CHECKPOINT.fullmatch(name)):
            continue
        serial, number = int(parts[2]), int(parts[3])
        if serial == holds.serial or name in counted:
            manifest = _manifest_of(path / name)
            if manifest is not None:
                found.append(((serial, number), Stored(path / name, manifest)))
    found.sort(key=lambda one: one[0])
    return [stored for _, stored in found]


def one_checkpoint(folder: str | os.PathLike[str], step: int | None = None) -> Stored:
    """Return the newest checkpoint in a folder, or that of ``step``, or the checkpoint that a folder is.

    NotFoundError where there is none.
    """
    path = Path(folder)
    own = _manifest_of(path)
    if own is not None and step in (None, own.step):
        return Stored(path, own)
    found = checkpoints_in(path)
    wanted = [one for one in found if step in (None, one.step)]
    if wanted:
        return wanted[-1]
    if not path.is_dir():
        raise NotFoundError(
            f"folder {path} is not there\ngive the folder that a sharded job writes to",
            field="folder",
        )
    if found:
        steps = ", ".join(dict.fromkeys(str(one.step) for one in found))
        raise NotFoundError(
            f"folder {path} has no checkpoint of step {step}\nit has those of {steps}", field="step"
        )
    raise NotFoundError(
        f"folder {path} has no checkpoint\n"
        "give the folder that a sharded job writes to, or one of the checkpoints in it",
        field="folder",
    )


def _manifest_of(path: Path) -> Manifest | None:
    try:
        data = (path / MANIFEST).read_bytes()
        return msgspec.json.decode(data, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError):
        # Its place among the others is known by its name; what verify() says of it is why not.
        parts = _CHECKPOINT.fullmatch(path.name)
        if parts is None:
            return None
        return Manifest(step=int(parts[1]), serial=int(parts[2]), ranks=0, at_s=0.0)


def verify(stored: Stored, names: list[str] | None = None) -> str:
    """Return what is wrong with the files of a checkpoint (``names``: with these), empty if nothing is.

    Reads each of them whole.
    """
    manifest = stored.manifest
    if not manifest.files:
        return f"{MANIFEST} cannot be read"
    for name in sorted(manifest.files) if names is None else names:
        nbytes, expected = manifest.files[name]
        try:
            present = (stored.path / name).stat().st_size
            if present != nbytes:
                return f"{name} is torn: {present} bytes of {nbytes}"
            if file_sum(stored.path / name) != expected:
                return f"{name} is damaged: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that what is left of a removal does not count."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(folder: Path, claim: Claim, kept: set[str]) -> None:
    """Remove what no gang will finish, and what earlier gangs wrote after ``claim`` was made.

    ``kept``: names of checkpoints that stay.
    """
    for name in os.listdir(folder):
        parts = _CHECKPOINT.fullmatch(name)
        one = _CLAIM.fullmatch(name)
        if one is not None and int(one[1]) < claim.serial:
            (folder / name).unlink(missing_ok=True)
        elif parts is None or name in kept or int(parts[2]) >= claim.serial:
            continue
        elif (folder / name / MANIFEST).exists() or _is_old(folder / name):
            remove(folder / name)


def _is_old(path: Path) -> bool:
    try:
        newest = max(one.stat().st_mtime for one in (path, *path.iterdir()))
    except OSError:
        return False
    return time.time() - newest > _ABANDONED_S
