"""Imports without ballast: the same packages, and the same behaviour."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

CERTIFICATES = """
import json, ssl, sys
from stoker_wire.process import fast_imports
load = ssl.SSLContext.load_default_certs
fast_imports.import_aiohttp()
from aiohttp import connector
late = connector._SSL_CONTEXT_VERIFIED
before = late.cert_store_stats()["x509"]
late.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="example.org")
usual = ssl.create_default_context()
print(json.dumps({
    "before": before,
    "after": late.cert_store_stats()["x509"],
    "usual": usual.cert_store_stats()["x509"],
    "checks": late.verify_mode is ssl.CERT_REQUIRED and late.check_hostname,
    "plain": type(usual) is ssl.SSLContext and ssl.SSLContext.load_default_certs is load,
    "own": "set_default_verify_paths" in vars(ssl.SSLContext),
}))
"""

SERVICE = """
import json, sys
import stoker_wire.http.server.service
print(json.dumps({"rich": "rich" in sys.modules}))
"""


def told(program: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_certificates_are_read_when_tls_is_first_used() -> None:
    found = told(CERTIFICATES)
    assert found.pop("before") == 0
    assert found["after"] == found["usual"]
    assert found == {**found, "checks": True, "plain": True, "own": False}


def test_a_service_does_not_load_rich() -> None:
    assert told(SERVICE) == {"rich": False}
