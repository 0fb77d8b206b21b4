"""Every block of code in the documentation is executed by a test, or says why not and can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.e2e.cli.docs._blocks import (
    CHECKED,
    DATA,
    RUN_ELSEWHERE,
    SHOWN,
    Block,
    blocks_of,
    check_options,
    check_syntax,
    pages,
)

REPO = Path(__file__).resolve().parents[2]
BLOCKS = [block for page, text in pages().items() for block in blocks_of(page, text)]
PAGE = """\
<!-- not run: it takes 8 GPUs -->
```python
train()
```

<!-- first:
x = 1
-->
```python
print(x)  # 1
```

```console
$ stoker status \\
    --json
{}
```
"""


def test_a_block_is_in_a_language_that_is_known() -> None:
    assert [str(one) for one in BLOCKS if one.language not in (*CHECKED, *SHOWN)] == []


def test_commands_are_in_a_block_of_a_shell() -> None:
    starts = ("$ ", "stoker ", "curl ", "make ")
    hidden = [
        str(one)
        for one in BLOCKS
        if one.language == ""
        and any(line.startswith(starts) for line in one.text.splitlines())
        and not one.page.startswith("docs/adr/")
    ]
    assert hidden == [], "name the language: console, or sh"


def test_a_block_that_is_not_executed_says_why_in_words() -> None:
    assert [str(one) for one in BLOCKS if one.not_run and len(one.not_run.split()) < 3] == []


def lines_of(block: Block) -> set[str]:
    return {re.sub(r" +#.*", "", line) for line in block.text.splitlines()}


def test_what_is_run_by_another_test_is_read_by_it() -> None:
    """The test reads the page, or the page that has the same lines."""
    assert {one.page for one in BLOCKS if one.run_by} >= set(RUN_ELSEWHERE)
    of_readme = {line for one in BLOCKS if one.page == "README.md" for line in lines_of(one)}
    for block in BLOCKS:
        if block.run_by:
            text = (REPO / block.run_by).read_text()
            reads = Path(block.page).name in text
            copies = "README.md" in text and lines_of(block) <= of_readme
            assert reads or copies, f"{block} is not executed by {block.run_by}"


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in CHECKED], ids=str)
def test_a_block_can_be_read(block: Block) -> None:
    check_syntax(block)


def test_commands_in_the_prose_exist() -> None:
    wrong = []
    for page, text in pages().items():
        if page.startswith("docs/adr/") or page == "CHANGELOG.md":
            continue  # they keep the words of their time
        prose = re.sub(r"(?ms)^```.*?^```", "", text)
        for command in re.findall(r"`(stoker [^`]+)`", prose):
            try:
                check_options(" ".join(command.split()), page)
            except AssertionError as error:
                # An option is named without its value.
                wrong += [] if "requires an argument" in str(error) else [str(error)]
    assert wrong == []


def test_at_least_half_of_the_pythons_are_executed() -> None:
    python = [
        one
        for one in BLOCKS
        if one.language == "python" and not one.page.startswith("docs/errors/")
    ]
    assert sum(one.is_run or bool(one.run_by) for one in python) * 2 > len(python)


def test_blocks_and_what_is_said_of_them_are_found() -> None:
    not_run, first, console = blocks_of("docs/x.md", PAGE)
    assert (not_run.not_run, not_run.is_run, not_run.line) == ("it takes 8 GPUs", False, 2)
    assert (first.first, first.text, first.is_run) == ("x = 1", "print(x)  # 1\n", True)
    assert console.commands == "stoker status \\\n    --json\n"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "def f(:\n"),
        ("sh", "if true; then\n"),
        ("sh", "stoker job submit --no-such-option -- true\n"),
        ("sh", "A=1 stoker jbo list\n"),
        ("console", "$ stoker status --jsn\n"),
        ("yaml", "a: [1\n"),
        ("toml", "a = \n"),
        ("json", "{'a': 1}\n"),
    ],
)
def test_a_block_that_cannot_be_read_is_found(language: str, text: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, ValueError, yaml.YAMLError)):
        check_syntax(Block("docs/x.md", 1, language, text))


def test_data_is_parsed_whatever_is_said_of_it() -> None:
    assert {one.language for one in BLOCKS} >= set(DATA)
