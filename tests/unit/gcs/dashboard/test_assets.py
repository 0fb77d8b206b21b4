"""The files of the dashboard's page: what the content policy and safety ask of each."""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

import pytest
from aiohttp.test_utils import make_mocked_request

from stoker_gcs.dashboard.assets import FOLDER, Assets
from stoker_wire.errors import NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MOST_BYTES = 80_000
"""Of the whole page, compressed."""


def name_of(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def test_the_page_is_small() -> None:
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES) < MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_names_no_other_site(path: Path) -> None:
    found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", path.read_text())
    assert [one for one in found if not one.startswith("http://www.w3.org/")] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_makes_no_html_and_no_code_of_texts(path: Path) -> None:
    unsafe = (
        r"(?:inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function|javascript:|srcdoc"
    )
    assert re.findall(unsafe, path.read_text()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_imports_what_is_there_and_uses_it(path: Path) -> None:
    text = path.read_text()
    for names, source in re.findall(r'^import (.+?) from "(.+?)";', text, re.MULTILINE | re.DOTALL):
        target = (path.parent / source).resolve()
        assert target in FILES, source
        exported = target.read_text()
        wanted = re.findall(r"(\w+)(?: as (\w+))?", names.strip("{} "))
        if "*" in names:
            continue
        for name, local in wanted:
            assert re.search(rf"export (async )?(function\*?|const|class|let) {name}\b", exported)
            assert len(re.findall(rf"\b{local or name}\b", text)) > 1, f"{name} is not used"


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_an_exported_function_says_what_it_takes(path: Path) -> None:
    for before, name in re.findall(r"(.*)\nexport (?:async )?function\*? (\w+)", path.read_text()):
        assert before.rstrip().endswith("*/"), f"{name} has no JSDoc"


def test_the_document_has_no_script_and_no_style_of_its_own() -> None:
    text = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text) == []


def test_a_file_is_kept_once_by_however_many_names_strangers_ask_for_it() -> None:
    assets, request = Assets(), make_mocked_request("GET", "/assets/main.js")
    for name in ("main.js", "./main.js", "views/../main.js", "views/../views//../main.js"):
        assert assets.respond(request, name).status == 200
    assert len(assets._known) == 1


@pytest.mark.parametrize(
    "name", ["/etc/hosts", "../assets.py", "a\0.js", "x" * 5000 + ".js", "none.js"]
)
def test_what_is_no_file_of_the_page_is_not_found(name: str) -> None:
    with pytest.raises(NotFoundError):
        Assets().respond(make_mocked_request("GET", "/assets/x"), name)
