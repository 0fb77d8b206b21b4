"""Clusters on this machine: started, found, stopped; what ``init()`` and ``stoker start`` share."""
