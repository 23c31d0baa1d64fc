"""The page of a report: complete in itself, the same for the same facts, small, and text stays text."""

import base64
import hashlib
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations

import attrs
import pytest
import told_facts

from resilience_sdk.core.console import printable
from resilience_sdk.report.page import SECTIONS, render_page, render_sections

TOLD = {name: getattr(told_facts, name) for name in ("empty", "one_rank", "four_ranks", "many_ranks")}
VOID = {"meta", "link", "br", "img", "input", "hr"}
ATTRIBUTES = {
    *("id", "class", "lang", "charset", "http-equiv", "content", "name", "rel", "href", "hidden", "tabindex", "type"),
    *("role", "title", "scope", "open", "datetime", "focusable", "transform"),
    *("aria-label", "aria-labelledby", "aria-hidden"),
    *(
        "x",
        "y",
        "x1",
        "x2",
        "y1",
        "y2",
        "cx",
        "cy",
        "r",
        "rx",
        "d",
        "width",
        "height",
        "viewbox",
        "preserveaspectratio",
    ),
    *("patternunits", "data-from", "data-to", "data-name", "data-unit", "data-first", "data-at", "data-values"),
    *("data-steps", "data-ranks", "data-edges", "data-live", "data-tip", "data-label"),
}
ELEMENTS = {
    *("html", "head", "meta", "title", "link", "style", "body", "a", "header", "div", "span", "nav", "button", "main"),
    *("section", "footer", "p", "code", "script", "h1", "h2", "h3", "dl", "dt", "dd", "ul", "ol", "li", "b", "small"),
    *("strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption"),
    *("time", "i", "bdi"),
    *("svg", "g", "rect", "line", "path", "circle", "text", "defs", "pattern"),
}  # fmt: skip


class Reading(HTMLParser):
    """What a browser would make of a page: texts, elements and attributes; raises where elements do not close."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.texts, self.elements, self.attributes, self.open = [], [], [], []
        self.styles, self.scripts = [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            (self.styles if self.open[-1] == "style" else self.scripts).append(data)
        else:
            self.texts.append(data)

    @property
    def words(self):
        """All text, and all values of attributes, without line breaks."""
        return " ".join(" ".join([*self.texts, *(value for _, _, value in self.attributes if value)]).split())


@pytest.fixture(scope="module", params=TOLD)
def told(request):
    return TOLD[request.param]()


@pytest.fixture(scope="module")
def hostile():
    facts, put = told_facts.hostile()
    return render_page(facts), put


def test_a_page_is_well_formed(told):
    """Every element closes, and ids are unique."""
    reading = Reading(render_page(told))
    ids = [value for _, name, value in reading.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value[1:] for tag, name, value in reading.attributes if tag == "a" and name == "href" and value[0] == "#"}
    assert links <= set(ids)


def test_the_same_facts_give_the_same_page(told):
    """A page depends on its facts alone."""
    assert render_page(told) == render_page(told)


def test_nothing_is_asked_for(told):
    """No address stands in a page but places of the page itself, names of namespaces and the icon in the text."""
    page = render_page(told)
    reading = Reading(page)
    places = [value for _, name, value in reading.attributes if name in ("href", "src", "action", "data")]
    assert all(place.startswith(("#", "data:image/svg+xml,")) for place in places)
    assert not re.findall(r"url\((?!#hatch-)", reading.styles[0])
    assert "@import" not in reading.styles[0]
    assert not re.findall(r"\b(fetch|XMLHttpRequest|WebSocket|import)\b\(", "".join(reading.scripts))


def hashes(texts):
    return {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts}


@pytest.mark.parametrize("script", ["", "console.log('of the dashboard');"])
def test_the_policy_names_what_the_page_brings(script):
    """A browser runs and applies what has the hash of our files, and nothing else."""
    reading = Reading(render_page(told_facts.four_ranks(), live=bool(script), script=script))
    policy = next(value for _, name, value in reading.attributes if name == "content" and "default-src" in value)
    rules = {rule.split()[0]: set(rule.split()[1:]) for rule in policy.split("; ")}
    assert rules["default-src"] == {"'none'"}
    assert rules["style-src"] == hashes(reading.styles)
    assert rules["script-src"] == hashes(reading.scripts)
    assert rules.get("connect-src") == ({"'self'"} if script else None)
    assert not [name for _, name, _ in reading.attributes if name.startswith("on") or name == "style"]


def test_every_text_is_there_as_text(hostile):
    """Whatever a job wrote stands on the page, its control characters replaced, none of it lost or cut."""
    page, put = hostile
    words = Reading(page).words
    # A title of a picture has 240 characters at most. The measure of a heat map and the id of a standstill are ours.
    facts, _ = told_facts.hostile()
    titles = {
        *(segment.bucket for segment in facts.segments),
        *(word for pin in facts.pins for word in (pin.kind, pin.label)),
    }
    short = {text: text[:60] for text in put if text in titles}
    ours = {facts.heat.measure, *(one.id for one in facts.standstills)}
    expected = [text for text in put if text not in ours]
    assert [text for text in expected if " ".join(printable(short.get(text, text)).split()) not in words] == []


def test_no_text_becomes_markup(hostile):
    """Hostile texts bring neither an element nor an attribute, in or out of quotes."""
    page, _ = hostile
    reading = Reading(page)
    assert set(reading.elements) <= ELEMENTS
    assert {name for _, name, _ in reading.attributes} <= ATTRIBUTES
    assert len(reading.scripts) == 1
    tags = re.findall(r'<[a-z](?:[^<>"]|"[^"]*")*>', re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S))
    assert len(tags) == len(reading.elements) - 2
    assert [tag for tag in tags if "=" in re.sub(r'="[^"]*"', "", tag)] == []


def test_places_of_a_hostile_page_are_its_own(hostile):
    """An id that a job wrote leads to a place of the page, and never to a script."""
    page, _ = hostile
    places = [value for _, name, value in Reading(page).attributes if name == "href"]
    assert all(re.fullmatch(r"#[A-Za-z0-9_-]+|data:image/svg\+xml,[^\"<>]*", place) for place in places)


def test_control_characters_are_shown_as_such(hostile):
    """Nothing steers a terminal, turns the direction of writing or ends a file."""
    page, _ = hostile
    assert not {c for c in page if not c.isprintable() and c != "\n"}


def test_a_page_is_small_for_any_run():
    """4,096 ranks, two weeks, sixty incidents and everything full: below 5 MB."""
    assert len(render_page(told_facts.full()).encode()) < 5_000_000


def test_long_texts_are_cut_where_they_would_make_the_page_large():
    """What is cut is said, and a command is never cut."""
    command = "resilience run " + "--option value " * 400
    facts = told_facts.full()
    many = tuple(attrs.evolve(one, paragraph="word " * 9000, rerun=command) for one in facts.incidents)
    page = render_page(attrs.evolve(facts, incidents=many, events=facts.events * 4))
    assert len(page.encode()) < 5_000_000
    assert "long texts were cut after" in page
    assert command in page


def test_sections_are_those_of_the_page(told):
    """What replaces a section of a living page is what the page began with."""
    page = render_page(told)
    sections = render_sections(told)
    assert list(sections) == list(SECTIONS)
    assert all(html in page for html in sections.values())


def test_an_empty_directory_says_what_to_do():
    """Nothing has run: one sentence and the command, and no empty frames."""
    sections = render_sections(told_facts.empty())
    assert "Nothing has run" in sections["summary"]
    assert "resilience run --run-dir" in sections["summary"]
    assert {name for name, html in sections.items() if html} == {"summary", "time"}


def test_frames_of_the_user_stand_out():
    """The lines that the reader can change are marked in a stack."""
    incidents = render_sections(told_facts.four_ranks())["incidents"]
    assert '<li class="users">/home/me/train.py:83 fetch</li>' in incidents
    assert "<li>/usr/lib/python3.11/threading.py:327 wait</li>" in incidents


def test_of_many_incidents_the_newest_is_open():
    """Three cards are open at once, of more only the newest, which is the first."""
    few = render_sections(told_facts.four_ranks())["incidents"]
    many = render_sections(told_facts.many_ranks())["incidents"]
    opened = [
        re.findall(r'<details class="card incident[^>]*id="incident-(\d+)[^>]* open>', text) for text in (few, many)
    ]
    assert opened == [["0003", "0002", "0001"], ["0014"]]


def test_what_is_left_out_is_counted():
    """A list that was cut says how many there are, and which command has them all."""
    sections = render_sections(told_facts.full())
    assert "7 more: <code>resilience why</code>" in sections["incidents"]
    assert "of 4,096" in sections["ranks"]


def test_what_was_lost_and_not_counted_is_unknown_after_a_fault():
    """A dash would say that nothing was done again; without a fault there is nothing to count."""
    facts = told_facts.four_ranks()

    def sections(replayed_s):
        buckets = {**facts.goodput["buckets"], "replayed": replayed_s}
        return render_sections(attrs.evolve(facts, goodput={**facts.goodput, "lost_steps": None, "buckets": buckets}))

    uncounted, good = sections(None), sections(0.0)
    assert "unknown" in uncounted["time"]
    assert "steps are not counted over attempts" in uncounted["summary"]
    assert "unknown" not in good["time"]
    assert "not counted" not in good["summary"]


def test_jobs_and_attempts_are_told_apart():
    """Of several jobs in a directory the page says which is meant, in the summary, the time and the incidents."""
    one, many = (render_sections(facts) for facts in (told_facts.four_ranks(), told_facts.several_jobs()))
    assert "all 3 jobs since" in many["summary"]
    assert "job 3: <b>4714.3-node01" in many["summary"]
    assert ">job 3, attempt 0<" in many["time"]
    assert "job 1, attempt 0 &middot;" in many["incidents"]
    assert not [name for name, html in one.items() if "job 1" in html or "all 1" in html]


def test_verdicts_on_stragglers_are_newest_first():
    """As incidents, saves and events are."""
    ranks = render_sections(told_facts.four_ranks())["ranks"]
    assert 0 < ranks.index("as fast as the others again") < ranks.index("rank 1 on node0 is slow")


def test_a_run_that_is_over_is_told_nothing_yet():
    """What comes may still come in a run that goes on, and only there."""
    facts = attrs.evolve(told_facts.one_rank(), why_slow=None, shares=(), throughput=None)
    running = attrs.evolve(facts, headline=attrs.evolve(facts.headline, state="running"))
    assert "Nothing was told of a step." in render_sections(facts)["step"]
    assert "Nothing is told of a step yet." in render_sections(running)["step"]


def test_a_map_of_whole_steps_says_that_it_hides_who_is_slow():
    """All ranks wait in a step for the slowest, so an even map is no proof that no rank is slow."""
    facts = told_facts.four_ranks()
    whole = attrs.evolve(facts, heat=attrs.evolve(facts.heat, measure="step"))
    own = attrs.evolve(facts, heat=attrs.evolve(facts.heat, measure="own"))
    assert "does not stand out here" in render_sections(whole)["ranks"]
    assert "does not stand out here" not in render_sections(own)["ranks"]


def test_a_run_without_a_checkpoint_of_the_sdk_may_have_its_own():
    """The page does not claim that such a run begins at step 0."""
    checkpoints = render_sections(attrs.evolve(told_facts.four_ranks(), checkpoints=[]))["checkpoints"]
    assert "unless the script loads what it has saved itself" in checkpoints


def test_facts_without_an_account_have_the_sums_of_their_segments():
    """Buckets are shown although the account could not be made."""
    facts = attrs.evolve(told_facts.four_ranks(), goodput={})
    assert "productive" in render_sections(facts)["time"]


def test_colours_that_lie_upon_one_another_are_explained_where_there_are_any():
    """A run all of whose times are known needs no such sentence."""
    facts = told_facts.four_ranks()
    alone = [attrs.evolve(one, parts={one.bucket: one.ended_at - one.began_at}) for one in facts.segments]
    first = attrs.evolve(alone[0], parts={alone[0].bucket: 1.0, "data": 1.0})
    for segments, is_told in ((alone, False), ([first, *alone[1:]], True)):
        page = render_sections(attrs.evolve(facts, segments=segments))["time"]
        assert ("upon one another" in page) is is_told


SOLID = ("productive", "startup", "rendezvous", "data", "checkpoint", "hang", "preempted")
# What is seen without one kind of cones, in linear light (Machado et al. 2009, severity 1).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour, eye):
    """Return a colour as an eye sees it, in CIE Lab, where distances are differences."""
    light = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in light]
    r, g, b = (min(1.0, max(0.0, sum(a * c for a, c in zip(row, light, strict=True)))) for row in eye)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_buckets_are_told_apart_by_all_eyes(eye, theme):
    """No two buckets that have no hatching look the same to somebody who lacks a kind of cones."""
    style = Reading(render_page(told_facts.empty())).styles[0]
    told = dict(re.findall(r"--b-(\w+): (light-dark\(.*?\));", style))
    colours = {name: seen(re.findall(r"#\w{6}", told[name])[theme], EYES[eye]) for name in SOLID}
    near = {
        (one, other): round(math.dist(colours[one], colours[other]))
        for one, other in combinations(SOLID, 2)
        if math.dist(colours[one], colours[other]) < 20
    }
    assert near == {}


def test_without_jinja_the_cure_is_named(tmp_path):
    """`resilience report` needs an extra, and says which; `--json` does without it."""
    hide = "import sys; sys.modules['jinja2'] = None; from resilience_sdk.cli.main import main; "
    (tmp_path / "run" / "journal").mkdir(parents=True)
    run = str(tmp_path / "run")
    for words, code in ((["report", run], 2), (["report", "--json", run], 0)):
        program = [sys.executable, "-c", f"{hide}sys.exit(main({words!r}))"]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert ("pip install 'resilience-sdk[report]'" in done.stderr) == (code == 2)
