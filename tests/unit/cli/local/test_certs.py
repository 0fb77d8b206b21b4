"""``stoker certs`` as a user types it, and what openssl says of the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from stoker.cli import root

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def certs(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(root, ["certs", *args, "--dir", str(folder)])


def made(folder: Path, *args: str) -> list[dict[str, Any]]:
    result = certs(folder, *args, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)
    return found


def openssl(*args: str, stdin: bytes = b"") -> str:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    done = subprocess.run(["openssl", *args], input=stdin, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(errors="replace")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a CA."""
    folder = tmp_path / "certs"
    made(folder, "init", "--name", "ours")
    return folder


def test_keys_are_private_and_a_second_ca_is_refused(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    made(folder, "issue", "node")
    for name in ("ca.key", "node.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    before = (folder / "ca.key").read_bytes()
    assert "has a CA already" in certs(folder, "init").output
    assert "stoker certs renew node" in certs(folder, "issue", "node").output
    assert (folder / "ca.key").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.key", "ca.pem", "node.key", "node.pem",
    ]  # fmt: skip


def test_openssl_accepts_a_nodes_certificate_for_servers_and_clients_by_its_hosts(
    folder: Path,
) -> None:
    [info] = made(folder, "issue", "node", "--host", "head.example", "--host", "10.0.0.7")
    assert info["hosts"] == ["head.example", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    strict = ("verify", "-x509_strict", "-CAfile", str(folder / "ca.pem"))
    for more in (
        ("-purpose", "sslserver", "-verify_hostname", "head.example"),
        ("-purpose", "sslserver", "-verify_ip", "10.0.0.7"),
        ("-purpose", "sslclient"),
    ):
        assert "OK" in openssl(*strict, *more, str(folder / "node.pem"))
    text = openssl("x509", "-in", str(folder / "node.pem"), "-noout", "-text")
    assert "prime256v1" in text
    assert "CA:FALSE" in text


def test_a_clients_certificate_is_one_for_clients_only(folder: Path) -> None:
    [info] = made(folder, "issue", "me", "--client", "--days", "7")
    assert (info["usages"], info["hosts"], info["days_left"]) == (["client"], [], 7)
    strict = ("verify", "-x509_strict", "-CAfile", str(folder / "ca.pem"), "-purpose")
    assert "OK" in openssl(*strict, "sslclient", str(folder / "me.pem"))
    with pytest.raises(AssertionError):
        openssl(*strict, "sslserver", str(folder / "me.pem"))
    assert certs(folder, "issue", "you", "--client", "--host", "h").exit_code == 2


def test_without_hosts_a_certificate_is_for_this_machine(folder: Path) -> None:
    from stoker.local.certificates import own_names

    [info] = made(folder, "issue", "node")
    assert set(own_names()) <= set(info["hosts"])


def test_show_says_what_kubeadm_and_openssl_say_of_the_ca(folder: Path) -> None:
    made(folder, "issue", "node")
    ca, node = made(folder, "show")
    assert (ca["is_ca"], node["is_ca"]) == (True, False)
    assert node["issuer"] == ca["subject"] == "CN=ours"
    path = str(folder / "ca.pem")
    der = subprocess.run(
        f"openssl x509 -pubkey -noout -in {path} | openssl pkey -pubin -outform der "
        "| openssl dgst -sha256 -r",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ca["public_key_hash"] == f"sha256:{der.stdout.split()[0]}"
    said = openssl("x509", "-in", path, "-noout", "-fingerprint", "-sha256")
    assert ca["fingerprint"] == f"sha256:{said.strip().partition('=')[2]}"
    [same] = made(folder, "show", path)
    assert same == ca
    text = certs(folder, "show").output
    assert "3650 days left" in text
    assert ca["public_key_hash"] in text


def test_a_renewed_certificate_keeps_its_names_and_key_unless_asked(folder: Path) -> None:
    [before] = made(folder, "issue", "node", "--host", "h.example", "--days", "1")
    [after] = made(folder, "renew", "node", "--days", "90")
    same = ("hosts", "usages", "subject", "public_key_hash")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert after["days_left"] == 90
    assert after["fingerprint"] != before["fingerprint"]
    [rekeyed] = made(folder, "renew", "node", "--new-key")
    assert rekeyed["public_key_hash"] != before["public_key_hash"]
    assert (folder / "node.key").stat().st_mode & 0o777 == 0o600
    made(folder, "issue", "me", "--client")
    assert made(folder, "renew", "me")[0]["usages"] == ["client"]


def test_no_certificate_outlives_its_ca(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    [ca] = made(folder, "init", "--days", "10")
    [node] = made(folder, "issue", "node", "--days", "365")
    assert node["not_after"] == ca["not_after"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("issue", "../x"), "no name of a certificate"),
        (("issue", "ca"), "no name of a certificate"),
        (("issue", "n", "--host", "a b"), "no name of a host"),
        (("issue", "n", "--host", "head:7600"), "no name of a host"),
        (("renew", "nobody"), "stoker certs issue nobody"),
        (("renew", "ca"), "replaced, not renewed"),
        (("show", "nobody"), "there is no certificate"),
    ],
)
def test_an_error_names_its_fix(folder: Path, args: tuple[str, ...], text: str) -> None:
    result = certs(folder, *args)
    assert result.exit_code == 1
    assert text in result.output
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem"]


def test_issuing_without_a_ca_says_how_to_make_one(tmp_path: Path) -> None:
    assert "stoker certs init" in certs(tmp_path, "issue", "node").output
    assert "stoker certs init" in certs(tmp_path, "show").output


def test_without_cryptography_the_command_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from stoker.cli import root; root(['certs', 'show'], prog_name='stoker')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "pip install 'stoker[tls]'" in done.stderr
    assert "Traceback" not in done.stderr
