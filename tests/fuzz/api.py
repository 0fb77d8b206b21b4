"""Fuzzing of the live API: Schemathesis makes cases of each operation by the service's own document.

A case that fits the document must be answered as documented, and not with 400 unless that depends on state.
One that does not fit must be refused as documented, and be no 5xx.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis import GenerationMode

from stoker_wire.messages.common import MAX_NAMES
from tests.fuzz import formats
from tests.fuzz.findings import Finding, Outcome
from tests.fuzz.requests import (
    EVENT_STREAM,
    JSON,
    MSGPACK,
    NDJSON,
    Connection,
    Replies,
    filled,
    request_of,
)
from tests.fuzz.rules import BY_STATE, LEFT_OUT, SAY_LESS, SPARED, UNAVAILABLE
from tests.fuzz.world import NEVER, harmless, world

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.fuzz.requests import Got, Sent
    from tests.fuzz.world import World

POSITIVE_SHARE = 0.7
MAX_ROUNDS = 3
_ACCEPTS = (JSON, JSON, MSGPACK, MSGPACK, NDJSON, EVENT_STREAM)


class ServiceFuzzer:
    """The cases of one service."""

    def __init__(self, world: World, service: str, *, seed: int) -> None:
        self.world, self.service, self.seed = world, service, seed
        self._api = world.services[service]
        self._document = self._api("GET", "/openapi.json").json
        formats.register()
        self._schema = schemathesis.openapi.from_dict(_with_msgpack(self._document))
        self._replies = Replies(self._document)
        self._findings: dict[str, Finding] = {}
        self._inputs = 0
        self.operations = [
            operation.ok()
            for operation in self._schema.get_all_operations()
            if (service, operation.ok().method.upper(), operation.ok().path) not in LEFT_OUT
        ]
        self._seconds = 0.0

    @property
    def outcome(self) -> Outcome:
        """What was found until now."""
        return Outcome(self.service, self._inputs, self._seconds, list(self._findings.values()))

    def fuzz(self, operation: Any, cases: int, again: int = 0) -> None:
        """Send cases of one operation; ``again`` they are others."""
        began_s = time.monotonic()
        name = name_of(operation)
        self.world.prepare()
        wrong = round(cases * (1 - POSITIVE_SHARE)) if _can_be_wrong(operation) else 0
        self._fuzz(operation, name, GenerationMode.POSITIVE, cases - wrong, again)
        self._fuzz(operation, name, GenerationMode.NEGATIVE, wrong, again)
        self._seconds += time.monotonic() - began_s

    def _fuzz(
        self, operation: Any, name: str, mode: GenerationMode, cases: int, again: int
    ) -> None:
        rng = random.Random(f"{self.seed} {self.service} {name} {mode} {again}")
        if not cases:
            return
        connection = Connection(self._api)

        @hypothesis_seed(rng.randrange(1 << 32))
        @settings(
            max_examples=cases, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(mode))
        def one(case: Any) -> None:
            sent = self._request(operation, case, rng, connection.host)
            got = connection.send(sent)
            self._inputs += 1
            for fault in self._faults(operation, mode, sent, got):
                self._add(name, fault, sent, got)

        try:
            one()
        finally:
            connection.close()

    def _request(self, operation: Any, case: Any, rng: random.Random, host: str) -> Sent:
        method = operation.method.upper()
        parameters = dict(case.path_parameters or {})
        if (self.service, method, operation.path) not in SPARED:
            for name in parameters:
                known = _fitting(self.world.known.get(name, []), operation, name)
                if known and rng.random() < 0.6:
                    parameters[name] = rng.choice(known)
        if case.media_type in (JSON, MSGPACK):
            case.body = harmless(case.body)
            _never_start(case.body, operation.path)
        return request_of(
            method, filled(operation.path, parameters), case,
            accept=rng.choice(_ACCEPTS), token=self._api.token, host=host,
        )  # fmt: skip

    def _faults(self, operation: Any, mode: GenerationMode, sent: Sent, got: Got) -> Iterator[str]:
        yield from self._replies.faults(operation.definition.raw, sent.method, got)
        text = got.body.decode(errors="replace")
        detail = _detail(got)
        if got.status >= 500 and not any(rule.search(detail) for rule in UNAVAILABLE):
            yield f"status {got.status}: {detail or text[:300]}"
        if (
            got.status == 400
            and mode is GenerationMode.POSITIVE
            and (self.service, sent.method, operation.path) not in SAY_LESS
            and not any(rule.search(detail) for rule in BY_STATE)
        ):
            yield f"a valid request is refused: {detail}"
        if "Traceback" in text:
            yield "a traceback is shown"

    def _add(self, name: str, fault: str, sent: Sent, got: Got) -> None:
        kind = f"{name} {_without_values(fault)}"
        if kind not in self._findings:
            repeat = f"python -m tests.fuzz --only {self.service} --seed {self.seed} --operation '{name}'"
            found = re.search(r"request id (\S+)", fault)
            trace = self.world.trace(found[1]) if found else ""
            self._findings[kind] = Finding(
                f"{name}: {fault}\n  sent {sent}\n  got {got.status}\n{trace}", repeat
            )


def _with_msgpack(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document in which each body of JSON may be msgpack as well, which ours says in words."""
    for ways in document["paths"].values():
        for operation in ways.values():
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content:
                content[MSGPACK] = {"schema": content[JSON]["schema"]}
    return document


def _fitting(values: list[str], operation: Any, name: str) -> list[str]:
    """Return those of some values that the document admits for a part of the path."""
    for one in operation.definition.raw["parameters"]:
        if (one["in"], one["name"]) == ("path", name):
            return [value for value in values if re.search(one["schema"]["pattern"], value)]
    return values


def name_of(operation: Any) -> str:
    """Return how an operation is named: ``POST /v1/jobs``."""
    return f"{operation.method.upper()} {operation.path}"


def fuzz_api(
    services: Iterable[str], *, seed: int, cases: int, operation: str = "", operations: int = 0
) -> list[Outcome]:
    """Fuzz the operations of some services of a cluster with ``cases`` in all.

    Only one ``operation``, or a number of them that are chosen by the seed.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-fuzz-") as folder, world(Path(folder)) as made:
        fuzzers = [ServiceFuzzer(made, service, seed=seed) for service in services]
        chosen = [
            (fuzzer, one)
            for fuzzer in fuzzers
            for one in fuzzer.operations
            if operation in ("", name_of(one))
        ]
        if operations:
            chosen = random.Random(f"{seed} operations").sample(chosen, operations)
        if operation:
            cases = cases // sum(len(fuzzer.operations) for fuzzer in fuzzers)
        each = max(2, -(-cases // len(chosen)))
        for again in range(MAX_ROUNDS):
            # An operation without parameters has one case: the others get more.
            for fuzzer, one in chosen:
                if not again or _can_be_wrong(one):
                    left = cases - sum(fuzzer.outcome.inputs for fuzzer in fuzzers)
                    if left > 0 or not again:
                        fuzzer.fuzz(one, each, again)
        return [fuzzer.outcome for fuzzer in fuzzers]


def _never_start(body: Any, path: str) -> None:
    """Have a job that is submitted ask for what there is none of."""
    job = body.get("job") if isinstance(body, dict) and path == "/v1/schedules" else body
    if path in ("/v1/jobs", "/v1/schedules") and isinstance(job, dict):
        job.setdefault("resources", {NEVER: 1})
    if path == "/api/jobs/" and isinstance(body, dict):
        asked = body.get("entrypoint_resources") or {}
        if isinstance(asked, dict) and len(asked) < MAX_NAMES:
            body["entrypoint_resources"] = {**asked, NEVER: 1}


def _can_be_wrong(operation: Any) -> bool:
    """Whether anything of an operation can be violated."""
    raw = operation.definition.raw
    body = raw.get("requestBody", {}).get("content", {})
    parameters = [one for one in raw.get("parameters", ()) if one["in"] == "query"]
    return bool(parameters or JSON in body)


def _detail(got: Got) -> str:
    if not got.content_type.endswith("problem+json"):
        return ""
    try:
        detail: str = json.loads(got.body)["detail"]
    except (ValueError, KeyError):
        return ""
    return detail


def _without_values(fault: str) -> str:
    """Return the kind of a fault: its text without quoted values and numbers."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", fault.split("\n")[0])[:100]
