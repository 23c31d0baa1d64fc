"""Pictures of a report: whatever was measured, they stay inside of their frame, are well-formed and hold only text."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.report import charts, rank_charts, svg
from resilience_sdk.report.facts import AttemptTimes, CheckpointFacts, CurveFacts, HeatMap, Pin, ScoreFacts, Segment

SPAN = svg.TimeSpan(1000.0, 2000.0)
ANY = st.floats()
MAYBE = st.none() | ANY
WORDS = st.text(max_size=30)
MOMENTS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(1000, 2000)


@st.composite
def curves(draw):
    """A curve of any values, with or without a band."""
    count = draw(st.integers(0, 12))

    def column(of):
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    has_band = draw(st.booleans())
    band = (column(MAYBE), column(MAYBE)) if has_band else ((), ())
    bad = tuple(draw(st.lists(st.tuples(MOMENTS, st.none() | st.integers(), WORDS), max_size=3)))
    at = tuple(sorted(column(st.floats(1000, 2000))))
    unit, steps = draw(st.sampled_from(["s", "", "GB"])), column(st.none() | st.integers())
    return CurveFacts(draw(WORDS), unit, at, steps, column(MAYBE), *band, bad)


PINS = st.lists(st.builds(Pin, WORDS, MOMENTS, st.sampled_from(["crash", "hang", "nobody knows"]), WORDS), max_size=8)
SEGMENTS = st.lists(st.builds(Segment, WORDS, MOMENTS, MOMENTS, st.none() | st.integers()), max_size=8)


def parsed(markup):
    """Return the elements of a picture, which has to be well-formed and without numbers that are none."""
    # XML knows fewer characters than HTML, and what is not printable was replaced before.
    root = ElementTree.fromstring(f"<all>{markup}</all>".replace("￾", "?").replace("￿", "?"))
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "d", "viewBox"):
                assert not re.search("nan|inf", value, re.IGNORECASE), (element.tag, name, value)
            if name in ("x", "x1", "x2", "cx", "width") and value.endswith("%"):
                assert 0 <= float(value[:-1]) <= 100
    return root


def inside(root, height):
    """Tell that every point of every path of a stretched picture is inside of it."""
    for path in root.iter("path"):
        if path.get("class") == "over-replayed":
            continue
        for x, y in re.findall(r"[ML]?(-?[\d.]+) (-?[\d.]+)", path.get("d")):
            assert 0 <= float(x) <= svg.WIDTH
            assert 0 <= float(y) <= height


@given(st.lists(curves(), min_size=1, max_size=3), PINS, st.booleans())
def test_curves_stay_inside(some, pins, from_zero):
    """Values that are huge, tiny, infinite or no numbers leave no point outside of the picture."""
    inside(parsed(charts.curve_chart("loss", some, pins, SPAN, from_zero=from_zero)), 190)


@given(SEGMENTS, PINS)
def test_the_strip_stays_inside(segments, pins):
    """Segments and pins beyond the run stand at its ends."""
    attempts = [AttemptTimes("job", 0, 900.0, 2100.0, {"productive": 1.0}, None, None, None, ())]
    parsed(charts.time_strip(segments, attempts, pins, SPAN, frozenset()))


NAMES = st.sampled_from(["productive", "data", "replayed", "hang"])
PARTS = st.dictionaries(NAMES, st.floats(0.5, 40.0), min_size=1)


@given(st.lists(PARTS, min_size=1, max_size=12))
def test_the_colours_of_the_strip_are_the_seconds_of_their_buckets(lengths):
    """The area of each colour is its share of the run, as in the table below the strip."""
    segments, now = [], SPAN.began_at
    for number, parts in enumerate(lengths):
        segments.append(Segment("any", now, now + sum(parts.values()), number, parts))
        now += sum(parts.values())
    root = parsed(charts.time_strip(segments, (), (), svg.TimeSpan(SPAN.began_at, now), frozenset()))
    drawn = [one for one in root.iter("rect") if "segment" in one.get("class")]
    whole = sum(float(one.get("width")[:-1]) * float(one.get("height")) for one in drawn)
    for name in ("productive", "data", "replayed", "hang"):
        area = sum(
            float(one.get("width")[:-1]) * float(one.get("height"))
            for one in drawn
            if one.get("class") == f"segment b-{name}"
        )
        share = sum(parts.get(name, 0.0) for parts in lengths) / (now - SPAN.began_at)
        assert area / whole == pytest.approx(share, abs=0.01)


def test_a_strip_without_pins_has_no_room_for_them():
    """Of a run in which nothing happened the strip begins at the top."""
    segment = Segment("productive", 1000.0, 2000.0, 0)
    heights = []
    for pins in ((), (Pin("0001-hang", 1500.0, "hang", "told"),)):
        root = parsed(charts.time_strip([segment], (), pins, SPAN, frozenset()))
        heights.append(float(next(one for one in root.iter("rect") if "segment" in one.get("class")).get("y")))
    assert heights[0] < 10 < heights[1]


def test_attempts_of_several_jobs_are_told_apart():
    """The strip had two attempts 0 side by side, each of another job."""
    attempts = [
        AttemptTimes("a", 0, 1000.0, 1500.0, {}, None, None, None, (), job_number=1),
        AttemptTimes("b", 0, 1500.0, 2000.0, {}, None, None, None, (), job_number=2),
    ]
    segments = [Segment("productive", 1000.0, 1500.0, 0), Segment("productive", 1500.0, 2000.0, 1)]
    root = parsed(charts.time_strip(segments, attempts, (), SPAN, frozenset()))
    titles = [title.text for title in root.iter("title")]
    assert [sum(f"job {number}, attempt 0" in title for title in titles) for number in (1, 2)] == [2, 2]
    assert [text.text for text in root.iter("text")][:2] == ["job 1, attempt 0", "job 2, attempt 0"]


OUTCOMES = st.sampled_from(["committed", "failed", "?<>"])
STEPS = st.none() | st.integers()
SAVES = st.builds(CheckpointFacts, MOMENTS, STEPS, OUTCOMES, MAYBE, MAYBE, st.none(), WORDS)


@given(st.lists(SAVES, max_size=6), PINS)
def test_saves_stay_inside(saves, pins):
    """Of a save any duration may have been told."""
    parsed(charts.checkpoint_chart(saves, pins, SPAN))


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_heat_map_stays_inside(rows, columns, data):
    """A map has its cells within its rows, whatever the ratios are."""
    times = tuple(sorted(data.draw(st.lists(st.floats(1000, 2000), min_size=columns + 1, max_size=columns + 1))))
    cells = tuple(tuple(data.draw(st.lists(MAYBE, min_size=columns, max_size=columns))) for _ in range(rows))
    slowest = tuple((None,) * columns for _ in range(rows))
    heat = HeatMap(times, tuple((row, row) for row in range(rows)), cells, slowest, ("n0",) * rows, (), "own")
    root = parsed(rank_charts.heat_map(heat, (), SPAN))
    assert len(root.findall(".//rect[@class='heat-row']")) == rows
    parsed(rank_charts.heat_strip(cells[0], times, SPAN))


@given(ANY, ANY, ANY, MAYBE)
def test_ranges_stay_inside(least, median, most, threshold):
    """Scores and shares are drawn between the ends of their cell."""
    parsed(rank_charts.score_range(ScoreFacts("relative", least, median, most, ((1, "n0", least),)), threshold))
    parsed(rank_charts.share_with_range(median, least, most))
    parsed(charts.bar(most))
    parsed(charts.stacked({"productive": 3.0, "hang": 1.0}))


@given(st.text(), st.text())
def test_an_element_holds_text(inside_it, attribute):
    """A text is the text of its element and the value of its attribute, whatever is in it."""
    root = parsed(svg.tag("text", inside_it, data_told=attribute))[0]
    assert len(root) == 0
    assert set(root.attrib) == {"data-told"}


def test_gaps_stay_gaps():
    """A line is not drawn over the time between two attempts, and a single point can be seen."""
    at = (1000.0, 1100.0, 1200.0, 1300.0, 1400.0)
    curve = CurveFacts("loss", "", at, (0, 1, 2, 3, 4), (1.0, 2.0, None, 1.0, math.nan))
    root = parsed(charts.curve_chart("loss", [curve], (), SPAN, from_zero=True))
    lines = [path.get("d") for path in root.iter("path")]
    assert len(lines) == 2
    assert lines[1].endswith("h0")


def test_what_is_no_number_is_marked():
    """Points that cannot be drawn have a mark with their word and step."""
    curve = CurveFacts("loss", "", (1000.0,), (0,), (1.0,), not_finite=((1500.0, 7, "nan"),))
    root = parsed(charts.curve_chart("loss", [curve], (), SPAN, from_zero=True))
    mark = next(text for text in root.iter("text") if "bad" in text.get("class", ""))
    assert mark.get("x") == "50%"
    assert mark.find("title").text.startswith("loss is nan, step 7")


def test_a_spike_is_cut_and_marked():
    """One value that would press the others flat is told by an arrow with its value."""
    values = (*(0.2 for _ in range(49)), 60.0)
    curve = CurveFacts("step", "s", tuple(1000.0 + 20 * i for i in range(50)), (None,) * 50, values)
    root = parsed(charts.curve_chart("Step time", [curve], (), SPAN, from_zero=True))
    marks = [text for text in root.iter("text") if "cut" in text.get("class", "")]
    assert [mark.find("title").text for mark in marks] == ["1m, beyond the axis"]


def test_what_does_not_change_is_a_line_in_the_middle():
    """A constant has an axis from zero with different words at its ticks."""
    curve = CurveFacts("norm", "", (1000.0, 2000.0), (0, 1), (3.0, 3.0))
    assert charts.curve_edges([curve], from_zero=False)[0] == 0.0
    root = parsed(charts.curve_chart("norm", [curve], (), SPAN, from_zero=False))
    assert next(root.iter("path")).get("d") == "M0 95L1000 95"


def pin(identifier, at, kind="crash"):
    return Pin(identifier, at, kind, f"rank 1 of {identifier}")


def strip(*pins, cards=frozenset()):
    segment = Segment("productive", 1000.0, 2000.0, 0)
    return parsed(charts.time_strip([segment], [], pins, SPAN, cards))


def test_pins_lead_to_their_cards():
    """A pin of an incident is a link, that of a stop without a card can be focused all the same."""
    root = strip(pin("0001-crash", 1200.0), pin("stop", 1600.0, "preemption"), cards=frozenset({"0001-crash"}))
    link = root.find(".//a")
    assert link.get("href") == "#incident-0001-crash"
    assert link.find("text").text == "C"
    mark = root.find(".//g[@tabindex='0']")
    assert mark.get("aria-label").startswith("stop: rank 1 of stop, ")


def test_pins_that_would_cover_one_another_become_one():
    """A pin for several says how many they are and what each is; one that is near stands on another level."""
    root = strip(*(pin(f"000{i}-crash", 1200.0 + i) for i in range(3)), pin("0009-hang", 1240.0, "hang"))
    pins = root.findall(".//g[@tabindex='0']")
    assert [one.find("text").text for one in pins] == ["3", "H"]
    assert pins[0].get("aria-label").count("rank 1 of") == 3
    levels = [float(one.find("circle").get("cy")) for one in pins]
    assert levels[0] != levels[1]


@pytest.mark.parametrize(
    ("ratio", "class_"),
    [(None, "h-none"), (math.nan, "h-none"), (0.5, "h0"), (1.0, "h1"), (1.6, "h4"), (99.0, "h6")],
)
def test_a_cell_has_the_class_of_its_ratio(ratio, class_):
    """The colour tells how much slower a rank is than the others."""
    assert rank_charts.heat_class(ratio) == class_
