"""Ray's submissions as Stoker's, and Stoker's jobs as Ray's. Pure: packages are resolved by the caller.

An id that a user chose is a Stoker id once ``job_`` stands before it; the job's metadata keep it as it was.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.api.ray_jobs.types import RayJob, RayJobType
from stoker_wire.constraints.ray_environments import (
    REFUSED,
    WITHOUT_EFFECT,
    process_setup,
    requirements,
)
from stoker_wire.errors import BadRequestError
from stoker_wire.http.codec import JSON, Codec, encode_json
from stoker_wire.messages.work import SubmitJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.api.ray_jobs.types import RaySubmit
    from stoker_wire.messages.work import Job

SUBMISSION_ID = "ray.submission_id"
"""The key of the metadata that has an id as it was chosen, if Stoker's is another."""
_PREFIX = "job_"
_URI = re.compile(r"gcs://([A-Za-z0-9_.+-]{1,200})")
_SAME = frozenset({"env_vars", "preload", "kernels", "image_uri"})
_SUBMISSION = Codec(SubmitJob)


def job_id_of(given: str) -> str:
    """Return Stoker's id of a job by the one that a user of Ray knows."""
    return given if given.startswith(_PREFIX) else f"{_PREFIX}{given}"


def shown_id(job: Job) -> str:
    """Return the id of a job that a user of Ray knows."""
    chosen = job.metadata.get(SUBMISSION_ID, "")
    return chosen if job_id_of(chosen) == job.job_id else job.job_id


def package_names(env: Mapping[str, Any]) -> list[str]:
    """Return the names of the packages in a ``runtime_env``; BadRequestError for another address."""
    names = [_package_name(env["working_dir"], "working_dir")] if env.get("working_dir") else []
    return [*names, *(_package_name(one, "py_modules") for one in _listed(env, "py_modules"))]


def _listed(env: Mapping[str, Any], name: str) -> list[Any]:
    given = env.get(name) or []
    if not isinstance(given, list):
        raise BadRequestError(
            f"runtime_env.{name}: expected a list, got {type(given).__name__}",
            field=f"runtime_env.{name}",
        )
    return given


def _package_name(uri: object, name: str) -> str:
    found = _URI.fullmatch(uri) if isinstance(uri, str) else None
    if found is None:
        raise BadRequestError(
            f"runtime_env.{name}: {str(uri)[:200]!r} is no uploaded package\n"
            "give a folder of the machine that submits; its client uploads it",
            field=f"runtime_env.{name}",
        )
    return found[1]


def submission(body: RaySubmit, packages: Mapping[str, str]) -> SubmitJob:
    """Return a submission of Ray as Stoker's; ``packages`` are the hashes of its packages by name."""
    given = body.submission_id or body.job_id
    own = {
        "CPU": body.entrypoint_num_cpus,
        "GPU": body.entrypoint_num_gpus,
        "memory": body.entrypoint_memory,
    }
    metadata = {name: text for name, text in (body.metadata or {}).items() if name != SUBMISSION_ID}
    if given and job_id_of(given) != given:
        metadata[SUBMISSION_ID] = given
    document = {
        "entrypoint": body.entrypoint,
        "job_id": job_id_of(given) if given else None,
        "metadata": metadata,
        "resources": {
            **{name: amount for name, amount in own.items() if amount},
            **(body.entrypoint_resources or {}),
        },
        "label_selector": body.entrypoint_label_selector or {},
        "runtime_env": _environment(body.runtime_env or {}, packages),
    }
    return _SUBMISSION.decode(encode_json(document), JSON)


def _environment(env: Mapping[str, Any], packages: Mapping[str, str]) -> dict[str, Any]:
    mapped: dict[str, Any] = {}
    for name, value in env.items():
        way = WITHOUT_EFFECT.get(name)
        if value is None or way == "" or name == "excludes":  # which the client has obeyed
            continue
        if name in _SAME:
            mapped[name] = value
        elif name == "working_dir":
            mapped[name] = packages[_package_name(value, name)]
        elif name == "py_modules":
            mapped[name] = [packages[_package_name(one, name)] for one in _listed(env, name)]
        elif name in ("pip", "uv"):
            mapped[name] = requirements(name, value)
        elif name == "conda" and isinstance(value, str) and "\n" not in value:
            mapped[name] = value
        elif name == "conda":
            file = value if isinstance(value, str) else encode_json(value).decode()
            mapped["conda_file"] = file
        elif name == "worker_process_setup_hook":
            mapped["worker_process_setup"] = process_setup(value)
        else:
            fix = way or REFUSED.get(name, "leave it out, or see docs/options.md")
            raise BadRequestError(
                f"runtime_env has no key {name!r}\n{fix}", field=f"runtime_env.{name}"
            )
    return mapped


def details(job: Job) -> RayJob:
    """Return a job as Ray shows it."""
    node = job.node_id or None
    env = msgspec.to_builtins(job.runtime_env)
    return RayJob(
        type=RayJobType.SUBMISSION if job.submitted else RayJobType.DRIVER,
        job_id=job.job_id,
        submission_id=shown_id(job) if job.submitted else None,
        status=job.state,
        entrypoint=job.entrypoint,
        message=job.message,
        metadata={name: text for name, text in job.metadata.items() if name != SUBMISSION_ID},
        runtime_env={name: value for name, value in env.items() if value},
        start_time=_ms(job.started_at_s or job.created_at_s),
        end_time=_ms(job.ended_at_s),
        driver_node_id=node,
        driver_exit_code=job.exit_code,
    )


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1000)
