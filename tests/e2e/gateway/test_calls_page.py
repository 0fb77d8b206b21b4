"""What `docs/calls.md` says to type is typed: its Python, its curl lines, its JavaScript."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.launch import spawn_local
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "calls.md").read_text(encoding="utf-8")
TOKEN = "the-token-of-a-page-about-calls"
WAIT_S = 60.0
NEEDS = {"curl": shutil.which("curl"), "node": shutil.which("node")}


def blocks(language: str) -> list[str]:
    """The page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def lines(start: str) -> list[str]:
    """The commands of the page that begin with a word, without what is said behind them."""
    commands = "".join(blocks("sh")).splitlines()
    return [re.sub(r" +# .*", "", one) for one in commands if one.startswith(start)]


def run(command: list[str], folder: Path, **env: str) -> str:
    """Run a command to its end; return what it printed."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a reader who has typed the page's Python; a job, a task and an actor are there."""
    home = tmp_path_factory.mktemp("page")
    (home / ".stoker").mkdir()
    (home / ".stoker" / "token").write_text(TOKEN)
    with session_root(home), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_TOKEN", TOKEN)
        patch.chdir(home)
        cluster = spawn_local(embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            info = cluster.wait_ready()
            patch.setenv("STOKER_ADDRESS", info.gcs_url)
            (python,) = blocks("python")
            exec(compile(python, "docs/calls.md", "exec"), {"stoker": stoker, "__name__": "page"})
            _register_train()
            try:
                kept = [_counter("counter"), _counter("other")]
                assert stoker.get([one.add.remote(0) for one in kept], timeout=WAIT_S) == [0, 0]
                yield {
                    "HOME": str(home),
                    "GATEWAY": info.gateway_url,
                    "STOKER_ADDRESS": info.gcs_url,
                    "ACTOR": kept[1].actor_id,
                }
            finally:
                stoker.shutdown()
        finally:
            cluster.stop()


def _counter(name: str) -> Any:
    """Start an actor of the page."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self, by: int = 1) -> int:
            self.count += by
            return self.count

    return stoker.remote(Counter).options(name=name).remote()


def _register_train() -> None:
    """Register what the page names and does not show."""

    def train() -> str:
        sys.stdout.write("trained\n")
        return "trained"

    stoker.register(train)


@pytest.fixture
def curl(environ: dict[str, str], tmp_path: Path) -> Callable[[str], Any]:
    """Types a line of the page; one that follows is left once it has said something."""
    if NEEDS["curl"] is None:
        pytest.skip("there is no curl on this machine")
    (tmp_path / "images.tar").write_bytes(bytes(range(256)))
    (export,) = lines("export GATEWAY")
    export = export.partition(" AUTH=")[2]

    def type_it(line: str) -> Any:
        line = line.replace("curl ", "curl -sS --fail-with-body ", 1)
        if "watch=true" in line:
            line += " | head -n 1"
        said = run(["bash", "-c", f"AUTH={export}\n{line}"], tmp_path, **environ)
        is_json = said.startswith("{") and "\n" not in said and "Range" not in line
        return json.loads(said) if is_json else said

    return type_it


def test_functions_and_actors_are_called(curl: Callable[[str], Any]) -> None:
    answers = [curl(line) for line in lines("curl") if '"args": [3]' in line or "counter" in line]
    assert answers[0] == {"result": 9}
    assert answers[1]["result"] % 2 == 0


def test_the_command_line_does_the_same(environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker.cli"]
    typed = [line.split()[1:] for line in lines("stoker call")]
    said = [run([*command, *words], tmp_path, **environ).strip() for words in typed]
    assert float(said[0]) == 9
    assert said[1].isdecimal()


def test_values_are_held_by_reference(curl: Callable[[str], Any]) -> None:
    begin, put, state, value, wait = [
        one for one in lines("curl") if "async" in one or "refs" in one
    ]
    begun, held = curl(begin), curl(put)
    assert curl(state.replace("o_12", begun["ref"]))["state"] == "READY"
    assert len(curl(value.replace("o_12", held["ref"])).encode("latin-1", "replace")) >= 100
    refs = {"o_1": begun["ref"], "o_2": held["ref"]}  # which may begin with o_2 themselves
    waited = curl(re.sub(r"o_[12]", lambda found: refs[found[0]], wait))
    assert len(waited["ready"]) + len(waited["pending"]) == 2
    assert waited["ready"]


def test_everything_else_is_at_the_same_address(
    curl: Callable[[str], Any], environ: dict[str, str]
) -> None:
    submit, stop, delete, kill, follow, logs = [
        one for one in lines("curl") if not re.search(r"/v1/(calls|refs)", one)
    ]
    job = curl(submit)
    environ["JOB"] = job["job_id"]
    curl(stop)
    done = f'curl -H "$AUTH" "$GATEWAY/v1/jobs/{job["job_id"]}?wait_s=40"'
    assert curl(done)["state"] in ("STOPPED", "FAILED")
    curl(delete)
    curl(kill)
    assert "task_id" in str(curl(follow))
    begun = curl(next(one for one in lines("curl") if '"train"' in one))
    environ["TASK"] = begun["task_id"]
    listed = 'curl -H "$AUTH" $GATEWAY/v1/tasks'
    until(lambda: begun["task_id"] in str(curl(listed)), WAIT_S, "the history has the task")
    until(lambda: "trained" in str(curl(logs)), WAIT_S, "the task's output is there")


def test_javascript_calls(environ: dict[str, str], tmp_path: Path) -> None:
    if NEEDS["node"] is None:
        pytest.skip("there is no node on this machine; `make interop` brings one for TypeScript")
    (script,) = blocks("js")
    constants = "const GATEWAY = process.env.GATEWAY, TOKEN = process.env.TOKEN;\n"
    last = script.rstrip().rpartition("\n")[2]
    assert last.startswith("await call(")
    program = constants + script.replace(last, f"console.log({last.rstrip(';')});")
    (tmp_path / "page.mjs").write_text(program)
    assert run([str(NEEDS["node"]), "page.mjs"], tmp_path, **environ, TOKEN=TOKEN) == "9\n"
