"""An entry point logs JSON, stops in good order on SIGTERM, and fails with one clear line."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from stoker_wire.http.server.service import Service, run_service
from stoker_wire.settings import Settings

settings = Settings.from_env()

async def main():
    service = Service("demo", settings, token="t")
    await service.start("127.0.0.1", settings.port)
    service.ready()
    return service

run_service(main, settings=settings)
"""


def _start(tmp_path: Path, **env: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen([sys.executable, program], stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    with _start(tmp_path) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert (first["event"], first["service"], first["level"]) == ("listening", "demo", "info")
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\nUmask:\t0077\n" in status, "its files are its user's alone"
    assert [json.loads(line)["event"] for line in rest.splitlines()] == ["stopped"]


def test_a_failed_start_is_one_line_and_status_1(tmp_path: Path) -> None:
    with _start(tmp_path) as first:
        assert first.stderr is not None
        port = json.loads(first.stderr.readline())["url"].rpartition(":")[2]
        with _start(tmp_path, STOKER_PORT=port) as second:
            _, text = second.communicate(timeout=60)
        first.terminate()
        first.communicate(timeout=60)
    assert second.returncode == 1
    assert text.startswith("error (port_in_use): demo cannot listen on 127.0.0.1:")
    assert text.count("\n") == 1


def test_a_service_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        process = _start(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with process:
        assert process.stderr is not None
        process.stderr.readline()
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] > 512
        process.terminate()
        process.communicate(timeout=60)
