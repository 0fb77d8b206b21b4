"""A ``runtime_env`` as users write it becomes the message that travels, or an error with its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.runtime.options.runtime_env import make_runtime_env
from stoker_wire.errors import BadRequestError, UnknownOptionError
from stoker_wire.messages.common import KernelSpec, RuntimeEnv
from tests.unit.sdk.options.test_packages import names, write

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.runtime.options.packages import Package


def test_a_runtime_env_becomes_the_message_that_travels(tmp_path: Path) -> None:
    uploaded: list[Package] = []
    project = write(tmp_path / "project", {"train.py": ""})
    write(tmp_path / "lib", {"__init__.py": ""})
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# pinned\nnumpy>=2  # arrays\n\ntorch\n")
    env = make_runtime_env(
        {
            "env_vars": {"A": 1, "B": "two"},
            "working_dir": project,
            "py_modules": [tmp_path / "lib"],
            "pip": str(requirements),
            "preload": ["torch.nn"],
        },
        uploaded.append,
    )
    assert env.env_vars == {"A": "1", "B": "two"}
    assert [env.working_dir, *env.py_modules] == [package.hash for package in uploaded]
    assert all(name.startswith("lib/") for name in names(uploaded[1]))
    assert env.pip == ("numpy>=2", "torch")
    assert env.preload == ("torch.nn",)


def test_kernels_are_named_by_op_by_mapping_or_by_function() -> None:
    class torch_bfloat16:  # as torch.bfloat16 prints, without torch
        def __str__(self) -> str:
            return "torch.bfloat16"

    sized = {"op": "rms_norm", "dtype": torch_bfloat16(), "columns": 4096}
    entries = ["rms_norm", sized, "a.b:C.step", {"call": "a:f"}, make_runtime_env]
    made = make_runtime_env({"kernels": entries}, no_upload)
    assert made.kernels == (
        KernelSpec(op="rms_norm"),
        KernelSpec(op="rms_norm", dtype="bfloat16", sizes={"columns": 4096}),
        KernelSpec(call="a.b:C.step"),
        KernelSpec(call="a:f"),
        KernelSpec(call="stoker.runtime.options.runtime_env:make_runtime_env"),
    )
    assert make_runtime_env({"kernels": made.kernels}, no_upload) == made


def test_nothing_and_a_finished_environment_pass_through() -> None:
    assert make_runtime_env(None, no_upload) == RuntimeEnv()
    made = RuntimeEnv(pip=("x",))
    assert make_runtime_env(made, no_upload) is made
    assert make_runtime_env({"working_dir": "a" * 64}, no_upload).working_dir == "a" * 64


def no_upload(package: Package) -> None:
    raise AssertionError(f"uploads {package.hash}")


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        ({"env_var": {}}, UnknownOptionError, "did you mean 'env_vars'"),
        ({"env_vars": ["A"]}, BadRequestError, "runtime_env.env_vars: expected a mapping"),
        ({"env_vars": {"A-B": "1"}}, BadRequestError, "a name of letters"),
        ({"env_vars": {"A": None}}, BadRequestError, "runtime_env.env_vars.A: expected text"),
        ({"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}, BadRequestError, "ask for GPUs by num_gpus"),
        (
            {"env_vars": {"STOKER_TOKEN": "x"}},
            BadRequestError,
            "STOKER_TOKEN: this variable cannot",
        ),
        ({"working_dir": "/no/such/folder"}, BadRequestError, "a folder that exists"),
        ({"working_dir": 3}, BadRequestError, "the path of a folder"),
        ({"py_modules": "lib"}, BadRequestError, "a list of folders"),
        ({"pip": "no-such-file.txt"}, BadRequestError, "a list of requirements"),
        ({"pip": [1]}, BadRequestError, "a list of requirements"),
        ({"preload": ["not a module"]}, BadRequestError, "a module's name"),
        ("working_dir", BadRequestError, "runtime_env: expected a mapping"),
        ({"kernels": "rms_norm"}, BadRequestError, r"runtime_env\.kernels: expected a list of"),
        ({"kernels": {"op": "a"}}, BadRequestError, r"runtime_env\.kernels: expected a list of"),
        ({"kernels": ["a", 3]}, BadRequestError, r"runtime_env\.kernels\[1\]: expected an op"),
        ({"kernels": ["a b"]}, BadRequestError, r"kernels\[0\]\.op: expected an op"),
        ({"kernels": [{"rows": 1}]}, BadRequestError, r"kernels\[0\]: expected an op"),
        ({"kernels": ["a:b c"]}, BadRequestError, r"kernels\[0\]: expected 'module:function'"),
        ({"kernels": [{"call": "a"}]}, BadRequestError, r"kernels\[0\]\.call: expected 'module:"),
        ({"kernels": [{"call": "a:b", "n": 1}]}, BadRequestError, "'call' alone"),
        (
            {"kernels": [{"op": "a", "dtype": "int8"}]},
            BadRequestError,
            r"\[0\]\.dtype: expected one",
        ),
        ({"kernels": [{"op": "a", "rows": 0}]}, BadRequestError, r"\[0\]\.rows: expected a whole"),
        (
            {"kernels": [{"op": "a", "rows": "1"}]},
            BadRequestError,
            r"\[0\]\.rows: expected a whole",
        ),
        ({"kernels": [lambda: None]}, BadRequestError, "at the top of a module"),
    ],
)
def test_a_wrong_runtime_env_is_named_with_its_fix(
    env: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_runtime_env(env, no_upload)  # type: ignore[arg-type]


def test_excludes_and_virtual_environments_are_left_out(tmp_path: Path) -> None:
    uploaded: list[Package] = []
    files = {
        "a.py": "",
        "data/x": "",
        "deep/big.bin": "",
        "env/pyvenv.cfg": "",
        "env/bin/python": "",
    }
    project = write(tmp_path / "project", files)
    env = {"working_dir": project, "excludes": ["/data", "*.bin"]}
    make_runtime_env(env, uploaded.append)
    assert names(uploaded[0]) == ["a.py"]


def test_a_uv_project_travels_as_its_two_files(tmp_path: Path) -> None:
    uploaded: list[Package] = []
    files = {"pyproject.toml": "", "uv.lock": "", "secret.py": ""}
    project = write(tmp_path / "project", files)
    env = make_runtime_env({"uv": project / "uv.lock"}, uploaded.append)
    assert names(uploaded[0]) == ["pyproject.toml", "uv.lock"]
    assert env.uv_project == uploaded[0].hash and env.uv == ()
    assert make_runtime_env({"uv": ["numpy"]}, no_upload).uv == ("numpy",)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"uv": "no/such/folder"}, "runtime_env.uv"),
        ({"uv": ["a"], "pip": ["b"]}, "runtime_env.uv"),
        ({"excludes": "data/"}, "runtime_env.excludes"),
        ({"setup": " "}, "runtime_env.setup"),
        ({"worker_process_setup": "module.function"}, "runtime_env.worker_process_setup"),
        ({"worker_process_setup": 3}, "runtime_env.worker_process_setup"),
    ],
)
def test_what_cannot_be_installed_names_its_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as failure:
        make_runtime_env(given, no_upload)
    assert failure.value.field == field
