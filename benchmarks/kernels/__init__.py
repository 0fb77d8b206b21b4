"""Every kernel beside what a user would otherwise call, as time, bandwidth and share of the roofline.

``python -m benchmarks.kernels`` (see ``--help``); results are appended to ``results.csv`` here.
"""
