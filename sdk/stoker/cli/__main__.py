"""``python -m stoker.cli``: the same as the ``stoker`` command, where that is not on the path."""

from stoker.cli import main

main()
