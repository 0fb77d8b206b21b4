"""Starting and finding clusters on this machine: sessions, the head's spawner, and its janitor.

``stoker.launch`` is the door: nothing else imports from here, but for the CLI's look at sessions.
"""
