"""A page for each code of the error tree: its meaning, causes, fix and an example.

The page is what ``stoker docs CODE`` prints and what ``docs/errors/`` has, so it ships with the code
that raises and needs no network. The meaning is the docstring of the class; a test fails if a code has no
texts. Nothing here is imported before a page is asked for.
"""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from stoker_wire.errors import error_classes
from stoker_wire.http.error_pages.of_requests import OF_REQUESTS
from stoker_wire.http.error_pages.of_work import OF_WORK

if TYPE_CHECKING:
    from stoker_wire.errors import StokerError
    from stoker_wire.http.error_pages.texts import ErrorTexts

PAGES: Final[MappingProxyType[str, ErrorTexts]] = MappingProxyType({**OF_REQUESTS, **OF_WORK})


def page_of(code: str) -> str:
    """Return the page of a code as Markdown; KeyError for one that does not exist."""
    texts, error = PAGES[code], error_classes()[code]
    example = texts.example.strip("\n")
    language = "console" if example.startswith("$ ") else "python"
    marker = f"<!-- not run: {texts.not_run} -->\n" if texts.not_run else ""
    return (
        f"# {code}\n\n{_meaning(error)}\n\n{_facts(error)}\n"
        f"## Cause\n\n{texts.cause}\n\n## Fix\n\n{texts.fix}\n\n"
        f"## Example\n\n{marker}```{language}\n{example}\n```\n"
    )


def summary_of(code: str) -> str:
    """Return the first sentence of the meaning of a code."""
    return _meaning(error_classes()[code]).partition("\n")[0]


def _meaning(error: type[StokerError]) -> str:
    return (inspect.getdoc(error) or "").replace("``", "`")


def _facts(error: type[StokerError]) -> str:
    bases = [
        base for base in error.__bases__ if base is not Exception and not hasattr(base, "code")
    ]
    facts = {
        "exception": f"`stoker.exceptions.{error.__name__}`",
        "also": ", ".join(f"`{base.__name__}`" for base in bases),
        "HTTP status": str(error.status),
        "retryable": "yes, the same call may succeed later" if error.retryable else "no",
    }
    return "".join(f"- **{name}**: {fact}\n" for name, fact in facts.items() if fact)
