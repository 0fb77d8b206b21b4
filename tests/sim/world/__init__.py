"""Whole clusters of real parts in virtual time: gcs, schedulers, nodelets, drivers, and seeded faults.

``world.run`` is the entry; ``loop`` has the clock, ``network`` the messages, ``control``, ``node`` and
``driver`` the parts, ``checks`` the invariants, ``mutants`` the bugs that prove that the world finds bugs.
"""
