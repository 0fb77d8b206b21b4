"""Bugs planted in the generation machine one at a time, such as it had: worlds have to find each.

A mutant replaces a piece of the machine's source, which has to stand there once.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from stoker_train.elastic import fence
from stoker_train.elastic.core import machine, places, replacing

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: what stands in the machine, and what stands there instead."""

    name: str
    right: str
    wrong: str
    first: int = 0
    """The seed from which to look."""
    module: types.ModuleType = machine

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        """Have worlds run the machine with this bug."""
        path = self.module.__file__
        assert path is not None
        source = Path(path).read_text()
        assert source.count(self.right) == 1, f"{self.name}: no longer there once: {self.right!r}"
        module = types.ModuleType(self.module.__name__)
        module.__file__ = path
        exec(compile(source.replace(self.right, self.wrong), path, "exec"), vars(module))
        with contextlib.ExitStack() as patches:
            if self.module is machine:
                patches.enter_context(mock.patch("tests.sim.training.world.machine", module))
            for name, wrong in vars(module).items():
                right = vars(self.module).get(name)
                if self.module is not machine and isinstance(right, type):
                    for method, does in vars(wrong).items():
                        if isinstance(does, types.FunctionType):
                            patches.enter_context(mock.patch.object(right, method, does))
            yield


MUTANTS = (
    Mutant(
        "the samples after a checkpoint are not voided",
        "if rank == 0 and self.s.pending_restore.durable:",
        "if False:",
    ),
    Mutant(
        "the samples after a commit are not voided",
        "if restore.step is not None:\n            self.do(ev.Void(",
        "if False:\n            self.do(ev.Void(",
    ),
    Mutant(
        "a generation begins before all its ranks are in",
        "if any(member.incarnation not in self.s.formed for member in pending.members):",
        "if not self.s.formed:",
    ),
    Mutant(
        "an offer that takes slots away is accepted while replicas train there",
        "if offer.withdraws and self._in(Life.MEMBER, Life.BROKEN, Life.RETURNED):",
        "if False:",
    ),
    Mutant(
        "the next generation does not wait for the members of the last one",
        "if self.s.pending is not None or self._in(Life.MEMBER):  # members of one that did not form",
        "if self.s.pending is not None:",
        first=1890,
    ),
    Mutant(
        "survivors go back to a commit that rank 0 has not",
        "survivors.sort(key=lambda one: (step_ not in one.committed, one.last_rank))",
        "survivors.sort(key=lambda one: (step_ in one.committed, one.last_rank))",
    ),
    Mutant(
        "a job does not end whose last rank dies after the others returned",
        "                self._end_if_all_returned()\n                return",
        "                return",
        first=190,
    ),
    Mutant(
        "leavers stay after a resize",
        "if worker.life is Life.LEFT or (",
        "if False and (",
        first=230,
    ),
    Mutant(
        "a job that is stopped before it begins waits for ever",
        "        if self.s.stopping is not None:\n            self._end_all",
        "        if False:\n            self._end_all",
    ),
    Mutant(
        "a rank that is to be replaced leaves before its newcomer is in",
        "        starts = any(one.slot in self._desired for one in self._in(Life.STARTING))",
        "        return 'at once'",
        module=replacing,
    ),
    Mutant(
        "a job that has too few slots left does not try those in quarantine again",
        "        if len(slots) < limits.min_replicas:",
        "        if True:",
        module=places,
    ),
    Mutant(
        "a controller that was taken for dead writes into the ledger",
        "        while not self._store.put(self._name, data, over=self._present):",
        "        while not self._store.put(self._name, data, over=self._store.get(self._name)):",
        module=fence,
    ),
)
