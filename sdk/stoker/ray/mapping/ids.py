"""Ids with the methods of Ray's: programs write ``node_id.hex()``."""

from __future__ import annotations

from typing import Any, Self


class Id(str):
    """An id of Stoker's, a text, which is its own ``hex()``."""

    __slots__ = ()

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """Return the id whose ``hex()`` this is."""
        return cls(text)

    @classmethod
    def nil(cls) -> Self:
        """Return the id of nothing."""
        return cls()

    def hex(self) -> str:
        """Return the text."""
        return str(self)

    def binary(self) -> bytes:
        """Return the text as bytes."""
        return self.encode()

    def is_nil(self) -> bool:
        """Return whether it is the id of nothing."""
        return not self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)
