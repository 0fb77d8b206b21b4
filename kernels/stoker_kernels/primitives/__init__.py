"""Device functions and tile sizes that several ops share; ``philox`` is in PyTorch and needs no Triton."""
