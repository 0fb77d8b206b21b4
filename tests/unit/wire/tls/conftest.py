"""A CA, what it has signed, and a certificate that nobody has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.local import certificates
from stoker_wire.settings import Settings
from stoker_wire.tls.files import TlsFiles, files_of


class Certs(NamedTuple):
    """A folder of ``stoker certs``."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def settings(self, mode: str = "mutual", name: str = "node", **more: Any) -> dict[str, Any]:
        """The settings of a process with the certificate of that name."""
        files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": "ca.pem"}
        return {"tls": mode, **{key: self.path(file) for key, file in files.items()}, **more}

    def files(self, mode: str = "mutual", name: str = "node", **more: Any) -> TlsFiles:
        return files_of(Settings(**self.settings(mode, name, **more)))

    def trusting(self, mode: str = "off") -> TlsFiles:
        """Those of a client without a certificate."""
        return TlsFiles(mode, ca=self.path("ca.pem"))


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certificates.init(folder, name="the cluster's CA")
    certificates.issue(folder, "node", ["node.example"])
    certificates.issue(folder, "me", client=True)
    other = folder / "other"
    certificates.init(other, name="another CA")
    certificates.issue(other, "node")
    return folder


@pytest.fixture
def certs(_made: Path, tmp_path: Path) -> Certs:
    """``node``, a ``me`` for a client, and in ``other`` the same of another CA."""
    return Certs(Path(shutil.copytree(_made, tmp_path / "certs")))


@pytest.fixture
def other(certs: Certs) -> Certs:
    """The certificates of another CA."""
    return Certs(certs.folder / "other")


def openssl(*args: str, cwd: Path) -> None:
    """Run openssl; skip without it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=30)


@pytest.fixture
def expired(certs: Certs) -> str:
    """The name of a certificate that was good last year."""
    long_ago = "20240101000000Z"
    openssl(
        "req", "-new", "-key", "node.key", "-subj", "/CN=old", "-out", "old.csr", cwd=certs.folder
    )
    (certs.folder / "old.ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    (certs.folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=it\n[it]\ndatabase=index.txt\nnew_certs_dir=.\nserial=serial\n"
        "default_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n"
    )
    (certs.folder / "index.txt").touch()
    (certs.folder / "serial").write_text("1000\n")
    openssl(
        *("ca", "-batch", "-config", "ca.cnf", "-cert", "ca.pem", "-keyfile", "ca.key"),
        *("-in", "old.csr", "-extfile", "old.ext", "-notext", "-out", "old.pem"),
        *("-startdate", long_ago, "-enddate", "20240201000000Z"),
        cwd=certs.folder,
    )
    shutil.copy(certs.folder / "node.key", certs.folder / "old.key")
    return "old"


@pytest.fixture
def self_signed(certs: Certs) -> str:
    """The name of a certificate that no CA has signed."""
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", "/CN=self", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
        *("-keyout", "self.key", "-out", "self.pem"),
        cwd=certs.folder,
    )
    os.chmod(certs.folder / "self.key", 0o600)
    return "self"
