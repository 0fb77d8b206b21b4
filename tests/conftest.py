"""Fixtures and rules for every test: real servers, printed seeds, and a check for leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import traceback
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import pytest

from tests import leaks
from tests.quiet import Quiet
from tests.services import PostgresServer, RedisServer, ServerUnavailable
from tests.tiers.slow import slow_tests

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

with contextlib.suppress(ImportError):  # the tests of tests/gpu do without it
    from hypothesis import HealthCheck, settings

    # A slow machine is no failure: an example may take as long as it needs.
    settings.register_profile("stoker", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("stoker")

FAILURES = pytest.StashKey[list[BaseException]]()
# Folders whose tests start processes: these are checked for leaks one by one.
PROCESS_FOLDERS = {"e2e", "chaos", "interop"}
# Folders whose tests run services: a warning or an error in a log fails the test.
QUIET_FOLDERS = {"e2e", "chaos", "contract", "interop"}
# Folders that mark their tests, so that no file in them can forget it.
MARKED_FOLDERS = {"gpu": "gpu", "soak": "soak"}
# With several workers what takes longest goes first, and what is short fills the end: a file that
# compiles for minutes, then folders.
LONGEST_FIRST = ("test_codegen.py", "e2e", "kernels", "sim", "contract")
# Each of these tests has a dozen processes, which mostly wait: spread among all others they get the
# time that they need, and the others what they leave.
SPREAD = "chaos"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run slow tests too, as a run that names files does"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS and not hasattr(
        config, "workerinput"
    ):
        config.option.slow = True
    # Before numpy is there: of several processes on few cores its threads would mostly wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Settings of the developer's own shell must not decide a test.
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        if not name.startswith("STOKER_TEST_"):
            del os.environ[name]
    leaks.mark_this_run()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts its background jobs so, and children would inherit it: Ctrl-C is tested.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    # Here and not in the header, which -q hides.
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    seed = run_seed(config)
    terminalreporter.write_line(
        f"repeat this run: PYTHONHASHSEED={hash_seed} STOKER_TEST_SEED={seed} "
        f"pytest --randomly-seed={seed}"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    items: list[pytest.Item], config: pytest.Config
) -> Generator[None, object, object]:
    for item in items:
        for folder, marker in MARKED_FOLDERS.items():
            if folder in item.path.parts:
                item.add_marker(marker)
    if not config.option.slow:
        _leave_out_slow(items, config)
    result = yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Within their folders, files stay as pytest-randomly has shuffled them.
        items.sort(key=lambda item: [folder not in item.path.parts for folder in LONGEST_FIRST])
        items[:] = _spread(items)
    return result


def _leave_out_slow(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave tests to ``make test-all``: those of tests/tiers/slow.txt, and cases that are marked."""
    slow = slow_tests()
    left = [
        one
        for one in items
        if one.nodeid.partition("[")[0] in slow or one.get_closest_marker("slow") is not None
    ]
    out = set(left)
    items[:] = [one for one in items if one not in out]
    config.hook.pytest_deselected(items=left)


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the files of the folder SPREAD at equal distances between the first two thirds of the others."""
    files: list[list[pytest.Item]] = [list(of) for _, of in groupby(items, lambda one: one.path)]
    spread = [of for of in files if SPREAD in of[0].path.parts]
    others = [of for of in files if SPREAD not in of[0].path.parts]
    places = [(n / len(spread) * 2 / 3, of) for n, of in enumerate(spread)]
    places += [((n + 0.5) / len(others), of) for n, of in enumerate(others)]
    return [item for _, of in sorted(places, key=lambda place: place[0]) for item in of]


def pytest_collection_finish() -> None:
    # Modules are not looked at again: the collections between tests, below, take milliseconds.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        item.stash.setdefault(FAILURES, []).append(call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """A test leaves nothing to those after it: what it held is let go, with all fixtures if it failed.

    The cycle of a caught exception and its frames would keep refs and actor handles alive, as would
    the traceback of a failure. After a failure the module's cluster, where something of the test may
    still run, ends too; the next test of the module gets a new one.
    """
    failed = bool(item.stash.get(FAILURES, None))
    for error in item.stash.get(FAILURES, []):
        let_go(error)
    if PROCESS_FOLDERS.intersection(item.path.parts):
        gc.collect()
    try:
        return (yield)
    except BaseException:
        failed = True
        raise
    finally:
        if failed:
            item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]
        if nextitem is not None and nextitem.path != item.path:
            # What is left are libraries that the file was the first to import, torch among them.
            gc.collect()
            gc.freeze()


def let_go(error: BaseException) -> None:
    """Clear the variables of all frames that an exception and its causes hold."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            with contextlib.suppress(RuntimeError):  # it runs: a part of pytest
                frame.clear()
                _ = frame.f_locals  # a copy that pytest has made; reading it again empties it
        seen = seen.__cause__ or seen.__context__


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("engine") and not container_engine_answers():
        pytest.skip("needs a running container engine: `docker info` does not answer")


@cache
def container_engine_answers() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        return subprocess.run([docker, "info"], capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run_seed(config: pytest.Config) -> int:
    """STOKER_TEST_SEED, else the seed that also orders the tests."""
    chosen = os.environ.get("STOKER_TEST_SEED") or config.getoption("randomly_seed", 0)
    return int(chosen) % 2**32


@pytest.fixture(scope="session", autouse=True)
def _no_leaks_at_the_end() -> Iterator[None]:
    before = leaks.Snapshot.take()
    yield
    gc.collect()
    left = before.leaks(fd_slack=64)  # of two thousand tests
    assert not left, "the test run left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def _no_leaks_per_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if not PROCESS_FOLDERS.intersection(request.path.parts):
        yield
        return
    before = leaks.Snapshot.take()
    yield
    left = before.leaks()
    assert not left, "this test left behind:\n  " + "\n  ".join(left)


@pytest.fixture(scope="session")
def _quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    return Quiet(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module", autouse=True)
def _quiet_logs_at_the_end(
    request: pytest.FixtureRequest, _quiet: Quiet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Services that a module shares say nothing loud when they end."""
    if not QUIET_FOLDERS.intersection(request.path.parts):
        yield
        return
    _quiet.begin()
    with pytest.MonkeyPatch.context() as patch:
        # A cluster of which nobody says where its session lies is to be heard as well.
        patch.setenv("STOKER_SESSION_ROOT", str(tmp_path_factory.mktemp("q")))
        yield
    said = _quiet.unexpected()
    _quiet.end()
    assert not said, "services logged at their end:\n  " + "\n  ".join(said)


@pytest.fixture(autouse=True)
def _quiet_logs(request: pytest.FixtureRequest, _quiet: Quiet) -> Iterator[None]:
    """What services log as a warning or an error fails the test, unless its marker expects it."""
    if not QUIET_FOLDERS.intersection(request.path.parts):
        yield
        return
    for marker in request.node.iter_markers("logs"):
        _quiet.allow(marker.args)
    # Asked for first, so that they are there to the end.
    needs = request.fixturenames
    own = request.getfixturevalue("tmp_path") if "tmp_path" in needs else None
    postgres = request.getfixturevalue("postgres_server") if "postgres_server" in needs else None
    if postgres:
        _quiet.join(postgres.log)
    yield
    said = _quiet.unexpected(*([postgres.log] if postgres else []))
    if own is not None:
        _quiet.finish(own)
    assert not said, "services logged:\n  " + "\n  ".join(said)


@pytest.fixture(scope="session")
def session_seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for fixtures of modules."""
    return run_seed(request.config)


@pytest.fixture
def seed(session_seed: int) -> int:
    """The run's seed, printed so that a failure shows it; pass it to random.Random."""
    print(f"seed={session_seed}  # repeat with STOKER_TEST_SEED={session_seed}")
    return session_seed


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole run. A test that breaks Redis takes `own_redis`."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    _start_or_skip(server)
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of the run's Redis, emptied for this test."""
    redis_server.command("FLUSHALL")
    return redis_server.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A started Redis of this test's own, to stop, restart, pause and resume."""
    server = RedisServer(tmp_path)
    _start_or_skip(server)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole run. A test that breaks PostgreSQL takes `own_postgres`."""
    yield from _postgres()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A started PostgreSQL of this test's own, to stop and start again."""
    yield from _postgres()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The SQLAlchemy URL (asyncpg) of an empty database made for this test."""
    name = postgres_server.create_database()
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The SQLAlchemy URL (aiosqlite) of a database file that does not exist yet."""
    return f"sqlite+aiosqlite:///{tmp_path / 'stoker.sqlite3'}"


def _postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("asyncpg", reason="needs asyncpg: pip install stoker[postgres]")
    server = PostgresServer()
    try:
        _start_or_skip(server)
        yield server
    finally:
        server.remove()


def _start_or_skip(server: RedisServer | PostgresServer) -> None:
    try:
        server.start()
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
