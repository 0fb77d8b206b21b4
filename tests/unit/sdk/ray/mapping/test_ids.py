"""Ids with Ray's methods: texts of Stoker's, which travel as what they are."""

from __future__ import annotations

import pickle

import stoker.ray as ray
from stoker.ray.mapping.ids import Id
from stoker.ray.util.placement_group import PlacementGroup
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy, strategy_of


def test_an_id_is_its_text() -> None:
    actor_id = ray.ActorID("a_1")
    assert actor_id == "a_1"
    assert actor_id.hex() == "a_1"
    assert type(actor_id.hex()) is str
    assert actor_id.binary() == b"a_1"
    assert ray.ActorID.from_hex(actor_id.hex()) == actor_id
    assert not actor_id.is_nil()
    assert Id.nil().is_nil()
    assert type(pickle.loads(pickle.dumps(actor_id))) is Id


def test_a_group_with_such_an_id_is_asked_for_by_its_text() -> None:
    group = PlacementGroup("pg_1", [{"CPU": 1}])
    assert group.id.hex() == "pg_1"
    assert group.id.binary() == b"pg_1"
    assert type(strategy_of(PlacementGroupSchedulingStrategy(group)).group_id) is str
    assert pickle.loads(pickle.dumps(group)) == group
