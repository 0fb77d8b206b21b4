"""Texts of the errors of jobs, tasks, actors, placement groups and objects."""

from __future__ import annotations

from typing import Final

from stoker_wire.http.error_pages.texts import HANDLES, NEEDS, ErrorTexts

OF_WORK: Final[dict[str, ErrorTexts]] = {
    "job_finished": ErrorTexts(
        "The job of this driver was stopped, or the cluster has given the driver up.",
        "Call `stoker.shutdown()` and then `stoker.init()`: this is a new job.",
        """
try:
    stoker.get(ref)
except stoker.exceptions.JobFinishedError:
    stoker.shutdown()
    stoker.init()
""",
        HANDLES,
    ),
    "placement_group_removed": ErrorTexts(
        "A task or an actor asks for a bundle of a placement group that was removed.",
        "Make the group again, or remove it only when its work has ended.",
        """
group = stoker.placement_group([{"CPU": 1}])
stoker.get(group.ready(), timeout=30)
stoker.remove_placement_group(group)


@stoker.remote(num_cpus=1, scheduling_strategy=stoker.PlacementGroupSchedulingStrategy(group))
def step(): ...


stoker.get(step.remote(), timeout=30)
""",
    ),
    "pending_calls_limit": ErrorTexts(
        "The actor has `max_pending_calls` calls of this process that have not ended.",
        "Wait for some of them, or raise the limit.",
        """
@stoker.remote(max_pending_calls=1)
class Slow:
    def wait(self):
        import time

        time.sleep(1)


slow = Slow.remote()
calls = [slow.wait.remote() for _ in range(3)]
""",
    ),
    "infeasible": ErrorTexts(
        "No node of the cluster has what is asked for, even when it is idle: too many GPUs for one "
        "node, a label or a resource that no node has.",
        'Ask for less, or add such a node. With `on_infeasible="wait"` the work waits for one. '
        "`stoker explain` says what each node lacks.",
        """
@stoker.remote(resources={"tpu": 1})
def step(): ...


stoker.get(step.remote(), timeout=60)
""",
    ),
    "runtime_env_failed": ErrorTexts(
        "What a `runtime_env` names could not be installed: a package does not exist, a folder could not be "
        "fetched, the setup command failed.",
        "Read the last lines of the installer in the message, and try the same command on a node.",
        """
@stoker.remote(num_cpus=1, runtime_env={"setup": "exit 7"})
def step(): ...


stoker.get(step.remote(), timeout=60)
""",
    ),
    "get_timeout": ErrorTexts(
        "The objects were not there within `timeout`: their tasks wait, run longer, or wait for others.",
        "The message names what each object waits for; `stoker explain TASK` says more. Give it more "
        "time, or use `stoker.wait`.",
        """
@stoker.remote(num_cpus=1)
def slow():
    import time

    time.sleep(2)


stoker.get(slow.remote(), timeout=0.1)
""",
    ),
    "unserializable": ErrorTexts(
        "An argument, a result or a captured variable holds something that cannot travel: a lock, a "
        "socket, an open file.",
        "Leave out the member whose path the message names, or make it inside the task.",
        """
import threading


@stoker.remote(num_cpus=1)
def step(lock): ...


step.remote({"lock": threading.Lock()})
""",
    ),
    "work_failed": ErrorTexts(
        "The root of all that happens to tasks, actors and objects; more exact codes derive from it.",
        "Catch it where any loss of work is handled alike.",
        """
try:
    result = stoker.get(ref)
except stoker.exceptions.WorkFailedError as error:
    print(error.one_line)
""",
        HANDLES,
    ),
    "task_failed": ErrorTexts(
        "The function raised. The error is of the user's own type as well, and `cause` is the exception.",
        "Mend the function; the trace in the message has its lines. `retry_exceptions` runs it again.",
        """
@stoker.remote(num_cpus=1)
def divide(x):
    return 1 / x


stoker.get(divide.remote(0), timeout=30)
""",
    ),
    "task_cancelled": ErrorTexts(
        "Somebody called `stoker.cancel`, or the call of which the task is a part was cancelled.",
        "Nothing, if it was meant. `stoker story TASK` says who did it.",
        """
@stoker.remote(num_cpus=1)
def slow():
    import time

    time.sleep(60)


ref = slow.remote()
stoker.cancel(ref)
stoker.get(ref, timeout=30)
""",
    ),
    "task_timeout": ErrorTexts(
        "The task ran longer than its `timeout`, or had not started by its `start_deadline`.",
        "Raise the option, or find out what it does for so long with `stoker logs TASK`.",
        """
@stoker.remote(num_cpus=1, timeout=0.2, max_retries=0)
def slow():
    import time

    time.sleep(60)


stoker.get(slow.remote(), timeout=30)
""",
    ),
    "worker_died": ErrorTexts(
        "The worker process ended: a signal, a crash in native code, `os._exit`. The message has the exit "
        "code or signal, the peak of its memory and its last lines.",
        "Read the last lines in the message; `stoker logs TASK` has all. `max_retries` runs the task again.",
        """
@stoker.remote(num_cpus=1, max_retries=0)
def crash():
    import os

    os._exit(3)


stoker.get(crash.remote(), timeout=30)
""",
    ),
    "out_of_memory": ErrorTexts(
        "The worker used more memory than its `memory` option says, or the node was short of memory.",
        "Ask for more by `memory=`, or work on smaller parts. See [memory](../memory.md).",
        """
@stoker.remote(num_cpus=1, memory=200 * 1024**2, max_oom_retries=0)
def large():
    import time

    data = bytearray(400 * 1024**2)
    time.sleep(60)


stoker.get(large.remote(), timeout=60)
""",
    ),
    "preempted": ErrorTexts(
        "Work of a higher priority, or of a queue below its share, needed the place.",
        "Save what there is in `stoker.on_stop`. A task is run again by itself while it has retries; see "
        "[preemption](../preemption.md).",
        """
@stoker.remote(num_gpus=1, preemptible=True)
def train(): ...
""",
        "it takes other work that preempts",
    ),
    "actor_failed": ErrorTexts(
        "The root of what ends a call of an actor.",
        "Catch it where a dead actor and one out of reach are handled alike.",
        """
try:
    stoker.get(actor.step.remote())
except stoker.exceptions.ActorError as error:
    print(error.one_line)
""",
        HANDLES,
    ),
    "actor_died": ErrorTexts(
        "The actor was killed, left by itself, failed in its constructor, or died more often than "
        "`max_restarts`.",
        "The message has the cause; `stoker story ACTOR` tells all of it. Allow restarts by `max_restarts`.",
        """
@stoker.remote
class Counter:
    def add(self): ...


counter = Counter.remote()
stoker.get(counter.add.remote(), timeout=30)
stoker.kill(counter)
stoker.get(counter.add.remote(), timeout=30)
""",
    ),
    "actor_unavailable": ErrorTexts(
        "The actor is being started again, or its node cannot be reached. The call may have run.",
        "Call again if the method may run twice, or set `max_task_retries`.",
        """
@stoker.remote(max_restarts=3, max_task_retries=3)
class Counter:
    def add(self): ...
""",
        "it takes an actor that restarts",
    ),
    "arena_full": ErrorTexts(
        "Objects that are being read fill the shared memory of the node, so that none can be moved to "
        "disk; or the disk is full as well. The message names the largest holders.",
        "Drop refs and arrays that are not needed, or give the node more by `STOKER_ARENA_MAX_BYTES`. "
        "`stoker list objects` shows what is there.",
        """
$ stoker list objects
""",
        NEEDS,
    ),
    "object_lost": ErrorTexts(
        "The node that held the only copy is gone, and the task that made the object cannot run again.",
        "Let its task have retries (`max_retries`), or keep copies: a detached object with `copies=2`. See "
        "[objects](../objects.md).",
        """
ref = stoker.put(b"weights", lifetime="detached", name="weights", copies=2)
""",
        "it takes two nodes",
    ),
    "owner_died": ErrorTexts(
        "The driver or worker that made the object has ended, and its objects with it.",
        "Keep the owner until the object is used, or make the object detached.",
        """
stoker.put(b"weights", lifetime="detached", name="weights")
""",
        HANDLES,
    ),
    "object_freed": ErrorTexts(
        "`stoker.free` was called for the object before this use.",
        "Free it after the last use, or not at all: it goes with its last ref.",
        """
ref = stoker.put(bytes(1024 * 1024))
stoker.free(ref)
stoker.get(ref, timeout=30)
""",
    ),
    "node_died": ErrorTexts(
        "No heartbeat came from the node for a while: it crashed, lost power, or the network is cut.",
        "Tasks are run again on other nodes while they have retries. `stoker story NODE` says since when it "
        "was silent.",
        """
$ stoker list nodes
""",
        NEEDS,
    ),
    "object_node_died": ErrorTexts(
        "The node that held the object was declared dead, and nothing could make the object again.",
        "As for `object_lost`: retries, copies, or `disk=True`. See [objects](../objects.md).",
        """
ref = stoker.put(b"weights", lifetime="detached", name="weights", disk=True)
""",
        "it takes a node that dies",
    ),
}
