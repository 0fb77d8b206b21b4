"""Prefix sums, and the radix sort that is made of them."""

from __future__ import annotations

from stoker_kernels.ops.scan.autograd import prefix_sum, radix_sort

__all__ = ("prefix_sum", "radix_sort")
