"""The policies of a study by name: how each is made, and what its jobs may choose themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker_scheduler.core.elastic.baselines import Optimus
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.jobs import ElasticPolicy
from stoker_scheduler.elastic.policies import BUILT_IN, installed


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """The rules of a study for a policy.

    ``fixes_replicas``: jobs have those that their users tuned. ``tunes_batches``: jobs choose their batches.
    ``fixes_models``: models that the study lets choose nothing do not. ``is_random``: means are over seeds.
    """

    make: Callable[[int], ElasticPolicy]
    fixes_replicas: bool = False
    tunes_batches: bool = True
    fixes_models: bool = False
    needs_oracle: bool = False
    is_random: bool = False


KINDS = {
    "stoker": PolicyKind(BUILT_IN["stoker"]),
    "sia": PolicyKind(BUILT_IN["sia"]),
    "pollux": PolicyKind(BUILT_IN["pollux"], fixes_models=True, is_random=True),
    "fifo": PolicyKind(BUILT_IN["fifo"], fixes_replicas=True, tunes_batches=False),
    "tiresias": PolicyKind(BUILT_IN["tiresias"], fixes_replicas=True, tunes_batches=False),
    "optimus": PolicyKind(
        lambda seed: Optimus(), tunes_batches=False, fixes_models=True, needs_oracle=True
    ),
}


def kinds(fairness: float | None = None) -> dict[str, PolicyKind]:
    """Return the policies that can be simulated, ``stoker`` with a ``fairness``; installed ones too."""
    ours = KINDS | {"stoker": PolicyKind(lambda seed: GoodputPolicy(fairness=fairness))}
    return ours | {name: _installed(make) for name, make in installed().items()}


def _installed(make: Callable[[], ElasticPolicy]) -> PolicyKind:
    return PolicyKind(lambda seed: make())
