"""Requirements: senseless amounts."""

from __future__ import annotations

import pytest

from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import InvalidDemandError


@pytest.mark.parametrize(
    "resources", [{"GPU": 1.5}, {"CPU": -1}, {"CPU": float("nan")}, {"CPU": 1e-6}]
)
def test_a_senseless_amount_is_rejected(resources: dict[str, float]) -> None:
    with pytest.raises(InvalidDemandError):
        make_requirements(resources)
