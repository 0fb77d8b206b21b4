"""Keep what a training loop must not lose: commits in memory, checkpoints on disk."""
