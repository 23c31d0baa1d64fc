"""The dashboard as its users have it: the command in another directory, a real browser, and a job that really runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import needed
import pytest
from browser import DOWN, ENTER
from dashboard_fleet import HOSTILE, fleet, hostile, odd
from harness import PROJECT, job
from told_fleet import ToldFleetRun

from resilience_sdk.core.journal import Event
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory

pytestmark = pytest.mark.slow
for _module in ("jinja2", "starlette", "uvicorn"):
    needed.library(_module, "dashboard")

PATIENCE_S = 60.0
RUNS = 20
_ADDRESS = re.compile(r"http://\S+:(\d+)/")


@attrs.define
class Served:
    """A dashboard that runs."""

    process: subprocess.Popen[str]
    url: str
    port: int
    said: str
    """Its first line."""

    def get(self, path: str = "", **headers: str) -> tuple[int, str]:
        """Return status and text of an answer; redirects are not followed."""
        request = urllib.request.Request(self.url + path, headers=headers)
        opener = urllib.request.build_opener(_Stay())
        try:
            with opener.open(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; return exit code and what was said."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def served(folder: Path, *words: str, port: int = 0, **env: str) -> Iterator[Served]:
    """Start the command in a directory of its own, as a person does; without a token, unless `env` has one."""
    elsewhere = folder.parent / f"cwd-{folder.name}"
    elsewhere.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "VIRTUAL_ENV") if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk", "dashboard", *(words or (str(folder),)), "--port", str(port)],
        cwd=elsewhere,
        env={
            **kept,
            "PYTHONPATH": str(PROJECT),
            "RESILIENCE_PAGE_DIR": str(elsewhere),
            "RESILIENCE_DASHBOARD_TOKEN": "none",
            **env,
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while (found := _ADDRESS.search(said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield Served(process, found[0].rstrip("/"), int(found[1]), said)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of every kind."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    folder.mkdir()
    fleet(folder, RUNS)
    odd(folder)
    for index, text in enumerate(HOSTILE):
        hostile(folder, text, index)
    return folder


@pytest.fixture(scope="module")
def shown(runs: Path) -> Iterator[Served]:
    """A dashboard of them."""
    with served(runs) as one:
        yield one


def until(browser: Any, happened: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait until a page has come to something, and return that."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    waiting = WebDriverWait(browser.driver, patience_s, 0.1, [StaleElementReferenceException])
    return waiting.until(lambda _: happened(), what)


def text_of(browser: Any, selector: str) -> str:
    """Return the text of the first such element, nothing where there is none."""
    told = browser.ask("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
    return str(told)


def is_live(browser: Any) -> bool:
    """Tell whether the page says so."""
    return text_of(browser, "#live").endswith(" live")


def leaves_here(browser: Any) -> list[str]:
    """Return the addresses of other hosts that were asked."""
    return [url for url in browser.requests() if not url.startswith(("http://127.0.0.1:", "data:"))]


@pytest.mark.parametrize(
    ("width", "most"),
    [(390, len(HOSTILE) + 5), *(pytest.param(width, None, marks=pytest.mark.release) for width in (1280, 390))],
)
def test_every_page_is_quiet_and_asks_nobody_else(browser: Any, shown: Served, width: int, most: int | None) -> None:
    """The list and its runs: a silent console, no other host, hostile texts as texts, nothing beyond the edge.

    `most`: of the runs the last ones, which hold hostile texts and odd files.
    """
    browser.open(f"{shown.url}/", width=width)
    until(browser, lambda: is_live(browser), "live")
    links = browser.ask("return [...document.querySelectorAll('tbody th a')].map((a) => a.href)")
    assert len(links) == RUNS + 5 + len(HOSTILE)
    for link in [f"{shown.url}/", *links[-(most or len(links)) :]]:
        browser.open(link, width=width)
        until(browser, lambda: is_live(browser), "live")
        assert browser.complaints() == []
        assert leaves_here(browser) == []
        assert "owned" not in browser.driver.title[:5]
        assert (
            browser.ask("return document.querySelectorAll('img, iframe, object, embed, [onload], [onerror]').length")
            == 0
        )
        assert browser.ask("return document.documentElement.scrollWidth") == width, link
    browser.open(f"{shown.url}/", width=width)
    for text in HOSTILE[:2]:
        assert text in browser.ask("return document.querySelector('#rows').textContent")


CUT = """return [...document.querySelectorAll('#runs table, #runs td, #runs tbody th, #runs .state, #runs .gauge')]
  .map((part) => [part.getBoundingClientRect().right, part.outerHTML.slice(0, 99)])
  .filter(([right]) => right > document.querySelector('#runs').getBoundingClientRect().right + 1)"""


@pytest.mark.parametrize(
    "width",
    [1440, 390, *(pytest.param(each, marks=pytest.mark.release) for each in (1600, 1310, 1290, 1200, 1130, 1100, 800))],
)
def test_no_column_is_cut(browser: Any, tmp_path: Path, width: int) -> None:
    """With long names, steps and reasons of a run that stands still each column is inside of the list."""
    name = "llama-70b-pretraining-with-a-long-name"
    run = ToldFleetRun.make(tmp_path / "runs" / name, ["node1"], ranks_per_node=2, at=time.time() - 1000)
    run.start()
    for rank in range(2):
        run.tell("node1", Event.FIRST_BEAT, rank=rank, step=12_345_678, step_is_global=True)
    run.fail("node1", "rank_killed_sigkill", "process")
    run.tell("node1", Event.FIRST_BEAT, rank=0, step=12_345_678, step_is_global=True)
    why = "no rank has made progress for 42 s: the others wait for rank 1 on node1, stuck at /home/me/train.py:83 fetch"
    run.tell("node1", Event.STALL, text=why, since=run.at)
    lease = Lease.acquire(RunDirectory(run.path), "job")
    try:
        with served(tmp_path / "runs") as one:
            browser.open(f"{one.url}/", width=width)
            until(browser, lambda: is_live(browser), "live")
            assert "stands still" in text_of(browser, "#rows")
            assert browser.ask(CUT) == []
            assert browser.ask("return document.documentElement.scrollWidth") == width
            # The reason has room for its words.
            across = browser.ask("return document.querySelector('td[data-key=state] .detail').offsetWidth")
            assert across >= (300 if width == 390 else 120)
    finally:
        lease.release()


def test_the_list_is_sorted_and_filtered_by_keyboard(browser: Any, shown: Served) -> None:
    """Both stand in the address; rows that change keep their place, and the focus its row."""
    browser.open(f"{shown.url}/")
    until(browser, lambda: is_live(browser), "live")
    shown_names = "return [...document.querySelectorAll('tbody tr:not([hidden]) th')].map((name) => name.textContent)"
    before = browser.ask(shown_names)
    browser.press("/")
    browser.press("llama")
    names = browser.ask(shown_names)
    assert names
    assert all(name.startswith("llama") for name in names)
    assert text_of(browser, "#shown") == f"{len(names)} of {len(before)}"
    button = browser.find("th[data-key=step] button")
    browser.ask("arguments[0].focus()", button)
    browser.press(ENTER)
    assert browser.find("th[data-key=step]").get_attribute("aria-sort") == "descending"
    cells = "[...document.querySelectorAll('tbody tr:not([hidden]) td[data-key=step]')]"
    steps = f"return {cells}.map((cell) => +cell.dataset.value)"
    assert browser.ask(steps) == sorted(browser.ask(steps), reverse=True)
    assert browser.driver.current_url == f"{shown.url}/?q=llama&sort=-step"
    browser.driver.refresh()
    assert browser.ask(steps) == sorted(browser.ask(steps), reverse=True)
    assert set(browser.ask(shown_names)) == set(names)
    browser.ask("document.querySelector('tbody tr:not([hidden]) th a').focus()")
    browser.press(DOWN)
    assert browser.ask("return document.activeElement.textContent") == browser.ask(shown_names)[1]
    browser.press("/")
    browser.press("there is no such run")
    assert browser.find("#nomatch").is_displayed()
    browser.find("#clear").click()
    assert len(browser.ask(shown_names)) == len(before)
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.release)])
def test_everybody_can_use_it(browser: Any, shown: Served, tmp_path: Path, dark: bool) -> None:
    """axe finds nothing serious on the list, with many runs and with none, on a run, and where a token is asked."""
    (empty := tmp_path / "empty").mkdir()
    with served(empty) as nothing, served(empty, RESILIENCE_DASHBOARD_TOKEN="t0ken") as closed:
        run = re.findall(r'href="(/run/[^"]*)"', shown.get("/")[1])[RUNS]
        for width in (1280, 390):
            for page in (f"{shown.url}/", f"{nothing.url}/", f"{closed.url}/", f"{shown.url}{run}", f"{shown.url}/no"):
                browser.open(page, width=width, dark=dark)
                assert browser.barriers("serious", "critical") == [], page


def test_a_job_is_followed_as_it_runs(browser: Any, tmp_path: Path) -> None:
    """Its steps, the death of a rank and its end arrive in the list and in its report, which are not loaded again."""
    folder, goes = tmp_path / "jobs", tmp_path / "goes"
    folder.mkdir()
    with (
        job(folder, "--nproc-per-node", "2", "training.py", "--until", str(goes)) as run,
        # A rank's page is looked for where the job has it.
        served(folder, RESILIENCE_PAGE_DIR=str(run.pages)) as one,
    ):
        browser.open(f"{one.url}/")
        browser.ask("window.isTheSame = true")
        until(browser, lambda: "running" in text_of(browser, "tbody td[data-key=state]"), "the run")
        step = "return Number(document.querySelector('tbody td[data-key=step]')?.dataset.value || 0)"
        first = until(browser, lambda: browser.ask(step), "a step")
        until(browser, lambda: browser.ask(step) > first, "the next step")
        link = browser.ask("return document.querySelector('tbody th a').href")

        listed = browser.driver.current_window_handle
        browser.driver.switch_to.new_window("tab")
        browser.driver.get(link)
        report = browser.driver.current_window_handle
        browser.ask("window.isTheSame = true")
        until(browser, lambda: is_live(browser), "live")
        ranks = text_of(browser, "#ranks")
        until(browser, lambda: text_of(browser, "#ranks") != ranks, "another step of the ranks")
        (victim,) = run.told("rank-0-1")
        os.kill(int(victim.read_text()), signal.SIGKILL)
        until(browser, lambda: "rank_killed_sigkill" in text_of(browser, "#incidents"), "the incident in the report")
        browser.driver.switch_to.window(listed)
        told = lambda: text_of(browser, "tbody td[data-key=incident]")  # noqa: E731
        until(browser, lambda: "rank_killed_sigkill" in told(), "the incident in the list")
        until(browser, lambda: text_of(browser, "tbody td[data-key=attempt]") == "1", "the next attempt")
        run.wait_event("recovered")
        goes.touch()
        assert run.finish() == 0, run.screen
        until(browser, lambda: "finished" in text_of(browser, "tbody td[data-key=state]"), "the end in the list")
        for page, state in ((listed, "#rows"), (report, "#summary")):
            browser.driver.switch_to.window(page)
            until(browser, lambda state=state: "finished" in text_of(browser, state), "the end")
            assert browser.ask("return window.isTheSame") is True
        assert browser.complaints() == []
        assert leaves_here(browser) == []
        browser.driver.close()
        browser.driver.switch_to.window(listed)


def test_a_page_says_that_nobody_answers_any_more(browser: Any, runs: Path) -> None:
    """When the server is gone, and that it is back."""
    with served(runs) as one:
        browser.open(f"{one.url}/")
        until(browser, lambda: is_live(browser), "live")
        one.process.kill()
        one.process.wait()
        until(browser, lambda: "connection lost" in text_of(browser, "#live"), "that the connection is lost")
        with served(runs, port=one.port):
            until(browser, lambda: is_live(browser), "live again")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_ends_at_once(shown: Served, runs: Path, number: int, code: int) -> None:
    """With pages that are open, without a stack and with the exit code of its signal."""
    with served(runs) as one:
        streams = [urllib.request.urlopen(f"{one.url}/events", timeout=PATIENCE_S) for _ in range(3)]
        for stream in streams:
            assert stream.readline().startswith(b"retry:")
        assert one.end(number) == (code, "")
        for stream in streams:
            stream.read()
            stream.close()


def test_it_only_reads(shown: Served, runs: Path) -> None:
    """No file of a run, and no time of one, is another one after everybody has looked at everything."""

    def facts() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [runs, *runs.rglob("*")]}

    before = facts()
    page = shown.get("/")[1]
    for address in re.findall(r'href="(/run/[^"]*)"', page):
        assert shown.get(address)[0] == 200
        assert shown.get(f"/report/{address.rpartition('/')[2]}.html")[0] == 200
        with urllib.request.urlopen(f"{shown.url}{address}/events", timeout=PATIENCE_S) as stream:
            while not stream.readline().startswith(b"data:"):
                pass
    assert facts() == before


def test_nobody_else_on_the_machine_can_look(browser: Any, runs: Path) -> None:
    """The address that is printed has a token, which becomes a cookie; without it there is no answer but 401."""
    with served(runs, RESILIENCE_DASHBOARD_TOKEN="") as one, served(runs, RESILIENCE_DASHBOARD_TOKEN="") as other:
        address = re.search(r"http://\S+", one.said)
        assert address is not None
        assert (one.get("/")[0], one.get("/events")[0], one.get("/?token=x")[0]) == (401, 401, 401)
        query = address[0].removeprefix(one.url)
        assert (one.get(query)[0], other.get(query)[0]) == (303, 401)
        browser.open(address[0])
        until(browser, lambda: is_live(browser), "live")
        assert browser.driver.current_url == f"{one.url}/"
        assert browser.complaints() == []
    with served(runs, str(runs), "--no-token", RESILIENCE_DASHBOARD_TOKEN="t0ken") as open_to_all:
        assert open_to_all.get("/")[0] == 200
        assert "token" not in open_to_all.said.lower()


def test_what_is_missing_is_told_beside_the_others(browser: Any, runs: Path) -> None:
    """One directory that is not there keeps nobody from the others; its runs are shown once it is."""
    late = runs.parent / "late"
    with served(runs, str(runs), str(late)) as one:
        assert f"there is no directory {late}" in one.said
        assert len(one.said.splitlines()) == 2
        browser.open(f"{one.url}/")
        until(browser, lambda: f"there is no directory {late}" in text_of(browser, "#problems"), "what is missing")
        count = "return document.querySelectorAll('tbody tr').length"
        before = browser.ask(count)
        assert before >= RUNS
        late.mkdir()
        fleet(late, 1)
        until(browser, lambda: browser.ask(count) == before + 1, "the run that is new")
        until(browser, lambda: text_of(browser, "#problems").strip() == "", "that nothing is missing")


def test_other_hosts_need_a_token(browser: Any, runs: Path) -> None:
    """A person brings it once, and a cookie from then on; what the variable holds is not printed."""
    with served(runs, str(runs), "--host", "0.0.0.0", RESILIENCE_DASHBOARD_TOKEN="t0ken") as one:
        assert "t0ken" not in one.said
        here = f"http://127.0.0.1:{one.port}"
        one.url = here
        assert one.get("/")[0] == 401
        assert one.get("/events")[0] == 401
        assert one.get("/", Authorization="Bearer t0ken")[0] == 200
        assert one.get("/", Authorization="Bearer t0ken", Host="evil.example")[0] == 421
        browser.open(f"{here}/")
        browser.find("input[name=token]").send_keys("t0ken", ENTER)
        until(browser, lambda: is_live(browser), "live")
        assert browser.driver.current_url == f"{here}/"
        assert browser.ask("return document.cookie") == ""  # it is not for scripts
        browser.driver.refresh()
        until(browser, lambda: is_live(browser), "live")
        assert [line for line in browser.complaints() if " 401 " not in line] == []


def test_who_takes_nothing_delays_nobody(shown: Served) -> None:
    """Connections that are silent, that stop within a request, and that read no answer."""
    with contextlib.ExitStack() as held:
        for text in (b"", b"GET / HTTP/1.1\r\nHost: ", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40):
            one = held.enter_context(socket.create_connection(("127.0.0.1", shown.port)))
            one.sendall(text)
        assert shown.get("/")[0] == 200


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no directory nowhere"),
        (["nowhere", "there"], "there is no directory nowhere, there"),
        (["--port", "x"], "--port x"),
        (["--port", "65536"], "--port 65536"),
        (["--host", "no.such.host.invalid"], "no address of this machine"),
        (["--db", "nowhere.db"], "resilience history index"),
        ([".", "--db", "x.db"], "not both"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], told: str) -> None:
    """With the cure, and exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "dashboard", *words], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert told in done.stderr


FAULTS = "kill:rank=1,step=15,attempt=0; hang:how=sleep,rank=0,step=35,attempt=1"


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder of a real run with a kill, a hang, a straggler and a preemption, and its incidents' ids by kind."""
    folder = tmp_path_factory.mktemp("eventful")
    options = ("--nproc-per-node", "2", "--stuck-after", "3", "--report", "eventful.py")
    with job(folder, *options, env={"RESILIENCE_FAULT": FAULTS}) as run:
        run.wait_event("straggler", what="found", attempt=2)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish() == 75, run.screen
        yield folder, {incident["kind"]: incident["id"] for incident in run.incidents()}


@pytest.mark.parametrize("place", ["file", "dashboard"])
def test_all_that_happened_is_on_the_page(browser: Any, eventful: tuple[Path, dict[str, str]], place: str) -> None:
    """A card for each incident, the slow rank, the end; nothing is complained of, asked of others or a barrier."""
    folder, incidents = eventful
    assert incidents.keys() >= {"crash", "hang", "preemption"}
    with served(folder) as here:
        if place == "file":
            browser.open((folder / "run" / "report.html").as_uri())
        else:
            browser.open(here.url)
            browser.driver.get(browser.ask("return document.querySelector('tbody th a').href"))
            until(browser, lambda: is_live(browser), "live")
        cards = text_of(browser, "#incidents")
        assert [name for name in incidents.values() if name not in cards] == []
        assert "all ranks stopped after" in text_of(browser, "#summary")
        assert "rank 1" in text_of(browser, "#ranks .verdicts")
        assert browser.barriers("serious", "critical") == []
        assert browser.complaints() == []
        assert [url for url in leaves_here(browser) if not url.startswith("file:")] == []


def test_programs_get_the_same_facts(eventful: tuple[Path, dict[str, str]]) -> None:
    """`report --json` has the incidents, the account, the attempts and the slow rank's verdict."""
    folder, incidents = eventful
    command = [sys.executable, "-m", "resilience_sdk", "report", str(folder / "run"), "--json"]
    facts = json.loads(subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120).stdout)
    assert {incident["id"] for incident in facts["incidents"]} == set(incidents.values())
    assert facts["headline"]["state"] == "ended"
    assert len(facts["attempts"]) == 3
    buckets = facts["goodput"]["buckets"]
    assert min(buckets["hang"], buckets["restart"], buckets["productive"]) > 0
    assert any("rank 1" in text for _, _, text in facts["stragglers"]["verdicts"])
