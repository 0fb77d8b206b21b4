"""The object store of a process: refs, values, reference counts, borrowing, waiting."""
