"""Durable state: an append-only event log, and the tables that change in the same transaction.

``changes`` has the operations, ``protocol`` the contract; ``memory`` is its executable specification,
``sqlite`` and ``postgres`` are the real ones; ``group_commit`` is the one writer that all callers share.
"""
