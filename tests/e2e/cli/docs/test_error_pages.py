"""The examples on the pages of errors raise what they are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import StokerError
from stoker_wire.http.error_pages.page import PAGES
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = [code for code, texts in PAGES.items() if not texts.not_run]


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", "1")
        with embedded(tmp_path_factory.mktemp("errors"), num_cpus=4, num_gpus=0):
            yield


@pytest.mark.logs(r"exceeded memory=")
@pytest.mark.parametrize("code", RUN)
def test_an_example_raises_its_error(code: str) -> None:
    names: dict[str, Any] = {"stoker": stoker, "__name__": "page"}
    example = compile(PAGES[code].example, f"docs/errors/{code}.md", "exec")
    with pytest.raises(StokerError) as caught:
        exec(example, names)
    assert caught.value.code == code, caught.value


def test_most_of_what_users_cause_is_run() -> None:
    assert len(RUN) >= 20
