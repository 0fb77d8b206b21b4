"""Parts of every process: event loop, logs, metrics, host identity, background work."""
