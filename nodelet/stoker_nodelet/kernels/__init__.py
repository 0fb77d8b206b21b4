"""The kernels that are compiled before a worker starts: compiler, cache, measured configurations."""
