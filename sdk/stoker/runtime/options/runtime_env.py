"""Conversion of the ``runtime_env`` that users write into the one that travels: checked, uploaded.

Used by ``stoker.init(runtime_env=...)``, by the option of tasks and actors, and by job submission.
Every mistake is an error here, at the call, with its fix in the message.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from stoker.runtime.options.fetching.uris import is_uri, parse
from stoker.runtime.options.kernel_specs import kernel_specs
from stoker.runtime.options.packages import Package, pack, pack_files
from stoker_wire.constraints import variables
from stoker_wire.errors import BadRequestError, UnknownOptionError
from stoker_wire.messages.common import IMAGE, MAX_IMAGE, MAX_TEXT, PICKLED, RuntimeEnv
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Upload = Callable[[Package], None]
    Fetched = dict[tuple[str, tuple[str, ...]], str]
    """Packages by the URI and the excludes with which they were fetched."""

KEYS = (
    *("env_vars", "working_dir", "py_modules", "excludes", "pip", "uv", "conda", "setup"),
    *("worker_process_setup", "preload", "kernels", "image_uri"),
)
"""The keys that a user may give. ``sys_path`` and ``cwd`` are the runtime's own."""

_HASH = re.compile(r"[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MAX_FUNCTION_BYTES = 64 << 10
"""A larger function would make each request for a lease heavy."""
PROJECT_FILES = ("pyproject.toml", "uv.lock")

_IMAGE = re.compile(IMAGE)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def make_runtime_env(
    user: Mapping[str, Any] | RuntimeEnv | None, upload: Upload, fetched: Fetched | None = None
) -> RuntimeEnv:
    """Return ``user`` as a message; ``upload`` is called once for each folder that it names.

    ``fetched`` remembers what URIs were when they were fetched first.

    - ``env_vars``: mapping of names to values (numbers become text), but for ``CUDA_VISIBLE_DEVICES``,
      ``CUDA_DEVICE_ORDER`` and ``STOKER_*``, which leases and nodes set.
    - ``working_dir``: a folder (or ``.zip``): the current directory of tasks, and on ``sys.path``.
    - ``py_modules``: folders, ``.py`` files, wheels or imported modules, made importable.
      Both take URIs too: ``https://host/code.zip#sha256=...``, ``git+https://host/repository@commit``, and
      what fsspec reads (``s3://bucket/code.tar.gz``).
    - ``pip``: requirement lines, or the path of a requirements file.
    - ``excludes``: what is left out of those folders, in the patterns of ``.gitignore``.
    - ``uv``: as ``pip``, installed by the uv of the node; or a folder (or ``uv.lock``, ``pyproject.toml``)
      of a project, whose lock file is followed to the hash.
    - ``conda``: the name or the folder of an environment that nodes have, the path of an ``environment.yml``
      or its content as a mapping, of which they make one.
    - ``setup``: a shell command, run once per node after the packages are installed and kept with them.
    - ``worker_process_setup``: a function, or "module:function", that each worker runs before its first call.
    - ``preload``: names of modules that workers have imported before they start.
    - ``kernels``: what to compile for the task's GPU before it starts: ops by name, mappings with
      ``op``, ``dtype`` and sizes, or functions ("module:function") that run a step.
    - ``image_uri``: the name of an image, in whose containers workers run; it has Python and Stoker.

    A 64-digit hash stands for a package that is already uploaded. Raises BadRequestError naming
    the key, or UnknownOptionError naming the nearest one.
    """
    if user is None:
        return RuntimeEnv()
    if isinstance(user, RuntimeEnv):
        return user
    if not hasattr(user, "keys"):
        raise _wrong("", user, "a mapping such as {'env_vars': {'NAME': 'value'}}")
    for key in user:
        if key == "container":
            raise BadRequestError(
                "runtime_env.container: the image is named by another key\n"
                "give runtime_env={'image_uri': 'repository/image:tag'}",
                field="runtime_env.container",
            )
        if key not in KEYS:
            raise UnknownOptionError(
                f"runtime_env has no key {key!r}\n{suggestion(str(key), KEYS)}",
                field=f"runtime_env.{key}",
            )
    working_dir = user.get("working_dir")
    fetched = {} if fetched is None else fetched
    excludes = user.get("excludes")
    excluded = (
        () if excludes is None else _texts("excludes", excludes, "a list of patterns as ['data/']")
    )
    uv, uv_project = _uv(user.get("uv"), upload)
    pip = _pip(user.get("pip"))
    if pip and (uv or uv_project):
        raise _wrong("uv", user["uv"], "either pip or uv, not both")
    conda, conda_file = _conda(user.get("conda"))
    if (conda or conda_file) and (pip or uv or uv_project):
        raise _wrong("conda", user["conda"], "either conda or pip or uv; pip may be in its file")
    image_uri = _image_uri(user.get("image_uri"))
    made = RuntimeEnv(
        env_vars=_env_vars(user.get("env_vars")),
        pip=pip,
        uv=uv,
        uv_project=uv_project,
        conda=conda,
        conda_file=conda_file,
        setup=_setup(user.get("setup")),
        worker_process_setup=_process_setup(user.get("worker_process_setup")),
        preload=_preload(user.get("preload")),
        working_dir=None
        if working_dir is None
        else _working_dir(working_dir, upload, excluded, fetched),
        py_modules=_py_modules(user.get("py_modules"), upload, excluded, fetched),
        kernels=kernel_specs(user.get("kernels")),
        image_uri=image_uri,
    )
    if image_uri and made.not_in_images:
        key = made.not_in_images[0].partition("_")[0]
        raise BadRequestError(
            f"runtime_env.{key}: it is not done in images\n"
            f"build the image with it and leave {key} out, or leave image_uri out",
            field=f"runtime_env.{key}",
        )
    return made


def _env_vars(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not hasattr(value, "items"):
        raise _wrong("env_vars", value, "a mapping of names to values")
    checked = {}
    for name, text in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise _wrong(
                f"env_vars.{name}",
                name,
                "a name of letters, digits and _, not starting with a digit",
            )
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise _wrong(f"env_vars.{name}", text, "text or a number")
        if "\0" in str(text):
            raise _wrong(f"env_vars.{name}", text, "text without a zero byte")
        checked[name] = str(text)
    variables.check(checked)
    return checked


def _pip(value: Any, key: str = "pip") -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, Path)):
        path = Path(value).expanduser()
        if not path.is_file():
            raise _wrong(key, str(value), "a list of requirements, or the path of a file of them")
        value = path.read_text().splitlines()
    lines = _texts(key, value, "a list of requirements such as ['numpy>=2']")
    requirements = (line.partition(" #")[0].strip() for line in lines)
    return tuple(line for line in requirements if line and not line.startswith("#"))


def _uv(value: Any, upload: Upload) -> tuple[tuple[str, ...], str | None]:
    """Return requirement lines, or the hash of the uploaded files of a project."""
    if not isinstance(value, (str, Path)):
        return _pip(value, "uv"), None
    path = Path(value).expanduser()
    if path.name in PROJECT_FILES:
        path = path.parent
    if not path.is_dir():
        return _pip(value, "uv"), None
    if not (path / PROJECT_FILES[0]).is_file():
        raise _wrong(
            "uv", str(value), "a folder with a pyproject.toml, and its uv.lock if it has one"
        )
    return (), _uploaded(pack_files(path, PROJECT_FILES), upload)


def _conda(value: Any) -> tuple[str, str]:
    """Return the name of an environment, or the text of a file of which one is made."""
    if value is None:
        return "", ""
    expected = "a name, the path of an environment.yml, or a mapping with its 'dependencies'"
    if isinstance(value, (str, Path)):
        path = Path(value).expanduser()
        if path.suffix not in (".yml", ".yaml"):
            if not str(value).strip() or "\0" in str(value) or len(str(value)) > MAX_TEXT:
                raise _wrong("conda", value, expected)
            return str(path if path.is_absolute() else value), ""
        if not path.is_file():
            raise _wrong("conda", str(value), "the path of an environment.yml that exists")
        text = path.read_text(errors="replace")
    elif hasattr(value, "keys") and not isinstance(value.get("dependencies"), (str, type(None))):
        try:
            text = json.dumps(dict(value))  # which is YAML, too
        except (TypeError, ValueError):
            raise _wrong("conda", value, expected) from None
    else:
        raise _wrong("conda", value, expected)
    if "\0" in text or len(text) > MAX_TEXT:
        raise _wrong("conda", value, f"a file of at most {MAX_TEXT >> 10} KiB of text")
    return "", text


def _image_uri(value: Any) -> str:
    if value is None:
        return ""
    named = isinstance(value, str) and value and len(value) <= MAX_IMAGE
    if not named or not _IMAGE.fullmatch(value):
        raise _wrong("image_uri", value, "the name of an image such as 'repository/image:tag'")
    return str(value)


def _setup(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _wrong("setup", value, "a shell command such as 'python -m nltk.downloader punkt'")
    return value


def _process_setup(value: Any) -> str:
    if value is None:
        return ""
    key, expected = "worker_process_setup", "a function without arguments, or 'module:function'"
    if isinstance(value, str):
        if not _FUNCTION.fullmatch(value):
            raise _wrong(key, value, expected)
        return value
    if not callable(value):
        raise _wrong(key, value, expected)
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise _wrong(key, value, f"a function that pickles ({error})") from None
    if len(pickled) > _MAX_FUNCTION_BYTES:
        raise _wrong(
            key,
            value,
            f"a function of at most {_MAX_FUNCTION_BYTES >> 10} KiB with what it refers to",
        )
    return PICKLED + base64.b64encode(pickled).decode()


def _preload(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    names = _texts("preload", value, "a list of module names such as ['torch']")
    for name in names:
        if not _MODULE.fullmatch(name):
            raise _wrong("preload", name, "a module's name")
    return names


def _texts(key: str, value: Any, expected: str) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise _wrong(key, value, expected)
    checked = tuple(value)
    for each in checked:
        if not isinstance(each, str):
            raise _wrong(key, each, expected)
    return checked


def _working_dir(value: Any, upload: Upload, excludes: tuple[str, ...], fetched: Fetched) -> str:
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    if is_uri(value):
        return _fetched("working_dir", value, upload, excludes, fetched)
    if not isinstance(value, (str, Path)):
        raise _wrong("working_dir", value, "the path of a folder")
    path = Path(value).expanduser()
    if not (path.is_dir() or path.suffix == ".zip"):
        raise _wrong("working_dir", str(value), "the path of a folder that exists")
    return _uploaded(pack(path, excludes=excludes), upload)


def _py_modules(
    value: Any, upload: Upload, excludes: tuple[str, ...], fetched: Fetched
) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Path)) or not hasattr(value, "__iter__"):
        raise _wrong("py_modules", value, "a list of folders, files or modules")
    return tuple(
        _fetched("py_modules", each, upload, excludes, fetched)
        if is_uri(each)
        else _py_module(each, upload, excludes)
        for each in value
    )


def _py_module(value: Any, upload: Upload, excludes: tuple[str, ...]) -> str:
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    if isinstance(value, ModuleType):
        value = _source_of(value)
    if not isinstance(value, (str, Path)):
        raise _wrong("py_modules", value, "a folder, a .py file, a wheel or an imported module")
    path = Path(value).expanduser()
    if not path.exists():
        raise _wrong("py_modules", str(value), "a path that exists")
    # A folder stays a package of its name: its parent goes on sys.path.
    inside = path.resolve().name if path.is_dir() else ""
    return _uploaded(pack(path, inside=inside, excludes=excludes), upload)


def _source_of(module: ModuleType) -> Path:
    spec = importlib.util.find_spec(module.__name__)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise _wrong("py_modules", module.__name__, "a module written in Python")
    return Path(spec.origin)


def _fetched(
    key: str, text: str, upload: Upload, excludes: tuple[str, ...], fetched: Fetched
) -> str:
    """Return the package that a URI was when it was named first."""
    try:
        uri = parse(text)
    except ValueError as error:
        raise _wrong(key, _without_password(text), str(error)) from None
    # Here, so that programs that fetch nothing import no archives.
    from stoker.runtime.options.fetching.fetch import fetch

    known = fetched.get((text, excludes))
    if known is None:
        known = fetched[text, excludes] = _uploaded(fetch(uri, excludes=excludes), upload)
    return known


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", text.partition("?")[0])


def _uploaded(package: Package, upload: Upload) -> str:
    upload(package)
    return package.hash


def _wrong(key: str, value: Any, expected: str) -> BadRequestError:
    field = f"runtime_env.{key}" if key else "runtime_env"
    shown = repr(value)
    return BadRequestError(
        f"{field}: expected {expected}, got {shown if len(shown) <= 200 else shown[:200] + '...'}",
        field=field,
    )
