"""Elastic training in virtual time: jobs that go by measured profiles, and policies beside each other."""

import os

# A fit has matrices of 7 rows: threads of OpenBLAS would wait for each other, beside other work above all.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
