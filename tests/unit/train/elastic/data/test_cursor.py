"""The cursor: it moves with steps, and jumps with restores."""

from __future__ import annotations

from stoker_train.elastic.data.cursor import Cursor


def test_it_moves_and_jumps_back() -> None:
    cursor = Cursor()
    cursor.advance(8)
    saved = cursor.state_dict()
    cursor.advance(3)
    cursor.begin_epoch(1)
    assert cursor == Cursor(epoch=1, step=2, first=0)
    assert cursor.jumps == 0
    cursor.load_state_dict(saved)
    assert cursor == Cursor(epoch=0, step=1, first=8)
    assert cursor.jumps == 1
