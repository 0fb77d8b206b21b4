"""What crosses a process boundary: messages, ids, errors, frames, auth, and the HTTP server and client bases.

Imported by every component of Stoker; imports none of them. Submodules are imported where they are
needed, so that reading this package costs nothing.
"""
