"""Runtime environments of workers, and the folders of jobs on this node's disk."""
