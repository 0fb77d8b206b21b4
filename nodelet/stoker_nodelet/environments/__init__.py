"""Runtime environments of workers, and the folders of jobs."""
