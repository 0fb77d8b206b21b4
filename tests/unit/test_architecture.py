"""The folders are the architecture: who may import whom, and what every source file must look like.

Each rule is read off the syntax tree, so that a broken one is named with its file and line. An
empty folder passes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

REPO = Path(__file__).resolve().parents[2]
ROOTS = {
    "stoker_wire": REPO / "wire/stoker_wire",
    "stoker_gcs": REPO / "gcs/stoker_gcs",
    "stoker_scheduler": REPO / "scheduler/stoker_scheduler",
    "stoker_nodelet": REPO / "nodelet/stoker_nodelet",
    "stoker": REPO / "sdk/stoker",
    "stoker_kernels": REPO / "kernels/stoker_kernels",
    "stoker_goodput": REPO / "goodput/stoker_goodput",
    "stoker_train": REPO / "train/stoker_train",
    "stoker_migrations": REPO / "migrations/stoker_migrations",
}
# What each package may import of ours, besides itself. Services talk HTTP to each other.
ALLOWED = {
    "stoker_wire": set(),
    "stoker_gcs": {"stoker_wire", "stoker_migrations"},
    "stoker_scheduler": {"stoker_wire", "stoker_goodput"},
    "stoker_nodelet": {"stoker_wire"},
    "stoker": {"stoker_wire"},
    "stoker_kernels": set(),
    "stoker_goodput": set(),
    "stoker_train": {"stoker", "stoker_wire", "stoker_goodput", "stoker_kernels"},
    "stoker_migrations": {"stoker_wire", "stoker_gcs"},
}
SERVICES = {"stoker_gcs", "stoker_scheduler", "stoker_nodelet"}
# The composition root starts services in one process; some modules are lazy aliases: names, and no code.
COMPOSITION_ROOT = ROOTS["stoker"] / "local/main.py"
LAZY_ALIASES = {
    "stoker_kernels": {ROOTS["stoker"] / "__init__.py", ROOTS["stoker"] / "kernels.py"},
    "stoker_train": {
        ROOTS["stoker"] / "collective.py",
        ROOTS["stoker"] / "data.py",
        ROOTS["stoker"] / "ps.py",
    },
}
# Pure decisions: time is a field of the event, ids and randomness are injected, no IO.
_RUNTIME = ROOTS["stoker"] / "runtime"
PURE = (
    ROOTS["stoker_scheduler"] / "core",
    ROOTS["stoker_nodelet"] / "core",
    ROOTS["stoker_train"] / "elastic/core",
    ROOTS["stoker_train"] / "streaming/core",
    _RUNTIME / "objects/table.py",
    _RUNTIME / "objects/borrow_table.py",
    _RUNTIME / "tasks/dispatch.py",
    _RUNTIME / "tasks/ready_queue.py",
    _RUNTIME / "actors/call_order.py",
    _RUNTIME / "net/read_handover.py",
)
# Unlike a service's core, these keep what travels (addresses, locations) and decide on messages.
PURE_WITH_MESSAGES = {_RUNTIME / "objects/table.py", _RUNTIME / "objects/borrow_table.py"}
IMPURE_MODULES = {
    "aiohttp", "anyio", "asyncio", "concurrent", "http", "multiprocessing", "os", "pathlib",
    "random", "secrets", "socket", "sqlalchemy", "subprocess", "threading", "time", "uuid",
}  # fmt: skip
MAX_LINES = 600
MAX_SIBLINGS = 14
MAX_TEST_SIBLINGS = 17
TESTS = REPO / "tests"
# What a folder of unit tests mirrors: each of its folders and files has a namesake in one of these.
MIRRORED = {
    "cli": (ROOTS["stoker"] / "cli",),
    "gcs": (ROOTS["stoker_gcs"],),
    "goodput": (ROOTS["stoker_goodput"],),
    "harness": (TESTS,),
    "nodelet": (ROOTS["stoker_nodelet"],),
    "scheduler": (ROOTS["stoker_scheduler"],),
    "sdk": (ROOTS["stoker"], ROOTS["stoker"] / "runtime"),
    "train": (ROOTS["stoker_train"],),
    "wire": (ROOTS["stoker_wire"],),
}
# Unit tests of no single module, and of what else.
TESTS_OF_MORE = {
    "cli/test_command_line.py": "the command line as a user types it, across all commands",
    "gcs/test_events.py": "every kind of event, across all modules that emit one",
    "wire/test_request_bounds.py": "the bounds of what requests hold, across all routes of all services",
    "gcs/test_replay.py": "replay(events) == state, across the rules of nodes, jobs and actors",
}
MIGRATION_VERSIONS = "versions"
# Files that may start a task outside a TaskGroup; each says there who awaits it.
BARE_TASKS_ALLOWED = {
    REPO / "wire/stoker_wire/process/background.py",
    REPO / "sdk/stoker/runtime/worker/event_loops.py",  # it runs its loop until that task ends
}
# Of a docstring: it sends the reader on, or leaves the noun to be guessed.
EMPTY_OPENINGS = (
    "See the module",
    *("How ", "What ", "When ", "Where ", "Which ", "Who ", "Why "),
)
HEAVY = {"torch", "numpy", "sqlalchemy", "redis", "aiohttp", "cloudpickle"}


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed source file."""

    package: str
    path: Path
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(REPO)}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> list[tuple[str, ast.AST]]:
        """The absolute names this file imports, at any depth, with the importing node."""
        found: list[tuple[str, ast.AST]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.append((node.module, node))
        return found


@cache
def sources() -> tuple[Source, ...]:
    return tuple(
        Source(package, path, text := path.read_text(), ast.parse(text, str(path)))
        for package, root in ROOTS.items()
        for path in sorted(root.rglob("*.py"))
    )


def modules() -> dict[str, Source]:
    """Every module of ours by its dotted name."""
    found: dict[str, Source] = {}
    for source in sources():
        parts = source.path.relative_to(ROOTS[source.package]).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((source.package, *names))] = source
    return found


def imported_modules(source: Source, known: dict[str, Source]) -> set[str]:
    """The modules of ours that a file imports: at the top, inside functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            whole = len(submodules) < len(node.names)
            found |= submodules | ({node.module} if whole else set())
    return found & known.keys()


def check(broken: list[str], rule: str) -> None:
    assert not broken, f"{rule}:\n  " + "\n  ".join(sorted(broken))


def may_import(source: Source, imported: str) -> bool:
    if imported not in ROOTS or imported == source.package or imported in ALLOWED[source.package]:
        return True
    if source.package != "stoker":
        return False
    if imported in SERVICES:
        return source.path == COMPOSITION_ROOT or source.path.stem.endswith("_main")
    return source.path in LAZY_ALIASES.get(imported, ())


def test_packages_import_only_what_their_place_allows() -> None:
    broken = [
        f"{source.at(node)}: {source.package} imports {name}"
        for source in sources()
        for name, node in source.imports()
        if not may_import(source, name.partition(".")[0])
    ]
    check(broken, "import direction (ARCHITECTURE.md: dependencies point one way)")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not lazily, and not for types only: a reader meets a circle whichever way it is written."""
    known = modules()
    graph = {name: imported_modules(source, known) - {name} for name, source in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail("a circle of imports: " + " -> ".join(circle.args[1]))


def test_a_folder_can_be_seen_at_a_glance() -> None:
    aliases = set().union(*LAZY_ALIASES.values())
    files = [
        one.path
        for one in sources()
        if MIGRATION_VERSIONS not in one.path.parts and one.path not in aliases
    ]
    check(
        [wide for root in ROOTS.values() for wide in wide_folders(root, files, MAX_SIBLINGS)],
        f"a folder with more than {MAX_SIBLINGS} files and folders",
    )


def test_a_folder_of_tests_can_be_seen_at_a_glance() -> None:
    check(
        wide_folders(TESTS, TESTS.rglob("*.py"), MAX_TEST_SIBLINGS),
        f"a folder of tests with more than {MAX_TEST_SIBLINGS} files and folders",
    )


def wide_folders(root: Path, files: Iterable[Path], limit: int) -> list[str]:
    """Return the folders from ``root`` down with more than ``limit`` of the files, or folders of them."""
    folders: dict[Path, set[str]] = {}
    for file in files:
        for child in (file, *file.parents) if file.is_relative_to(root) else ():
            if child == root:
                break
            if child.name not in ("__init__.py", "__main__.py"):
                folders.setdefault(child.parent, set()).add(child.name)
    return [
        f"{folder.relative_to(REPO)}: {len(names)}"
        for folder, names in folders.items()
        if len(names) > limit
    ]


def test_unit_tests_lie_where_their_module_lies() -> None:
    """``test_<module>.py``, or ``test_<module>_<aspect>.py`` where one file would be too long."""
    unit = TESTS / "unit"
    files = {path.relative_to(unit).as_posix(): path for path in unit.glob("*/**/test_*.py")}
    broken = [
        f"tests/unit/{name}"
        for name, path in files.items()
        if name not in TESTS_OF_MORE and not is_mirror(path.relative_to(unit))
    ]
    check(broken, "a unit test whose name and folder are no module's (CONTRIBUTING.md: tests)")
    stale = [name for name in TESTS_OF_MORE if name not in files or is_mirror(Path(name))]
    check(stale, "an exception in TESTS_OF_MORE that is none")


def is_mirror(test: Path) -> bool:
    """Return whether a test, by its path in tests/unit, names a module at the same place of its package."""
    package, *folders = test.parent.parts
    subject = test.stem.removeprefix("test_")
    return any(
        f"{subject}_".startswith(f"{module.stem}_")
        for root in MIRRORED.get(package, ())
        for module in root.joinpath(*folders).glob("*.py")
        if module.stem != "__init__"
    )


@pytest.mark.parametrize(
    ("test", "mirrors"),
    [
        ("wire/http/server/test_service.py", True),
        ("wire/http/server/test_service_life.py", True),
        ("sdk/tasks/test_dispatch.py", True),
        ("sdk/local/test_sessions.py", True),
        ("wire/http/test_service.py", False),
        ("wire/http/server/test_services.py", False),
        ("nodelet/transfer/test_parts.py", False),
        ("nowhere/test_service.py", False),
    ],
)
def test_the_rule_of_mirrors_knows_a_module_from_another(test: str, mirrors: bool) -> None:
    assert is_mirror(Path(test)) is mirrors


def test_no_source_imports_tests_examples_or_benchmarks() -> None:
    broken = [
        f"{source.at(node)}: imports {name}"
        for source in sources()
        for name, node in source.imports()
        if name.partition(".")[0] in {"tests", "examples", "benchmarks"}
    ]
    check(broken, "what ships imports nothing that does not")


def test_the_cores_are_pure() -> None:
    broken = [
        f"{source.at(node)}: imports {name}"
        for source in sources()
        if any(source.path.is_relative_to(core) for core in PURE)
        for name, node in source.imports()
        if name.partition(".")[0] in IMPURE_MODULES
        or (name.partition(".")[0] == "stoker_wire" and source.path not in PURE_WITH_MESSAGES)
    ]
    check(
        broken,
        "a core has no clock, IO, event loop or randomness of its own, and no type of the wire",
    )


def test_every_module_says_why_it_exists() -> None:
    broken = [source.at(source.tree) for source in sources() if not ast.get_docstring(source.tree)]
    check(broken, "a module without a docstring")


def test_a_docstring_says_what_its_function_does_or_what_its_class_is() -> None:
    """An imperative verb or a noun phrase; a clause that begins with a question word is neither."""
    broken = [
        f"{source.at(node)}: {text.splitlines()[0]}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node) or "").startswith(EMPTY_OPENINGS)
    ]
    check(broken, "a docstring that neither does nor names (CONTRIBUTING.md: prose)")


def test_no_file_is_two_ideas() -> None:
    broken = [
        f"{source.path.relative_to(REPO)}: {lines} lines"
        for source in sources()
        if MIGRATION_VERSIONS not in source.path.parts
        and (lines := source.text.count("\n")) > MAX_LINES
    ]
    check(broken, f"a file over {MAX_LINES} lines")


def test_no_junk_drawers() -> None:
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py"}
    # stoker.util is public API, under the name that users of the field know.
    allowed = {ROOTS["stoker"] / "util.py"}
    broken = [
        source.at(source.tree)
        for source in sources()
        if source.path.name in names and source.path not in allowed
    ]
    check(broken, "a file named for nothing in particular")


def test_tasks_belong_to_a_task_group() -> None:
    broken = [
        f"{source.at(node)}: {ast.unparse(node.func)}(...)"
        for source in sources()
        if source.path not in BARE_TASKS_ALLOWED
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and starts_a_bare_task(node.func)
    ]
    check(broken, "a task outside a TaskGroup (nobody awaits it, nobody sees its error)")


def starts_a_bare_task(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"create_task", "ensure_future"}
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if function.attr == "ensure_future":
        return owner == "asyncio"
    return function.attr == "create_task" and (
        owner == "asyncio" or owner.removesuffix("()").endswith("loop")
    )


@pytest.mark.parametrize(
    ("call", "bare"),
    [
        ("asyncio.create_task(f())", True),
        ("asyncio.ensure_future(f())", True),
        ("create_task(f())", True),
        ("loop.create_task(f())", True),
        ("self._loop.create_task(f())", True),
        ("asyncio.get_running_loop().create_task(f())", True),
        ("group.create_task(f())", False),
        ("self._tasks.create_task(f())", False),
    ],
)
def test_the_task_rule_knows_a_group_from_a_loop(call: str, bare: bool) -> None:
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call)
    assert starts_a_bare_task(expression.func) is bare


def test_importing_stoker_loads_nothing_heavy() -> None:
    program = f"import sys, stoker; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], f"import stoker loads {result.stdout}"
