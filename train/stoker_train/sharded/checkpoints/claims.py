"""The fence of a folder of checkpoints: of two gangs only the one that took over last adds to it.

A gang may be cut off, be replaced, and wake up while its successor trains. No file system compares and sets,
so a claim says what counts: the checkpoints that it found, and those that its gang writes. What the other
gang writes afterwards is under an older claim's number and not in the list, whenever it comes: there is no
moment between a look and a write. Called by rank 0 of the store; files are written here, nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import msgspec

from stoker_train.durable import sync_folder, whole_file
from stoker_train.sharded.checkpoints.layout import Claim, checkpoints_in, newest_claim
from stoker_wire.errors import BadRequestError, FencedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("check", "take")


def take(folder: Path, owner: str, attempt: int) -> Claim:
    """Take a folder over for attempt ``attempt`` of ``owner`` (a job), and return the claim.

    FencedError where a later attempt of the same owner has it. Another owner's is taken over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = newest_claim(folder)
    latest = before
    while True:
        if latest.owner == owner and latest.attempt > attempt:
            raise _fenced(folder, latest, attempt)
        counted = _names(folder, before)
        claim = Claim(serial=latest.serial + 1, owner=owner, attempt=attempt, counted=counted)
        path = folder / f"claim-{claim.serial:06d}.json"
        prepared = folder / f".claim-{claim.serial:06d}-{os.getpid()}-{os.urandom(4).hex()}"
        with whole_file(prepared) as file:
            file.write(msgspec.json.encode(claim))
        try:
            os.link(prepared, path)  # the one call that writes whole and only if there is none
        except FileExistsError:
            before = latest = newest_claim(folder)
            continue
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise BadRequestError(
                f"the file system of {folder} has no hard links\n"
                "give a folder on another one, that all nodes share",
                field="folder",
            ) from None
        finally:
            with contextlib.suppress(OSError):
                prepared.unlink()
        sync_folder(folder)
        # What the gang before wrote or removed in between; now it does so no more, save what it is just at.
        if _names(folder, before) == counted:
            return claim
        latest = claim


def _names(folder: Path, claim: Claim) -> tuple[str, ...]:
    return tuple(one.path.name for one in checkpoints_in(folder, claim=claim))


def check(folder: Path, claim: Claim, counted: str = "") -> None:
    """Raise FencedError where a later claim than ``claim`` holds, which does not count ``counted``."""
    holds = newest_claim(folder)
    if holds.serial > claim.serial and counted not in holds.counted:
        raise _fenced(folder, holds, claim.attempt)


def _fenced(folder: Path, holds: Claim, attempt: int) -> FencedError:
    by = f" of {holds.owner}" if holds.owner else ""
    return FencedError(
        f"attempt {attempt} writes no more to {folder}: attempt {holds.attempt}{by} has taken over\n"
        "only the newest gang goes on; end this one"
    )
