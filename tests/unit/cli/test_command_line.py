"""The command line without a cluster: help, errors in one line, sizes, settings, and what it costs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from stoker.cli import root
from stoker.cli.options import Bytes
from stoker.cli.output import duration, nbytes, print_prose, print_table, resources
from stoker_wire.errors import StartError

if TYPE_CHECKING:
    from click.testing import Result


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        if not name.startswith("STOKER_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(tmp_path / "sessions"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STOKER_TOKEN", "t")


def stoker(*args: str) -> Result:
    return CliRunner().invoke(root, args)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append((*path, name))
    return found


@pytest.mark.parametrize("path", commands(root), ids=" ".join)
def test_every_command_has_help_with_a_sentence(path: tuple[str, ...]) -> None:
    shown = stoker(*path, "--help")
    assert shown.exit_code == 0
    sentence = shown.output.split("\n\n")[1].strip()
    assert sentence.partition("\n\n")[0].rstrip()[-1] in ".:)1"


def test_help_has_every_command_once_in_a_group() -> None:
    shown = stoker("--help").output
    for name in root.list_commands(click.Context(root)):
        assert len(re.findall(rf"^  {name} +\S", shown, re.MULTILINE)) == 1, name
    assert "Others:" not in shown


def test_every_command_that_asks_a_cluster_can_be_pointed_at_one() -> None:
    local = {
        "start",
        "stop",
        "config",
        "version",
        "simulate",
        "backup",
        "restore",
        "certs",
        "port",
        "docs",
    }
    of_folders = {("train", "checkpoints"), ("train", "export")}
    paths = commands(root)
    groups = {path[:-1] for path in paths if path}
    for path in paths:
        if path not in groups | of_folders and path[0] not in local:
            shown = stoker(*path, "--help").output
            options = ("--address", "--token", "--token-file", "--json")
            assert all(option in shown for option in options), path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["starts"], "no command 'starts'; did you mean 'start'?"),
        (["job", "submits"], "did you mean 'submit'? See: "),
        (["start", "--hed"], "--head"),
        (["start"], "give --head for a new cluster, or --address URL"),
        (["start", "--head", "--memory", "8XB"], "write it like 8GiB"),
        (["start", "--head", "--resources", "disk=2"], "is no JSON object"),
        (["list", "nodes", "--limit", "0"], "--limit"),
        (["job", "submit"], "missing argument"),
        (["kernels", "tune", "rms_norm", "columns"], "'columns' is not KEY=VALUE"),
        (["kernels", "tune", "rms_norm", "columns=0"], "columns=0: a size is a whole number"),
        (["kernels", "tun"], "did you mean 'tune'?"),
        (["up"], "no command 'up': start a cluster with `stoker start --head`"),
        (["exec"], "use `stoker job submit`"),
        (["list", "tasks", "--filter", "state=FINISHEDX"], "did you mean FINISHED?"),
        (["job", "submit", "--address", "http://127.0.0.1:1", "--env", "A",
          "--", "true"], "'A' is not KEY=VALUE"),
        (["job", "submit", "--address", "http://127.0.0.1:1", "--array", "5-x",
          "--", "true"], "'5-x': write it like 0-99, 0-99%8, 0-20:5 or 1,4,9"),
        (["queue", "create", "q", "--quota", "GPU"], "'GPU' is not NAME=AMOUNT"),
        (["queue", "create", "q", "--limit", "memory=8XB"], "is no amount, such as 2, 0.5 or 8GiB"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_line_with_the_fix_and_exit_code_2(args: list[str], said: str) -> None:
    shown = stoker(*args)
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert shown.output.count("\n") == 1
    assert said in shown.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status"], "no running cluster was found on this machine; start one with"),
        (["list", "nodes", "--address", "http://127.0.0.1:1"], "cannot reach the cluster at http"),
        (["status", "--address", "ftp://x"], "is not an address of a cluster"),
        (["explain", "x_1", "--address", "http://127.0.0.1:1"], "is no id of a"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_the_fix_and_exit_code_1(
    args: list[str], said: str
) -> None:
    shown = stoker(*args)
    assert (shown.exit_code, shown.output.count("\n")) == (1, 1), shown.output
    assert shown.output.startswith("error: ")
    assert said in shown.output


@pytest.mark.parametrize(
    ("args", "exit_code", "code", "said"),
    [
        (["status", "--json"], 1, "start_failed", "no running cluster was found"),
        (["list", "tassk", "--json"], 2, "usage", "did you mean 'tasks'?"),
        (["list", "tasks", "--json", "--filter", "x"], 2, "usage", "is not KEY=VALUE"),
        (["explain", "--json", "x_1", "--address", "http://127.0.0.1:1"], 1,
         "bad_request", "is no id of a"),
        (["config", "--json", "--chnged"], 2, "usage", "--changed"),
        (["plan", "--json", "--job", "job_1", "--queue", "q"], 2, "usage", "that of the job"),
        (["plan", "--json", "--gang", "PACK", "--strategy", "spread"], 2, "usage", "not a gang"),
        (["job", "submit", "--json", "--address", "ftp://x", "--", "true"], 1,
         "bad_request", "is not an address of a cluster"),
    ],
)  # fmt: skip
def test_with_json_an_error_is_one_object_on_stderr(
    args: list[str], exit_code: int, code: str, said: str
) -> None:
    shown = stoker(*args)
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (exit_code, "", 1)
    told = json.loads(shown.stderr)
    assert (told["code"], told["exit_code"]) == (code, exit_code)
    assert said in told["message"]


def test_on_a_terminal_an_error_names_its_page() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "stoker.cli", "status", "--address", "ftp://x"]
    with os.fdopen(ours, "rb") as read:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, timeout=30, check=False
        )
        os.close(theirs)
        said = os.read(read.fileno(), 65536).decode().splitlines()
    assert done.returncode == 1
    assert said[-1] == "more: stoker docs bad_request"


def test_docs_explains_an_error_by_its_code() -> None:
    page = stoker("docs", "infeasible")
    assert page.exit_code == 0
    assert page.output.startswith("# infeasible\n")
    assert "on_infeasible=" in page.output and "```" not in page.output
    assert json.loads(stoker("docs", "infeasible", "--json").output)["code"] == "infeasible"
    codes = [row["code"] for row in json.loads(stoker("docs", "--json").output)]
    assert "infeasible" in codes and len(codes) == len(set(codes))
    wrong = stoker("docs", "infeasibel")
    assert (wrong.exit_code, "did you mean 'infeasible'" in wrong.output) == (2, True)


def test_json_of_the_job_s_own_program_is_none_of_ours() -> None:
    args = ("job", "submit", "--address", "ftp://x", "--", "program", "--json")
    assert stoker(*args).output.startswith("error: ")


def test_prose_is_folded_on_a_terminal_and_ids_stay_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "on n_df97c8a18dd3c297: leases on the node must end until 1 CPU is free"
    print_prose(text, label="to change that:")
    assert capsys.readouterr().out == f"  to change that: {text}\n", "a pipe gets one line"
    monkeypatch.setattr("stoker.cli.output.terminal_width", lambda: 40)
    print_prose(text, label="to change that:")
    assert capsys.readouterr().out.splitlines() == [
        "  to change that: on n_df97c8a18dd3c297:",
        "    leases on the node must end until 1",
        "    CPU is free",
    ]


def test_a_token_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def resolve(address: str | None, token: str | None) -> None:
        seen.append(token)
        raise StartError("not today")

    # Both are there before either is changed, as one imports from the other.
    for module in [
        importlib.import_module(name) for name in ("stoker.local.address", "stoker.jobs")
    ]:
        monkeypatch.setattr(module, "resolve", resolve)
    (tmp_path / "token").write_text("from-the-file\n")
    (tmp_path / "token").chmod(0o600)
    for command in (["status"], ["job", "status", "job_1"], ["start", "--address", "http://x"]):
        stoker(*command, "--token-file", str(tmp_path / "token"))
    both = stoker("status", "--token", "x", "--token-file", str(tmp_path / "token"))
    assert both.exit_code == 2 and "give --token or --token-file, not both" in both.output
    missing = stoker("status", "--token-file", str(tmp_path / "none"))
    assert seen[0] == "from-the-file" and set(seen) == {"from-the-file"}
    assert (missing.exit_code, missing.output.count("\n")) == (1, 1)


AT = ("--address", "ftp://x")


@pytest.mark.parametrize("command", [("list", "nodes", *AT), ("start", *AT)], ids=" ".join)
def test_a_token_on_the_command_line_is_warned_of_once_and_one_in_a_file_is_not(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("of the file")
    assert stoker(*command, "--token", "x").stderr.count("sees --token in `ps`; give") == 1
    assert "`ps`" not in stoker(*command, "--token-file", str(tmp_path / "token")).output
    assert "`ps`" not in stoker(*command, "--token", "x", "--json").output, "errors are one object"


def test_fields_and_states_of_filters_are_completed() -> None:
    def completed(*words: str) -> set[str]:
        found = subprocess.run(
            [sys.executable, "-m", "stoker.cli"],
            env={**os.environ, "_STOKER_COMPLETE": "bash_complete",
                 "COMP_WORDS": " ".join(("stoker", *words)), "COMP_CWORD": str(len(words))},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert found.stderr == ""
        return {line.partition(",")[2] for line in found.stdout.split()}

    assert completed("list", "tasks", "--filter", "n") == {"name=", "node_id="}
    assert completed("list", "tasks", "--filter", "state=F") == {"state=FINISHED", "state=FAILED"}
    assert completed("explain", "job_") == set(), "nobody answers, and nothing is said"


def test_bash_completes_words_with_an_equals_sign() -> None:
    """With readline's own function: it ends words at each of them."""
    stoker = Path(sys.executable).with_name("stoker")
    program = (
        f'eval "$(_STOKER_COMPLETE=bash_source {stoker})"\n'
        'for line in "$@"; do\n'
        "    COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()\n"
        f"    _stoker_completion {stoker}\n"
        '    echo "${COMPREPLY[*]}"\n'
        "done\n"
    )
    lines = {
        "stoker list tasks --filter n": "name= node_id=",
        "stoker list tasks --filter state=F": "FINISHED FAILED",
        "stoker list tasks --filter state=f": "finished failed",
        "stoker list tasks --filter=state=Q": "QUEUED",
        "stoker list tasks --filter=na": "name=",
        "stoker sto": "stop story",
        "stoker job ": "submit list status logs stop",
    }
    shown = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *lines],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = dict(zip(lines, shown.stdout.splitlines(), strict=True))
    assert set(found.pop("stoker job ").split()) >= set(lines.pop("stoker job ").split())
    assert found == lines


def test_stop_with_nothing_to_stop_is_no_error() -> None:
    shown = stoker("stop")
    assert (shown.exit_code, shown.output.startswith("Nothing runs")) == (0, True)


def test_config_shows_value_and_source_and_masks_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "very-secret")
    monkeypatch.setenv("STOKER_HEARTBEAT_S", "2.5")
    monkeypatch.setenv("STOKER_HEARTBEATS", "3")
    shown = CliRunner().invoke(root, ["config", "--changed", "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["heartbeat_s"]["value"] == "2.5"
    assert rows["heartbeat_s"]["source"] == "STOKER_HEARTBEAT_S"
    assert "very-secret" not in shown.stdout
    text = stoker("config", "--changed")
    assert "STOKER_HEARTBEATS names no setting; did you mean 'STOKER_HEARTBEAT_S'?" in text.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1000", 1000),
        ("8GiB", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("1.5MB", 1_572_864),
        ("512 kib", 524_288),
        ("1e9", 10**9),
        ("2TiB", 2**41),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert Bytes().convert(text, None, None) == value


@pytest.mark.parametrize("text", ["", "GiB", "8XB", "-1", "inf", "1..2G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Bytes().convert(text, None, None)


def test_amounts_are_short() -> None:
    assert resources({"CPU": 2.0, "GPU": 0.5, "memory": 8.0 * 2**30}) == (
        "CPU 2, GPU 0.5, memory 8.0 GiB"
    )
    assert resources(None) == "-"
    assert [nbytes(v) for v in (0, 1023, 1536, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 TiB",
    ]
    assert [duration(v) for v in (0.123, 59.6, 61, 3720, 90_000)] == [
        "0.12s", "1m00s", "1m01s", "1h02m", "1d01h",
    ]  # fmt: skip


def test_a_table_in_a_pipe_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "n_1", "state": "ALIVE"}, {"id": "n_22", "state": None}]
    print_table(rows, {"node": "id", "state": "state"}, empty="none")
    assert capsys.readouterr().out == "NODE  STATE\nn_1   ALIVE\nn_22\n"
    print_table([], {"node": "id"}, empty="no nodes")
    assert capsys.readouterr().out == "no nodes\n"


def test_help_and_completion_import_nothing_heavy() -> None:
    heavy = {"rich", "aiohttp", "asyncio", "http.client", "sqlalchemy", "stoker.jobs"}
    program = (
        "import sys\nfrom stoker.cli import root\n"
        "try:\n    root(['--help'], prog_name='stoker')\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', *sorted({heavy!r} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert shown.stdout.rstrip().endswith("LOADED")
    completed = subprocess.run(
        [sys.executable, "-m", "stoker.cli"],
        env={**os.environ, "_STOKER_COMPLETE": "bash_complete", "COMP_WORDS": "stoker st",
             "COMP_CWORD": "1"},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert {line.partition(",")[2] for line in completed.stdout.split()} == {
        "stack", "start", "stop", "status", "story",
    }, completed.stderr  # fmt: skip


def test_commands_their_choices_and_options_are_completed() -> None:
    def completed(*words: str) -> set[str]:
        shown = subprocess.run(
            [sys.executable, "-m", "stoker.cli"],
            env={**os.environ, "_STOKER_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words),
                 "COMP_CWORD": str(len(words) - 1)},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        return {line.partition(",")[2] for line in shown.stdout.split()}

    assert completed("stoker", "to") == {"token", "top"}
    assert completed("stoker", "summary", "") == {"tasks", "actors", "objects"}
    assert completed("stoker", "report", "--f") == {"--force"}
