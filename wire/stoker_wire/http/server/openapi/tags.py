"""The tags of the document: an operation has the one of its resource, the first part of its path.

A generator of clients makes a module, or a group of functions, of each tag.
"""

from __future__ import annotations

from typing import NamedTuple


class Tag(NamedTuple):
    """A tag, and the resources that it is for."""

    name: str
    description: str
    resources: tuple[str, ...]


TAGS = (
    Tag(
        "Jobs",
        "Programs that run on the cluster or are attached to it, and what they printed and wrote.",
        ("jobs",),
    ),
    Tag("Schedules", "Jobs that are submitted at times of a cron line.", ("schedules",)),
    Tag("Calls", "Calls of registered functions and of actors, with JSON.", ("calls",)),
    Tag("Refs", "Values that a gateway holds for a token.", ("refs",)),
    Tag("Tasks", "Calls of remote functions and of methods, with their history.", ("tasks",)),
    Tag("Training", "Runs of training and the curves of what they report.", ("training-runs",)),
    Tag("Actors", "Objects that live in a process of their own.", ("actors", "named-actors")),
    Tag(
        "Placement groups",
        "Resources that are held together.",
        ("placement-groups", "named-placement-groups", "bundles"),
    ),
    Tag(
        "Queues",
        "Shares of the cluster, their limits, and what waits in them.",
        ("queues", "queue", "queue-usage"),
    ),
    Tag(
        "Scheduling",
        "What there is, who has it, and why something waits.",
        ("cluster", "elastic-plan", "explain", "leases", "owners", "plan", "resources"),
    ),
    Tag(
        "Nodes",
        "Machines of the cluster.",
        ("nodes", "arena", "drain", "environments", "gpus", "leave", "logs", "processes"),
    ),
    Tag(
        "Workers",
        "Processes that run tasks and actors, their stacks and profiles.",
        ("workers", "profiles", "stacks"),
    ),
    Tag("Objects", "Values in the nodes' memory.", ("objects", "detached-objects")),
    Tag("KV", "Small values by key.", ("kv",)),
    Tag("Packages", "Code, by the hash of its content.", ("packages", "functions")),
    Tag(
        "History",
        "What happened, in order, and how long that is kept.",
        ("activity", "events", "ids", "retention", "state", "story"),
    ),
    Tag(
        "Tokens",
        "Who may do what.",
        ("tokens", "channel-reviews", "join", "secret", "whoami"),
    ),
    Tag(
        "Dashboard",
        "What the page at / asks for.",
        (
            "",
            "assets",
            "changes",
            "control-plane",
            "kernels",
            "login-links",
            "overview",
            "session",
            "usage",
        ),
    ),
    Tag("Leaders", "Which replica of a service leads.", ("leaders",)),
    Tag("Ray jobs", "The job API of Ray, for its own client.", ("api",)),
    Tag(
        "Service",
        "Whether this service works, and what it offers.",
        ("errors", "healthz", "metrics", "openapi.json", "process", "readyz"),
    ),
)

_BY_RESOURCE = {resource: tag.name for tag in TAGS for resource in tag.resources}


def tag_of(path: str) -> str:
    """Return the tag of a path; a resource that no tag names is its own."""
    resource = path.removeprefix("/v1").split("/")[1]
    return _BY_RESOURCE.get(resource, resource)
