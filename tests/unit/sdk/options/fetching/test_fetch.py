"""Fetches: over TLS, from stores and from repositories, with hashes, limits and deadlines."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.local import certificates
from stoker.runtime.options.fetching import fetch, repositories
from stoker.runtime.options.fetching.uris import parse
from stoker.runtime.options.runtime_env import make_runtime_env
from stoker_wire.errors import BadRequestError, PayloadTooLargeError, RuntimeEnvSetupError
from tests.leaks import alive
from tests.services import until
from tests.unit.sdk.options.fetching.test_archives import files_of, zip_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.runtime.options.packages import Package


def get(text: str, **options: Any) -> dict[str, str]:
    return files_of(fetch.fetch(parse(text), **options))


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one archive, redirects, and errors."""

    content = b""

    def do_GET(self) -> None:
        if self.path.startswith("/code.zip"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.content)
            return
        if self.path == "/slow.zip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has left
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.01)
            return
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/").replace("~", "://"))
        else:
            self.send_response(404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certificates.init(folder, name="the CA")
    certificates.issue(folder, "server")
    return folder


@pytest.fixture
def server(trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server over TLS, whose CA this process trusts."""
    Handler.content = zip_of(tmp_path / "served.zip", {"repo-1/train.py": "1"}).read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted / "server.pem", trusted / "server.key")
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted / "ca.pem"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.socket = context.wrap_socket(served.socket, server_side=True)
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join(10)


def test_an_archive_over_tls_with_and_without_its_hash(server: str) -> None:
    digest = hashlib.sha256(Handler.content).hexdigest()
    assert get(f"{server}/code.zip") == {"train.py": "1"}
    assert get(f"{server}/code.zip?sig=1#sha256={digest}") == {"train.py": "1"}
    with pytest.raises(RuntimeEnvSetupError, match=rf"not what its hash says\.\n.*{digest}"):
        get(f"{server}/code.zip#sha256={'0' * 64}")


def test_redirects_stay_encrypted(server: str) -> None:
    to = server.replace("://", "~")
    assert get(f"{server}/to/{to}/code.zip") == {"train.py": "1"}
    open_ = to.replace("https", "http")
    with pytest.raises(RuntimeEnvSetupError, match="not https://"):
        get(f"{server}/to/{open_}/code.zip")


def test_what_the_server_says_is_told_without_the_query(server: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match="answered 404") as failure:
        get(f"{server}/none.zip?sig=secret")
    assert "secret" not in str(failure.value)


def test_a_certificate_of_nobody_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(RuntimeEnvSetupError, match="CERTIFICATE_VERIFY_FAILED"):
        get(f"{server}/code.zip")


def test_limits_of_bytes_and_of_time(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_HEADERS_BYTES", 0)
    with pytest.raises(PayloadTooLargeError, match=r"code\.zip has more than"):
        get(f"{server}/code.zip", max_bytes=10)
    monkeypatch.setattr(fetch, "FETCH_S", -1.0)
    with pytest.raises(RuntimeEnvSetupError, match="in time"):
        get(f"{server}/code.zip")
    with pytest.raises(RuntimeEnvSetupError, match="in time"):
        get(f"git+{repository(tmp_path).as_uri()}")


def test_a_server_that_sends_byte_by_byte_does_not_hold_the_caller(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 1.0)
    with pytest.raises(RuntimeEnvSetupError, match="in time"):
        get(f"{server}/slow.zip")


def test_what_git_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{tmp_path}/pid\nwait\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(fetch, "FETCH_S", 5.0)  # a busy machine starts the program by then
    with pytest.raises(RuntimeEnvSetupError, match="in time"):
        get("git+file:///x")
    pid = int((tmp_path / "pid").read_text())

    until(lambda: not alive(pid), 40, "what git had started has ended")


def test_a_tar_is_unpacked_and_one_that_grows_without_end_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.py").write_text("1")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x.py", "repo/x.py")
    assert get((tmp_path / "a.tar.gz").as_uri()) == {"x.py": "1"}
    zip_of(tmp_path / "a-1-py3-none-any.whl", {"lib/x.py": "1"})
    assert get((tmp_path / "a-1-py3-none-any.whl").as_uri()) == {"lib/x.py": "1"}
    monkeypatch.setattr(fetch, "_HEADERS_BYTES", 4096)
    with pytest.raises(PayloadTooLargeError):
        get((tmp_path / "a.tar.gz").as_uri(), max_bytes=10)
    (tmp_path / "b.tgz").write_bytes(b"noise")
    with pytest.raises(RuntimeEnvSetupError, match="cannot be unpacked"):
        get((tmp_path / "b.tgz").as_uri())
    with pytest.raises(RuntimeEnvSetupError, match="No such file"):
        get((tmp_path / "none.zip").as_uri())


def test_a_store_is_read_by_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    content = zip_of(tmp_path / "a.zip", {"x.py": "1"}).read_bytes()
    with fsspec.open("memory://bucket/a.zip", "wb") as writer:
        writer.write(content)
    digest = hashlib.sha256(content).hexdigest()
    assert get(f"memory://bucket/a.zip#sha256={digest}") == {"x.py": "1"}
    with pytest.raises(RuntimeEnvSetupError, match=r"bucket/none\.zip"):
        get("memory://bucket/none.zip")
    with pytest.raises(RuntimeEnvSetupError, match="pip install"):
        get("nosuchstore://bucket/a.zip")


def test_without_fsspec_a_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(RuntimeEnvSetupError, match=r"pip install fsspec, .* s3fs"):
        get("s3://bucket/a.zip")


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    done = subprocess.run(
        ["git", *own, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / "x.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", text)
    return git(folder, "rev-parse", "HEAD")


def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def test_a_repository_by_branch_tag_and_commit(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    first = commit(folder, "1")
    git(folder, "tag", "v1")
    commit(folder, "2")
    address = f"git+{folder.as_uri()}"
    assert get(address) == get(f"{address}@main") == {"lib/x.py": "2"}
    assert get(f"{address}@v1") == get(f"{address}@{first}") == {"lib/x.py": "1"}
    assert get(address, excludes=("none",)) == {"lib/x.py": "2"}
    with pytest.raises(RuntimeEnvSetupError, match="no-such-branch\n") as failure:
        get(f"{address}@no-such-branch")
    assert "cannot be fetched by git" in str(failure.value)


def test_a_repository_runs_nothing_of_its_own_and_leads_nowhere(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    (folder / ".gitattributes").write_text("* filter=evil export-subst\n")
    (folder / "link").symlink_to("/etc/hostname")
    commit(folder, "1")
    with pytest.raises(RuntimeEnvSetupError, match="leads to no file"):
        get(f"git+{folder.as_uri()}")
    assert "lib/x.py" in get(f"git+{folder.as_uri()}", excludes=("link",))


def test_a_repository_that_is_too_large_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path)
    (folder / "noise").write_bytes(hashlib.shake_256(b"x").digest(1 << 20))
    commit(folder, "1")
    monkeypatch.setattr(fetch, "_HEADERS_BYTES", 0)
    with pytest.raises(PayloadTooLargeError):
        get(f"git+{folder.as_uri()}", max_bytes=1 << 16)


def test_a_machine_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repositories, "_variables", lambda: {"PATH": str(tmp_path)})
    with pytest.raises(RuntimeEnvSetupError, match="install git"):
        get("git+file:///x")


def test_a_uri_is_fetched_once_and_stays_what_it_was(tmp_path: Path) -> None:
    uploaded: list[Package] = []
    fetched: dict[tuple[str, tuple[str, ...]], str] = {}
    zip_of(tmp_path / "a.zip", {"x.py": "1"})
    uri = (tmp_path / "a.zip").as_uri()
    env = {"working_dir": uri, "py_modules": [uri]}
    first = make_runtime_env(env, uploaded.append, fetched)
    assert first.working_dir == first.py_modules[0] == uploaded[0].hash
    zip_of(tmp_path / "a.zip", {"x.py": "2"})
    assert make_runtime_env(env, uploaded.append, fetched) == first
    assert len(uploaded) == 1
    assert make_runtime_env(env, uploaded.append).working_dir != first.working_dir


def test_a_wrong_uri_is_an_error_of_its_key_without_its_password() -> None:
    with pytest.raises(BadRequestError, match=r"runtime_env\.working_dir: .*password") as failure:
        make_runtime_env({"working_dir": "https://me:secret@h/a.zip"}, lambda _: None)
    assert "secret" not in str(failure.value)
    with pytest.raises(BadRequestError, match=r"runtime_env\.py_modules: .*https://"):
        make_runtime_env({"py_modules": ["http://h/a.zip"]}, lambda _: None)
