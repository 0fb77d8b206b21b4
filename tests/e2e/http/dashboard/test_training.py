"""The view of training in a browser: curves are drawn, grow while one looks, and show what is no number."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.http.training import TrainingRun
from stoker_wire.messages.control import Page
from stoker_wire.messages.elastic import ElasticState, Hints, Scaling
from tests.e2e._cluster import WAIT_S, driver, head, http, line_of
from tests.e2e.http.dashboard._browser import Screen
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.launch import LocalCluster

WORK = """
import itertools, math, time
import stoker, stoker.train

stoker.init()

def report(first, last, run="default"):
    for step in range(first, last):
        wave = 0.05 * math.sin(step)
        stoker.train.report(
            step, run=run, loss=2.0 * math.exp(-step / 900) + 0.4 + abs(wave), tokens_per_s=9e4 + 1e4 * wave,
            lr=3e-4 * min(1.0, step / 200), **{"grad/norm": 1 / (1 + step)},
        )

report(0, 2000)
stoker.train.report(5, run="broken", loss=1.0)
stoker.train.report(6, run="broken", loss=math.nan)
stoker.train.report(7, run="broken", loss=math.inf)
print("JOB", stoker.get_runtime_context().job_id, flush=True)
for step in itertools.count():
    report(step, step + 1, run="live")
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("s"), num_cpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: LocalCluster) -> Iterator[str]:
    """The job of a driver that has reported two runs, and goes on with a third."""
    with driver(cluster, WORK) as process:
        job = line_of(process, "JOB")
        until(lambda: len(_runs(cluster)) == 3, WAIT_S, "its runs are there")
        yield job


def _runs(cluster: LocalCluster) -> tuple[TrainingRun, ...]:
    page = http(cluster).call("GET", "/v1/training-runs", reply=Page[TrainingRun])
    return tuple(page.items)


@pytest.fixture
def screen(browser: Any, cluster: LocalCluster) -> Iterator[Screen]:
    """A page on which nothing may go wrong."""
    screen = Screen(browser, cluster.info.gcs_url).log_in(cluster.info.token)
    yield screen
    assert screen.wrong == []
    assert screen.strangers == []
    screen.close()


def _reads(part: Any, text: str) -> bool:
    return text in part.inner_text()


def paths(screen: Screen, label: str, look: str) -> str:
    """The outline of one part of a chart."""
    return str(
        screen.page.locator(".curve", has_text=label).locator(f"path.{look}").get_attribute("d")
    )


def test_the_curves_of_a_run_are_drawn(
    screen: Screen, job: str, picture: Callable[[Screen, str], None]
) -> None:
    screen.open("#/training")
    screen.see("broken", "tbody")
    screen.see("loss ∞", "tbody")
    assert screen.problems() == []
    screen.page.locator("tbody a", has_text="default").click()
    screen.see("default", "h1")
    screen.see("RUNNING", ".heading")
    for label in ("loss", "lr", "tokens_per_s", "grad/norm"):
        assert paths(screen, label, "mean").count("L") > 300
        assert paths(screen, label, "band").endswith("Z")
    assert screen.problems() == []
    picture(screen, "training")
    screen.open(f"#/jobs/{job}")
    screen.page.locator(".panel", has_text="Training").locator("a", has_text="broken").wait_for()


def test_an_elastic_job_shows_what_it_has_is_offered_and_says(
    screen: Screen, cluster: LocalCluster, job: str
) -> None:
    client, path = http(cluster), f"/v1/jobs/{job}"
    scaling = Scaling(base_batch=64, max_local_batch=64, resources={"GPU": 1.0})
    client.call("PUT", f"{path}/scaling", scaling, reply=ElasticState)
    screen.open(f"#/jobs/{job}")
    panel = screen.page.locator(".panel", has_text="Replicas")
    panel.locator("text=none lives").wait_for()
    hints = Hints(
        grad_sqr=1.0, grad_var=8.0, batch=256, local_batch=64, lr_scale=2.0, efficiency=0.8
    )
    client.call("PUT", f"{path}/hints", hints, reply=ElasticState)
    client.call("PUT", f"{path}/hints", Hints(restart_s=-1.0), reply=ElasticState)
    panel.locator("text=256 samples, 64 a pass").wait_for()
    for text in ("1 to 1,000, of 1 GPU", "512 samples", "80 %", "× 2.00", "1: restart_s is -1.0"):
        until(partial(_reads, panel, text), WAIT_S, f"{text!r} can be read")
    assert screen.problems() == []
    client.call("DELETE", f"{path}/scaling")
    panel.wait_for(state="detached")


def test_a_curve_grows_while_one_looks(screen: Screen, job: str) -> None:
    screen.open(f"#/training/{job}?run=live")
    screen.page.evaluate("window.stays = true")
    last = ".curve .axis > span:last-child"
    first = int(screen.page.locator(last).first.inner_text())
    screen.page.wait_for_function(
        "([last, first]) => Number(document.querySelector(last)?.innerText) > first + 40",
        arg=[last, first],
    )
    assert screen.page.evaluate("window.stays") is True
    screen.see("RUNNING", ".heading")


def test_what_is_no_number_is_seen(screen: Screen, job: str) -> None:
    screen.open(f"#/training/{job}?run=broken")
    screen.see("1 NaN, 1 infinite", ".curve")
    assert screen.page.locator(".curve line.nan").count() == 1
    assert screen.problems() == []
    chart = screen.page.locator(".curve svg")
    chart.focus()
    for key in ("ArrowLeft", "ArrowLeft"):
        screen.page.keyboard.press(key)
    screen.see("step 6 · NaN", ".curve output")


def test_a_chart_is_zoomed_and_scaled_by_hand_and_by_keys(screen: Screen, job: str) -> None:
    screen.open(f"#/training/{job}")
    linear = paths(screen, "grad/norm", "mean")
    screen.page.click("text='log'")
    screen.page.wait_for_function(
        "before => (document.querySelector('.curve path.mean')?.getAttribute('d') ?? before) !== before",
        arg=linear,
    )
    chart = screen.page.locator(".curve svg").first
    box = chart.bounding_box()
    mouse, y = screen.page.mouse, box["y"] + box["height"] / 2
    mouse.move(box["x"] + box["width"] * 0.25, y)
    screen.see("step ", ".curve output")
    mouse.down()
    mouse.move(box["x"] + box["width"] * 0.5, y)
    mouse.up()
    screen.page.wait_for_function("() => location.hash.includes('from_step=')")
    screen.see("all steps", ".filters")
    first = int(
        screen.page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('from_step')")
    )
    assert first > 300
    screen.page.locator(".curve svg").first.press("0")
    screen.page.wait_for_function("() => !location.hash.includes('from_step=')")
    screen.page.click("text='time'")
    screen.page.wait_for_function(
        "() => document.querySelector('.curve .axis')?.innerText.includes(':')"
    )
