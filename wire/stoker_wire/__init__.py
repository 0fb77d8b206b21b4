"""Everything that crosses a process boundary: messages, ids, errors, frames, auth, HTTP server and clients.

Imported by every component of Stoker; imports none of them. Submodules are imported where they are
needed, so that reading this package costs nothing.
"""
