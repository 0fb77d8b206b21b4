"""The settings of TLS as one value: the mode, and where the certificates of this process are.

Made of the settings by services and runtimes, of the environment by command line tools, which have
none. It reads no certificate (:mod:`stoker_wire.tls.contexts` does).
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from stoker_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_wire.settings import Settings

OFF, SERVER, MUTUAL = MODES = ("off", "server", "mutual")


class TlsFiles(NamedTuple):
    """``STOKER_TLS`` and the files that it needs; an empty path is one that is not set."""

    mode: str = OFF
    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def is_on(self) -> bool:
        """Whether TCP ports speak TLS, and clients nothing else."""
        return self.mode != OFF

    @property
    def all(self) -> tuple[str, ...]:
        """The paths that are set."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path)


def files_of(settings: Settings) -> TlsFiles:
    """Return what the settings say of TLS."""
    paths = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    return TlsFiles(settings.tls, *map(os.path.expanduser, paths))


def files_of_env(environ: Mapping[str, str] | None = None) -> TlsFiles:
    """Return what the variables say, for who has no settings."""
    environ = os.environ if environ is None else environ
    mode = environ.get("STOKER_TLS", "").lower() or OFF
    if mode not in MODES:
        raise StartError(f"STOKER_TLS={mode!r} is no mode\nset it to one of {', '.join(MODES)}")
    names = ("STOKER_TLS_CERT", "STOKER_TLS_KEY", "STOKER_TLS_CA")
    return TlsFiles(mode, *(os.path.expanduser(environ.get(name, "")) for name in names))


def check_complete(files: TlsFiles) -> None:
    """Raise StartError, which names the setting, if this is too little for a listener."""
    needed = {"STOKER_TLS_CERT": files.cert, "STOKER_TLS_KEY": files.key}
    if files.mode == MUTUAL:
        needed["STOKER_TLS_CA"] = files.ca
    missing = [name for name, path in needed.items() if not path]
    if missing:
        raise StartError(
            f"STOKER_TLS={files.mode} needs certificates\n"
            f"set {' and '.join(missing)}; `stoker certs init` and `stoker certs issue` make them"
        )

    for name, path in needed.items():
        if not os.path.isabs(path):
            raise StartError(
                f"{name}={path} is not a whole path\n"
                "write one that begins with /: workers run in folders of their own"
            )


def check_private(key: str) -> None:
    """Raise StartError if everybody may read a private key."""
    if key and stat.S_IMODE(os.stat(key).st_mode) & 0o007:
        raise StartError(f"the private key {key} is readable by every user\nrun: chmod 600 {key}")
