"""The actor of a node of ``stoker launch``: it runs the agent, and passes on what that says and prints.

It holds the node's bundle; when it ends, by the driver or with the bundle, the nodelet ends all that it has
started. Made by the driver; it must not import torch.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING

import msgspec

from stoker.runtime import current
from stoker.train.rendezvous import advertised_host, bind_interface
from stoker_train.launch.spec import AgentSpec, Ended, Event, Lines, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_WAITING = 1000
_MOST_LINES = 500
_END_S = 5.0


class Node:
    """A node of the run ``run_id``, as its actor."""

    def run(self, spec: Spec, run_id: str, member: str, namespace: str) -> Iterator[list[Event]]:
        """Start the agent, and yield its events until it has ended; :class:`Ended` is the last."""
        if spec.cwd and not os.path.isdir(spec.cwd):
            why = f"the folder {spec.cwd} is not on this node\nsend it along: --working-dir {spec.cwd}"
            yield [Ended(left=False, message=why)]
            return
        events: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        process, said = self._start(spec, run_id, member, namespace)
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=_read_events, args=(said, events), daemon=True),
            threading.Thread(
                target=_read_lines, args=("stdout", process.stdout, events), daemon=True
            ),
            threading.Thread(
                target=_read_lines, args=("stderr", process.stderr, events), daemon=True
            ),
        ]
        for one in readers:
            one.start()
        open_ends, ended = len(readers), False
        while open_ends:
            batch = [events.get()]
            while len(batch) < _MOST_LINES and not events.empty():
                batch.append(events.get_nowait())
            open_ends -= batch.count(None)
            kept = [event for event in batch if event is not None]
            ended = ended or any(isinstance(event, Ended) for event in kept)
            if kept:
                yield kept
        code = process.wait(_END_S)
        if not ended:
            yield [Ended(left=False, message=f"the agent ended with exit code {code}")]

    def _start(
        self, spec: Spec, run_id: str, member: str, namespace: str
    ) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        reading, writing = os.pipe()
        host = advertised_host()
        bind_interface(host)
        told = AgentSpec(
            spec=spec,
            run_id=run_id,
            member=member,
            address=current.runtime().identity.gcs_url,
            namespace=namespace,
            local_addr=host,
        )
        environ = dict(os.environ)
        if spec.nproc > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "stoker_train.launch.agent", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writing,),
            cwd=spec.cwd or None,
            env=environ,
        )
        os.close(writing)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(told))
        return process, os.fdopen(reading, "rb")


def _read_events(file: IO[bytes], events: queue.Queue[Event | None]) -> None:
    with file:
        for line in file:
            events.put(msgspec.json.decode(line, type=Event))
    events.put(None)


def _read_lines(stream: str, file: IO[bytes], events: queue.Queue[Event | None]) -> None:
    with file:
        for line in file:
            text = line.decode(errors="replace").rstrip("\r\n")
            events.put(Lines(stream=stream, lines=(text,)))
    events.put(None)
