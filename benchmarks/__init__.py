"""Measurements. ``python -m benchmarks`` times Stoker and, where they are installed, its peers in one run."""
