"""What the documents name exists: the words of the glossary, and every path of the map of the code.

A path in the prose of a document is a token in backticks that ends in ``/`` or in the suffix of a file
and does not begin with ``/``. It is relative to the root of the repository; one without a folder lies
beside the path before it in the same paragraph or row (inside it, if that is a folder). In the code map
of ARCHITECTURE.md all are relative to the package at the head of their paragraph.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.inspect import IntType

from scripts import docs_site, limits, operations, python_api, reference
from stoker_wire.errors import error_classes
from stoker_wire.http.error_pages.page import PAGES
from stoker_wire.messages.events import EventKind
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[2]
ARCHITECTURE = (REPO / "ARCHITECTURE.md").read_text()
MAX_WORDS = 40
MAX_PATHS = 2
TOKEN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w][\w./-]*(?:/|\.(?:py|md|csv|toml))")
NAME = re.compile(r"[A-Za-z_]\w*")
# Found by a word of the question, so that a row may be reworded but not dropped.
QUESTIONS = (
    "lease is granted", "option to `@remote`", "HTTP route", "add a table", "scheduling policy",
    "event kind", "heartbeat timeout", "kernel op", "verb", "ephemeral", "arguments are unpickled",
    "retry is decided", "why it waits",
)  # fmt: skip


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Return the cells of each row of the tables in ``text``, without their heads."""
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line.startswith("|")
    ]
    heads = [at - 1 for at, row in enumerate(rows) if not "".join(row).strip("-: ")]
    return [row for at, row in enumerate(rows) if not {at, at - 1} & set(heads)]


def section(title: str) -> str:
    """Return one section of ARCHITECTURE.md."""
    return ARCHITECTURE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def paragraphs(text: str) -> Iterator[str]:
    """Return paragraphs, rows of tables and items of lists, one by one."""
    return iter(
        re.split(r"\n\n+|\n(?=[|-] ?|\d+\. )", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    )


def paths_in(text: str, package: str = "") -> list[Path]:
    """Return the paths that a paragraph names, whether they exist or not."""
    paths: list[Path] = []
    beside = REPO
    for token in filter(PATH.fullmatch, TOKEN.findall(text)):
        if package:
            path = REPO / package / token.removeprefix(package)
        else:
            path = (REPO if "/" in token else beside) / token
        paths.append(path)
        beside = path if token.endswith("/") else path.parent
    return paths


def missing_in(text: str, package: str = "") -> list[str]:
    """Return the paths of a paragraph that do not exist, or are not what their end says."""
    return [str(path.relative_to(REPO)) for path in paths_in(text, package) if not path.exists()]


GLOSSARY = rows_of((REPO / "docs/glossary.md").read_text())


def test_the_glossary_is_short_sorted_and_without_doubles() -> None:
    words = [word for word, _, _ in GLOSSARY]
    names = [name for _, _, name in GLOSSARY]
    assert 0 < len(words) <= MAX_WORDS
    assert words == sorted(words)
    assert len(set(words)) == len(words)
    assert len(set(names)) == len(names), "two words for one type"


@pytest.mark.parametrize(("word", "name"), [(word, name) for word, _, name in GLOSSARY])
def test_a_word_of_the_glossary_names_a_type(word: str, name: str) -> None:
    module, _, symbol = name.strip("`").rpartition(".")
    assert hasattr(importlib.import_module(module), symbol), f"{word}: there is no {name}"


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_in_the_prose_exists(document: str) -> None:
    text = (REPO / document).read_text().replace(section("Code map"), "")
    missing = [path for paragraph in paragraphs(text) for path in missing_in(paragraph)]
    assert not missing, f"{document} names {missing}"


def test_every_path_in_the_code_map_exists() -> None:
    packages: list[str] = []
    for paragraph in paragraphs(section("Code map")):
        if head := re.match(r"- \*\*`([\w/]+/)`\*\*", paragraph):
            packages.append(head[1])
            assert len(paths_in(paragraph, head[1])) > 1
            assert not missing_in(paragraph, head[1])
        else:
            assert not missing_in(paragraph)
    roots = {f"{path.relative_to(REPO)}/" for path in REPO.glob("*/stoker*/") if path.is_dir()}
    assert set(packages) == {root for root in roots if not root.startswith("tests")}


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as its host makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = re.findall(r"(?m)^#{1,6} +(.+?)\s*$", text)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead to no file, or to no heading of it."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        there = page.parent / target if target else page
        if "://" in target:
            continue
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            yield f"{page.relative_to(REPO)}: {target}#{anchor}"


def test_every_link_between_documents_leads_somewhere() -> None:
    template = REPO / "docs/adr/0000-template.md"
    pages = {*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")} - {template}
    made = REPO / "docs/reference"
    kept = sorted(page for page in pages if not page.is_relative_to(made))
    assert [link for page in kept for link in broken_links(page)] == []


def test_a_link_to_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REPO", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# A `b` (c)\n[1](#a-b-c) [2](#no) [3](a.md#a-b-c) [4](b.md)\n")
    assert list(broken_links(page)) == ["a.md: #no", "a.md: b.md#"]


def test_the_navigation_of_the_site_names_pages_that_exist() -> None:
    text = (REPO / "mkdocs.yml").read_text()
    named = re.findall(r"(?m)^\s+- (?:.*: )?([\w./-]+\.md)$", text)
    root = {"index.md", *(path.name for path in REPO.glob("*.md"))}
    missing = [
        page
        for page in named
        if page not in root
        and not page.startswith("reference/")
        and not (REPO / "docs" / page).exists()
    ]
    assert len(named) > 30
    assert missing == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (REPO / "mkdocs.yml").read_text()
    folders = set(re.findall(r"(?m): ([\w/-]+/)$", text))
    lost = [
        name
        for path in (REPO / "docs").rglob("*.md")
        if (name := path.relative_to(REPO / "docs").as_posix()) not in text
        and f"{name.rpartition('/')[0]}/" not in folders
    ]
    assert lost == []


def test_every_test_that_is_named_as_proof_exists() -> None:
    named = [
        (page.name, *found)
        for page in (REPO / "SECURITY.md", *(REPO / "docs").glob("*.md"))
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    ]
    assert named
    missing = [
        (page, path, name)
        for page, path, name in named
        if not (REPO / path).exists() or f"def {name}(" not in (REPO / path).read_text()
    ]
    assert not missing


@pytest.mark.parametrize(
    ("source", "written", "shown"),
    [
        ("index.md", "[a](docs/kv.md#x)", "[a](kv.md#x)"),
        ("index.md", "[a](CHANGELOG.md)", "[a](CHANGELOG.md)"),
        ("kv.md", "[a](../ARCHITECTURE.md)", "[a](ARCHITECTURE.md)"),
        ("kv.md", "[a](../README.md#b)", "[a](index.md#b)"),
        ("kv.md", "[a](#b) [c](https://d.example/e)", "[a](#b) [c](https://d.example/e)"),
        ("how-to/secure.md", "[a](../../SECURITY.md)", "[a](../SECURITY.md)"),
        ("how-to/secure.md", "[a](../tls.md)", "[a](../tls.md)"),
        ("kv.md", "[a](../LICENSE)", "a"),
        ("kv.md", "```\n[a](../LICENSE)\n```\n", "```\n[a](../LICENSE)\n```\n"),
    ],
)
def test_links_lead_to_pages_of_the_site(source: str, written: str, shown: str) -> None:
    assert docs_site.with_links_to_pages(written, source) == shown


def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(
        '<a href="https://a.example">a</a><script src="assets/a.js"></script><img src="a.svg">'
    )
    assert docs_site.requests_of(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://a.example/a.js"></script><link rel=stylesheet href=//b.example/b.css>'
    )
    (tmp_path / "bad.css").write_text("@font-face{src:url(https://c.example/c.woff)}")
    assert len(docs_site.requests_of(tmp_path)) == 3


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_frequent_question_has_an_answer(question: str) -> None:
    assert sum(question in asked for asked, _ in rows_of(section("Where is …"))) == 1


@pytest.mark.parametrize(("question", "answer"), rows_of(section("Where is …")))
def test_an_answer_is_one_or_two_files_that_have_what_it_names(question: str, answer: str) -> None:
    paths = paths_in(answer)
    assert 1 <= len(paths) <= MAX_PATHS, question
    assert not missing_in(answer)
    sources = [
        source.read_text()
        for path in paths
        for source in (path.rglob("*.py") if path.is_dir() else (path,))
    ]
    for name in filter(NAME.fullmatch, TOKEN.findall(answer)):
        assert any(re.search(rf"\b{name}\b", source) for source in sources), f"{question}: {name}"


def test_the_page_of_limits_is_current() -> None:
    assert limits.LIMITS.read_text() == limits.limits_page(), "run: make docs"


def test_the_page_of_operations_is_current() -> None:
    assert operations.OPERATIONS.read_text() == operations.operations_page(), "run: make docs"


def test_the_pages_of_settings_events_and_errors_are_current() -> None:
    stale = [
        str(path.relative_to(REPO))
        for path, text in reference.kept_pages().items()
        if not path.exists() or path.read_text() != text
    ]
    assert not stale, "run: make docs"


def test_every_error_code_has_a_page_and_every_page_a_code() -> None:
    assert set(PAGES) == set(error_classes())
    assert {path.stem for path in (REPO / "docs/errors").glob("*.md")} == {*PAGES, "README"}


def test_every_setting_and_every_kind_of_event_is_on_its_page() -> None:
    settings, events = reference.settings_page(), reference.events_page()
    assert all(f"| `{one.variable}` |" in settings for one in Settings().describe())
    assert all(f"| `{kind}` |" in events for kind in EventKind)


def test_every_command_and_every_operation_is_on_a_page_of_the_site() -> None:
    made = {path.name: text for path, text in reference.site_pages().items()}
    for command in ("stoker job submit", "stoker queue create", "stoker docs"):
        assert f"\n## {command}\n" in made["cli.md"]
    for service, document in operations.documents().items():
        page = made[f"http-{service}.md"]
        for path, ways in document["paths"].items():
            for method in ways:
                assert f"\n### `{method.upper()} {path}`\n" in page


def test_every_public_name_is_on_a_page_of_the_site() -> None:
    made = {path.stem: text for path, text in python_api.pages().items()}
    for module in python_api.MODULES:
        names = getattr(importlib.import_module(module), "__all__", ())
        missing = [
            name
            for name in names
            if name[:1] != "_"
            and f"\n## {name}\n" not in made[module]
            and f"{module}.{name}" not in made["README"]
        ]
        assert not missing, module


@pytest.mark.parametrize("service", limits.SERVICES)
def test_every_integer_of_a_request_has_64_bits(service: str) -> None:
    integers = [
        one for one in limits.fields_of(limits.SERVICES[service]) if isinstance(one.kind, IntType)
    ]
    assert integers
    wild = [
        f"{one.owner}.{one.name}" for one in integers if not limits.is_bounded_integer(one.kind)
    ]
    assert not wild, "use Int64 or Count of stoker_wire.messages.common"
