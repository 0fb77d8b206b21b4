"""What threads leave for the loop thread, whatever interrupts them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from stoker.runtime.tasks.inbox import TaskInbox


def task(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_threads_take_turns_and_lose_nothing_when_they_end() -> None:
    inbox = TaskInbox()
    names = [f"{thread}.{number}" for thread in range(3) for number in range(700)]

    def submit(thread: int) -> None:
        for number in range(700):
            inbox.add(task(f"{thread}.{number}"))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [task.name for task in inbox.take()]
    assert len(first) == 1500 and {name[0] for name in first} == {"0", "1", "2"}
    assert inbox
    second = [task.name for task in inbox.take()]
    assert sorted(first + second) == sorted(names)
    assert [n for n in first + second if n[0] == "1"] == names[700:1400]
    assert not inbox
    assert not list(inbox.take())
    current = threading.current_thread()
    assert [thread for _, thread in inbox._inboxes] == [current], (
        "of threads that are over nothing stays"
    )
