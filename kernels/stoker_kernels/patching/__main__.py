"""Print the digest of every class of the catalogue, as the installed transformers has it."""

from __future__ import annotations

import sys
from importlib import import_module

from stoker_kernels.patching.catalogue import ENTRIES
from stoker_kernels.patching.recognition import digest

if __name__ == "__main__":
    for full, entry in ENTRIES.items():
        module, _, name = full.rpartition(".")
        if entry.digests:
            found = digest(getattr(import_module(module), name))
            known = "known" if found in entry.digests else "NEW"
            sys.stdout.write(f"{found} {known:5} {full}\n")
