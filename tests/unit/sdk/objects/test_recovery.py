"""What an owner answers a borrower that could not read an object."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from stoker.exceptions import ObjectFreedError
from stoker.runtime.objects.recovery import Recovery
from stoker.runtime.objects.table import ObjectTable
from stoker.runtime.serialization.exceptions import decode_error
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Failed, Recover, Resolved, Stored

OWNER = Address("p_owner", "n", "h", "", "")
ASKED = Recover("o_1", "n_1")


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable()


@pytest.fixture
def recovery(table: ObjectTable) -> Recovery:
    unused: Any = Mock()
    return Recovery(OWNER, unused, unused, unused, table, unused, unused, unused)


def test_what_was_freed_while_the_channel_of_its_borrower_was_broken_is_said_to_be(
    recovery: Recovery,
) -> None:
    channel = Mock()
    recovery.on_recover(channel, ASKED)
    ((answer,), _) = channel.post.call_args
    assert isinstance(answer, Resolved)
    assert isinstance(answer.location, Failed)
    error = decode_error(answer.location)
    assert isinstance(error, ObjectFreedError)
    assert "o_1 was freed by its owner p_owner" in str(error)


def test_what_is_being_made_again_is_told_once_it_is_there(
    recovery: Recovery, table: ObjectTable
) -> None:
    entry, channel = table.create("o_1"), Mock()
    recovery.on_recover(channel, ASKED)
    recovery.on_recover(channel, ASKED)
    channel.post.assert_not_called()
    assert entry.subscribers == [channel], "and once, though it asks twice"


def test_what_is_elsewhere_by_now_is_told_at_once(recovery: Recovery, table: ObjectTable) -> None:
    entry, channel = table.create("o_1"), Mock()
    entry.location = Stored(8, "n_2", "http://n_2", (), "o_1")
    recovery.on_recover(channel, ASKED)
    channel.post.assert_called_once_with(Resolved("o_1", entry.location))
