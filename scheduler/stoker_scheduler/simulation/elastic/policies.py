"""The policies of a study by name: how each is made, and what its jobs may choose themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker_scheduler.core.elastic.baselines import Fifo, Optimus, Tiresias
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.jobs import ElasticPolicy
from stoker_scheduler.core.elastic.pollux import Pollux
from stoker_scheduler.core.elastic.sia import Sia


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
    "stoker": PolicyKind(lambda seed: GoodputPolicy()),
    "sia": PolicyKind(lambda seed: Sia()),
    "pollux": PolicyKind(Pollux, fixes_models=True, is_random=True),
    "fifo": PolicyKind(lambda seed: Fifo(), fixes_replicas=True, tunes_batches=False),
    "tiresias": PolicyKind(lambda seed: Tiresias(), fixes_replicas=True, tunes_batches=False),
    "optimus": PolicyKind(
        lambda seed: Optimus(), tunes_batches=False, fixes_models=True, needs_oracle=True
    ),
}
