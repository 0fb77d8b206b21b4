"""A record of what :func:`~stoker_kernels.patching.applying.apply` did to a model, and the way back."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Applied:
    """The result of ``apply``: print it for a table.

    ``replaced`` and ``left`` name modules: which kernels each runs now ("rotary, attention"), or why it
    stays as it is. "" is the model itself.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []

    def note_replaced(self, name: str, kind: str, kernel: str, undo: Callable[[], None]) -> None:
        """Note that the module ``name`` of class ``kind`` runs ``kernel``, and how that ends."""
        before = self.replaced.get(name)
        self.replaced[name] = kernel if before is None else f"{before}, {kernel}"
        self._kinds[name] = kind
        self._undo.append(undo)

    def note_undo(self, undo: Callable[[], None]) -> None:
        """Note how something ends that is no module's kernel."""
        self._undo.append(undo)

    def note_left(self, name: str, kind: str, why: str) -> None:
        """Note that the module ``name`` of class ``kind``, or a part of it, stays, and why."""
        before = self.left.get(name)
        self.left[name] = why if before is None else f"{before}; {why}"
        self._kinds.setdefault(name, kind)

    def undo(self) -> None:
        """Give every module its own code again, exactly; a second time does nothing.

        Raises ``RuntimeError`` for a module that has got another class since, as by ``fully_shard``.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __str__(self) -> str:
        counts = Counter((self._kinds[n], kernels) for n, kernels in self.replaced.items())
        rows = [(str(n), kind, kernels) for (kind, kernels), n in sorted(counts.items())]
        stay = Counter((self._kinds[n], f"left: {why}") for n, why in self.left.items())
        rows += [(str(n), kind, why) for (kind, why), n in sorted(stay.items())]
        rows = [("modules", "class", "kernels"), *rows]
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:>{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows)

    def __repr__(self) -> str:
        return f"Applied({len(self.replaced)} replaced, {len(self.left)} left)"
