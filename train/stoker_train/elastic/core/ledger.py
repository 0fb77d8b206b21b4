"""The sample ledger: which samples each committed step used, and the proof that each was used once.

The controller extends it as steps are committed, cuts it where a job goes back to a commit, and writes what
has changed to the cluster's KV under ``train/{job_id}/ledger/``, behind a fence (:mod:`..fence`);
``stoker train verify JOB`` reads and checks it. Pure: it neither reads nor writes keys itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = (
    "CHUNK_ENTRIES",
    "HEAD",
    "Entry",
    "EpochUse",
    "Head",
    "Ledger",
    "chunk_key",
    "decode",
    "decode_chunk",
    "ledger_prefix",
    "use_by_epoch",
    "verify",
)

CHUNK_ENTRIES = 1000
HEAD = "head"
_MAX_PROBLEMS = 20


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One step: of ``epoch``, samples ``first`` to ``first + count`` in the epoch's order.

    ``step`` counts updates of the model over the whole job; ``batch`` is M, the samples that a step has
    unless the epoch ends; ``lr`` is the first parameter group's learning rate.
    """

    epoch: int
    step: int
    first: int
    count: int
    generation: int
    batch: int
    lr: float


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The facts to check entries against: samples by epoch, and whether the last was to be finished."""

    lengths: dict[int, int] = {}
    finished: bool = False


class EpochUse(msgspec.Struct, frozen=True):
    """The use of an epoch: ``samples`` of ``length`` (None: not known), over steps and generations."""

    epoch: int
    samples: int
    length: int | None
    steps: int
    first_generation: int
    last_generation: int
    least_batch: int
    largest_batch: int


def ledger_prefix(job_id: str) -> str:
    """Return what the keys of a job's ledger begin with; the index, or the name of a chunk, follows."""
    return f"train/{job_id}/ledger/"


def chunk_key(number: int) -> str:
    """Return the number of a chunk as keys have it."""
    return f"{number:08d}"


class Ledger:
    """The entries of a job, in order of steps, and what of them is not yet kept.

    :meth:`changes` says which keys to write; what of the rest is in the KV already stays as it is.
    """

    def __init__(self, entries: Iterable[Entry] = (), head: Head | None = None) -> None:
        self._entries = list(entries)
        self._head = head or Head()
        self._clean = len(self._entries)
        """Entries before this one are kept as they are."""
        self._kept = len(self._entries)
        """So many entries are kept, some of which may be void."""
        self._head_is_kept = head is not None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries that count; not to be changed."""
        return self._entries

    @property
    def head(self) -> Head:
        """The lengths that the entries are checked against."""
        return self._head

    @property
    def next_step(self) -> int:
        """The step that comes next: 0 where there is no entry."""
        return self._entries[-1].step + 1 if self._entries else 0

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add entries; those that it has are left out, so that a report may come twice.

        One that differs from the entry of its step voids that and all later ones: the training has gone
        another way since, of which a controller that starts has not read yet.
        """
        for entry in entries:
            index = entry.step - (self._entries[0].step if self._entries else entry.step)
            if 0 <= index < len(self._entries):
                if self._entries[index] == entry:
                    continue
                self.truncate(entry.step)
            if entry.step >= self.next_step:
                self._entries.append(entry)

    def truncate(self, step: int) -> int:
        """Void the entries of ``step`` and later: the job went back to before it. Return how many."""
        kept = len(self._entries)
        while self._entries and self._entries[-1].step >= step:
            self._entries.pop()
        self._clean = min(self._clean, len(self._entries))
        return kept - len(self._entries)

    def set_length(self, epoch: int, length: int) -> None:
        """Say how many samples an epoch has."""
        if self._head.lengths.get(epoch) != length:
            lengths = {**self._head.lengths, epoch: length}
            self._set_head(Head(lengths, self._head.finished))

    def finish(self) -> None:
        """Say that the job has used all that it was to use: its last epoch must be whole."""
        self._set_head(Head(self._head.lengths, True))

    def changes(self) -> dict[str, bytes | None]:
        """Return what to write since the last call, by the end of the key; None is to be deleted.

        In this order: a writer that is cut off leaves a ledger whose entries are right, and some missing at
        the end.
        """
        found: dict[str, bytes | None] = {}
        first = min(self._clean, len(self._entries)) // CHUNK_ENTRIES
        last = max(0, len(self._entries) - 1) // CHUNK_ENTRIES
        for void in range(max(0, self._kept - 1) // CHUNK_ENTRIES, last, -1):
            found[chunk_key(void)] = None
        if self._clean < max(len(self._entries), self._kept):
            for number in range(min(first, last), last + 1):
                start = number * CHUNK_ENTRIES
                found[chunk_key(number)] = _encode(self._entries[start : start + CHUNK_ENTRIES])
        if not self._head_is_kept:
            found[HEAD] = msgspec.json.encode(self._head)
        self._clean = self._kept = len(self._entries)
        self._head_is_kept = True
        return found

    def verify(self) -> list[str]:
        """Return what is wrong with it (see :func:`verify`)."""
        return verify(self._entries, self._head.lengths, finished=self._head.finished)

    def _set_head(self, head: Head) -> None:
        self._head, self._head_is_kept = head, False


def decode(values: Mapping[str, bytes]) -> Ledger:
    """Return the ledger that :meth:`Ledger.changes` wrote, from its keys without their prefix.

    Chunks are read from the first up to one that is missing or not full. msgspec.DecodeError for others.
    """
    entries: list[Entry] = []
    number = 0
    while (chunk := values.get(chunk_key(number))) is not None:
        part = decode_chunk(chunk)
        entries += part
        if len(part) < CHUNK_ENTRIES:
            break
        number += 1
    head = values.get(HEAD)
    return Ledger(entries, None if head is None else msgspec.json.decode(head, type=Head))


def decode_chunk(chunk: bytes) -> list[Entry]:
    """Return the entries of one chunk. msgspec.DecodeError for what is none."""
    return msgspec.msgpack.decode(chunk, type=list[Entry])


def verify(
    entries: Iterable[Entry], lengths: Mapping[int, int], *, finished: bool = True
) -> list[str]:
    """Return what is wrong with a ledger: nothing, if each sample of each epoch was used once, in order.

    ``lengths`` are the samples of each epoch; of one that is missing, only gaps and overlaps are seen. The
    last epoch may end early unless ``finished``. At most 20 problems, and how many more there are.
    """
    check = _Check(lengths)
    for entry in entries:
        check.add(entry)
    check.end(finished)
    more = len(check.problems) - _MAX_PROBLEMS
    return check.problems[:_MAX_PROBLEMS] + ([f"and {more} more problems"] if more > 0 else [])


def use_by_epoch(entries: Iterable[Entry], lengths: Mapping[int, int]) -> list[EpochUse]:
    """Sum up a ledger by epoch; whether it is right, :func:`verify` says."""
    found: dict[int, EpochUse] = {}
    for entry in entries:
        known = found.get(entry.epoch)
        if known is None:
            known = EpochUse(
                entry.epoch,
                0,
                lengths.get(entry.epoch),
                0,
                entry.generation,
                entry.generation,
                entry.batch,
                entry.batch,
            )
        found[entry.epoch] = msgspec.structs.replace(
            known,
            samples=known.samples + entry.count,
            steps=known.steps + 1,
            last_generation=entry.generation,
            least_batch=min(known.least_batch, entry.batch),
            largest_batch=max(known.largest_batch, entry.batch),
        )
    return [found[epoch] for epoch in sorted(found)]


class _Check:
    """A ledger as it is read, entry by entry."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self.problems: list[str] = []
        self._lengths = lengths
        self._last: Entry | None = None
        self._next = 0
        """The sample that the present epoch takes next."""

    def add(self, entry: Entry) -> None:
        """Compare an entry with the one before it, and with its epoch."""
        last, at = self._last, f"step {entry.step}, epoch {entry.epoch}"
        if last is None:
            self._begin(entry, 0)
            if entry.step != 0:
                self._say(f"{at}: the steps before it are missing")
        else:
            if entry.step != last.step + 1:
                self._say(f"{at}: comes after step {last.step}")
            if entry.generation < last.generation:
                self._say(
                    f"{at}: generation {entry.generation} comes after generation {last.generation}"
                )
            if entry.epoch < last.epoch:
                self._say(f"{at}: comes after epoch {last.epoch}")
                self._next = entry.first
            elif entry.epoch > last.epoch:
                self._end_epoch(last.epoch)
                self._begin(entry, last.epoch + 1)
        if entry.count < 1:
            self._say(f"{at}: has {entry.count} samples")
        if entry.first > self._next:
            self._say(f"{at}: samples {self._next} to {entry.first} were left out")
        elif entry.first < self._next:
            end = min(self._next, entry.first + entry.count)
            self._say(f"{at}: samples {entry.first} to {end} were used before")
        end = entry.first + entry.count
        length = self._lengths.get(entry.epoch)
        if length is not None and end > length:
            self._say(f"{at}: samples {entry.first} to {end} of an epoch of {length}")
        if entry.count > entry.batch or (
            entry.count < entry.batch and length is not None and end < length
        ):
            self._say(f"{at}: {entry.count} samples in a batch of {entry.batch}")
        self._next = max(self._next, end)
        self._last = entry

    def end(self, finished: bool) -> None:
        """Close the last epoch, which must be whole if the job has ``finished``."""
        if not finished:
            return
        if self._last is not None:
            self._end_epoch(self._last.epoch)
        first = 0 if self._last is None else self._last.epoch + 1
        for epoch in sorted(epoch for epoch in self._lengths if epoch >= first):
            if self._lengths[epoch]:
                self._say(f"epoch {epoch}: none of its {self._lengths[epoch]} samples was used")

    def _begin(self, entry: Entry, expected: int) -> None:
        if entry.epoch != expected:
            self._say(f"step {entry.step}: epoch {entry.epoch} begins, epoch {expected} is missing")
        self._next = 0

    def _end_epoch(self, epoch: int) -> None:
        length = self._lengths.get(epoch)
        if length is not None and self._next < length:
            self._say(f"epoch {epoch}: samples {self._next} to {length} were left out")

    def _say(self, problem: str) -> None:
        self.problems.append(problem)


def _encode(entries: Sequence[Entry]) -> bytes:
    return msgspec.msgpack.encode(entries)
