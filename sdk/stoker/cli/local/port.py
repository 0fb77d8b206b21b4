"""``stoker port``: read programs that were written for Ray, and say what of them will not work here.

It reads the syntax tree: names below ``ray`` that ``stoker.ray`` lacks, keywords of ``init``, options of
``remote`` and ``method``, keys of a ``runtime_env``. What a program computes it does not see.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from stoker.cli.options import json_option
from stoker.cli.output import echo, plural, print_json

RAY, HERE = "ray", "stoker.ray"
ERROR, NOTE = "error", "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One place in a program. ``kind`` is "error" for what will not work, "note" for what has no effect."""

    file: str
    line: int
    column: int
    kind: str
    name: str
    text: str


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@json_option
def port(files: tuple[Path, ...], as_json: bool) -> None:
    """Say what of programs written for Ray will not work with `import stoker.ray as ray`.

    FILES are Python files, or folders of them. Exit code 1 if something will not work.
    """
    paths = [path for given in files for path in _programs(given)]
    findings = [finding for path in paths for finding in check_file(path)]
    errors = sum(finding.kind == ERROR for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for one in findings:
            echo(f"{one.file}:{one.line}:{one.column}: {one.kind}: {one.name}: {one.text}")
        notes = len(findings) - errors
        echo(f"{plural(len(paths), 'file')}: {plural(errors, 'error')}, {plural(notes, 'note')}")
    sys.exit(1 if errors else 0)


def _programs(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def check_file(path: Path) -> list[Finding]:
    """Return what of a program will not work, or has no effect, in the order of its lines."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return [Finding(str(path), line, 1, ERROR, "syntax", str(error))]
    checker = _Checker(str(path))
    checker.visit(tree)
    return sorted(set(checker.findings), key=lambda one: (one.line, one.column, one.name))


class _Checker(ast.NodeVisitor):
    """The findings of one program."""

    def __init__(self, file: str) -> None:
        self.findings: list[Finding] = []
        self._file = file
        self._names: dict[str, str] = {}
        """What names of the program stand for: dotted names below ``ray``, '' for itself."""

    def visit_Import(self, node: ast.Import) -> None:
        """Note what an import binds, and whether the module is there."""
        for alias in node.names:
            below = _below_ray(alias.name)
            if below is None:
                continue
            self._check_name(node, below)
            if alias.asname:
                self._names[alias.asname] = below
            elif alias.name == HERE or alias.name.startswith(f"{HERE}."):
                self._names["stoker"] = "\0"
            else:
                self._names[RAY] = ""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note what an import binds, and whether the names are there."""
        module = node.module or ""
        if node.level == 0 and module == "stoker":
            for alias in node.names:
                if alias.name == RAY:
                    self._names[alias.asname or RAY] = ""
            return
        below = _below_ray(module) if node.level == 0 else None
        if below is None:
            return
        for alias in node.names:
            name = ".".join(filter(None, (below, alias.name)))
            if alias.name != "*":
                self._names[alias.asname or alias.name] = name
            self._check_name(node, below if alias.name == "*" else name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check a name below ``ray`` as a whole."""
        name = self._resolved(node)
        if name is None:
            self.generic_visit(node)
        elif name:
            self._check_name(node, name)

    def visit_Call(self, node: ast.Call) -> None:
        """Check keywords of the functions that take Ray's."""
        self.generic_visit(node)
        name = self._resolved(node.func)
        kinds = {"init": _init_fault, "remote": _option_fault, "method": _method_fault}
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            if name in kinds and (fault := kinds[name](keyword.arg)) is not None:
                self._add(keyword.value, *fault)
            if keyword.arg == "runtime_env" and isinstance(keyword.value, ast.Dict):
                for key in keyword.value.keys:
                    if isinstance(key, ast.Constant) and (found := _env_fault(str(key.value))):
                        self._add(key, *found)

    def _resolved(self, node: ast.expr) -> str | None:
        """Return the dotted name below ``ray`` that an expression is, or None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return None
        parts.reverse()
        base = self._names[node.id]
        if base == "\0":  # the package stoker itself
            return ".".join(parts[1:]) if parts[:1] == [RAY] else None
        return ".".join(filter(None, (base, *parts)))

    def _check_name(self, node: ast.AST, name: str) -> None:
        text = fault_of(name)
        if text is not None:
            self._add(node, ERROR, f"ray.{name}", text)

    def _add(self, node: ast.AST, kind: str, name: str, text: str) -> None:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        self.findings.append(Finding(self._file, line, column, kind, name, text))


def _below_ray(module: str) -> str | None:
    """Return the rest of a module's name below ``ray``; None if it is not there."""
    for root in (RAY, HERE):
        if module == root or module.startswith(f"{root}."):
            return module.removeprefix(root).lstrip(".")
    return None


def fault_of(name: str) -> str | None:
    """Return why a dotted name below ``ray`` does not work with ``stoker.ray``; None if it does."""
    import importlib
    from types import ModuleType

    from stoker.ray.mapping.lacking import NotInStokerError, reason

    if not name:
        return None
    if (known := reason(name)) is not None:
        return known
    value: object = importlib.import_module(HERE)
    path = HERE
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except NotInStokerError as error:
            return error.one_line
        except ModuleNotFoundError as error:
            return f"it needs a module that is not there: {error}"
        except AttributeError:
            try:
                value = importlib.import_module(path)
            except ModuleNotFoundError:
                return "there is no such name in stoker.ray"
        if not isinstance(value, ModuleType):
            return None
    return None


_Fault = tuple[str, str, str]


def _init_fault(name: str) -> _Fault | None:
    from stoker.ray.mapping.init import ACCEPTED, MAPPED, OWN, WARNED

    if name in WARNED:
        return NOTE, f"init({name}=)", f"has no effect: {WARNED[name]}"
    if name in {*ACCEPTED, *MAPPED, *OWN}:
        return None
    return ERROR, f"init({name}=)", "there is no such argument"


def _option_fault(name: str) -> _Fault | None:
    from stoker.ray.mapping.remote import GROUP, WITHOUT_EFFECT
    from stoker.runtime.options.actor_options import ActorOptions
    from stoker.runtime.options.options import TaskOptions

    known = {*TaskOptions.__struct_fields__, *ActorOptions.__struct_fields__}
    return _effect(name, "remote", WITHOUT_EFFECT, {*known, *GROUP, "fallback_strategy"})


def _method_fault(name: str) -> _Fault | None:
    from stoker.ray.mapping.remote import WITHOUT_EFFECT
    from stoker.runtime.options.actor_options import MethodOptions

    return _effect(name, "method", WITHOUT_EFFECT, set(MethodOptions.__struct_fields__))


def _effect(name: str, what: str, without: Mapping[str, str], known: set[str]) -> _Fault | None:
    if name in without:
        why = without[name]
        return (NOTE, f"{what}({name}=)", f"has no effect: {why}") if why else None
    return None if name in known else (ERROR, f"{what}({name}=)", "there is no such option")


def _env_fault(name: str) -> _Fault | None:
    from stoker.ray.runtime_env import SAME
    from stoker_wire.constraints.ray_environments import REFUSED, WITHOUT_EFFECT

    title = f"runtime_env[{name!r}]"
    if name in REFUSED:
        return ERROR, title, REFUSED[name]
    if name in WITHOUT_EFFECT:
        why = WITHOUT_EFFECT[name]
        return (NOTE, title, f"has no effect: {why}") if why else None
    return (
        None
        if name in {*SAME, "pip", "uv", "worker_process_setup_hook"}
        else (ERROR, title, "there is no such key")
    )
