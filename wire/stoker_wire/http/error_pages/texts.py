"""Texts of the page of an error, beside what its class says: cause, fix, example."""

from __future__ import annotations

from dataclasses import dataclass

NEEDS = "it takes a cluster in that state"
HANDLES = "it shows how a program handles it"


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """Causes and fix of an error, and an example: Python, or commands that begin with ``$``.

    Without ``not_run`` the example is executed by the tests, and raises the error.
    """

    cause: str
    fix: str
    example: str
    not_run: str = ""
