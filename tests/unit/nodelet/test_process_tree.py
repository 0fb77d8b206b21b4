"""Processes as /proc shows them."""

from __future__ import annotations

import os

from stoker_nodelet import process_tree


def test_the_process_tree_is_seen() -> None:
    me = os.getpid()
    assert process_tree.start_time(me) > 0
    assert process_tree.start_time(2**30) == 0
    assert me in process_tree.children(os.getppid()) or os.getppid() == 0
    assert process_tree.rss_bytes(me) > 1 << 20
    assert process_tree.tree_bytes(me) > 1 << 20
