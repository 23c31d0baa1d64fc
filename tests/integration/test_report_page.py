"""The page of a report in a real browser: it loads nothing, runs nothing of a job, and is there for everybody."""

import pytest
import told_facts
from browser import DOWN, ENTER, ESCAPE, SPACE, TAB

from resilience_sdk.report.page import render_page

pytestmark = pytest.mark.slow

PAGES = ("empty", "one_rank", "four_ranks", "several_jobs", "many_ranks", "hostile")


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Pages as files, by name."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name in PAGES:
        facts = told_facts.hostile()[0] if name == "hostile" else getattr(told_facts, name)()
        path = folder / f"{name}.html"
        path.write_text(render_page(facts), encoding="utf-8")
        found[name] = path.as_uri()
    return found


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_asks_for_nothing_and_fits(browser, urls, name, width):
    """The console is silent, nothing leaves the file, and nothing stands beyond the edge of the screen."""
    browser.open(urls[name], width=width)
    assert browser.ask("return document.readyState") == "complete"
    browser.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("data:", urls[name]))] == []
    assert browser.ask("return document.documentElement.scrollWidth") == width


def test_hostile_texts_stay_texts(browser, urls):
    """No text of a job runs, is an element, or has an effect when it is pointed at or followed."""
    browser.open(urls["hostile"])
    facts, _ = told_facts.hostile()
    assert browser.driver.title.startswith(f"{facts.name}: ")
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.ask(count, "script") == 1
    assert (
        browser.ask(count, "img, iframe, object, embed, form, base, link:not([rel=icon]), main style, main script") == 0
    )
    assert browser.ask(count, "[onmouseover], [onload], [onerror], [onclick], a[href^=javascript], [style]") == 0
    assert browser.ask("return document.querySelector('h1').textContent.trim()").startswith("[4] ")
    for selector in (".pin", ".segment", ".heat-row", "summary", ".verdicts .chip"):
        browser.point_at(browser.find(selector))
    browser.click(browser.find(".pin"))
    # A dialog would be an exception here.
    assert browser.ask("return document.getElementById('tip').children.length") == 0
    assert browser.complaints() == []


def test_an_injected_script_would_not_run(browser, urls):
    """Should markup get into a page after all, its policy lets neither script, style nor picture of it count."""
    browser.open(urls["four_ranks"])
    browser.ask(
        """const here = document.querySelector('main');
        here.insertAdjacentHTML('beforeend', '<img src="https://evil.example/x.png" onerror="window.struck = 1">');
        here.insertAdjacentHTML('beforeend', '<p id="styled" style="color: rgb(1, 2, 3)">words</p>');
        const script = document.createElement('script');
        script.textContent = 'window.struck = 2';
        here.append(script);"""
    )
    assert browser.ask("return window.struck") is None
    assert browser.ask("return getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"
    assert len(browser.complaints()) >= 3
    assert not [url for url in browser.requests() if "evil" in url]


def active(browser):
    return browser.ask(
        "const on = document.activeElement; return (on.className.baseVal ?? on.className) || on.tagName.toLowerCase()"
    )


def tab_until(browser, wanted, most=80):
    for _ in range(most):
        browser.press(TAB)
        if active(browser).startswith(wanted):
            return
    raise AssertionError(f"no {wanted} within {most} stops")


def test_the_keyboard_is_enough(browser, urls):
    """A skip link comes first, pins open what they are about, rows of the map are gone through with the arrows."""
    browser.open(urls["many_ranks"])
    browser.press(TAB)
    assert active(browser) == "skip"
    browser.press(ENTER)
    assert browser.ask("return location.hash") == "#summary"

    tab_until(browser, "pin")
    words = browser.find("#tip").text
    assert words.startswith("0001-preemption: ")
    browser.press(ENTER)
    assert browser.ask("return location.hash") == "#incident-0001-preemption"
    browser.wait_for("return document.getElementById('incident-0001-preemption').open")
    browser.wait_for("return document.activeElement.localName === 'summary'")
    browser.press(SPACE)
    browser.wait_for("return !document.getElementById('incident-0001-preemption').open")

    tab_until(browser, "heat-row")
    first = browser.ask("return document.activeElement.getAttribute('aria-label')")
    browser.press(DOWN)
    second = browser.ask("return document.activeElement.getAttribute('aria-label')")
    assert (first.split(":")[0], second.split(":")[0]) == ("ranks 0-63 on", "ranks 64-127 on") or first != second
    browser.press(ESCAPE)
    assert browser.find("#tip").is_displayed() is False


def test_the_pointer_is_told_what_is_there(browser, urls):
    """Curves tell value and step, the map rank and ratio, and one line goes through all axes of time."""
    browser.open(urls["four_ranks"])
    browser.point_at(browser.find("#curves svg.plot"))
    assert "median of the ranks" in browser.find("#tip").text
    assert " at step " in browser.find("#tip").text
    assert " after the start" in browser.find("#tip").text
    assert browser.ask(
        "return document.querySelectorAll('.cross').length == document.querySelectorAll('svg.plot').length"
    )
    browser.point_at(browser.find(".heat-row"), right=40)
    assert browser.find("#tip").text.startswith("rank 0 on node0\n")
    browser.point_at(browser.find("h1"))
    assert browser.ask("return document.querySelectorAll('.cross').length") == 0


def background(browser):
    return browser.ask("return getComputedStyle(document.body).backgroundColor")


def test_light_and_dark(browser, urls):
    """A page follows the system, until its reader says otherwise, which it remembers; paper is white."""
    browser.open(urls["four_ranks"])
    light = background(browser)
    browser.look_like(dark=True)
    dark = background(browser)
    assert light != dark
    browser.click(browser.find("#theme"))
    assert background(browser) == light
    browser.driver.refresh()
    assert background(browser) == light
    browser.click(browser.find("#theme"))
    assert background(browser) == dark
    browser.look_like(dark=True, media="print")
    assert background(browser) == "rgb(255, 255, 255)"
    assert browser.find("header").is_displayed() is False
    browser.ask("localStorage.clear()")


def test_paper_shows_what_is_closed(browser, urls):
    """Everything is open while a page is printed, and as it was afterwards."""
    browser.open(urls["many_ranks"])
    closed = "return document.querySelectorAll('details:not([open])').length"
    before = browser.ask(closed)
    assert before > 10
    browser.ask("dispatchEvent(new Event('beforeprint'))")
    assert browser.ask(closed) == 0
    browser.ask("dispatchEvent(new Event('afterprint'))")
    assert browser.ask(closed) == before
    assert len(browser.command("Page.printToPDF", printBackground=True)["data"]) > 10_000


@pytest.mark.parametrize("width", [1280, 1200, 910, 890, 641, 390])
@pytest.mark.parametrize("name", ["four_ranks", "several_jobs"])
def test_no_table_of_rows_is_cut(browser, urls, name, width):
    """Attempts, ranks and saves fit: on a telephone each row is a card with the names of its values."""
    browser.open(urls[name], width=width)
    browser.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    cut = """return [...document.querySelectorAll('.scroll')]
      .filter((part) => part.querySelector('.cards') && part.scrollWidth > part.clientWidth)
      .map((part) => [part.getAttribute('aria-label'), part.scrollWidth, part.clientWidth])"""
    assert browser.ask(cut) == []
    label = "return getComputedStyle(document.querySelector('#attempts td'), '::before').content"
    assert browser.ask(label) == ('"Began"' if width <= 900 else "none")


def test_paper_is_white_and_nothing_is_cut(browser, urls):
    """Printed from a system that is dark, at the width of a sheet: ink on white, and no table goes beyond the edge."""
    browser.open(urls["four_ranks"], width=700, dark=True)
    browser.look_like(dark=True, media="print")
    browser.ask("dispatchEvent(new Event('beforeprint'))")
    colours = """return [...document.querySelectorAll('main .card, main .tiles div, main .verdict')]
      .map((part) => getComputedStyle(part).backgroundColor)"""
    assert set(browser.ask(colours)) == {"rgb(255, 255, 255)"}
    assert browser.ask("return document.documentElement.scrollWidth") == 700
    beyond = """return [...document.querySelectorAll('main table')]
      .filter((part) => part.getBoundingClientRect().right > innerWidth).map((part) => part.outerHTML.slice(0, 99))"""
    assert browser.ask(beyond) == []


def test_a_command_is_copied_whole(browser, urls):
    """The button copies what stands beside it, to the last character."""
    browser.open(urls["four_ranks"])
    browser.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.click(browser.find(".command button"))
    copied = browser.driver.execute_async_script(
        "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    )
    assert copied == told_facts.four_ranks().headline.commands[0]
    assert browser.find(".command button").text == "Copied"


def test_without_a_script_everything_can_be_read(browser, urls):
    """Nothing that needs the script is shown, and cards still open."""
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(urls["four_ranks"])
        assert browser.find("h1").text.startswith("The job stopped")
        assert browser.find("#theme").is_displayed() is False
        browser.click(browser.find(".evidence summary"))
        assert "flight record" in browser.find(".evidence dl").text
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_a_section_is_replaced_in_place(browser, urls):
    """What a reader has opened stays open, and the focus where it is, when a living page brings news."""
    browser.open(urls["many_ranks"])
    browser.ask("document.getElementById('incident-0005-numerics').open = true")
    browser.ask("document.querySelector('#incident-0004-crash summary').focus()")
    browser.ask("replaceSection('incidents', document.getElementById('incidents').innerHTML)")
    assert browser.ask("return document.getElementById('incident-0005-numerics').open") is True
    assert browser.ask("return document.activeElement.parentElement.id") == "incident-0004-crash"
    browser.ask("replaceSection('nodes', '')")
    assert browser.find("nav a[href='#nodes']").is_displayed() is False
    assert browser.complaints() == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True])
def test_nobody_is_left_out(browser, urls, name, dark):
    """axe finds nothing serious: contrasts, names of controls and pictures, order of headings, what can be focused."""
    browser.open(urls[name], dark=dark)
    browser.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert browser.barriers("moderate", "serious", "critical") == []
    assert browser.complaints() == []
