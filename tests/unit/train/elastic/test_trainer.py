"""What a user is told while a training waits for its replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import BadRequestError
from stoker_train import training_job
from stoker_train.elastic.options import check_seconds
from stoker_train.elastic.trainer import ElasticTrainer


class Client:
    """A client of jobs, of which one waits."""

    asked = 0

    def explain_job(self, job_id: str) -> Any:
        self.asked += 1
        return SimpleNamespace(summary="nodes have room for 2", remedy="")


def test_a_wait_for_replicas_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(training_job, "time", SimpleNamespace(monotonic=lambda: now_s))
    client: Any = Client()
    wait = training_job.Wait("mine", "job_1", "replicas")
    trainer = ElasticTrainer.__new__(ElasticTrainer)
    trainer.job_id = "job_1"

    def look(at_s: float, replicas: int = 0, **progress: Any) -> str:
        nonlocal now_s
        now_s = at_s
        scaling = SimpleNamespace(min_replicas=2)
        state = SimpleNamespace(replicas=(0,) * replicas, offer=None, scaling=scaling)
        job: Any = SimpleNamespace(elastic=state)
        wait.look(trainer._waits(job, progress), lambda: trainer._reason(client, progress))
        return capsys.readouterr().err

    assert look(0.0) == ""
    assert look(5.0, phase="FORMING") == ""
    told = look(9.0, phase="FORMING")
    assert "'mine' has waited 9 s" in told
    assert "nodes have room for 2" in told
    assert "stoker explain job_1" in told
    assert look(30.0, phase="FORMING") == "", "once"
    assert look(31.0, 2, phase="FORMING") == "", "it has them, and they start"
    assert look(45.0, 2, phase="FORMING") == ""
    assert look(46.0, 2, phase="RUNNING") == ""
    assert look(60.0, 1, phase="RESTORING") == ""
    assert "has waited 9 s" in look(69.0, 1, phase="RESTORING"), "again, when it waits again"
    assert client.asked == 2


def test_a_wait_of_no_time_is_a_look() -> None:
    check_seconds("timeout_s", 0, or_zero=True)
    with pytest.raises(BadRequestError):
        check_seconds("timeout_s", -1, or_zero=True)
    with pytest.raises(BadRequestError):
        check_seconds("timeout_s", 0)
