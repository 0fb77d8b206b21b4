"""Processes as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import time

from stoker_wire.process import process_tree


def test_the_process_tree_is_seen() -> None:
    me = os.getpid()
    assert process_tree.start_time(me) > 0
    assert process_tree.start_time(2**30) == 0
    assert me in process_tree.children(os.getppid()) or os.getppid() == 0
    assert process_tree.rss_bytes(me) > 1 << 20
    assert process_tree.tree_bytes(me) > 1 << 20


def test_the_foreground_is_what_started_since_and_stayed_in_the_process_group() -> None:
    me, started = os.getpid(), []

    def start(**options: bool) -> int:
        started.append(subprocess.Popen(["sleep", "1000"], **options))
        return started[-1].pid

    try:
        earlier = start()
        time.sleep(0.05)  # times of starts are told in hundredths of a second
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        apart, here = start(start_new_session=True), start()
        foreground = process_tree.foreground(me, since_s)
        assert here in foreground
        assert earlier not in foreground and apart not in foreground
        assert earlier in process_tree.foreground(me, 0.0)
    finally:
        for process in started:
            process.kill()
            process.wait()
