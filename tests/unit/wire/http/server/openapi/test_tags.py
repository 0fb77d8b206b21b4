"""Every route of every service has a tag that the document describes."""

from __future__ import annotations

import pytest

from scripts.docs import SERVICE_ROUTES
from stoker_wire.http.server.openapi.tags import TAGS, tag_of


@pytest.mark.parametrize("service", SERVICE_ROUTES)
def test_a_route_has_a_tag_that_is_described(service: str) -> None:
    known = {tag.name for tag in TAGS}
    strange = {route.path for route in SERVICE_ROUTES[service] if tag_of(route.path) not in known}
    assert not strange, f"name the first part of the path in {tag_of.__module__}"


def test_a_resource_has_one_tag_and_a_tag_one_name() -> None:
    resources = [resource for tag in TAGS for resource in tag.resources]
    assert len(set(resources)) == len(resources)
    assert len({tag.name for tag in TAGS}) == len(TAGS)


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("/v1/jobs/{job_id}/logs", "Jobs"),
        ("/v1/named-actors/{namespace}/{name}", "Actors"),
        ("/api/jobs/", "Ray jobs"),
        ("/openapi.json", "Service"),
        ("/v1/unheard-of/{id}", "unheard-of"),
    ],
)
def test_the_tag_is_that_of_the_first_part_of_the_path(path: str, tag: str) -> None:
    assert tag_of(path) == tag
