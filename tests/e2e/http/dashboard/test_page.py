"""The page in a browser, on a live cluster where some things fail and some wait."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.messages.control import CreateToken, Page, PersonRole, Token
from stoker_wire.messages.work import Job, SubmitJob, TaskRecord
from tests.e2e._cluster import WAIT_S, driver, head, http, line_of
from tests.e2e.http.dashboard._browser import Relay, Screen, interactive_ms
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.launch import LocalCluster

WORK = """
import json, time
import stoker

stoker.init(namespace="demo")
HOSTILE = "<img src=x onerror=window.hacked=1>"

@stoker.remote
def fails(i):
    raise ValueError(f"bad record {i}")

def body(i):
    return i

body.__name__ = body.__qualname__ = HOSTILE
hostile = stoker.remote(body)

@stoker.remote(num_cpus=0.5)
class Counter:
    def add(self, k):
        return k

@stoker.remote
class Broken:
    def __init__(self):
        raise RuntimeError("no weights at /nowhere")

@stoker.remote(num_gpus=64, on_infeasible="wait")
def train():
    pass

@stoker.remote
def step(i):
    time.sleep(0.05 + 0.05 * (i % 4))

from_s = time.time()
stoker.get([step.remote(i) for i in range(24)])
waits = train.remote()
counter = Counter.options(name="counter").remote()
for k in range(6):
    stoker.get(counter.add.remote(k))
broken = Broken.remote()
gang = stoker.placement_group([{"GPU": 64}], name="gang")
failed = [fails.remote(i) for i in range(3)]
done = hostile.remote(1)
stoker.get(done)
stoker.wait(failed, num_returns=3)
big = stoker.put(b"x" * 1_000_000)
job = stoker.get_runtime_context().job_id
ids = {"actor": counter.actor_id, "gang": gang.id, "job": job}
times = {"from_s": f"{from_s:.2f}", "to_s": f"{time.time():.2f}"}
print("READY", json.dumps({**ids, **times}), flush=True)
time.sleep(600)
"""
HOSTILE = "<img src=x onerror=window.hacked=1>"
PICTURES = {
    "#/": "overview",
    "#/jobs/{job}?tab=functions": "job",
    "#/tasks/{task}": "attempt",
    "#/timeline?from_s={from_s}&to_s={to_s}": "timeline",
}


@pytest.fixture(scope="module")
def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("s"), num_cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def work(cluster: LocalCluster) -> Iterator[dict[str, str]]:
    """Ids of what a driver has started there."""
    with driver(cluster, WORK) as process:
        ids = json.loads(line_of(process, "READY"))
        failed = until(
            lambda: _failed(cluster), WAIT_S, "the attempts that failed are in the history"
        )
        (node,) = http(cluster).call("GET", "/v1/nodes", reply=dict)["items"]
        yield {**ids, "task": failed["task_id"], "node": node["node_id"]}


def _failed(cluster: LocalCluster) -> Any:
    query = {"state": "FAILED", "name": "fails"}
    found = http(cluster).call("GET", "/v1/tasks", reply=dict, query=query)["items"]
    return found[0] if len(found) == 3 else None


def screen_of(browser: Any, cluster: LocalCluster, token: str) -> Screen:
    return Screen(browser, cluster.info.gcs_url).log_in(token)


@pytest.fixture(scope="module")
def shared(browser: Any, cluster: LocalCluster) -> Iterator[Screen]:
    screen = screen_of(browser, cluster, cluster.info.token)
    yield screen
    screen.close()


@pytest.fixture
def screen(shared: Screen) -> Iterator[Screen]:
    """The page of an admin, on which nothing may go wrong."""
    yield shared
    assert shared.wrong == []
    assert shared.strangers == []


@pytest.fixture
def opened(browser: Any, cluster: LocalCluster) -> Iterator[Callable[[str], Screen]]:
    """Open a page of its own for a token."""
    screens: list[Screen] = []

    def open_(token: str) -> Screen:
        screens.append(screen_of(browser, cluster, token))
        return screens[-1]

    yield open_
    for one in screens:
        one.close()


def token_of(cluster: LocalCluster, name: str, role: PersonRole) -> Token:
    return http(cluster).call("POST", "/v1/tokens", CreateToken(name=name, role=role), reply=Token)


def submit(cluster: LocalCluster, name: str, entrypoint: str = "true") -> Job:
    return http(cluster).call(
        "POST", "/v1/jobs", SubmitJob(entrypoint=entrypoint, name=name), reply=Job
    )


def at_its_end(cluster: LocalCluster, job: Job) -> Job:
    query = {"wait_s": 20}
    return http(cluster).call("GET", f"/v1/jobs/{job.job_id}", query=query, reply=Job)


@pytest.mark.parametrize(
    ("place", "shows"),
    [
        ("#/", "Recent failures"),
        ("#/nodes", "CPU"),
        ("#/nodes/{node}", "Held by"),
        ("#/jobs", "RUNNING"),
        ("#/jobs?tab=schedules", "No schedules yet"),
        ("#/jobs/{job}", "Output"),
        ("#/jobs/{job}?tab=workers", "to its end|following|lines"),
        ("#/jobs/{job}?tab=functions", "fails"),
        ("#/jobs/{job}?tab=tasks", "fails"),
        ("#/jobs/{job}?tab=actors", "Broken"),
        ("#/jobs/{job}?tab=explanation", "64 GPU"),
        ("#/jobs/{job}?tab=story", "no weights at /nowhere"),
        ("#/jobs/{job}?tab=attempts", "RUNNING"),
        ("#/jobs/{job}?tab=cost", "actor counter"),
        ("#/jobs/{job}?tab=environment", "Environment"),
        ("#/tasks", "task_failed"),
        ("#/tasks?by=none&state=FAILED", "bad record"),
        ("#/functions/fails", "bad record"),
        ("#/tasks/{task}", "Where its time went"),
        ("#/tasks/{task}?tab=story", "task.started"),
        ("#/tasks/{task}?tab=output", "The output of the worker"),
        ("#/actors", "no weights at /nowhere"),
        ("#/actors/{actor}", "Counter"),
        ("#/actors/{actor}?tab=calls", "Counter.add"),
        ("#/groups", "gang"),
        ("#/groups/{gang}", "not reserved"),
        ("#/queues", "default"),
        ("#/queues/default", "Standing"),
        ("#/objects", "The largest"),
        ("#/timeline", "attempts on"),
        ("#/timeline?from_s={from_s}&to_s={to_s}", "attempts on"),
        ("#/kernels", "Nothing was measured yet"),
        ("#/events", "job.started"),
        ("#/control", "no default|Settings that were set|settings have their default"),
    ],
)
def test_each_view_shows_the_cluster_to_everyone(
    screen: Screen,
    work: dict[str, str],
    place: str,
    shows: str,
    picture: Callable[[Screen, str], None],
) -> None:
    screen.open(place.format(**work))
    screen.page.wait_for_function(
        "shows => RegExp(shows).test(document.querySelector('main')?.innerText)", arg=shows
    )
    assert screen.page.locator("main [role=alert]").all_inner_texts() == []
    assert screen.problems() == []
    if place in PICTURES:
        picture(screen, PICTURES[place])


def test_what_cannot_be_read_or_heard_is_found(screen: Screen) -> None:
    screen.open("#/queues")
    screen.page.evaluate("document.querySelector('main').append(document.createElement('img'))")
    found = screen.problems()
    screen.page.evaluate("document.querySelector('main > img').remove()")
    assert [one[:21] for one in found] == ["light: axe: image-alt", "dark: axe: image-alt:"]
    assert screen.problems() == []


def test_the_range_of_the_charts_is_chosen_by_keys(screen: Screen) -> None:
    screen.open("#/")
    ranges = screen.page.get_by_role("group", name="Range").get_by_role("button")
    assert ranges.all_inner_texts() == ["5 min", "1 h", "6 h", "1 d", "7 d", "60 d"]
    chosen = [one.get_attribute("aria-pressed") for one in ranges.all()]
    assert chosen == ["false", "true", "false", "false", "false", "false"]
    ranges.nth(1).focus()
    screen.page.keyboard.press("Shift+Tab")
    screen.page.keyboard.press("Enter")
    screen.page.locator("button[aria-pressed=true]", has_text="5 min").wait_for()
    assert screen.page.evaluate("location.hash") == "#/?range=5m"
    assert screen.page.evaluate("document.activeElement.textContent") == "5 min"


def test_gpus_show_their_heat_and_power(screen: Screen) -> None:
    device = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100", "memory_bytes": 80 << 30}
    usage = {
        "percent": 42,
        "temperature_celsius": 61.4,
        "power_watts": 512.3,
        "memory_bytes": 1 << 30,
    }

    def with_gpu(route: Any) -> None:
        page = route.fetch().json()
        for node in page["items"]:
            node["devices"] = [{**device, "mig_profile": "", "quarantine": ""}]
            node["usage"] |= {f"gpu0_{name}": value for name, value in usage.items()}
        route.fulfill(json=page)

    screen.page.route("**/v1/nodes?*", with_gpu)
    try:
        screen.open("#/nodes")
        screen.see("42 % · 1.0 GiB of 80.0 GiB · 61 °C · 512 W", ".gpu-numbers")
    finally:
        screen.page.unroute("**/v1/nodes?*")


def test_settings_are_shown_to_admins_and_health_to_all(
    screen: Screen, opened: Callable[[str], Screen], cluster: LocalCluster
) -> None:
    screen.open("#/control")
    screen.see("sqlite, revision", "main")
    screen.page.click("summary:has-text('settings have their default')")
    screen.see("keep_events", "table[aria-label='Settings with their default']")
    processes = screen.text("table[aria-label=Processes]")
    assert all(name in processes for name in ("gcs", "scheduler", "nodelet", "pid"))
    assert cluster.info.token not in screen.text()
    other = opened(token_of(cluster, "vito", PersonRole.VIEWER).secret)
    other.open("#/control")
    other.see("are shown to admins")
    assert "sqlite, revision" in other.text() and other.wrong == []
    other.open("#/kernels")
    other.see("Nothing was measured yet")


def test_a_search_finds_groups(screen: Screen, work: dict[str, str]) -> None:
    screen.open("#/")
    screen.page.keyboard.press("/")
    screen.page.keyboard.type(work["gang"][:-3])
    screen.see("gang", "#found")
    screen.page.keyboard.press("Enter")
    screen.see("gang", "h1")


def test_the_timeline_says_which_actor_ran_on_which_node(
    screen: Screen, work: dict[str, str]
) -> None:
    screen.open("#/timeline")
    canvas = screen.page.locator("canvas")
    canvas.wait_for()
    told = canvas.get_attribute("aria-label") or ""
    assert f"{work['node']}: " in told and f"counter {work['actor'][:6]}" in told


def test_the_timeline_follows_the_colours_of_the_system(
    screen: Screen, work: dict[str, str]
) -> None:
    screen.page.emulate_media(color_scheme="light")
    screen.open("#/timeline?from_s={from_s}&to_s={to_s}".format(**work))
    drawn = "() => document.querySelector('canvas')?.toDataURL() ?? ''"
    screen.page.wait_for_function(f"() => ({drawn})().length > 5000")
    light = screen.page.evaluate(drawn)
    screen.page.emulate_media(color_scheme="dark")
    screen.page.wait_for_function(f"light => !['', light].includes(({drawn})())", arg=light)


def test_the_page_is_soon_there(
    browser: Any, cluster: LocalCluster, record_property: Callable[[str, object], None]
) -> None:
    screen = screen_of(browser, cluster, cluster.info.token)
    try:
        took_ms = interactive_ms(screen)
        record_property("interactive_ms", round(took_ms))
        assert took_ms < 40_000
    finally:
        screen.close()


def test_what_tasks_and_their_actors_held_is_known(
    cluster: LocalCluster, work: dict[str, str]
) -> None:
    def of(path: str, **query: str) -> Any:
        return http(cluster).call("GET", path, reply=dict, query=query)

    attempt = http(cluster).call("GET", f"/v1/tasks/{work['task']}", reply=TaskRecord)
    assert (attempt.cpus, attempt.gpus, attempt.group_id) == (1.0, 0.0, "")
    calls = http(cluster).call(
        "GET", "/v1/tasks", reply=Page[TaskRecord], query={"actor_id": work["actor"]}
    )
    assert [one.cpus for one in calls.items] == [0.0] * 6, (
        "the actor holds it, whether it is called or not"
    )
    functions = {one["key"]: one for one in of("/v1/tasks/summary", job_id=work["job"])["items"]}
    assert functions["fails"]["cpu_s"] == pytest.approx(functions["fails"]["run_s"]["total"])
    parts = {one["id"] or one["name"]: one for one in of(f"/v1/jobs/{work['job']}/cost")["parts"]}
    assert parts[work["actor"]]["cpu_s"] > 0 and parts["fails"]["cpu_s"] > 0


def test_names_that_users_chose_are_text(screen: Screen, work: dict[str, str]) -> None:
    screen.open(f"#/jobs/{work['job']}?tab=tasks")
    screen.see(HOSTILE)
    screen.page.click(f"text={HOSTILE}")
    screen.see(HOSTILE, "h1")
    assert screen.page.evaluate("window.hacked") is None
    assert screen.page.locator("main img").count() == 0


def test_a_job_appears_and_ends_on_the_open_page(screen: Screen, cluster: LocalCluster) -> None:
    screen.open("#/jobs")
    screen.page.evaluate("window.stays = true")
    job = submit(cluster, "appears", "read line < /dev/zero & sleep 0.5")
    screen.see("appears")
    at_its_end(cluster, job)
    screen.page.locator("tr", has_text="appears").locator("text=SUCCEEDED").wait_for()
    assert screen.page.evaluate("window.stays") is True


def test_what_is_typed_stays_while_the_view_is_drawn_again(
    screen: Screen, cluster: LocalCluster, work: dict[str, str]
) -> None:
    screen.open("#/jobs")
    field = screen.page.get_by_label("namespace")
    field.press_sequentially("half a na")
    submit(cluster, "meanwhile")
    screen.see("meanwhile")
    assert field.input_value() == "half a na"
    field.press_sequentially("me")
    assert field.input_value() == "half a name"
    field.fill("")
    field.blur()


def test_a_page_that_was_cut_off_says_so_and_is_complete_again(
    browser: Any, cluster: LocalCluster
) -> None:
    relay = Relay(cluster.info.gcs_url)
    screen = Screen(browser, relay.url).log_in(cluster.info.token)
    try:
        screen.open("#/jobs")
        relay.cut()
        screen.page.wait_for_selector(".connection.reconnecting")
        submit(cluster, "unseen")
        assert "unseen" not in screen.text("main")
        relay.mend()
        screen.live()
        screen.see("unseen")
    finally:
        screen.close()
        relay.close()


def test_output_is_followed_and_searched(screen: Screen, cluster: LocalCluster) -> None:
    job = submit(cluster, "talks", "seq -f 'step %g' 1 400; sleep 60")
    screen.open(f"#/jobs/{job.job_id}")
    screen.see("step 400", ".log-lines")
    screen.page.get_by_label("search", exact=True).fill("STEP 39")
    screen.see("11 of 400 lines", ".log")
    assert screen.page.locator("mark").first.inner_text() == "step 39"
    assert "step 400" not in screen.text(".log-lines")
    screen.page.click("button:text-is('stop')")
    screen.page.click("button:text-is('Stop the job')")
    screen.page.locator("h1 + .badge", has_text="STOPPED").wait_for()


def test_an_earlier_moment_is_shown_and_left(
    screen: Screen, cluster: LocalCluster, work: dict[str, str]
) -> None:
    job = at_its_end(cluster, submit(cluster, "later"))
    events = http(cluster).call("GET", "/v1/events", reply=dict, query={"subject": job.job_id})
    before = events["items"][0]["seq"] - 1
    screen.open(f"#/jobs?at={before}")
    screen.see("Looking at the past", ".past")
    screen.see(work["job"])
    assert "later" not in screen.text("main tbody")
    screen.page.get_by_title("One event later").click()
    screen.page.locator("tr", has_text="later").locator("text=PENDING").wait_for()
    screen.page.click("text=Back to live")
    screen.page.locator("tr", has_text="later").locator("text=SUCCEEDED").wait_for()
    assert screen.text(".past") == ""


def test_the_keyboard_leads_everywhere(screen: Screen, work: dict[str, str]) -> None:
    screen.open("#/")
    keys = screen.page.keyboard
    keys.press("g")
    keys.press("p")
    screen.see("Placement groups", "h1")
    screen.see("gang", "main tbody")
    keys.press("j")
    keys.press("Enter")
    screen.see("gang", "h1")
    keys.press("?")
    screen.see("Keys", "dialog")
    keys.press("Escape")
    keys.press("/")
    keys.type(work["actor"][:-2])
    screen.see(work["actor"], "#found")
    keys.press("Enter")
    screen.see("counter", "h1")


def test_the_token_is_out_of_the_address_and_of_scripts(
    opened: Callable[[str], Screen], cluster: LocalCluster
) -> None:
    screen = opened(cluster.info.token)
    assert cluster.info.token not in screen.page.url
    kept = screen.page.evaluate("[document.cookie, ...Object.values({...localStorage})].join()")
    assert kept == ""


def test_a_wrong_token_is_said(browser: Any, cluster: LocalCluster) -> None:
    screen = Screen(browser, cluster.info.gcs_url)
    screen.page.goto(f"{screen.url}/#/jobs")
    screen.page.get_by_label("Token").fill("not a token")
    screen.page.click("button:text-is('Log in')")
    screen.page.wait_for_function("document.querySelector('[role=alert]')?.innerText.length > 10")
    screen.page.get_by_label("Token").fill(cluster.info.token)
    screen.page.click("button:text-is('Log in')")
    screen.see("Jobs", "h1")
    screen.close()


def test_a_session_that_ended_asks_for_a_token_and_goes_on(
    opened: Callable[[str], Screen], cluster: LocalCluster
) -> None:
    screen = opened(cluster.info.token)
    screen.open("#/queues")
    screen.context.clear_cookies()
    screen.page.evaluate("location.hash = '#/jobs'")
    screen.see("the session has ended")
    screen.page.get_by_label("Token").fill(cluster.info.token)
    screen.page.click("button:text-is('Log in')")
    screen.see("Jobs", "h1")


def test_who_may_only_look_on_has_no_button_that_is_refused(
    opened: Callable[[str], Screen], cluster: LocalCluster, work: dict[str, str]
) -> None:
    screen = opened(token_of(cluster, "vera", PersonRole.VIEWER).secret)
    places = ("nodes", "nodes/{node}", "jobs/{job}", "actors/{actor}", "groups/{gang}")
    for place in places:
        screen.open(f"#/{place}".format(**work))
        buttons = screen.page.locator("main .buttons button")
        assert buttons.count() > 0, place
        for button in buttons.all():
            assert button.get_attribute("aria-disabled") == "true"
            assert re.match("only .* may", button.get_attribute("title") or "")
            button.click(force=True)
    assert screen.page.locator("dialog").count() == 0
    assert screen.wrong == []


def test_a_user_sees_own_work_and_not_the_past(
    opened: Callable[[str], Screen], cluster: LocalCluster, work: dict[str, str]
) -> None:
    screen = opened(token_of(cluster, "ulf", PersonRole.USER).secret)
    screen.open("#/jobs")
    screen.see("stoker job submit -- python train.py")
    button = screen.page.locator("button:text-is('time travel')")
    assert button.get_attribute("aria-disabled") == "true"
    assert screen.wrong == []
