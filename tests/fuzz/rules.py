"""Exceptions of the fuzzing of the API: operations that are left out, and rules that need state.

Whatever is in here is looked at by other tests; each entry says why it is here.
"""

from __future__ import annotations

import re

LEFT_OUT = {
    ("nodelet", "POST", "/v1/drain"): "ends the only node's work: tests/e2e/cluster, tests/chaos",
    ("nodelet", "POST", "/v1/leave"): "ends the only node: tests/e2e/cluster, tests/chaos",
    ("gcs", "GET", "/v1/jobs/{job_id}/session"): "a WebSocket: tests/contract/jobs",
    ("gcs", "GET", "/api/jobs/{submission_id}/logs/tail"): "a WebSocket: tests/contract/jobs",
}
"""Operations that no case is made for."""

SPARED = {
    ("gcs", "POST", "/v1/actors/{actor_id}/kill"),
    ("gcs", "POST", "/v1/actors/{actor_id}/report"),
    ("gcs", "DELETE", "/v1/detached-objects/{id}"),
    ("nodelet", "POST", "/v1/workers/{id}/kill"),
    ("nodelet", "POST", "/v1/workers/{id}/move"),
    ("nodelet", "POST", "/v1/workers/{id}/spent"),
}
"""Operations whose cases name nothing that is there: it would end what others are to meet, and is not
made again."""

SAY_LESS = {("gcs", "POST", "/api/jobs/")}
"""Operations whose schema says less than what is asked: ids and environments are Ray's there."""

BY_STATE = tuple(
    re.compile(rule, re.DOTALL)
    for rule in (
        # What there is.
        r"^cursor: .* is none of this list",
        r"^there is no queue ",
        r"^parent: there is no queue ",
        r"^parent: a queue cannot be below itself",
        r"^after: there is no job ",
        r"^attempt: job \S+ has at most \d+",
        r"^at: there is no event \d+ yet",
        r"^at: .* is in the future",
        r"^policy: .* is none",  # built in, or installed
        r"^quota: .* is more than ",
        r"^taints: a node has \d+ at most",
        r"^the key .* holds no whole number",
        r"^the key .* cannot hold ",
        r"^bundles: placement group \S+ has no bundle ",
        r"^replicas: \d+ are not \d+ to \d+",
        # What another member says, in words of the type.
        r"^min_replicas: \d+ (is more|replicas with)",
        r"^base_batch: \d+ is more than max_batch",
        r"^min_local_batch: \d+ is more",
        r"^resources: a replica (has one GPU or none|needs some)",
        r"^replicas: a bundle is there twice",
        r"^array: an index is there twice",
        r"^one_per_node: an array has indices of its own",
        r"^get_if_exists: needs a name",
        r"^job\.(job_id|after): ",
        r"^queues: .* is there twice",
        r"^indices: one for each",
        r"^demands: give one at least, or bundles",
        r"^target: .* has no process",
        r"^metric .*: a value does not fit its tags or boundaries",
        r"^metric .*: tags .*give each once",
        r"^metric .* is a \w+ with other tags or boundaries",
        r"^format: a \w+ profile has no ",
        r"^lease.job_id: ",  # the type of a lease, which others have too, has no pattern
        r"^to_s: the range ends before it begins",
        r"^background: what is in a placement group",
        r"^node_filter: the nodes of a placement group",
        r"^a join token gives the cluster's secret away, for ever",
        r"^once is for join tokens, namespaces are for people",
        r"^run_as: (jobs do not run as root|a \S+ token starts no jobs)",
        r"^state: .* is none",  # of that kind of records: GET /v1/state
        r"^the key .* is too long",  # with its namespace, in bytes
        # Bytes, which OpenAPI has no schema for.
        r"^the body is no spool of task records",
        r"^the (function|package) is not what it is named by",
    )
)
"""Reasons of 400 for a request that fits its schema."""

UNAVAILABLE = tuple(
    re.compile(reason, re.DOTALL)
    for reason in (
        r"passed its deadline of",
        r"^no .* leads now",
        r"^node n_\S+ is (dead|suspect)",
        r" still runs after ",
        r"got no answer\nCannot connect to host",  # a node that is none but a record
        r"is larger than the node's whole shared memory",
    )
)
"""Reasons of 503, 504 and 507 that are true of this cluster."""
