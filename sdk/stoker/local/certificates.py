"""Certificates of a cluster: a CA of its own, and what it signs, as files in one folder.

For ``stoker certs`` alone, the one place that needs the package ``cryptography``: TLS itself is Python's
``ssl`` (:mod:`stoker_wire.tls`). A folder has ``ca.pem``, ``ca.key``, and of each certificate its
``NAME.pem`` and ``NAME.key``; keys are ECDSA P-256, mode 0600. Files appear whole.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import os
import re
import socket
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.errors import BadRequestError, ConflictError, NotFoundError, StartError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError:
    raise StartError(
        "certificates are made by the package cryptography, which is missing\n"
        "run: pip install 'stoker[tls]'"
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

CA = "ca"
CA_DAYS = 3650
DAYS = 365
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names of every certificate of a node: its processes reach each other by them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_BACKDATED = dt.timedelta(minutes=10)
"""Clocks of machines differ by that much at most."""


class CertificateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One certificate, as ``stoker certs show`` prints it."""

    path: str
    subject: str
    issuer: str
    hosts: tuple[str, ...]
    is_ca: bool
    usages: tuple[str, ...]
    not_before: str
    not_after: str
    days_left: int
    fingerprint: str
    public_key_hash: str
    """Of the public key, as kubeadm writes that of a CA: what a joining node may pin."""


def init(folder: Path, *, name: str, days: int = CA_DAYS) -> CertificateInfo:
    """Make a CA; ConflictError if there is one."""
    path = folder / f"{CA}.pem"
    if path.exists() or path.with_suffix(".key").exists():
        raise ConflictError(
            f"{folder} has a CA already\n"
            "issue certificates with it (stoker certs issue), or make another with --dir"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    _write(folder, CA, key, builder.sign(key, hashes.SHA256()))
    return read(path)


def issue(
    folder: Path, name: str, hosts: Sequence[str] = (), *, client: bool = False, days: int = DAYS
) -> CertificateInfo:
    """Make a key and its certificate: of a node (server and client) for ``hosts``, or of a client alone."""
    if not _NAME.fullmatch(name) or name == CA:
        raise BadRequestError(
            f"{name!r} is no name of a certificate\n"
            "write letters, digits, dots and dashes, and not 'ca', which is the CA",
            field="name",
        )
    path = folder / f"{name}.pem"
    if path.exists():
        raise ConflictError(
            f"there is a certificate {path} already\n"
            f"renew it (stoker certs renew {name}), or remove it first"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    names = () if client else tuple(dict.fromkeys((*hosts, *ALWAYS)))
    _sign(folder, name, key, _alternative_names(names), client=client, days=days, writes_key=True)
    return read(path)


def renew(folder: Path, name: str, *, days: int = DAYS, new_key: bool = False) -> CertificateInfo:
    """Sign the certificate again for ``days`` from now, with the same names and, unless asked, key."""
    path = folder / f"{name}.pem"
    old = _load(path)
    if name == CA or _is_ca(old):
        raise BadRequestError(
            f"{path} is a CA, which is replaced, not renewed\nsee docs/tls.md: another CA",
            field="name",
        )
    try:
        hosts = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        hosts = None
    key = ec.generate_private_key(ec.SECP256R1()) if new_key else _load_key(path)
    client = "server" not in _usages(old)
    _sign(folder, name, key, hosts, client=client, days=days, writes_key=new_key)
    return read(path)


def own_names() -> tuple[str, ...]:
    """Return the names by which other machines most likely reach this one."""
    from stoker_wire.http.server.request_guard import outward_address

    return tuple(dict.fromkeys((socket.gethostname(), outward_address())))


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder's certificates, the CA first."""
    found = sorted(path.stem for path in folder.glob("*.pem"))
    return sorted(found, key=lambda name: name != CA)


def read(path: Path) -> CertificateInfo:
    """Return what a file's first certificate says."""
    certificate = _load(path)
    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    public = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex(":").upper()
    return CertificateInfo(
        path=str(path),
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        hosts=_hosts(certificate),
        is_ca=_is_ca(certificate),
        usages=_usages(certificate),
        not_before=certificate.not_valid_before_utc.isoformat(),
        not_after=certificate.not_valid_after_utc.isoformat(),
        days_left=round(left / dt.timedelta(days=1)),
        fingerprint=f"sha256:{fingerprint}",
        public_key_hash=f"sha256:{hashlib.sha256(public).hexdigest()}",
    )


def _sign(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    hosts: x509.SubjectAlternativeName | None,
    *,
    client: bool,
    days: int,
    writes_key: bool,
) -> None:
    ca, ca_key = _load(folder / f"{CA}.pem"), _load_key(folder / f"{CA}.pem")
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if not client:
        usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, ca.subject, key.public_key(), days, until=ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if hosts is not None:
        builder = builder.add_extension(hosts, critical=False)
    _write(folder, name, key if writes_key else None, builder.sign(ca_key, hashes.SHA256()))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    until: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end if until is None else min(end, until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(hosts: Iterable[str]) -> x509.SubjectAlternativeName | None:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
        except ValueError:
            if not _HOST.fullmatch(host):
                raise BadRequestError(
                    f"{host!r} is no name of a host\n"
                    "write a DNS name or an IP address, without a port",
                    field="host",
                ) from None
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names) if names else None


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def _usages(certificate: x509.Certificate) -> tuple[str, ...]:
    known = {
        ExtendedKeyUsageOID.SERVER_AUTH: "server",
        ExtendedKeyUsageOID.CLIENT_AUTH: "client",
    }
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(known.get(usage, usage.dotted_string) for usage in usages)


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        how = "stoker certs init" if path.stem == CA else f"stoker certs issue {path.stem}"
        raise NotFoundError(f"there is no certificate {path}\nmake it: {how}") from None
    except (OSError, ValueError) as error:
        raise BadRequestError(f"{path} is no certificate in PEM\n{error}", field="path") from None


def _load_key(certificate: Path) -> ec.EllipticCurvePrivateKey:
    path = certificate.with_suffix(".key")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no private key {path}\ngo to the machine that has it: it signs or is renewed there"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise BadRequestError(f"{path} is no private key in PEM\n{error}", field="path") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadRequestError(f"{path} is no key of ECDSA\nrenew it with --new-key", field="path")
    return key


def _write(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey | None,
    certificate: x509.Certificate,
) -> None:
    """Write the key, if it is new, and then its certificate."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if key is not None:
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _replace(folder / f"{name}.key", pem, 0o600)
    _replace(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
