"""Examples of prompt and answer, packed into rows of tokens whose prompts have no loss.

Called by loops that fine-tune: each row goes through a model with ``Packing.of(cu_seqlens, ...)`` of
``stoker.kernels.nn``, so that no example sees another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ("IGNORED", "PackedRow", "masked_targets", "pack_examples")

IGNORED = -100
"""The target that losses leave out, as PyTorch's ``ignore_index`` has it."""

Example = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Several examples in one row of T tokens; what is left over is padding, a sequence of its own.

    ``tokens`` and ``targets`` (1, T) int64: each token's target is the next one of its example, where that
    is of the answer, else -100. ``cu_seqlens`` (sequences + 1,) int32 has the first token of each sequence,
    and T. ``examples``: their numbers, in the order in which they were given.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    examples: tuple[int, ...]

    @property
    def max_seqlen(self) -> int:
        """The bound of all sequences that a kernel is told: T, so that it is the same for all rows."""
        return self.tokens.shape[1]


def masked_targets(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the target of each token of an example: the next token of the answer, else -100.

    The prompt's last token predicts the answer's first; the answer's last predicts nothing.
    """
    before = [IGNORED] * (len(prompt) - 1) if prompt else []
    predicted = list(answer) if prompt else list(answer[1:])
    return [*before, *predicted, IGNORED] if prompt or answer else []


def pack_examples(
    examples: Iterable[Example],
    length: int,
    *,
    open_rows: int = 16,
    max_sequences: int | None = None,
    too_long: Literal["error", "truncate"] = "error",
    pad: int = 0,
) -> Iterator[PackedRow]:
    """Yield rows of exactly ``length`` tokens that hold every example once, whole.

    First fit (Johnson 1974) over ``open_rows`` rows: an example goes into the first that has room; where
    none has, the fullest is yielded. An example longer than a row is a ValueError, or loses the end of its
    answer with ``too_long="truncate"``. ValueError too for an example without an answer, whose loss would
    be that of nothing. With ``max_sequences`` a row has no more examples than that, and ``cu_seqlens`` has
    always ``max_sequences + 2`` numbers (empty sequences at the end), so that rows can be stacked.
    """
    if length < 2:
        raise ValueError(f"pack_examples(): length must be at least 2, got {length}")
    if open_rows < 1:
        raise ValueError(f"pack_examples(): open_rows must be at least 1, got {open_rows}")
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"pack_examples(): max_sequences must be at least 1, got {max_sequences}")
    rows: list[_Row] = []
    for number, (prompt, answer) in enumerate(examples):
        tokens = [*prompt, *answer]
        targets = masked_targets(prompt, answer)
        if len(tokens) > length:
            if too_long == "error" or len(prompt) >= length:
                raise ValueError(
                    f"pack_examples(): example {number} has {len(tokens)} tokens, a row {length}\n"
                    'give longer rows, or too_long="truncate" where its prompt alone is shorter'
                )
            tokens, targets = tokens[:length], [*targets[: length - 1], IGNORED]
        if all(target == IGNORED for target in targets):
            raise ValueError(
                f"pack_examples(): example {number} has nothing to predict\n"
                "give each example an answer, of two tokens where it has no prompt"
            )
        row = next(
            (
                one
                for one in rows
                if len(one.tokens) + len(tokens) <= length
                and (max_sequences is None or len(one.examples) < max_sequences)
            ),
            None,
        )
        if row is None:
            if len(rows) == open_rows:
                fullest = max(range(len(rows)), key=lambda place: len(rows[place].tokens))
                yield rows.pop(fullest).close(length, pad, max_sequences)
            row = _Row([], [], [0], [])
            rows.append(row)
        row.tokens += tokens
        row.targets += targets
        row.edges.append(len(row.tokens))
        row.examples.append(number)
    for row in rows:
        yield row.close(length, pad, max_sequences)


@dataclass(slots=True)
class _Row:
    """A row that may have room."""

    tokens: list[int]
    targets: list[int]
    edges: list[int]
    examples: list[int]

    def close(self, length: int, pad: int, max_sequences: int | None) -> PackedRow:
        left = length - len(self.tokens)
        edges = [*self.edges, length] if left else self.edges
        if max_sequences is not None:
            edges = [*edges, *[length] * (max_sequences + 2 - len(edges))]
        return PackedRow(
            torch.tensor([[*self.tokens, *[pad] * left]]),
            torch.tensor([[*self.targets, *[IGNORED] * left]]),
            torch.tensor(edges, dtype=torch.int32),
            tuple(self.examples),
        )
