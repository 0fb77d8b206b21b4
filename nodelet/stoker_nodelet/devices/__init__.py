"""The resources of this machine: CPUs and memory within its limits, and GPUs."""
