"""The object store as a process sees it: refs, values, reference counts, borrowing, waiting."""
