"""The token of an agent: each that the node's actor has is sent to it, and shown from then on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

import pytest

from stoker_train.launch.node import send_tokens
from stoker_wire.http.auth import Credential

pytest.importorskip("torch")
WAIT_S = 40.0
ECHO = """
import sys
for line in sys.stdin:
    print("got", line.strip(), flush=True)
"""


def test_each_token_of_the_actor_is_sent_while_the_agent_lives() -> None:
    credential = Credential("first")
    with subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        thread = threading.Thread(target=send_tokens, args=(process, "first", credential))
        thread.start()
        assert process.stdout is not None
        for token in ("second", "third"):
            credential.replace(token)
            assert process.stdout.readline() == f"got {token}\n".encode(), "and not the first"
        process.kill()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_what_is_sent_is_shown_to_the_cluster_and_has_workers_that_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stoker_train.launch.agent import follow_tokens

    monkeypatch.setenv("STOKER_TOKEN", "first")
    credential = Credential("first")
    follow_tokens(io.BytesIO(b"second\nthird\n"), credential)
    assert credential.header == "Bearer third"
    assert os.environ["STOKER_TOKEN"] == "third"
