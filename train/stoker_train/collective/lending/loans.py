"""Stand-ins for lent tensors, which travel in their place, and the copies that one value has lent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.exceptions import BadRequestError, SerializationError

if TYPE_CHECKING:
    import torch

    from stoker_train.collective.group import Group


class Loan(NamedTuple):
    """A stand-in for a tensor's bytes, which travels; ``group_id`` is of the one group of that name."""

    group: str
    group_id: str
    lender: int
    token: bytes
    nbytes: int
    is_cuda: bool

    def borrow(self) -> torch.UntypedStorage:
        """Return a storage with a copy of the lent bytes, on this process's device.

        SerializationError where this process is no member of the group; else as :meth:`Lent.fetch`.
        """
        from stoker_train.collective.joining import group, is_initialized

        found = group(self.group) if is_initialized(self.group) else None
        if found is None or found.group_id != self.group_id:
            raise SerializationError(
                f"tensors of collective group {self.group!r} cannot be read here\n"
                "read the value in an actor of the group, or put it without tensor_transport",
                field="tensor_transport",
            )
        copy = found.lent.fetch(self.lender, self.token, self.nbytes, is_cuda=self.is_cuda)
        return copy.untyped_storage()


class Lending:
    """The tensors of one value that are lent: a copy of each, until they are revoked."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.copies: list[bytes] = []

    def lend(self, flat: torch.Tensor) -> Loan | None:
        """Copy a contiguous tensor and lend the copy; None where it is empty."""
        if not flat.nbytes:
            return None
        group = self._group
        if flat.is_cuda and group.backend != "nccl":
            raise BadRequestError(
                f"CUDA tensors do not go through group {group.name!r}, which is one of gloo\n"
                'make the group with backend="nccl", or put the value without tensor_transport',
                field="tensor_transport",
            )
        token = group.lent.keep(flat)
        self.copies.append(token)
        return Loan(group.name, group.group_id, group.rank, token, flat.nbytes, flat.is_cuda)

    def revoke(self) -> None:
        """End the loans."""
        for token in self.copies:
            self._group.lent.drop(token)
        self.copies.clear()


def lending_of(name: str) -> Lending:
    """Return what lends to the members of this process's group ``name``. NotFoundError for none."""
    from stoker_train.collective.joining import group

    return Lending(group(name))
