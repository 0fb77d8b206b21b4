"""The public API of ``import stoker``: decorators, options, ``init``, ``get``, ``put`` and their like."""
