"""Extenders: when they are asked about requirements, and what follows from their answer.

They are services outside, so the shell asks them; the core orders that (``AskExtenders``) and waits for the
answer, which holds for all leases of equal requirements until its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import AskExtenders, Outbox
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.state import State, Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.events import ExtendersAnswered
    from stoker_scheduler.core.model.requirements import Requirements

MAX_ANSWERS = 1024
"""More are kept only while something waits for each of them."""


def ask_extenders(state: State, requirements: Requirements | Gang, outbox: Outbox) -> None:
    """Have the extenders asked about each kind of ``requirements`` of which no answer holds."""
    for kind in _kinds(requirements):
        answer = state.extender_answers.get(kind)
        if answer is not None and answer.valid_until_s > state.at_s:
            continue
        _forget(state, kind)
        if kind not in state.extenders_asked:
            state.extenders_asked[kind] = None
            outbox.append(AskExtenders(requirements=kind))


def extenders_answered(state: State, event: ExtendersAnswered) -> None:
    """Place by the answer from now on, until its time is over."""
    kind, answers = event.requirements, state.extender_answers
    state.extenders_asked.pop(kind, None)
    _forget(state, kind)
    if len(answers) >= MAX_ANSWERS:
        unwanted = next((one for one in answers if not _is_awaited(state, one)), None)
        if unwanted is not None:
            _forget(state, unwanted)
    answers[kind] = event.answer
    state.forget_rankings(kind)
    state.queue.wake([one for one in state.queue.blocked if kind in _kinds(one)])
    state.set_timer(event.answer.valid_until_s, Timer.EXTENDERS)


def expire_answers(state: State, outbox: Outbox) -> None:
    """Forget the answers whose time is over, and have those asked for again that something waits for."""
    over = [k for k, one in state.extender_answers.items() if one.valid_until_s <= state.at_s]
    for kind in over:
        _forget(state, kind)
        if _is_awaited(state, kind):
            ask_extenders(state, kind, outbox)


def _forget(state: State, kind: Requirements) -> None:
    if state.extender_answers.pop(kind, None) is not None:
        state.forget_rankings(kind)


def _is_awaited(state: State, kind: Requirements) -> bool:
    waiting = state.queue.subqueues
    return kind in waiting or any(isinstance(one, Gang) and kind in one.kinds for one in waiting)


def _kinds(requirements: Requirements | Gang) -> Sequence[Requirements]:
    return [kind for kind in requirements.kinds if kind.extenders]
