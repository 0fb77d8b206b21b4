"""Goodput of training jobs: the speed of their steps, the worth of their batches, and the best choice.

One copy for the trainer that measures, the scheduler that allocates and the simulator that compares. Needs
numpy, and scipy for fits; imported by what computes with it, never by ``import stoker``.
"""
