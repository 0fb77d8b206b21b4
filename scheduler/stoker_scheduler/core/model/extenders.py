"""Answers of extenders: what services outside say of the nodes for equal requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExtenderAnswer:
    """The nodes that all extenders admit, with what their scores lower the cost by, and why not others.

    A node in neither was not asked about: it waits for the next answer.
    """

    gains: Mapping[str, float]
    refusals: Mapping[str, str]
    valid_until_s: float
