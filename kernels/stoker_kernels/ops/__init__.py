"""The ops, one folder each: ``reference`` (specification), ``triton`` (kernel), ``autograd`` (torch glue).

Import the public functions from :mod:`stoker_kernels`; import from here to reach the parts of one op.
"""
