"""Starting and finding clusters on this machine: sessions, the head's spawner, its end.

``init()`` and the CLI use ``cluster`` and ``sessions``, which are light; the head process itself is
``stoker.launch``, the only module that imports services.
"""
