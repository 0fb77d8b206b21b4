"""Where a runtime listens: never in plain where its cluster has TLS."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.exceptions import StartError
from stoker.runtime.net.channels import Channels
from stoker.runtime.process.identity import Identity, LocalNode
from stoker_wire.tls.files import TlsFiles

IO: Any = None


def identity(*, gcs_url: str, node_url: str = "", tcp_host: str | None = "127.0.0.1") -> Identity:
    node = LocalNode("n_1", node_url, "/nowhere") if node_url else None
    return Identity(
        peer_id="d_1",
        gcs_url=gcs_url,
        token="t",
        host_id="h",
        node=node,
        socket_path="",
        tcp_host=tcp_host,
    )


@pytest.mark.parametrize("node_url", ["", "https://10.0.0.1:7620"])
def test_a_runtime_refuses_to_listen_in_plain_in_a_cluster_with_tls(node_url: str) -> None:
    driver = identity(gcs_url="https://10.0.0.1:7600", node_url=node_url)
    with pytest.raises(StartError, match=r"(?s)STOKER_TLS.*certs issue NAME --host 127\.0\.0\.1"):
        Channels(driver, IO, TlsFiles("off", ca="/some/ca.pem"))


def test_a_runtime_that_listens_on_no_port_needs_no_certificate() -> None:
    driver = identity(gcs_url="https://10.0.0.1:7600", tcp_host=None)
    assert Channels(driver, IO, TlsFiles("off", ca="/some/ca.pem")).address.url == ""


def test_a_proxy_with_tls_before_the_gcs_makes_no_node_one_with_tls() -> None:
    driver = identity(gcs_url="https://proxy.example", node_url="http://10.0.0.1:7620")
    channels = Channels(driver, IO, TlsFiles())
    assert channels.address.url.startswith("http://127.0.0.1:")
    assert channels._tcp is not None
    channels._tcp.close()


def test_a_runtime_without_a_certificate_is_told_what_to_set() -> None:
    with pytest.raises(StartError, match="STOKER_TLS_CERT and STOKER_TLS_KEY"):
        Channels(identity(gcs_url="https://10.0.0.1:7600"), IO, TlsFiles("server"))
