"""The way from an op to its kernel.

``backend`` picks the implementation, ``launch`` runs a kernel, ``dry_run`` has it compiled instead, and
``device`` is what a launcher may ask of the GPU.
"""
