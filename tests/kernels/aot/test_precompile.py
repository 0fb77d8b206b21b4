"""``python -m stoker_kernels.aot``: what it takes, what it prints, and how it fails.

It compiles in processes of its own: here the kernels are loaded interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_kernels.aot import command
from stoker_kernels.aot.command import main
from stoker_kernels.aot.specs import Spec, SpecError, make_spec
from tests.services import until

ROOT = Path(__file__).parents[3]
NORM = {"op": "rms_norm", "dtype": "float32", "columns": 256}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(ROOT / "kernels"), str(tmp_path)))
    return {**found, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": path}


@needs_triton
def test_a_second_process_compiles_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    def aot(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stoker_kernels.aot", *arguments],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    (tmp_path / "mine.py").write_text(
        "import torch\nfrom stoker_kernels import rms_norm\n"
        "import os\n"
        "def step():\n    print('not a record')\n    os.system('echo nor this')\n"
        "    rms_norm(torch.empty(8, 128), torch.ones(128))\n"
    )
    specs = (json.dumps(NORM), "mine:step")
    first, second = aot("--arch", "90", *specs), aot("--arch", "90", *specs)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    made = [json.loads(line) for line in first.stdout.splitlines()]
    found = [json.loads(line) for line in second.stdout.splitlines()]
    assert not any(one["cached"] for one in made) and all(one["cached"] for one in found)
    assert [one["entry"] for one in made] == [one["entry"] for one in found]
    assert {one["name"] for one in made} == {"rms_norm", "mine:step"}
    for one in made:
        assert (tmp_path / "triton" / one["entry"] / f"{one['kernel']}.cubin").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rms_norn"], "kernels[0].op: no op 'rms_norn'; did you mean 'rms_norm'?"),
        (
            ["rms_norm", '{"op": "rms_norm", "column": 4}'],
            "kernels[1].column: rms_norm has no size 'column'; did you mean 'columns'?",
        ),
        (["no_such:step"], "kernels[0].call: no_such:step cannot be imported on this node"),
        (["json:nothing"], "kernels[0].call: json:nothing cannot be imported on this node"),
        (["string:digits"], "kernels[0].call: string:digits is no function"),
        (['{"op": '], "is no JSON object"),
    ],
)
@needs_triton
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["--arch", "90", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and said in told.err
    assert len(told.err.splitlines()) == 1 and not told.out


@needs_triton
def test_a_step_that_fails_shows_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text("def step():\n    raise ValueError('wrong shapes')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--arch", "90", "failing:step"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any('failing.py", line 2, in step' in line for line in lines)
    assert lines[-1] == "error: kernels[0]: failing:step for sm_90: ValueError: wrong shapes"


@needs_triton
def test_a_function_that_ends_the_program_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits.py").write_text("import sys\ndef step():\n    sys.exit(0)\n")
    (tmp_path / "quits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--arch", "90", "quits:step"]) == 1
    assert "quits:step for sm_90: SystemExit: 0" in capsys.readouterr().err
    assert main(["--arch", "90", "quits_at_once:step"]) == 2
    assert 'ends the program (exit 0); guard what it runs with if __name__ == "__main__"' in (
        capsys.readouterr().err
    )


@needs_triton
def test_the_nodelet_is_told_the_files_of_a_users_function(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "layers.py").write_text("")
    (tmp_path / "mine.py").write_text("import json, torch, layers\ndef step():\n    pass\n")
    with subprocess.Popen(
        [sys.executable, "-m", "stoker_kernels.aot", "--arch", "90", "--stdin"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'["mine:step"]\n')
        process.stdin.flush()
        (record,) = (json.loads(line) for line in process.stdout)
    files = [tmp_path / "layers.py", tmp_path / "mine.py"]
    assert record == {"sources": {str(path): path.stat().st_mtime_ns for path in files}}


@needs_triton
def test_it_does_not_compile_what_was_loaded_for_the_interpreter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--arch", "90", "rms_norm"]) == 1
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err.splitlines()[-1]


def test_without_triton_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "triton" else name)
    assert main(["--arch", "90", "rms_norm"]) == 2
    told = capsys.readouterr().err
    assert told == "error: kernels: triton is not installed on this node: pip install triton\n"


def test_without_a_gpu_it_asks_for_the_architecture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert main(["rms_norm"]) == 2
    assert "give --arch, as --arch 90" in capsys.readouterr().err


def test_an_architecture_is_a_capability_and_help_tells_of_the_forms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, code, said in [
        (["--arch", "9", "rms_norm"], 2, "'9' is not a compute capability such as 90"),
        (["--help"], 0, "module:function"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr()
        assert ended.value.code == code and said in told.err + told.out


def test_it_ends_when_its_lifeline_does(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import subprocess, pathlib\n"
        "def step():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker_kernels.aot", "--arch", "90", "--stdin"],
        env=environment, stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(b'["mine:step"]\n')
        process.stdin.flush()
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60, "it runs")
        process.stdin.close()
        assert process.wait(timeout=30) != 0
        child = int((tmp_path / "pid").read_text())
        until(lambda: not runs(child), 10, "so does what it started")
    finally:
        process.kill()
        process.wait()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_three_forms_of_an_entry() -> None:
    assert make_spec("rms_norm", "k[0]") == Spec("k[0]", op="rms_norm")
    assert make_spec("a.b:C.step", "k[0]") == Spec("k[0]", call="a.b:C.step")
    assert make_spec(NORM, "k[0]") == Spec("k[0]", "rms_norm", "float32", {"columns": 256})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (7, r"k: expected a name"),
        ({}, r"k: give either 'op' or 'call'"),
        ({"op": "a", "call": "b:c"}, r"k: give either"),
        ({"call": "b:c", "rows": 3}, r"k: a 'call' takes no dtype and no sizes"),
        ({"call": "b c:d"}, r"k\.call: expected 'module:function'"),
        ({"op": "a", "dtype": "int8"}, r"k\.dtype: expected one of bfloat16"),
        ({"op": "a", "rows": 0}, r"k\.rows: expected a whole number"),
        ({"op": "a", "rows": True}, r"k\.rows: expected a whole number"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(entry: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make_spec(entry, "k")


@needs_triton
def test_a_dry_run_takes_the_usual_board_of_an_architecture() -> None:
    from stoker_kernels.aot import compiling

    # Cross-entropy's blocks depend on it: 500 rows are split on 132 multiprocessors, not on 108.
    for arch, expected in ((80, 108), (90, 132), (100, 148), (75, 132)):
        with compiling(arch) as run:
            assert run.device.multiprocessors == expected
    with compiling(80, multiprocessors=42) as run:
        assert run.device.multiprocessors == 42
