"""Git repositories as archives: one commit, without its history, hooks or filters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from stoker_wire.errors import PayloadTooLargeError, RuntimeEnvSetupError

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.runtime.options.fetching.uris import CodeUri

_BLOCK_BYTES = 512
_LIMITED = 'ulimit -f "$1" && shift && exec git "$@"'
"""No file of the repository becomes larger than that many blocks."""
_LINES = 5


def archive_commit(
    uri: CodeUri, folder: Path, target: Path, *, max_bytes: int, until_s: float
) -> None:
    """Write the files of the commit that a URI names into ``target``, a tar."""
    repository = folder / "repository"
    repository.mkdir()
    git = _Git(uri, repository, max_bytes, until_s)
    git.run("init", "--quiet", "--bare")
    wanted = uri.revision or "HEAD"
    git.run("fetch", "--quiet", "--depth=1", "--no-tags", "--", uri.location, wanted)
    # No checkout: what .gitattributes name as filters is not run, and links are only named.
    git.run("archive", "--format=tar", f"--output={target}", "FETCH_HEAD")


class _Git:
    """The commands on one repository, within one deadline."""

    def __init__(self, uri: CodeUri, repository: Path, max_bytes: int, until_s: float) -> None:
        self._uri = uri
        self._repository = repository
        self._blocks = max_bytes // _BLOCK_BYTES + 1
        self._until_s = until_s
        protocol = uri.scheme.removeprefix("git+")
        self._options = ("-c", "protocol.allow=never", "-c", f"protocol.{protocol}.allow=always")

    def run(self, *arguments: str) -> None:
        """Run a command; RuntimeEnvSetupError has its last words."""
        shell = ("/bin/sh", "-c", _LIMITED, "git", str(self._blocks))
        where = ("-C", str(self._repository))
        process = subprocess.Popen(
            [*shell, *self._options, *where, *arguments],
            env=_variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:
            try:
                _, said = process.communicate(timeout=max(0.0, self._until_s - time.monotonic()))
            except BaseException as error:
                # With what git has started, which else would keep its output open for as long as it likes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeEnvSetupError(f"{self._uri.shown} did not come in time") from None
                raise
        if process.returncode == 0:
            return
        if process.returncode == -signal.SIGXFSZ or f"signal {signal.SIGXFSZ:d}" in said:
            raise PayloadTooLargeError(
                f"{self._uri.shown} is too large\na package may not hold more"
            )
        shown = f"{self._uri.shown}@{self._uri.revision or 'HEAD'}"
        lines = said.strip().splitlines()[-_LINES:]
        if process.returncode == 127:
            lines = ["install git where the driver runs"]
        elif self._uri.revision:
            lines.append("a commit is named by all of its digits")
        raise RuntimeEnvSetupError("\n".join((f"{shown} cannot be fetched by git", *lines)))


def _variables() -> dict[str, str]:
    """Return the caller's variables, with none that names a repository, and without questions."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }
    ssh = {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes"} if "GIT_SSH_COMMAND" not in kept else {}
    return {**kept, **ssh, "GIT_TERMINAL_PROMPT": "0"}
