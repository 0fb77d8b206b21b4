"""``stoker.train``: what distributed training needs of the cluster, for actors that use PyTorch.

torch is imported when a process group is made, not here.
"""

from stoker.train.rendezvous import destroy_process_group, init_process_group

__all__ = ("destroy_process_group", "init_process_group")
