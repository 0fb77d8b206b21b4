"""Waits for keys: a control store that stops answers them at once, and is not held up."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from stoker.launch import spawn_local
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.control import KvGet, KvOperation, KvReply
from tests.e2e._cluster import session_root

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 40.0


def test_a_control_store_that_stops_answers_waits_for_keys(tmp_path: Path) -> None:
    def asked(key: str, wait_s: float) -> bytes:
        return msgspec.json.encode(KvGet(keys=(key,), wait_s=wait_s), order="deterministic")

    with session_root(tmp_path):
        cluster = spawn_local(embedded=False, num_gpus=0, num_cpus=1)
        try:
            cluster.wait_ready()
            url = urlsplit(cluster.info.gcs_url)
            waiting = http.client.HTTPConnection(str(url.hostname), url.port or 0, timeout=WAIT_S)
            headers = {
                "Authorization": f"Bearer {cluster.info.token}",
                "Content-Type": "application/json",
            }
            waiting.request("POST", "/v1/kv/n", asked("never", 50.0), headers)
            client = HttpClient(cluster.info.gcs_url, token=cluster.info.token)
            body: KvOperation = KvGet(keys=("no",), wait_s=0.3)
            assert client.call("POST", "/v1/kv/n", body, reply=KvReply).items == ()
        finally:
            cluster.stop()
        answer = waiting.getresponse()
        assert answer.status == 503, answer.read()
        waiting.close()
    log = next(tmp_path.rglob("head.log")).read_text()
    assert not [line for line in log.splitlines() if "cut off" in line and "/v1/kv/" in line]
