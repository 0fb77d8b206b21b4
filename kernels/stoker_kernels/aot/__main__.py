"""``python -m stoker_kernels.aot``, as :mod:`stoker_kernels.aot.command` describes it."""

from __future__ import annotations

import sys

from stoker_kernels.aot.command import main

if __name__ == "__main__":
    sys.exit(main())
