"""The scheduler's decisions, as pure functions and one state machine.

Nothing in this package reads a clock, makes an id, draws a random number, waits or does IO:
``machine.step(state, event)`` changes the state and returns commands; the engine around it turns
messages into events and carries commands out. That lets the simulator run the real scheduler through
thousands of faulty clusters a minute, and makes a recorded log of events a test.

Reading order: ``events`` and ``commands`` (in and out), ``model`` (resources, devices, requirements,
nodes), ``placement`` (``feasibility``, ``scoring``, ``ranking``; ``plan`` and ``explain`` are dry runs of
them), ``queueing.queue`` (the order of requests), ``state``, ``machine``, ``queueing.cycle`` and
``leases.lifecycle`` (what happens), ``queueing.preemption`` and ``queueing.reserve`` (what makes room).
"""
