"""Texts of the errors of requests, of services and of processes that start."""

from __future__ import annotations

from typing import Final

from stoker_wire.http.error_pages.texts import HANDLES, NEEDS, ErrorTexts

OF_REQUESTS: Final[dict[str, ErrorTexts]] = {
    "stoker_error": ErrorTexts(
        "Stoker answered with a code that this version does not know: the other side is newer.",
        "Read the message, which has the fix. Install the same version on both sides.",
        """
try:
    stoker.get(ref, timeout=60)
except stoker.exceptions.StokerError as error:  # every error of Stoker
    print(error.code, error.one_line)
""",
        HANDLES,
    ),
    "bad_request": ErrorTexts(
        "A value is out of its bounds, two options exclude each other, or a text cannot be read. "
        "`field` names the input at fault.",
        "Change that input as the second line of the message says.",
        """
@stoker.remote(num_cpus=-1)
def step(): ...
""",
    ),
    "wrong_type": ErrorTexts(
        "An argument or an option has another type than is documented.",
        "Pass the type that the message names. [Options](../options.md) has the types of all options.",
        """
@stoker.remote(num_cpus="two")
def step(): ...
""",
    ),
    "unknown_option": ErrorTexts(
        "The name of an option is misspelt, or it is an option of actors on a function.",
        "Use the name that the message suggests, or look it up in [options](../options.md).",
        """
@stoker.remote(num_cpu=1)
def step(): ...
""",
    ),
    "unauthorized": ErrorTexts(
        "The request carries no token, one of another cluster, or one that has ended or was revoked.",
        "Set `STOKER_TOKEN`, or `STOKER_TOKEN_FILE`, to a token of this cluster; `stoker token whoami` "
        "says whose it is. See [tokens](../tokens.md).",
        """
$ STOKER_TOKEN=wrong stoker status --address http://127.0.0.1:7600
""",
        NEEDS,
    ),
    "forbidden": ErrorTexts(
        "The role of the token is too low for the route, the thing belongs to somebody else, or the "
        "`Host` or `Origin` header names a site that the service does not answer to.",
        "Ask an admin for a token of one of the roles that the message names ([roles](../roles.md)). "
        "For a host name of your own, set `STOKER_ALLOWED_HOSTS`.",
        """
$ stoker token create alice --role user --output alice.token
$ stoker token create bob --token-file alice.token
""",
        NEEDS,
    ),
    "not_found": ErrorTexts(
        "There is nothing of that id or name: it is misspelt, in another namespace, or it has ended and "
        "its record has left by [retention](../retention.md).",
        "List what there is: `stoker list jobs`, `stoker list actors`. Name the namespace if it is "
        "not the job's own.",
        """
stoker.get_actor("nobody")
""",
    ),
    "conflict": ErrorTexts(
        "What is asked for does not fit the state of the thing: a second `init()`, a change of a job "
        "that has ended, a value that another has changed first.",
        "Read the state, and ask again for what fits it.",
        """
stoker.init()
stoker.init(namespace="another")
""",
    ),
    "name_taken": ErrorTexts(
        "A living actor of the namespace has this name.",
        "Use it by `stoker.get_actor(name)`, take `get_if_exists=True`, or choose another name.",
        """
@stoker.remote
class Counter: ...


first = Counter.options(name="counter").remote()
second = Counter.options(name="counter").remote()
""",
    ),
    "fenced": ErrorTexts(
        "A process that was replaced still speaks: a worker of an actor that was started again "
        "elsewhere, a scheduler after another was elected, a node that was declared dead.",
        "Nothing, mostly: the process ends by itself. If it comes often, the node was silent for too "
        "long; look for pauses in `stoker story NODE`.",
        """
$ stoker story n_3
""",
        NEEDS,
    ),
    "not_leader": ErrorTexts(
        "The scheduler that was asked is a standby, or none leads at the moment.",
        "Clients of Stoker ask the leader by themselves. By hand, send it to `extra.leader`.",
        """
$ curl -H "Authorization: Bearer $STOKER_TOKEN" "$STOKER_ADDRESS/v1/leaders/scheduler"
""",
        NEEDS,
    ),
    "idempotency_mismatch": ErrorTexts(
        "A client used an `Idempotency-Key` again for another request.",
        "Make a new key for each request, and repeat it only with the same body.",
        """
$ AUTH="Authorization: Bearer $STOKER_TOKEN" JOBS="$STOKER_ADDRESS/v1/jobs"
$ curl -H "$AUTH" "$JOBS" -H "Idempotency-Key: one" -d '{"entrypoint": "true"}'
$ curl -H "$AUTH" "$JOBS" -H "Idempotency-Key: one" -d '{"entrypoint": "false"}'
""",
        NEEDS,
    ),
    "protocol_mismatch": ErrorTexts(
        "Two components are of versions that do not understand each other.",
        "Compare `stoker version` on both machines. Upgrade by one minor version at a time.",
        """
$ stoker version
""",
        NEEDS,
    ),
    "compacted": ErrorTexts(
        "A watch begins at a sequence number whose events were removed by [retention](../retention.md).",
        "List again, and watch from the sequence number of that list.",
        """
$ curl -N -H "Authorization: Bearer $STOKER_TOKEN" "$STOKER_ADDRESS/v1/events?watch=1&since=1"
""",
        NEEDS,
    ),
    "payload_too_large": ErrorTexts(
        "The body of a request, or a value in the key-value store, is larger than its limit.",
        "Put large values into objects (`stoker.put`). [Limits](../limits.md) has each bound, and the "
        "setting that changes it.",
        """
stoker.kv.put("blob", bytes(17 * 1024 * 1024))
""",
    ),
    "unsupported_encoding": ErrorTexts(
        "A client sent a compressed body.",
        "Send it as it is, without `Content-Encoding`.",
        """
$ AUTH="Authorization: Bearer $STOKER_TOKEN" JOBS="$STOKER_ADDRESS/v1/jobs"
$ curl -H "$AUTH" "$JOBS" -H "Content-Encoding: gzip" --data-binary @job.json.gz
""",
        NEEDS,
    ),
    "rate_limited": ErrorTexts(
        "One token makes more calls of an expensive route than its rate, or one address sends wrong "
        "tokens.",
        "Wait as long as `Retry-After` says. An admin changes the rate by `STOKER_EXPENSIVE_PER_S`.",
        """
try:
    nodes = stoker.nodes()
except stoker.exceptions.RateLimitedError as error:
    time.sleep(error.extra["retry_after_s"])
""",
        HANDLES,
    ),
    "unavailable": ErrorTexts(
        "The service is not running, is starting again, or the network between is cut.",
        "Try again; clients of Stoker do so by themselves for a while. `stoker status` says whether the "
        "cluster answers; look at the address in `STOKER_ADDRESS`.",
        """
$ stoker status --address http://127.0.0.1:1
""",
        "it fails on purpose",
    ),
    "not_ready": ErrorTexts(
        "The service has just started, or it is stopping, or its database does not answer.",
        "Wait until `GET /readyz` answers 200; its text says what is missing.",
        """
$ curl "$STOKER_ADDRESS/readyz"
""",
        NEEDS,
    ),
    "tls_failed": ErrorTexts(
        "A certificate has ended, is not for this host name, or is signed by a CA that the other side "
        "does not know; or only one side speaks TLS.",
        "See the message for which. `stoker certs show` prints hosts and validity; [TLS](../tls.md) has the "
        "steps.",
        """
$ stoker certs show
""",
        NEEDS,
    ),
    "foreign_port": ErrorTexts(
        "A program of another Unix user listens on the port where a service was expected. No token was "
        "sent to it.",
        "Look who it is. If Stoker's services run as that user, set `STOKER_SERVER_USER` to it.",
        """
$ STOKER_SERVER_USER=stoker stoker status
""",
        NEEDS,
    ),
    "deadline_exceeded": ErrorTexts(
        "A wait passed its deadline. The message says what it waited for.",
        "Ask what holds it up by `stoker explain`, or give it more time.",
        """
try:
    stoker.kv.wait(["rank/0"], timeout=10)
except stoker.exceptions.DeadlineExceededError as error:  # get_timeout is one of them
    print(error.one_line)
""",
        HANDLES,
    ),
    "start_failed": ErrorTexts(
        "A process ended before it was ready, or no cluster was found on this machine.",
        "Read the log that the message names. Start a cluster by `stoker start --head`.",
        """
$ stoker status
""",
        "it fails where no cluster runs",
    ),
    "port_in_use": ErrorTexts(
        "Another program listens on the port, often a cluster that runs already.",
        "Stop it (`stoker stop`), choose another port by `--port` or `STOKER_PORT`, or use port 0, which "
        "takes a free one.",
        """
$ stoker start --head --port 0
""",
        "it starts a cluster",
    ),
    "open_bind": ErrorTexts(
        "A service shall listen beyond loopback, where anybody could reach it, and has no token.",
        "Set `STOKER_TOKEN` or `STOKER_TOKEN_FILE` to the same secret on all machines.",
        """
$ STOKER_TOKEN_FILE=cluster.token stoker start --head --host 0.0.0.0
""",
        "it starts a cluster",
    ),
    "database_unusable": ErrorTexts(
        "The database does not answer, has the schema of another version, or is damaged.",
        "Correct `STOKER_DATABASE_URL`, run the migrations that the message names, or restore a backup.",
        """
$ stoker restore monday.stoker --database-url sqlite:///new.sqlite3
""",
        NEEDS,
    ),
    "internal": ErrorTexts(
        "A bug in Stoker.",
        "Look for the request id in the log of the service: the trace is there. Report it with both.",
        """
$ grep REQUEST_ID /tmp/stoker-$UID/latest/logs/*
""",
        NEEDS,
    ),
}
