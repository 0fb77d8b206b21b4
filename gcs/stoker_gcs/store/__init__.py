"""The truth: an append-only event log and the state tables that change in the same transaction.

``changes`` is the vocabulary, ``protocol`` the contract; ``memory`` is its executable specification,
``sqlite`` and ``postgres`` are the real ones; ``journal`` is the one writer that all share.
"""
