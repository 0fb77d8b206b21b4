"""The options of ``@remote``: name, type, default and meaning of each, documented at its field.

The text at a field is the only one: the docstrings of the classes and ``docs/options.md`` are made of it
(``make docs``). :mod:`stoker.runtime.options.demands` checks what is given.
"""

from typing import Annotated, Any, Literal

import msgspec

from stoker.runtime.options.documentation import Option, documented
from stoker_wire.messages.common import MAX_NAMES

Amount = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Limit = Annotated[int, msgspec.Meta(ge=-1)]  # -1: without limit
Positive = Annotated[int, msgspec.Meta(ge=1)]
OOM_RETRIES = 3
MAX_OWN_NAMES = MAX_NAMES - 4
"""Options of their own add four to a request: CPU, GPU or gpu_memory, memory; accelerator_type."""

# Annotations are evaluated in this module: what is made of them needs no second pass.


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that remote functions and remote classes share."""

    num_cpus: Annotated[
        Amount | None,
        Option(
            "CPUs that each call of the function, or the actor all its life, has of its node. The "
            "scheduler starts no more than fit; nothing pins the process to cores, but libraries get "
            "as many threads (`OMP_NUM_THREADS`, unless it is set). While the code waits in "
            "`stoker.get` or `stoker.wait`, others may have its CPUs.",
            by="scheduler, nodelet (threads)",
            unit="CPUs; a part of one is possible",
            default="1 for a task, 0 for an actor",
            example="num_cpus=0.5",
        ),
    ] = None
    num_gpus: Annotated[
        Amount | None,
        Option(
            "GPUs of its node. The worker sees these alone in `CUDA_VISIBLE_DEVICES`, and none "
            "without this option. Below 1 several workers share a GPU, and each must keep to its part "
            "of the memory by itself; above 1 only whole numbers. A worker that opened a GPU ends with "
            "its lease, and the GPU is given to nobody else before that.",
            by="scheduler, nodelet",
            unit="GPUs",
            default="0",
            example="num_gpus=1",
        ),
    ] = None
    gpu_memory: Annotated[
        str | float | None,
        Option(
            "A part of one GPU, by its memory instead of by `num_gpus`: of a larger GPU it is a smaller "
            "part, and it goes to the GPU with the least room left over. The worker sees this GPU alone, "
            "and must keep to its part by itself. A node whose GPUs do not tell their memory cannot run it.",
            by="scheduler",
            unit="bytes, or a text with a suffix",
            default="no GPU",
            example='gpu_memory="10GiB"',
        ),
    ] = None
    memory: Annotated[
        Amount | None,
        Option(
            "Memory set aside on its node. A worker that uses more, together with the processes that it "
            "started, is ended with `OutOfMemoryError` (measured twice a second). Without this option a "
            "worker of tasks ends only when the whole node runs full.",
            by="scheduler, nodelet",
            unit="bytes",
            default="0: nothing set aside, no limit",
            example="memory=2 * 1024**3",
        ),
    ] = None
    resources: Annotated[
        dict[str, Amount] | None,
        Option(
            "Amounts of custom resources, by the names under which nodes offer them "
            "(`stoker start --resources`, `init(resources=...)`). Only counted: what a name means is "
            "the user's business. `CPU`, `GPU` and `memory` have options of their own.",
            by="scheduler",
            unit=f"as the node counts them; {MAX_OWN_NAMES} names at most",
            example='resources={"disk": 1}',
        ),
    ] = None
    accelerator_type: Annotated[
        str | None,
        Option(
            "The kind of GPU that the node must have: short for a `label_selector` with the label "
            '`accelerator_type`, which nodes have by themselves ("NVIDIA H200" is `H200`). Ask for the '
            "GPU itself with `num_gpus`.",
            by="scheduler",
            default="any",
            example='accelerator_type="H200"',
        ),
    ] = None
    label_selector: Annotated[
        dict[str, str] | None,
        Option(
            "Conditions on the labels of the node, all of which must hold: `value`, `!value`, "
            "`in(a,b)` or `!in(a,b)`. A label that the node does not have is none of the values.",
            by="scheduler",
            unit=f"{MAX_OWN_NAMES} labels at most",
            default="any node",
            example='label_selector={"zone": "in(a,b)", "disk": "!slow"}',
        ),
    ] = None
    node_filter: Annotated[
        str | None,
        Option(
            "A condition on the node, as in a SQL `WHERE`: of labels, free and total resources, `node_id`, "
            "`hostname`, `slow_ranks` ([extenders.md](extenders.md)). A placement group has its own.",
            by="scheduler",
            default="any node",
            example="node_filter=\"labels.rack != 'r7' and free.gpu >= 2\"",
        ),
    ] = None
    tolerations: Annotated[
        Any,
        Option(
            "Taints of nodes that do not keep it away: `key=value:Effect`, or shorter for every value "
            "(`key:Effect`) or every effect (`key`). A mapping has `key`, `value`, `effect` and "
            "`toleration_seconds`, after which a `NoExecute` taint ends it all the same "
            "([nodes.md](nodes.md)). A placement group has its own.",
            by="scheduler",
            default="none",
            takes="list of texts or mappings",
            example='tolerations=["dedicated=team-a:NoSchedule"]',
        ),
    ] = None
    name: Annotated[
        str | None,
        Option(
            "How it is called in lists, logs and errors. That of an actor is unique in its namespace: "
            "`stoker.get_actor` finds the actor by it, and a named actor outlives its handles.",
            by="caller, gcs (the names of actors)",
            default="the qualified name of the function or class; an actor then has no name",
            example='name="loader"',
        ),
    ] = None
    scheduling_strategy: Annotated[
        Any,
        Option(
            "Which of the nodes that fit is taken. `DEFAULT` fills nodes in order up to a utilisation "
            "(setting `spread_threshold`), then takes the least used, and prefers nodes where large "
            "arguments lie. `SPREAD` lets nodes take turns while they are used no more than that. "
            "`NodeAffinity` names the node, `PlacementGroupSchedulingStrategy` a placement group.",
            by="scheduler",
            default="'DEFAULT'",
            takes="'DEFAULT', 'SPREAD', a NodeAffinity or a PlacementGroupSchedulingStrategy",
            example='scheduling_strategy="SPREAD"',
        ),
    ] = None
    runtime_env: Annotated[
        Any,
        Option(
            "What the worker has besides its Python: `env_vars`, `working_dir`, `py_modules`, `excludes`, "
            "`pip`, `uv` or `conda`, `setup`, `worker_process_setup`, `preload`, `kernels`, `image_uri`: see "
            "[environments](environments.md). The caller uploads folders once per content. What is not "
            "named is as in the task or actor that starts it, in a driver as in the job: variables are "
            "merged by name, `py_modules` and `kernels` are added. Variables that a lease or the node sets "
            "(`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`, `STOKER_*`) are refused.",
            by="caller, gcs, nodelet",
            default="that of the caller",
            takes="mapping",
            example='runtime_env={"env_vars": {"MODE": "fast"}}',
        ),
    ] = None
    priority: Annotated[
        int,
        Option(
            "Requests of a higher priority are served first; one that waits gains 1 every 30 s, so that "
            "none starves. Workers that run calls of a lower priority are asked back for it; the call "
            "that runs there is finished first, or ended if it is `preemptible`.",
            by="scheduler",
            example="priority=10",
        ),
    ] = 0
    preemptible: Annotated[
        bool,
        Option(
            "Whether its worker may be ended while it runs, when other work has a better claim to its "
            "resources: a higher priority, a fair share, a long wait. It gets notice first "
            "(`stoker.preemption_notice`, `stoker.on_stop`). A task is then run again, an actor "
            "started again elsewhere and sent its calls again: that uses up no retry and no restart. "
            "Without it what runs is never ended for others.",
            by="scheduler, nodelet",
            example="preemptible=True",
        ),
    ] = False
    preemption_grace: Annotated[
        Amount | None,
        Option(
            "How long it has from the notice of its preemption to the end of its worker, if it is "
            "`preemptible`.",
            by="scheduler, nodelet",
            unit="seconds, a day at most",
            default="the setting `preemption_grace_s`, 30 s; 2 s for `background` work",
            example="preemption_grace=120",
        ),
    ] = None
    background: Annotated[
        bool,
        Option(
            "Work that has what other work leaves free: idle GPUs, or parts of them. It is `preemptible`, "
            "comes after all other work whatever its priority, and is ended, with notice, as soon as other "
            "work needs its place; then it runs again where there is room. It counts for no quota and no "
            "fair share.",
            by="scheduler, nodelet",
            example="background=True",
        ),
    ] = False
    on_infeasible: Annotated[
        Literal["error", "wait"],
        Option(
            "What happens to a request that no node could take even if it were idle: after "
            "`infeasible_grace_s` (a setting, 10 s) `error` fails it with `InfeasibleError`, which says "
            "why for each node; `wait` keeps it until a node comes that can.",
            by="scheduler",
            example='on_infeasible="wait"',
        ),
    ] = "error"


@documented
class TaskOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a remote function: ``@stoker.remote(...)``, or ``.options(...)`` for some calls."""

    num_returns: Annotated[
        Count | Literal["streaming", "dynamic"] | None,
        Option(
            "How many refs `.remote()` returns: one, a list of several, or None for 0. A function with "
            "several must return a tuple or a list of just so many values, or yield them. `streaming` "
            "returns a generator of refs, one for each value that the function yields. `dynamic` returns one "
            "ref, whose value has them all once the function has ended.",
            by="caller, worker",
            default="1; 'streaming' for a generator function",
            example="num_returns=2",
        ),
    ] = None
    max_retries: Annotated[
        Limit,
        Option(
            "How often a call is tried again when its worker or its node dies, and when it raised one "
            "of `retry_exceptions`. A call with 0 shares its worker with no other, so that the end of "
            "another cannot lose its result.",
            by="caller",
            unit="tries after the first; -1: without limit",
            example="max_retries=0",
        ),
    ] = 3
    retry_exceptions: Annotated[
        Any,
        Option(
            "Whether a call that raised is tried again: never, for every `Exception` of the user's "
            "code (Stoker's own errors excepted), or for these types. Uses up `max_retries`.",
            by="worker (decides), caller (retries)",
            takes="True, False, an exception type or a list of them",
            example="retry_exceptions=[ConnectionError]",
        ),
    ] = False
    max_oom_retries: Annotated[
        Limit | None,
        Option(
            "How often a call is tried again when its worker was ended because memory ran out, its own "
            "or the node's: counted apart from `max_retries`, with a pause of a second at least.",
            by="caller",
            unit="tries after the first; -1: without limit",
            default="3; 0 with `max_retries=0`",
            example="max_oom_retries=10",
        ),
    ] = None
    retry_delay: Annotated[
        Amount,
        Option(
            "Pause before the first retry of a call; before the next it is twice as long, and so on up to "
            "300 s, each time a quarter more or less by chance.",
            by="caller",
            unit="seconds",
            example="retry_delay=0.5",
        ),
    ] = 0.0
    max_calls: Annotated[
        Count,
        Option(
            "After so many calls of this function the worker takes no more calls of any, and ends: for "
            "code that leaks memory, or keeps what its process alone can let go.",
            by="worker, nodelet",
            unit="calls; 0: without limit",
            example="max_calls=1",
        ),
    ] = 0
    timeout: Annotated[
        Amount | None,
        Option(
            "How long each try may run, from its start in the worker. Then `TaskTimeoutError` is raised "
            "in its code and at its caller; a task that still runs 3 s later ends with its worker, which its "
            "nodelet kills within 2 s if it does not end, whatever it, its caller and the scheduler do. "
            "It is not tried again.",
            by="worker, caller, nodelet",
            unit="seconds; 0: without limit",
            default="without limit",
            example="timeout=60",
        ),
    ] = None
    start_deadline: Annotated[
        Amount | None,
        Option(
            "How long after `.remote()` the call may still wait for its arguments, for a worker or for "
            "its next try. Then it fails with `TaskTimeoutError`, which says what it waited for.",
            by="caller",
            unit="seconds",
            default="without limit",
            example="start_deadline=10",
        ),
    ] = None
    cache: Annotated[
        bool | Literal["cluster"],
        Option(
            "True returns the ref of an earlier call of this process with equal function and pickled "
            "arguments that has not failed; the last 1000 are kept. Has no effect where arguments hold "
            "refs or exceed 256 KiB, or results are not one. `cluster` keeps results for all jobs, as "
            "detached objects, by the code of the function and the values of its arguments: "
            "[objects.md](objects.md) says what counts.",
            by="caller, worker",
            takes="True, False or 'cluster'",
            example='cache="cluster"',
        ),
    ] = False
    cache_key: Annotated[
        Any,
        Option(
            'The key of a result with `cache="cluster"`, in place of a hash of code and arguments: a text, '
            "or a function of the arguments that returns one and runs in the worker. Calls of any function "
            "with the same key have the same result.",
            by="worker",
            default="a hash of the code and the arguments",
            takes="text or function",
            example='cache_key=lambda path: f"features-v2 {path}"',
        ),
    ] = None
    lifetime: Annotated[
        Literal["detached"] | None,
        Option(
            "`detached`: the result, once it is stored, is a detached object, which outlives the caller and "
            "its job until `stoker.free`; `stoker.get_ref` finds it by the `name` of the task. The task "
            "itself ends with its job all the same, and leaves nothing if it had not finished.",
            by="worker, gcs",
            default="that of its refs",
            example='lifetime="detached"',
        ),
    ] = None
    durability: Annotated[
        dict[Literal["copies", "disk", "path"], int | bool | str] | None,
        Option(
            'The places that keep a result with `lifetime` or `cache="cluster"`, as in `stoker.put`: '
            "how many nodes have `copies`, whether on `disk`, and the `path` of a file besides.",
            by="worker, gcs",
            default="one node, in memory",
            example='durability={"copies": 2, "disk": True}',
        ),
    ] = None
    enable_task_events: Annotated[
        bool,
        Option(
            "Keep a record of each call in the task history (`stoker list tasks`, `stoker timeline`). "
            "False for very many very short calls.",
            by="caller, worker",
            example="enable_task_events=False",
        ),
    ] = True

    @property
    def oom_retries(self) -> int:
        """The retries of a call whose worker ran out of memory."""
        if self.max_oom_retries is not None:
            return self.max_oom_retries
        return OOM_RETRIES if self.max_retries else 0
