"""What a controller knows at its start, where the user lets it use what earlier jobs measured."""

from __future__ import annotations

from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation
from stoker_train.elastic.controller.decisions import Decisions
from stoker_train.elastic.controller.offers import node_filter_without
from stoker_train.elastic.optimization.priors import Prior
from stoker_train.elastic.options import Scaling

SCALING = Scaling(max_replicas=4, resources={"CPU": 1}, base_batch=32, max_batch=256)


def test_a_job_begins_with_what_one_of_its_code_has_measured() -> None:
    observed = [Observation(1, n, 32 // n, 0.01 + 0.001 * n, 0.02 + 0.002 * n) for n in (1, 2, 4)]
    prior = Prior.of(observed, GradientNoise(2.0, 64.0))
    decisions = Decisions(SCALING, prior)
    hints = decisions.hints(None, 0.0)
    assert hints["profiled_replicas"] == 4
    assert hints["params"]
    assert (hints["grad_sqr"], hints["grad_var"]) == (2.0, 64.0)
    assert decisions.measured() == prior, "what it has not measured anew is left as it was"


def test_without_leave_it_knows_nothing() -> None:
    hints = Decisions(SCALING).hints(None, 0.0)
    assert hints["profiled_replicas"] == 0
    assert "params" not in hints
    assert "grad_sqr" not in hints


def test_with_less_than_the_base_batch_no_efficiency_above_1_is_told() -> None:
    decisions = Decisions(SCALING, Prior(sqr=2.0, var=64.0))
    decisions.batch = SCALING.base_batch // 4
    assert decisions.hints(None, 0.0)["efficiency"] == 1.0


def test_a_filter_of_very_many_nodes_is_one_that_is_taken() -> None:
    text = node_filter_without(f"node_{number:026d}" for number in range(400))
    assert len(text) <= 4096 and f"'node_{0:026d}'" in text
    assert node_filter_without(["a", "b"]) == "node_id not in ('a', 'b')"
    assert node_filter_without([]) == ""
