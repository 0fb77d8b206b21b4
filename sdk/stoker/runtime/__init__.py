"""The runtime inside every driver and worker: it owns objects, submits tasks and calls actors.

User threads call into it; one loop thread does all the IO. Nothing here is imported before
``stoker.init()`` (or the start of a worker), so that ``import stoker`` stays cheap.
"""
