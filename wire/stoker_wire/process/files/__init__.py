"""Files of a process: who may read them, and how many may be open."""
