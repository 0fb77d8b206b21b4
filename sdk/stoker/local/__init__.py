"""Clusters on this machine, for ``init()`` and ``stoker start``: their start, look-up, processes and end."""
