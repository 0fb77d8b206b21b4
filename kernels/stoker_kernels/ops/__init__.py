"""The ops, one folder each, all of one shape.

``reference``  the executable specification in PyTorch, with the formulas and their source
``cpu``        a faster path on the CPU, where PyTorch has one
``triton``     the kernels and their launchers, a module or a package
``autograd``   all that torch sees: the opaque ops with their fakes, the public functions and modules
``workload``   a typical call; :mod:`stoker_kernels.workloads` finds it by its place

``linear_cross_entropy`` has no kernel of its own: its ``chunked`` runs PyTorch's GEMMs and cross-entropy's
kernels on every device.

Import the public functions from :mod:`stoker_kernels`; import from here to reach the parts of one op.
"""
