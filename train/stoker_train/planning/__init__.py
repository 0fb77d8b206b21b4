"""Plan how a model is trained on a cluster: which degrees of parallelism, what is sharded, who sits where.

``stoker.plan_training`` and ``stoker train plan`` call :func:`plan_training`. Everything here is arithmetic
on shapes: nothing imports torch but :mod:`.profiles.profiling`, and nothing talks to a cluster but
:mod:`.hardware.cluster_records` and :mod:`.hardware.links`.
"""

from stoker_train.planning.cluster_shape import ClusterShape, Link
from stoker_train.planning.entry import plan_strategy, plan_training
from stoker_train.planning.hardware.cluster_records import cluster_of, cluster_of_kind
from stoker_train.planning.model_shape import LayerShape, ModelShape
from stoker_train.planning.plans import Plan, Plans, Refusal
from stoker_train.planning.strategy import Strategy

__all__ = (
    "ClusterShape",
    "LayerShape",
    "Link",
    "ModelShape",
    "Plan",
    "Plans",
    "Refusal",
    "Strategy",
    "cluster_of",
    "cluster_of_kind",
    "plan_strategy",
    "plan_training",
)
