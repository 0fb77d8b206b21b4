"""A sample of ``make fuzz``: other operations and inputs with each seed."""

from __future__ import annotations

from tests.fuzz.api import fuzz_api
from tests.fuzz.decoders import DECODERS
from tests.fuzz.decoding import fuzz_in_child
from tests.fuzz.findings import Finding, Outcome, table
from tests.fuzz.mutations import input_of

SERVICES = ("gcs", "scheduler", "nodelet")


def test_no_input_brings_a_decoder_to_what_it_does_not_document(seed: int) -> None:
    outcomes = fuzz_in_child([*DECODERS], seed=seed, inputs=500)
    assert {outcome.inputs for outcome in outcomes} == {500}, table(outcomes)
    assert not any(outcome.findings for outcome in outcomes), table(outcomes)


def test_the_live_api_does_what_its_document_says(seed: int) -> None:
    outcomes = fuzz_api(SERVICES, seed=seed, cases=300, operations=50)
    assert sum(outcome.inputs for outcome in outcomes) >= 200, table(outcomes)
    assert not any(outcome.findings for outcome in outcomes), table(outcomes)


def test_an_input_is_made_again_by_its_number() -> None:
    samples = DECODERS["frames"].samples()
    made = [input_of("1 frames", number, samples) for number in range(300)]
    assert made[: len(samples)] == samples
    assert made[250] == input_of("1 frames", 250, samples)
    assert len(set(made)) > 250


def test_a_finding_is_shown_with_the_command_that_repeats_it() -> None:
    text = table([Outcome("frames", 1000, 1.5, [Finding("KeyError: 1", "python -m tests.fuzz")])])
    assert "frames   1,000      1.5         1" in text
    assert "frames: KeyError: 1" in text
    assert "repeat: python -m tests.fuzz" in text
