"""A token file says at which step of a rotation it is, and no step is done twice or too early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.local.secret_rotation import SecretFile, Stage
from stoker_wire.errors import ConflictError
from stoker_wire.http.auth import load_secrets, write_private

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> SecretFile:
    write_private(tmp_path / "token", "first\n")
    return SecretFile(tmp_path / "token")


def test_three_steps_replace_a_secret_and_each_may_be_repeated(file: SecretFile) -> None:
    stages = []
    for step in (file.add, file.use, file.finish):
        step()
        stages.append((file.stage, load_secrets(file.path)))
        if file.stage is not Stage.NONE:
            step()
            assert load_secrets(file.path) == stages[-1][1]
        assert SecretFile(file.path).stage is file.stage
    (_, added), (_, used), (_, finished) = stages
    assert [stage for stage, _ in stages] == [Stage.NEXT, Stage.FORMER, Stage.NONE]
    assert added[0] == "first" and used == added[::-1] and finished == (added[1],)
    assert len(added[1]) == 48


def test_no_step_is_done_too_early(file: SecretFile) -> None:
    with pytest.raises(ConflictError, match="no next secret"):
        file.use()
    file.add()
    with pytest.raises(ConflictError, match="have it sign first"):
        file.finish()
    file.use()
    with pytest.raises(ConflictError, match="--finish"):
        file.add()


def test_two_lines_that_a_person_wrote_do_not_say_what_they_are(file: SecretFile) -> None:
    write_private(file.path, "first\nsecond\n")
    written = SecretFile(file.path)
    assert written.stage is Stage.UNKNOWN
    written.use()
    assert written.secrets == ("second", "first")


def test_a_link_to_a_token_file_stays_a_link(file: SecretFile, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file.path)
    SecretFile(link).add()
    assert link.is_symlink()
    assert len(load_secrets(file.path)) == 2
