"""The kernels of prefix sums and of the radix sort, with their launchers."""
