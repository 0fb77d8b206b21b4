"""A machine sends its join token to no cluster but the one that was meant, and overwrites no token file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.local import certificates, joining
from stoker.local.joining import ca_cert_hash, check_ca, join
from stoker_wire.errors import ConflictError, StartError
from stoker_wire.http.auth import load_secrets, write_private
from stoker_wire.messages.control import JoinReply

if TYPE_CHECKING:
    from pathlib import Path


class Gcs:
    """Answers a join, and remembers that it was asked."""

    asked: list[str]

    def __init__(self, address: str, token: str) -> None:
        Gcs.asked.append(token)

    def call(self, method: str, path: str, **_: object) -> JoinReply:
        return JoinReply(secrets=("first", "second"))


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.init(tmp_path / "certs", name="CA of the test")
    monkeypatch.setenv("STOKER_TLS_CA", str(tmp_path / "certs" / "ca.pem"))
    Gcs.asked = []
    monkeypatch.setattr(joining, "HttpClient", Gcs)
    write_private(tmp_path / "join", "the join token\n")


def test_the_secrets_go_into_a_new_private_file(tmp_path: Path) -> None:
    path = join("https://head:7600", str(tmp_path / "join"), str(tmp_path / "new" / "token"))
    assert load_secrets(path) == ("first", "second")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConflictError, match="is there already"):
        join("https://head:7600", str(tmp_path / "join"), str(path))
    assert Gcs.asked == ["the join token"]


def test_nothing_is_sent_where_the_ca_is_another(tmp_path: Path) -> None:
    good = certificates.read(tmp_path / "certs" / "ca.pem").public_key_hash
    assert ca_cert_hash() == good
    check_ca(good)
    other = "sha256:" + "0" * 64
    with pytest.raises(StartError, match=r"copy its ca\.pem again"):
        join("https://head", str(tmp_path / "join"), str(tmp_path / "t"), ca_hash=other)
    assert Gcs.asked == [] and not (tmp_path / "t").exists()


def test_nothing_is_sent_in_the_clear_beyond_this_machine(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="in the clear"):
        join("http://10.0.0.1:7600", str(tmp_path / "join"), str(tmp_path / "t"))
    assert Gcs.asked == []
    join("http://127.0.0.1:7600", str(tmp_path / "join"), str(tmp_path / "t"))


def test_a_pin_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_TLS_CA")
    with pytest.raises(StartError, match="STOKER_TLS_CA is not set"):
        check_ca("sha256:" + "0" * 64)
