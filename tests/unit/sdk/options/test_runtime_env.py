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
        ({"container": {"image": "x"}}, BadRequestError, "give runtime_env={'image_uri'"),
        ({"image_uri": "--privileged"}, BadRequestError, "image_uri: expected the name of an"),
        ({"image_uri": "a b"}, BadRequestError, "image_uri: expected the name of an image"),
        ({"image_uri": "a\n"}, BadRequestError, "image_uri: expected the name of an image"),
        ({"image_uri": ""}, BadRequestError, "image_uri: expected the name of an image"),
        ({"image_uri": "a" * 501}, BadRequestError, "image_uri: expected the name of an image"),
        ({"image_uri": "a", "pip": ["b"]}, BadRequestError, r"runtime_env\.pip: it is not done"),
        ({"image_uri": "a", "conda": "b"}, BadRequestError, r"runtime_env\.conda: it is not"),
        ({"image_uri": "a", "setup": "b"}, BadRequestError, r"runtime_env\.setup: it is not done"),
        ({"image_uri": "a", "kernels": ["b"]}, BadRequestError, r"runtime_env\.kernels: it is not"),
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


def test_conda_is_a_name_a_file_or_its_content(tmp_path: Path) -> None:
    file = tmp_path / "environment.yml"
    file.write_text("dependencies: [python]\n")
    assert make_runtime_env({"conda": "mine"}, no_upload) == RuntimeEnv(conda="mine")
    assert make_runtime_env({"conda": tmp_path}, no_upload) == RuntimeEnv(conda=str(tmp_path))
    made = make_runtime_env({"conda": str(file)}, no_upload)
    assert made == RuntimeEnv(conda_file="dependencies: [python]\n")
    made = make_runtime_env({"conda": {"dependencies": ["python"]}}, no_upload)
    assert made.conda_file == '{"dependencies": ["python"]}'
    assert made.installs == "conda (an environment.yml)"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"conda": "none.yml"}, "the path of an environment.yml that exists"),
        ({"conda": ""}, r"runtime_env\.conda: expected a name"),
        ({"conda": 3}, r"runtime_env\.conda: expected a name"),
        ({"conda": {"dependencies": "x"}}, "a mapping with its 'dependencies'"),
        ({"conda": {"dependencies": [object()]}}, "a mapping with its 'dependencies'"),
        ({"conda": {"dependencies": ["x" * 70_000]}}, "at most 64 KiB"),
        ({"conda": "mine", "pip": ["x"]}, "either conda or pip or uv"),
        ({"conda": "mine", "uv": ["x"]}, "either conda or pip or uv"),
    ],
)
def test_other_values_of_conda_are_refused(env: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        make_runtime_env(env, no_upload)


def test_what_is_installed_is_told_without_passwords_and_in_short() -> None:
    pip = ("a @ https://me:secret@h/a.whl", "b" * 300, "c", "d", "e")
    shown = RuntimeEnv(pip=pip, setup="x", working_dir="a" * 64).installs
    assert shown == f"packages, pip (a @ https://...@h/a.whl, {'b' * 200}, c and 2 more), setup"
    assert RuntimeEnv(uv=("x",), uv_project="a" * 64).installs == "uv (x), uv (a project)"
    assert RuntimeEnv().installs == ""
