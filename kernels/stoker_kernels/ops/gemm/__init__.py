"""The ops whose kernels are matrix products: fused dense layers, grouped products, fp8 products.

Each has a folder of an op's shape; ``tiles`` and ``configs`` are common to their kernels.
"""
