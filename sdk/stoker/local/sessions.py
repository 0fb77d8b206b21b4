"""Sessions on this machine: one private folder per local cluster, and the look-up of those that run.

The head writes ``head.json`` into its folder when it is ready; drivers and the CLI read it. Light on
purpose (standard library and msgspec): it runs inside every driver. It starts and stops nothing.

::

    <session_root>/              0700, STOKER_SESSION_ROOT
        latest -> <session>      the head that `stoker start --head` started last; without one, the newest
        <stamp>_<random>/        0700, one session
            token  address  head.json  stoker.sqlite3  logs/
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.errors import StokerError
from stoker_wire.http.auth import load_token, private_dir
from stoker_wire.settings import default_session_root

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT_SESSIONS = 10
"""The number of sessions of dead heads that are kept for their logs."""

KEPT_HISTORY_S = 7 * 86_400.0
"""How long a dead node's session is kept that has task history for a cluster which may still be there."""

LATEST = "latest"
INFO_NAME = "head.json"
TOKEN_NAME = "token"
DATABASE_NAME = "stoker.sqlite3"
_STARTING_S = 120.0  # a folder without head.json may belong to a head that is starting


class LocalInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a local cluster and the paths of its files.

    ``role`` is ``head`` or ``node``. ``embedded`` ones belong to one driver and end with it.
    ``pid_started`` tells the process from a later one with its pid. ``token`` is never written to
    ``head.json``.
    """

    gcs_url: str
    scheduler_url: str
    nodelet_url: str
    nodelet_unix: str
    node_id: str
    host_id: str
    arena_dir: str
    session_dir: str
    token_file: str
    pid: int
    gateway_url: str = ""
    pid_started: str = ""
    role: str = "head"
    embedded: bool = False
    started_at_s: float = 0.0
    token: str = ""


def session_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of all sessions of this user, made with mode 0700 if need be."""
    value = (os.environ if environ is None else environ).get("STOKER_SESSION_ROOT", "")
    return private_dir(value or default_session_root())


def new_session(root: Path) -> Path:
    """Make a folder for a new session."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    return prepare(root / f"{stamp}_{os.urandom(3).hex()}")


def prepare(session: Path) -> Path:
    """Make ``session`` and its ``logs`` folder, both private; return the session."""
    private_dir(session)
    private_dir(session / "logs")
    return session


def write_info(info: LocalInfo, root: Path) -> None:
    """Publish a ready head or node in ``root``: ``head.json`` appears whole or not at all.

    A session whose folder is elsewhere (``--session-dir``) is found by a link in ``root``. A program's
    own cluster does not take ``latest`` from one that was started to stay.
    """
    session = Path(info.session_dir)
    partial = session / f".{INFO_NAME}"
    partial.write_bytes(msgspec.json.encode(msgspec.structs.replace(info, token="")))
    partial.replace(session / INFO_NAME)
    (session / "address").write_text(f"{info.gcs_url}\n")
    with contextlib.suppress(OSError):
        if session.parent.resolve() != root.resolve():
            _link(root / f"{time.strftime('%Y%m%d_%H%M%S')}_{os.urandom(3).hex()}", session)
        if info.role == "head" and not (info.embedded and _has_started_head(root)):
            _link(root / LATEST, session)


def _has_started_head(root: Path) -> bool:
    return any(info.role == "head" and not info.embedded for info in running_sessions(root))


def _link(link: Path, session: Path) -> None:
    partial = link.with_name(f".{link.name}_{os.urandom(3).hex()}")
    partial.symlink_to(session.absolute())
    partial.replace(link)


def read_info(session: Path) -> LocalInfo | None:
    """Return the info that the head of ``session`` published, or None (none, or another version's)."""
    try:
        return msgspec.json.decode((session / INFO_NAME).read_bytes(), type=LocalInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def process_started(pid: int) -> str:
    """Return when ``pid`` started, in the kernel's ticks: empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_alive(info: LocalInfo) -> bool:
    """Return whether the head of ``info`` still runs (its pid may belong to another process by now)."""
    started = process_started(info.pid)
    return bool(started) and info.pid_started in ("", started)


def running_sessions(root: Path | None = None) -> list[LocalInfo]:
    """Return the living heads, the newest first, without their tokens."""
    infos = [read_info(path) for path in _sessions(root or session_root())]
    # By folder: one outside of the root may be linked more than once.
    alive = {info.session_dir: info for info in infos if info is not None and is_alive(info)}
    return sorted(alive.values(), key=lambda info: info.started_at_s, reverse=True)


def find_running(
    root: Path | None = None, *, embedded: bool = False, timeout_s: float = 1.0
) -> LocalInfo | None:
    """Return the newest cluster of this machine that answers ``/healthz``, with its token, or None.

    Only those that ``stoker start --head`` made; with ``embedded`` also those inside a driver
    (which end with it), after the others.
    """
    infos = running_sessions(root)
    infos.sort(key=lambda info: info.embedded)
    for info in infos:
        if info.role != "head" or (info.embedded and not embedded):
            continue
        if _is_healthy(info.gcs_url, timeout_s):
            return with_token(info)
    return None


def with_token(info: LocalInfo) -> LocalInfo:
    """Return ``info`` with the token read from its file; StartError if that is unreadable."""
    return msgspec.structs.replace(info, token=load_token(info.token_file))


def sweep(root: Path, *, keep: int = KEPT_SESSIONS) -> list[Path]:
    """Remove the folders of dead heads, all but the last ``keep``; return those removed.

    A folder whose head is alive, or may be starting, is not touched. Shared memory of dead nodes is
    the nodelet's to sweep: it does so at each start.
    """
    dead: list[tuple[float, Path]] = []
    for session in _sessions(root):
        info = read_info(session)
        with contextlib.suppress(OSError):
            changed_at_s = session.stat().st_mtime
            if info is None and time.time() - changed_at_s < _STARTING_S:
                continue
            if info is not None and is_alive(info):
                continue
            if time.time() - changed_at_s < KEPT_HISTORY_S and _has_unsent_history(session, info):
                continue
            dead.append((changed_at_s, session))
    dead.sort(reverse=True)
    for _, session in dead[keep:]:
        if session.is_symlink():
            session.unlink(missing_ok=True)  # the folder is outside, and is the user's
        else:
            shutil.rmtree(session, ignore_errors=True)
    return [session for _, session in dead[keep:]]


def _sessions(root: Path) -> list[Path]:
    """Return the folders that a head made: other programs' files in the root are left alone."""
    with contextlib.suppress(OSError):
        return [path for path in root.iterdir() if path.name != LATEST and _is_session(path)]
    return []


def _has_unsent_history(session: Path, info: LocalInfo | None) -> bool:
    if info is not None and info.embedded:
        return False  # its cluster ended with it
    return any((session / "spool").glob("*/*.*.*.*"))


def _is_session(path: Path) -> bool:
    return (path / "logs").is_dir()


def _is_healthy(url: str, timeout_s: float) -> bool:
    import ssl
    from http.client import HTTPException

    from stoker.runtime.net.http import connection_to

    try:
        connection = connection_to(url, timeout_s)
    except StokerError:
        return True  # whoever asks it for more is told which setting of TLS is wrong
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except ssl.SSLError:
        return True  # as above
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
