"""What threads leave for the loop thread, whatever interrupts them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from stoker.runtime.tasks.inbox import TaskInbox


def task(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_threads_take_turns_and_lose_nothing_when_they_end() -> None:
    submissions = TaskInbox()
    names = [f"{thread}.{number}" for thread in range(3) for number in range(700)]

    def submit(thread: int) -> None:
        for number in range(700):
            submissions.add(task(f"{thread}.{number}"))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    first = [one.name for one in submissions.take()]
    assert len(first) == 1500 and {name[0] for name in first} == {"0", "1", "2"}
    assert submissions
    second = [one.name for one in submissions.take()]
    assert sorted(first + second) == sorted(names)
    assert [n for n in first + second if n[0] == "1"] == names[700:1400]
    assert not submissions
    assert not list(submissions.take())
    mine = threading.current_thread()
    assert [one for _, one in submissions._inboxes] == [mine], (
        "of threads that are over nothing stays"
    )
