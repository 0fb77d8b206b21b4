"""The options of remote classes and of their methods; those of functions are in ``options.py``."""

from typing import Annotated, Any, Literal

import msgspec

from stoker.runtime.options.documentation import Option, documented
from stoker.runtime.options.options import (
    Amount,
    CommonOptions,
    Count,
    Limit,
    Positive,
)

# Annotations are evaluated in this module: what is made of them needs no second pass.


@documented
class ActorOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a remote class: ``@stoker.remote(...)``, or ``.options(...)`` for some actors."""

    namespace: Annotated[
        str | None,
        Option(
            "Where the `name` of the actor is unique, and where `stoker.get_actor(name, namespace)` "
            "looks for it.",
            by="gcs",
            default="that of the job",
            example='namespace="training"',
        ),
    ] = None
    get_if_exists: Annotated[
        bool,
        Option(
            "Return a handle to the living actor of this `name`, if there is one, in place of "
            "`NameTakenError`. Its options stay those with which it was made. Needs a `name`.",
            by="gcs",
            example="get_if_exists=True",
        ),
    ] = False
    lifetime: Annotated[
        Literal["detached", "non_detached"] | None,
        Option(
            "A `detached` actor outlives the process and the job that made it. Others end with their "
            "owner, unnamed ones also with their last handle.",
            by="gcs",
            default="'non_detached'",
            example='lifetime="detached"',
        ),
    ] = None
    max_restarts: Annotated[
        Limit,
        Option(
            "How often the actor is started again when its process or its node dies, or by "
            "`kill(actor, no_restart=False)`: a new process, the constructor with the same arguments, "
            "no state. A constructor that raises is not tried again.",
            by="gcs",
            unit="starts after the first; -1: without limit",
            example="max_restarts=3",
        ),
    ] = 0
    max_oom_restarts: Annotated[
        Limit | None,
        Option(
            "How often the actor is started again when its process was ended because memory ran out, its "
            "own or the node's: counted apart from `max_restarts`, after a pause of a second at least.",
            by="gcs",
            unit="starts after the first; -1: without limit",
            default="as many as `max_restarts`",
            example="max_oom_restarts=10",
        ),
    ] = None
    restart_delay: Annotated[
        Amount,
        Option(
            "Pause before the first restart; before the next it is twice as long, and so on up to 300 s, a "
            "quarter more or less. Restarts after a preemption or a drain do not wait.",
            by="gcs",
            unit="seconds",
            example="restart_delay=1",
        ),
    ] = 0.0
    save_interval_s: Annotated[
        Amount | None,
        Option(
            "How often an actor with `__stoker_save__` and `__stoker_restore__` saves its state: at "
            "the end of the first call that ends so long after the last save. 0: after every call, "
            "before its result is sent, so no call that was answered is lost. None: only when it "
            "leaves its node in order (a drain, a preemption, the stop of the node).",
            by="worker",
            unit="seconds",
            example="save_interval_s=10",
        ),
    ] = 0.0
    max_task_retries: Annotated[
        Limit,
        Option(
            "How often a call is sent again when the actor's process ended, or the connection to it, "
            "before its result was there: the call may have run. With 0 its ref raises "
            "`ActorUnavailableError`. Useful with `max_restarts`; a method may have its own.",
            by="caller",
            unit="tries after the first; -1: without limit",
            example="max_task_retries=2",
        ),
    ] = 0
    max_concurrency: Annotated[
        Positive | None,
        Option(
            "How many calls run at once, besides those of `concurrency_groups`: in threads, or in one "
            "event loop where a method is `async`.",
            by="worker",
            unit="calls",
            default="1; 1000 for an async actor",
            example="max_concurrency=4",
        ),
    ] = None
    concurrency_groups: Annotated[
        dict[str, Positive] | None,
        Option(
            "Groups of calls, by name, each with threads or an event loop of its own: slow calls of one "
            "do not hold up another. A method names its group with `@stoker.method`.",
            by="worker",
            unit="calls that run at once in each group",
            example='concurrency_groups={"io": 2, "compute": 1}',
        ),
    ] = None
    max_pending_calls: Annotated[
        Limit,
        Option(
            "How many unfinished calls one process may have at the actor; the next raises "
            "`PendingCallsLimitError` at `.remote()`.",
            by="caller",
            unit="calls per calling process; -1: without limit",
            example="max_pending_calls=100",
        ),
    ] = -1
    allow_out_of_order_execution: Annotated[
        bool | None,
        Option(
            "Whether a call may overtake earlier ones of its caller whose arguments are not there yet.",
            by="caller",
            default="True where several calls run at once (by group), else False",
            example="allow_out_of_order_execution=True",
        ),
    ] = None


@documented
class MethodOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Options of one method of an actor: ``@stoker.method(...)``, or ``.options(...)`` for some calls."""

    num_returns: Annotated[
        Count | Literal["streaming", "dynamic"] | None,
        Option(
            "How many refs `.remote()` returns, as for tasks.",
            by="caller, worker",
            default="1; 'streaming' for a generator method",
            example='num_returns="streaming"',
        ),
    ] = None
    concurrency_group: Annotated[
        str,
        Option(
            "Which of the class's `concurrency_groups` its calls run in; an unknown one is an error.",
            by="caller (order), worker",
            default="the calls that `max_concurrency` counts",
            example='concurrency_group="io"',
        ),
    ] = ""
    name: Annotated[
        str | None,
        Option(
            "How its calls are called in lists, logs and errors.",
            by="caller",
            default="the names of class and method",
            example='name="evaluate"',
        ),
    ] = None
    timeout: Annotated[
        Amount | None,
        Option(
            "How long a call may run, from its start in the actor. Then it is told to stop, and its "
            "caller gets `TaskTimeoutError` within a second, also if its code does not stop (within five, if "
            "its process does not answer): the actor, whose state is that of other callers too, goes on. A "
            "call that had not begun by then is not started later.",
            by="worker, caller",
            unit="seconds; 0: without limit",
            default="without limit",
            example="timeout=5",
        ),
    ] = None
    max_task_retries: Annotated[
        Limit | None,
        Option(
            "In place of the class's `max_task_retries`, for this method.",
            by="caller",
            unit="tries after the first; -1: without limit",
            default="that of the class",
            example="max_task_retries=1",
        ),
    ] = None
    max_oom_retries: Annotated[
        Limit | None,
        Option(
            "How often a call is sent again when the actor's process was ended because memory ran out: "
            "counted apart from `max_task_retries`. Useful with `max_oom_restarts`.",
            by="caller",
            unit="tries after the first; -1: without limit",
            default="as many as `max_task_retries`",
            example="max_oom_retries=3",
        ),
    ] = None
    retry_delay: Annotated[
        Amount,
        Option(
            "Pause before a call that raised is tried again, as for tasks; other calls go on meanwhile.",
            by="caller",
            unit="seconds",
            example="retry_delay=0.5",
        ),
    ] = 0.0
    retry_exceptions: Annotated[
        Any,
        Option(
            "Whether a call that raised is tried again, as for tasks. Uses up `max_task_retries`.",
            by="worker (decides), caller (retries)",
            takes="True, False, an exception type or a list of them",
            example="retry_exceptions=True",
        ),
    ] = False
    enable_task_events: Annotated[
        bool,
        Option(
            "Keep a record of each call in the task history.",
            by="caller, worker",
            example="enable_task_events=False",
        ),
    ] = True
