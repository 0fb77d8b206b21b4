"""The limit of open files of a service: raised at its start, as far as the system lets it.

Called by the entry points of services, before they start other processes, which inherit it. Login shells
and systemd give 1,024, so that old programs of ``select`` go on; each connection takes one.
"""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 16
"""Beyond it, programs that close every number up to the limit are slow, as a fork is on old kernels."""


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one, or to ``MOST`` if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may forbid it, and the kernel's own bound (fs.nr_open) may be lower.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
