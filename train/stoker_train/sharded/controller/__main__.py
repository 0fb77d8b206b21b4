"""The entry point of a sharded job: ``python -m stoker_train.sharded.controller``, on the cluster."""

from __future__ import annotations

import logging
import os
import sys

import stoker
from stoker.exceptions import ConflictError


def main() -> int:
    """Run the controller of the job that this process is the driver of; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    job_id = os.environ.get("STOKER_JOB_ID", "")
    if not job_id:
        raise ConflictError(
            "this is the program of a sharded job, and no job runs it\n"
            "call stoker.train.ShardedTrainer(...).fit()"
        )
    from stoker_train.sharded.records import FencedRecords

    stoker.init(log_to_driver=False)
    try:
        records = FencedRecords(job_id, int(os.environ.get("STOKER_JOB_ATTEMPT", "1")))
        result = records.result()
        if result is not None:  # an attempt before has said how it ended
            return int(bool(result.error))
        known = records.take()
        from stoker_train.sharded.controller.driver import Controller

        return int(not Controller(records, records.spec(), known).run())
    finally:
        stoker.shutdown()


if __name__ == "__main__":
    sys.exit(main())
