"""The facts that a gateway tells a caller at its start: on its input, as all of a machine see arguments."""

from __future__ import annotations

import os

import msgspec

from stoker_wire.messages.control import Whoami


class CallerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Whose caller it is, and where it listens."""

    gcs_url: str
    token: str
    user: Whoami
    host: str
    """The gateway's own, by which its clients name it."""
    folder: str
    """Where its sockets are; it removes this folder at its end."""
    gateway_path: str
    """Where the gateway takes connections back."""

    @property
    def socket_path(self) -> str:
        """The path of the socket that it listens on."""
        return os.path.join(self.folder, "caller.sock")

    @property
    def handover_path(self) -> str:
        """The path of the socket at which connections are handed to it."""
        return os.path.join(self.folder, "handover.sock")
