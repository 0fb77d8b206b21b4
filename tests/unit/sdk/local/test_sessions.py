"""Sessions: found while their head lives, swept when it is dead, and resolved in one order."""

from __future__ import annotations

import os
import stat
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from stoker.cli.local.cluster import _who_listens
from stoker.local.address import resolve
from stoker.local.sessions import (
    LocalInfo,
    find_running,
    is_alive,
    new_session,
    prepare,
    process_started,
    read_info,
    running_sessions,
    session_root,
    sweep,
    with_token,
    write_info,
)
from stoker_wire.errors import StartError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


def an_info(session: Path, **changes: object) -> LocalInfo:
    (session / "token").touch(mode=0o600)
    (session / "token").write_text("secret\n")
    facts: dict[str, object] = {
        "gcs_url": "http://127.0.0.1:1",
        "scheduler_url": "",
        "nodelet_url": "",
        "nodelet_unix": "",
        "node_id": "n_1",
        "host_id": "",
        "arena_dir": "",
        "session_dir": str(session),
        "token_file": str(session / "token"),
        "pid": os.getpid(),
        "pid_started": process_started(os.getpid()),
        "started_at_s": time.time(),
        "token": "secret",
    }
    info = LocalInfo(**{**facts, **changes})  # type: ignore[arg-type]
    write_info(info, session_root())
    return info


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STOKER_ADDRESS", "STOKER_TOKEN", "STOKER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(tmp_path / "sessions"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return session_root()


def test_a_session_is_private_and_latest_is_the_newest_ready_head(root: Path) -> None:
    an_info(new_session(root))
    session = new_session(root)
    an_info(session)
    an_info(new_session(root), role="node")
    new_session(root)
    for folder in (root, session, session / "logs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (root / "latest").resolve() == session.resolve()


def test_a_programs_cluster_does_not_take_latest_from_a_started_one(root: Path) -> None:
    an_info(new_session(root), embedded=True)
    started = new_session(root)
    an_info(started)
    an_info(new_session(root), embedded=True)
    assert (root / "latest").resolve() == started.resolve()
    an_info(started, pid_started="1")  # it has ended
    newest = new_session(root)
    an_info(newest, embedded=True)
    assert (root / "latest").resolve() == newest.resolve()


def test_a_session_elsewhere_is_found_and_its_folder_never_swept(
    root: Path, tmp_path: Path
) -> None:
    mine = prepare(tmp_path / "mine")
    info = an_info(mine)
    assert [each.session_dir for each in running_sessions(root)] == [info.session_dir]
    an_info(mine, pid_started="1")
    assert len(sweep(root, keep=0)) == 2, "a link for each time that it was started"
    assert (mine / "head.json").exists()


def test_the_token_is_not_in_head_json_but_comes_back_from_its_file(root: Path) -> None:
    session = new_session(root)
    info = an_info(session)
    assert "secret" not in (session / "head.json").read_text()
    found = read_info(session)
    assert found is not None
    assert with_token(found) == info


def test_a_pid_that_another_process_has_now_is_not_alive(root: Path) -> None:
    info = an_info(new_session(root))
    assert is_alive(info)
    assert not is_alive(an_info(new_session(root), pid_started="1"))
    assert not is_alive(an_info(new_session(root), pid=2**22 + 1, pid_started=""))


def test_the_newest_living_head_is_first(root: Path) -> None:
    old = an_info(new_session(root), started_at_s=1.0)
    new = an_info(new_session(root), started_at_s=2.0)
    an_info(new_session(root), started_at_s=3.0, pid_started="1")
    assert [each.session_dir for each in running_sessions(root)] == [
        new.session_dir, old.session_dir,
    ]  # fmt: skip


def test_one_that_does_not_answer_is_not_found(root: Path) -> None:
    an_info(new_session(root))
    assert find_running(root, timeout_s=0.2) is None
    assert find_running(root, embedded=True, timeout_s=0.2) is None


def test_sweeping_keeps_the_living_the_starting_and_the_last_dead(root: Path) -> None:
    alive = new_session(root)
    an_info(alive)
    starting = new_session(root)
    dead = [new_session(root) for _ in range(4)]
    for age, session in enumerate(dead):
        an_info(session, pid_started="1")
        os.utime(session, (1000 - age, 1000 - age))
    (root / "not-a-session").mkdir()
    assert set(sweep(root, keep=2)) == set(dead[2:])
    assert all(path.exists() for path in (alive, starting, *dead[:2], root / "not-a-session"))


def test_what_is_given_wins_over_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_ADDRESS", "http://env:1")
    monkeypatch.setenv("STOKER_TOKEN", "env-token")
    assert resolve().address == "http://env:1"
    assert resolve("auto").address == "http://env:1"
    assert resolve().token == "env-token"
    given = resolve("given:2", "given-token")
    assert (given.address, given.token) == ("http://given:2", "given-token")


def test_the_address_of_a_local_cluster_brings_its_token(root: Path) -> None:
    an_info(new_session(root))
    assert resolve("http://127.0.0.1:1").token == "secret"
    assert resolve("localhost:1").token == "secret"


def test_no_cluster_and_no_token_say_what_to_do(root: Path) -> None:
    with pytest.raises(StartError, match="stoker start --head"):
        resolve()
    with pytest.raises(UnavailableError, match=r"cannot reach .*http://127.0.0.1:1\."):
        resolve("http://127.0.0.1:1")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as somebody:
        Thread(target=somebody.serve_forever, daemon=True).start()
        with pytest.raises(StartError, match="STOKER_TOKEN"):
            resolve(f"http://127.0.0.1:{somebody.server_port}")
        somebody.shutdown()


class Healthy(BaseHTTPRequestHandler):
    """Answers as the gcs of somebody else's cluster does."""

    def do_GET(self) -> None:
        body = b'{"service": "gcs"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_whoever_has_a_port_is_named_with_what_to_do(root: Path) -> None:
    pid = os.getpid()
    an_info(new_session(root), gcs_url="http://127.0.0.1:7001")
    an_info(new_session(root), gcs_url="http://127.0.0.1:7002", embedded=True)
    an_info(new_session(root), nodelet_url="http://127.0.0.1:7003", role="node")
    mine, program, node = (_who_listens(None, port) for port in (7001, 7002, 7003))
    assert f"a Stoker cluster of yours listens on port 7001 already (pid {pid}" in mine
    assert "`stoker stop`" in mine
    assert f"of a running program (its head is pid {pid}) and ends with that" in program
    assert "`stoker stop`" not in program
    assert "a Stoker node of yours listens on port 7003 already" in node
    for handler, said in (
        (Healthy, "the gcs of a Stoker cluster of another user"),
        (BaseHTTPRequestHandler, ""),
    ):
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
            Thread(target=other.serve_forever, daemon=True).start()
            told = _who_listens("0.0.0.0", other.server_port)
            other.shutdown()
        assert said in told and bool(said) == bool(told)
        assert f"join it with --address http://127.0.0.1:{other.server_port}" in told or not said
