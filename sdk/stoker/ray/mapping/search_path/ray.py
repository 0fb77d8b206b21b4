"""``import ray`` in processes that a driver spawns: they get its search path, and this folder is its last.

``multiprocessing`` runs the driver's file again in each process that it spawns, before anything else. An
installed Ray is found before this.
"""

import sys

del sys.modules[__name__]

import stoker.ray  # noqa: E402

stoker.ray.install()
