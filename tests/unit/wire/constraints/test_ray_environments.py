"""Ray's keys of a runtime environment as Stoker's."""

from __future__ import annotations

import pytest

from stoker_wire.constraints.ray_environments import (
    REFUSED,
    WITHOUT_EFFECT,
    process_setup,
    requirements,
)
from stoker_wire.errors import BadRequestError


def test_packages_are_a_list_or_in_a_mapping() -> None:
    assert requirements("pip", ["numpy"]) == ["numpy"]
    assert requirements("uv", {"packages": ["numpy"], "uv_version": "==0.13"}) == ["numpy"]
    with pytest.raises(BadRequestError, match="packages") as caught:
        requirements("pip", {"pip_check": False})
    assert caught.value.field == "runtime_env.pip"


@pytest.mark.parametrize(("given", "made"), [("a.b.f", "a.b:f"), ("a.b:f", "a.b:f")])
def test_a_function_is_named_as_stoker_does(given: str, made: str) -> None:
    assert process_setup(given) == made


def test_a_key_is_refused_or_has_no_effect() -> None:
    assert not REFUSED.keys() & WITHOUT_EFFECT.keys()
