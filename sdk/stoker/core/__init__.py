"""The pure half of the runtime: who owns what, and which worker runs what next.

State machines without IO, threads, clocks or randomness; :mod:`stoker.runtime` is their shell.
"""
