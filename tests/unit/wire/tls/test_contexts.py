"""Real services with TLS and their clients: who gets in, what is said to who does not, and renewal."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.local import certificates
from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import StartError, TlsError, UnavailableError
from stoker_wire.http.client.liveness import answers
from stoker_wire.settings import Settings
from stoker_wire.tls import contexts
from stoker_wire.tls.contexts import check_listener, client_context, context_for, server_context
from stoker_wire.tls.files import TlsFiles

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Service
    from tests.unit.wire.conftest import Cluster
    from tests.unit.wire.tls.conftest import Certs


HEALTHCHECK = str(Path(__file__).parents[4] / "scripts/healthcheck")


async def run(*command: str, said: bytes = b"") -> tuple[int, str]:
    """Run a program to its end; return its exit code and what it printed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(said), 30)
    return process.returncode or 0, out.decode(errors="replace")


def curl_options(certs: Certs, client: str) -> list[str]:
    trust, own = ["--cacert", certs.path("ca.pem")], certs.path("me.pem")
    return {
        "trusts CA": trust,
        "skips verification": ["-k"],
        "client certificate": [*trust, "--cert", own, "--key", certs.path("me.key")],
    }[client]


def openssl_options(certs: Certs, client: str) -> list[str]:
    trust = ["-CAfile", certs.path("ca.pem"), "-verify_return_error"]
    return {
        "trusts CA": trust,
        "skips verification": [],
        "client certificate": [*trust, "-cert", certs.path("me.pem"), "-key", certs.path("me.key")],
    }[client]


async def serve(cluster: Cluster, certs: Certs, kind: str, request: Any) -> Service:
    settings = {
        "CA-signed": lambda: certs.settings("server"),
        "self-signed": lambda: certs.settings(
            "server",
            request.getfixturevalue("self_signed"),
            tls_ca=certs.path("self.pem"),
        ),
        "requires client certificate": lambda: certs.settings("mutual"),
    }[kind]()
    return await cluster.start(cluster.service(**settings))


MATRIX = [
    ("CA-signed", "trusts CA", True),
    ("CA-signed", "skips verification", True),
    ("CA-signed", "client certificate", True),
    ("self-signed", "trusts CA", False),
    ("self-signed", "skips verification", True),
    ("self-signed", "client certificate", False),
    ("requires client certificate", "trusts CA", False),
    ("requires client certificate", "skips verification", False),
    ("requires client certificate", "client certificate", True),
]


@pytest.mark.logs("TLS: a client")
@pytest.mark.parametrize(("server", "client", "gets_in"), MATRIX)
async def test_curl_and_openssl_get_in_where_they_should(
    cluster: Cluster,
    certs: Certs,
    request: pytest.FixtureRequest,
    server: str,
    client: str,
    gets_in: bool,
) -> None:
    service = await serve(cluster, certs, server, request)
    assert service.url.startswith("https://127.0.0.1:")
    code, said = await run(
        *("curl", "-sS", "-m", "10", "-w", "%{http_code}", "-o", "/dev/null"),
        *(*curl_options(certs, client), f"{service.url}/healthz"),
    )
    assert (code == 0 and said == "200") is gets_in, said
    # Reading on shows what a client of TLS 1.3 learns after its own end of the handshake.
    _, said = await run(
        *("openssl", "s_client", "-connect", f"127.0.0.1:{service.port}", "-ign_eof", "-quiet"),
        *openssl_options(certs, client),
        said=b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n",
    )
    assert ("200 OK" in said) is gets_in, said


@pytest.mark.parametrize("mode", ["off", "server", "mutual"])
async def test_the_health_check_of_the_image_asks_in_each_mode(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    settings = certs.settings(mode)
    service = await cluster.start(cluster.service(**settings))
    for name, value in settings.items():
        monkeypatch.setenv(f"STOKER_{name.upper()}", value)
    monkeypatch.setenv("STOKER_PORT", str(service.port))
    assert await run("bash", HEALTHCHECK) == (0, "")
    service.ready(False)
    code, _ = await run("bash", HEALTHCHECK)
    assert code == 1, "it answers, and is not ready"
    await service.stop()
    code, _ = await run("bash", HEALTHCHECK)
    assert code == 1, "nobody answers"


async def test_old_versions_of_tls_are_refused(cluster: Cluster, certs: Certs) -> None:
    service = await cluster.start(cluster.service(**certs.settings("server")))
    where = f"127.0.0.1:{service.port}"
    for version, works in (("-tls1_3", True), ("-tls1_2", False)):
        code, said = await run("openssl", "s_client", "-connect", where, version)
        assert (code == 0) is works, said


async def test_both_clients_of_ours_get_in_with_a_certificate(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    client = cluster.client(service, settings=Settings(**certs.settings("mutual", "me")))
    await client.call("GET", "/readyz")
    for name, value in certs.settings("mutual", "me").items():
        monkeypatch.setenv(f"STOKER_{name.upper()}", value)
    plain = HttpClient(service.url, token="correct-horse")
    await asyncio.to_thread(plain.call, "GET", "/readyz")
    assert await answers(service.url, certs.files("mutual", "me"))


@pytest.mark.logs("TLS: a client sent no certificate")
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_a_client_without_a_certificate_is_told_which_setting_to_set(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    await refused(cluster, service, certs.trusting(), monkeypatch, kind, "STOKER_TLS_CERT")


@pytest.mark.logs("TLS: a client does not trust this server's certificate")
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_a_server_of_another_ca_is_refused(
    cluster: Cluster, certs: Certs, other: Certs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = await cluster.start(cluster.service(**other.settings("server")))
    await refused(
        cluster,
        service,
        certs.trusting(),
        monkeypatch,
        kind,
        r"(?s)signed by no CA that this process trusts.*STOKER_TLS_CA",
    )


@pytest.mark.logs("TLS: a client")
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_a_client_of_another_ca_is_refused(
    cluster: Cluster, certs: Certs, other: Certs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    files = TlsFiles("off", other.path("node.pem"), other.path("node.key"), certs.path("ca.pem"))
    await refused(cluster, service, files, monkeypatch, kind, "STOKER_TLS_CERT")


@pytest.mark.logs("TLS: a client")
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_an_expired_certificate_is_called_expired(
    cluster: Cluster, certs: Certs, expired: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = await cluster.start(cluster.service(**certs.settings("mutual")))
    await refused(
        cluster, service, certs.files("off", expired), monkeypatch, kind, "(?s)expired.*certs renew"
    )
    with pytest.raises(StartError, match=r"(?s)has expired.*certs renew"):
        await cluster.start(cluster.service(**certs.settings("server", expired)))


@pytest.mark.logs("TLS: a client refuses this server's certificate")
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_a_certificate_of_another_name_is_refused(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings = certs.settings("server", advertise_host="127.0.0.1")
    service = await cluster.start(cluster.service(**settings), host="0.0.0.0")
    url = f"https://127.0.0.2:{service.port}"
    await refused(
        cluster, service, certs.trusting(), monkeypatch, kind, r"not for 127\.0\.0\.2", url=url
    )


async def refused(
    cluster: Cluster,
    service: Service,
    files: TlsFiles,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    text: str,
    *,
    url: str = "",
) -> None:
    """A client with these files is refused at once, and its error has this text."""
    names = dict(zip(("tls", "tls_cert", "tls_key", "tls_ca"), files, strict=True))
    url = url or service.url
    with pytest.raises(TlsError, match=text):
        if kind == "loop":
            settings = Settings(**names)
            from stoker_wire.http.client.client import Client

            async with Client(url, token="t", peer="me", settings=settings) as client:
                await client.call("GET", "/readyz", timeout_s=20)
        else:
            for name, value in names.items():
                monkeypatch.setenv(f"STOKER_{name.upper()}", value)
            client = HttpClient(url, token="t", timeout_s=20)
            await asyncio.to_thread(client.call, "GET", "/readyz")


async def test_an_address_without_tls_is_refused_where_tls_is_on(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await cluster.start(cluster.service())
    await refused(cluster, service, certs.files("server"), monkeypatch, "loop", "https://")
    await refused(cluster, service, certs.files("server"), monkeypatch, "thread", "https://")
    assert context_for(service.url, TlsFiles()) is None


async def test_a_port_of_tls_answers_nothing_in_plain(cluster: Cluster, certs: Certs) -> None:
    service = await cluster.start(cluster.service(**certs.settings("server")))
    client = cluster.client(service)
    client._endpoints.current = client._endpoints.urls[0].replace("https", "http")
    with pytest.raises(UnavailableError):
        await client.call("GET", "/healthz", retry=False)


async def test_a_renewed_certificate_is_used_without_a_restart(
    cluster: Cluster, certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "LOOK_S", 0.0)
    service = await cluster.start(cluster.service(**certs.settings("server")))
    before = await serial(service, certs)
    assert await serial(service, certs) == before
    certificates.renew(certs.folder, "node")
    assert await serial(service, certs) != before


@pytest.mark.logs("the old certificate stays in use")
async def test_files_that_do_not_fit_together_leave_the_last_good_ones(
    cluster: Cluster,
    certs: Certs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(contexts, "LOOK_S", 0.0)
    service = await cluster.start(cluster.service(**certs.settings("server")))
    before = await serial(service, certs)
    key = certs.folder / "node.key"
    good = key.read_bytes()
    key.write_bytes((certs.folder / "me.key").read_bytes())
    assert await serial(service, certs) == before
    assert await serial(service, certs) == before
    assert len([one for one in caplog.records if "stays in use" in one.message]) == 1
    key.write_bytes(good)
    certificates.renew(certs.folder, "node")
    assert await serial(service, certs) != before


async def test_a_ca_that_was_replaced_lets_in_nobody_of_the_old_one(
    cluster: Cluster, certs: Certs, other: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "LOOK_S", 0.0)
    files = certs.files("mutual")
    server = server_context(files)
    assert handshake(server, client_context(certs.files("off", "me"))) == ""
    for name in ("ca.pem", "node.pem", "node.key"):
        shutil.copy(other.path(name), certs.path(name))
    mine = TlsFiles("off", certs.path("me.pem"), certs.path("me.key"), other.path("ca.pem"))
    assert "CERTIFICATE_VERIFY_FAILED" in handshake(server, client_context(mine))
    theirs = TlsFiles("off", other.path("node.pem"), other.path("node.key"), other.path("ca.pem"))
    assert handshake(server, client_context(theirs)) == ""


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The error of a handshake in memory, or nothing."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(down, up, server_hostname="localhost"),
        server.wrap_bio(up, down, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(error)
    return ""


async def serial(service: Service, certs: Certs) -> str:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=certs.path("ca.pem"))
    _, writer = await asyncio.open_connection("127.0.0.1", service.port, ssl=context)
    number: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return number


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_cert": ""}, r"set STOKER_TLS_CERT;"),
        (
            {"tls_cert": "", "tls_key": "", "tls_ca": ""},
            "CERT and STOKER_TLS_KEY and STOKER_TLS_CA",
        ),
        ({"tls_cert": "node.pem"}, r"(?s)STOKER_TLS_CERT=node\.pem is not a whole path"),
        ({"tls_ca": "/nowhere"}, r"(?s)/nowhere.*STOKER_TLS_CA"),
        ({"tls_cert": "/nowhere"}, r"(?s)/nowhere.*STOKER_TLS_CERT"),
        ({"advertise_host": "head.example"}, r"(?s)not for head\.example.*--host head\.example"),
    ],
)
async def test_a_service_does_not_start_with_what_its_clients_would_refuse(
    cluster: Cluster, certs: Certs, settings: dict[str, str], text: str
) -> None:
    service = cluster.service(**certs.settings("mutual", **settings))
    with pytest.raises(StartError, match=text):
        await cluster.start(service)
    assert not service.port


def test_a_foreign_ca_a_foreign_key_and_a_clients_certificate_stop_a_start(
    certs: Certs, other: Certs
) -> None:
    foreign = certs.files(tls_ca=other.path("ca.pem"))
    with pytest.raises(StartError, match=r"(?s)signed by no CA.*STOKER_TLS_CA"):
        check_listener("gcs", "localhost", foreign)
    with pytest.raises(StartError, match="another certificate's"):
        check_listener("gcs", "localhost", certs.files(tls_key=certs.path("me.key")))
    with pytest.raises(StartError, match="clients only"):
        check_listener("gcs", "localhost", certs.files(name="me"))
    os.chmod(certs.folder / "node.key", 0o644)
    with pytest.raises(StartError, match="chmod 600"):
        check_listener("gcs", "localhost", certs.files("server"))


def test_what_the_check_of_a_start_finds_is_not_logged_as_a_clients_failure(
    certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StartError):
        check_listener("gcs", "head.example", certs.files())
    assert not caplog.records
