"""What several tests of the registry are given."""

from __future__ import annotations

from stoker_wire.messages.cluster import GrantedLease, Lease, LeaseKind
from stoker_wire.messages.common import Address


def granted(lease_id: str = "l_1") -> GrantedLease:
    lease = Lease(
        lease_id=lease_id,
        owner_id="gcs",
        job_id="job_1",
        kind=LeaseKind.TASK,
        node_id="n_1",
        node_incarnation=3,
        resources={},
    )
    address = Address("w_1", "n_1", "h", "", "u")
    return GrantedLease(lease=lease, worker_id="w_1", address=address, pid=5)
