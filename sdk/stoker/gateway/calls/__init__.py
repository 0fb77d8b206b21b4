"""Calls by HTTP: who has a token calls functions and actors with JSON, and holds objects by reference.

For each token that does, the gateway has a *caller*: a process of its own that is a driver with that token,
and so a job of that user, which owns the references. It ends with the token, or when it was idle for a while.
The gateway passes requests on to it, unread (:mod:`stoker.gateway.calls.processes`). A caller unpickles
nothing: arguments and results are bytes, which workers convert (:mod:`stoker.runtime.worker.json_calls`).
"""
