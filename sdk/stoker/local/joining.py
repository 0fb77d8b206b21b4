"""A machine that joins: its join token becomes the cluster's secret, in a token file of its own.

Called by ``stoker start`` before the nodelet is there. Nothing is sent to a cluster whose CA is not the one
that was meant, nor is a token file overwritten.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import ConflictError, StartError
from stoker_wire.http.auth import is_loopback, load_token, write_private
from stoker_wire.http.client.endpoints import checked_address, urls_of
from stoker_wire.messages.control import JoinReply
from stoker_wire.tls.files import files_of_env

if TYPE_CHECKING:
    from collections.abc import Mapping


def ca_cert_hash(environ: Mapping[str, str] | None = None) -> str:
    """Return the hash of the public key of this machine's CA, as kubeadm writes it; nothing without TLS."""
    path = files_of_env(environ).ca
    if not path:
        return ""
    from stoker.local import certificates  # of the extra "tls", as it says itself

    return certificates.read(Path(path)).public_key_hash


def check_ca(pin: str) -> None:
    """Raise StartError if the CA of this machine is not the one with the hash ``pin``."""
    found = ca_cert_hash()
    if pin.lower() != found:
        raise StartError(
            f"the CA of this machine has the hash {found or '(none: STOKER_TLS_CA is not set)'}\n"
            f"the cluster's has {pin}\ncopy its ca.pem again, by a way that you trust"
        )


def join(address: str, join_token_file: str, token_file: str, *, ca_hash: str = "") -> Path:
    """Write the cluster's secret into ``token_file``, which must not be there yet; return it."""
    path = Path(token_file).expanduser().absolute()
    if path.exists():
        raise ConflictError(
            f"{path} is there already\nstart without a join token if it is this cluster's, or delete it"
        )
    if ca_hash:
        check_ca(ca_hash)
    for url in urls_of(checked_address(address)):
        parts = urlsplit(url)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise StartError(
                f"a join token is not sent to {url} in the clear\n"
                "turn TLS on (docs/tls.md), or copy the token file by hand"
            )
    token = load_token(join_token_file)
    reply = HttpClient(address, token=token).call("POST", "/v1/join", reply=JoinReply)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, "\n".join(reply.secrets) + "\n")
    return path
