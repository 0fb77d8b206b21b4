"""The message types, by subject: one msgspec struct per thing that crosses a process boundary.

Requests refuse unknown fields, records ignore them. ``common`` has the parts that others share; then one
module per owner of state: ``cluster`` (nodes,
workers, leases), ``work`` (jobs, actors, tasks, objects), ``control`` (events, leaders, KV, tokens,
logs, explanations) and ``data`` (frames between runtimes; array-like, as they are sent by the
thousand). JSON and msgpack are both accepted and produced from these types, and so is OpenAPI.
"""
