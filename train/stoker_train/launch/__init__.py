"""Rendezvous for programs of others: a store for torch.distributed, torchrun and stoker launch."""
