"""Elastic training: an ordinary PyTorch loop, run by as many replicas as the scheduler offers."""
