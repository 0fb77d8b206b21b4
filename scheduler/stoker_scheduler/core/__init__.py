"""The scheduler's decisions, as pure functions and one state machine.

Nothing in this package reads a clock, makes an id, draws a random number, waits or talks to
anybody: ``machine.step(state, event)`` changes the state and returns commands, and the service
around it turns messages into events and carries commands out. That is what lets the simulator run
the real scheduler through thousands of faulty clusters a minute, and a production log be a test.

Reading order: ``resources`` and ``devices`` (what is counted), ``need`` and ``nodes`` (who wants
and who has), ``feasibility`` and ``scoring`` (may it, and should it), ``plan`` (both together, dry),
``queue`` (who is next), ``state``, ``machine`` and ``cycle`` (what happens), ``recall`` and
``reserve`` (what makes room), ``explain`` (why not yet).
"""
