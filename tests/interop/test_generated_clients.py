"""Clients that generators make of our OpenAPI documents, as docs/http-clients.md says: ``make interop``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("openapi_python_client", reason="no generator is installed: make interop")

import stoker
from stoker.launch import spawn_local
from tests.e2e._cluster import environment, session_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

PAGE = (Path(__file__).parents[2] / "docs/http-clients.md").read_text()
FILES = {"python": re.compile(r"# (\S+\.py)\n"), "ts": re.compile(r"// (\S+\.mts)\n")}
COMMAND_S = 240.0
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(3 * COMMAND_S)]


class Reader:
    """Somebody who does what a section of the page says, in a folder."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.folder = folder
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = environment(cluster, PATH=programs, STOKER_GATEWAY=cluster.info.gateway_url)

    def follows(self, section: str) -> str:
        """Write the programs of a section and run its commands, in order; return what they say."""
        text = PAGE.partition(f"\n### {section}\n")[2].partition("\n### ")[0]
        said = []
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if language == "sh":
                said.append(self.runs(block))
            elif name := FILES[language].match(block):
                (self.folder / name[1]).write_text(block)
        assert said, f"the page has no section {section!r}"
        return "".join(said)

    def runs(self, command: str) -> str:
        """Run lines of shell; return what they say, stderr too."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
        return done.stdout

    def program(self, name: str, text: str) -> None:
        """Write a program beside the client."""
        (self.folder / name).write_text(textwrap.dedent(text))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with session_root(tmp_path_factory.mktemp("s")):
        made = spawn_local(embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            made.wait_ready()
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def python(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, str]:
    reader = Reader(cluster, tmp_path_factory.mktemp("python"))
    return reader, reader.follows("Python")


@pytest.fixture(scope="module")
def typescript(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Reader, str]:
    if shutil.which("npm", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("Node is not installed: make interop")
    reader = Reader(cluster, tmp_path_factory.mktemp("typescript"))
    return reader, reader.follows("TypeScript")


def test_the_python_client_drives_a_job_to_its_result(python: tuple[Reader, str]) -> None:
    _, said = python
    assert said.endswith("SUCCEEDED 0\nhalf way\n\nb'42'\n"), said
    assert "warning" not in said.lower(), "the generator leaves nothing out"


def test_all_of_the_python_client_is_imported_and_has_types(python: tuple[Reader, str]) -> None:
    reader, _ = python
    reader.program(
        "load.py",
        """\
        import importlib, pkgutil
        import stoker_api
        names = [m.name for m in pkgutil.walk_packages(stoker_api.__path__, "stoker_api.")]
        for name in names:
            importlib.import_module(name)
        print(len(names))
        """,
    )
    assert int(reader.runs("python load.py")) > 300
    # Of the generator's own files one is not quite right: only what is made of the document counts.
    reader.runs(
        "python -m mypy --strict --follow-imports silent -p stoker_api.api -p stoker_api.models\n"
        "python -m mypy --strict --follow-imports silent submit.py"
    )


def test_the_python_client_sends_and_gets_bytes_pages_and_problems(
    python: tuple[Reader, str],
) -> None:
    reader, _ = python
    reader.program(
        "more.py",
        """\
        import io, json, os, tarfile
        import httpx
        from stoker_api import AuthenticatedClient
        from stoker_api.api.jobs import (
            download_job_output, get_job, get_job_logs, list_jobs, stop_job, submit_job,
        )
        from stoker_api.api.kv import change_keys, get_key, put_key
        from stoker_api.models import KvAdd, KvAddOp, Problem, SubmitJob
        from stoker_api.types import File

        client = AuthenticatedClient(
            os.environ["STOKER_ADDRESS"], token=os.environ["STOKER_TOKEN"],
            timeout=httpx.Timeout(60), raise_on_unexpected_status=True,
        )
        missing = get_job.sync("job_0123456789abcdef", client=client)
        assert isinstance(missing, Problem) and missing.code == "not_found", missing
        wrong = submit_job.sync(client=client, body=SubmitJob(entrypoint=""))
        assert isinstance(wrong, Problem) and wrong.status == 400, wrong

        put_key.sync("team", "deep/er", client=client, body=File(io.BytesIO(bytes(range(256)))))
        assert get_key.sync("team", "deep/er", client=client).payload.read() == bytes(range(256))
        sum_ = change_keys.sync("team", client=client, body=KvAdd(op=KvAddOp.ADD, key="n", amount=3))
        assert sum_.value, sum_

        write = "echo line; echo kept > $STOKER_JOB_OUTPUT_DIR/kept.txt; sleep 600"
        same = [
            submit_job.sync(client=client, body=SubmitJob(entrypoint=write), idempotency_key="once")
            for _ in range(2)
        ]
        job_id = same[0].job_id
        assert same[1].job_id == job_id
        while True:
            lines = get_job_logs.sync(job_id, client=client)
            if lines:
                break
        assert json.loads(lines.splitlines()[0])["text"] == "line", lines
        ended = stop_job.sync(job_id, client=client)
        while not ended.ended_at_s:
            ended = get_job.sync(job_id, client=client, wait_s=20)
        assert ended.state == "STOPPED", ended
        archive = download_job_output.sync(job_id, client=client)
        with tarfile.open(fileobj=archive.payload) as tar:
            assert any(name.endswith("kept.txt") for name in tar.getnames()), tar.getnames()

        found, cursor = [], ""
        while True:
            page = list_jobs.sync(client=client, limit=1, cursor=cursor)
            found += [job.job_id for job in page.items]
            cursor = page.next_cursor
            if not cursor:
                break
        assert job_id in found and len(set(found)) == len(found) >= 2, found
        """,
    )
    reader.runs("python more.py")


def test_the_typescript_client_drives_a_job_to_its_result(typescript: tuple[Reader, str]) -> None:
    _, said = typescript
    assert said.endswith("SUCCEEDED 0\nhalf way\n\n42\n"), said


def test_the_typescript_client_sends_bytes_and_knows_problems(
    typescript: tuple[Reader, str],
) -> None:
    reader, _ = typescript
    reader.program(
        "more.mts",
        """\
        import assert from "node:assert";
        import createClient from "openapi-fetch";
        import type { paths } from "./stoker.js";

        const client = createClient<paths, "application/json" | "application/problem+json">({
          baseUrl: process.env.STOKER_ADDRESS!,
          headers: { Authorization: `Bearer ${process.env.STOKER_TOKEN}` },
        });
        const missing = await client.GET("/v1/jobs/{job_id}", {
          params: { path: { job_id: "job_0123456789abcdef" } },
        });
        assert.equal(missing.error?.code, "not_found");

        const path = { namespace: "team", key: "by/ts" };
        await client.PUT("/v1/kv/{namespace}/{key}", {
          params: { path },
          body: "a\\nb",
          bodySerializer: (body) => body,
          headers: { "Content-Type": "application/octet-stream" },
        });
        const got = await client.GET("/v1/kv/{namespace}/{key}", {
          params: { path },
          parseAs: "arrayBuffer",
        });
        assert.equal(Buffer.from(got.data!).toString(), "a\\nb");

        const page = await client.GET("/v1/jobs", { params: { query: { limit: 1 } } });
        const ids: string[] = page.data!.items.map((job) => job.job_id);
        assert.equal(ids.length, 1);
        """,
    )
    reader.runs("npx tsc --strict --target es2022 --module nodenext more.mts && node more.mjs")


def test_a_client_of_calls_is_made_of_the_gateways_document(
    python: tuple[Reader, str], cluster: LocalCluster
) -> None:
    reader, _ = python
    said = reader.runs(
        'curl -sf -H "Authorization: Bearer $STOKER_TOKEN" '
        '"$STOKER_GATEWAY/v1/calls/openapi.json" >calls.json\n'
        "openapi-python-client generate --path calls.json --meta none --output-path calls_api"
    )
    assert "warning" not in said.lower(), said
    reader.program(
        "calls.py",
        """\
        import io, os
        import httpx
        from calls_api import AuthenticatedClient
        from calls_api.api.calls import call, list_functions
        from calls_api.api.refs import get_ref, get_value, put_object
        from calls_api.models import CallReply, CallRequest, HeldRef, Problem
        from calls_api.types import File

        client = AuthenticatedClient(
            os.environ["STOKER_GATEWAY"], token=os.environ["STOKER_TOKEN"],
            timeout=httpx.Timeout(60), raise_on_unexpected_status=True,
        )
        (square,) = list_functions.sync(client=client, namespace="team").items
        assert square.name == "square", square
        body = CallRequest(function="square", namespace="team", args=[3])
        nine = call.sync(client=client, body=body)
        assert isinstance(nine, CallReply) and nine.result == 9, nine
        body.async_ = True
        held = call.sync(client=client, body=body)
        assert isinstance(held, HeldRef), held
        while held.state == "PENDING":
            held = get_ref.sync(held.ref, client=client, wait_s=20)
        value = get_value.sync(held.ref, client=client)
        assert value.payload.read() == b"9", value
        put = put_object.sync(client=client, body=File(io.BytesIO(b"as it is")))
        assert isinstance(put, HeldRef), put
        assert get_value.sync(put.ref, client=client, wait_s=20).payload.read() == b"as it is"
        body.function = "cube"
        assert isinstance(call.sync(client=client, body=body), Problem)
        """,
    )
    stoker.init(
        cluster.info.gcs_url, token=cluster.info.token, namespace="team", log_to_driver=False
    )
    try:
        stoker.register(lambda x: x * x, name="square")
        reader.runs("python calls.py")
    finally:
        stoker.shutdown()
