"""Training kernels, one folder per op. Imports nothing of the cluster."""
