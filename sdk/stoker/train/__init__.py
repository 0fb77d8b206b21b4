"""``stoker.train``: the cluster's services for training: process groups, reports of their progress,
and kernels tuned to its GPUs.

torch is imported when a process group is made or a kernel measured, not here.
"""

from stoker.train.autotuning import autotune
from stoker.train.rendezvous import destroy_process_group, init_process_group
from stoker.train.reporting import report
from stoker.train.torchrun import env, run
from stoker.train.warming import warm

__all__ = (
    "autotune",
    "destroy_process_group",
    "env",
    "init_process_group",
    "report",
    "run",
    "warm",
)
