"""What ``import stoker`` offers: decorators, options, ``init``, ``get``, ``put`` and their like."""
