"""What is remembered of places at which ranks stood still."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.monitor.learning import MAX_FREE, Places

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_the_longest_stillness_of_a_place_is_kept_for_later_jobs():
    """Over the file, whatever the job; where the frame is not known, that of the section counts."""
    places = Places("job 1")
    places.survive("eval at train.py:9 evaluate", 40.0)
    places.survive("eval at train.py:9 evaluate", 20.0)
    known = Places.from_json(places.to_json(), "job 2")
    assert known.survived_s("eval at train.py:9 evaluate") == 40.0
    assert known.survived_s("eval at ?") == 40.0
    assert known.survived_s("eval at train.py:77 other") == 0.0


def test_the_first_ending_at_a_place_is_free_and_at_most_three_are():
    """Endings are this job's: a monitor that replaces another goes on counting, another job begins anew."""
    places = Places("job 1")
    assert places.end("a")
    places = Places.from_json(places.to_json(), "job 1")
    assert not places.end("a")
    assert places.endings("a") == 2
    assert [places.end(place) for place in "bcde"].count(True) == MAX_FREE - 1
    assert Places.from_json(places.to_json(), "job 2").endings("a") == 0


@given(st.dictionaries(st.sampled_from(("job", "survived", "endings", "free")), JSON) | JSON)
def test_garbage_costs_what_it_held(data):
    """The file lies in a directory that anybody may have edited."""
    places = Places.from_json(data, "job")
    assert places.endings("nowhere") == 0
    assert Places.from_json(places.to_json(), "job") == places


def test_only_the_newest_places_are_kept():
    """A program with thousands of places does not grow the file for ever."""
    places = Places("job")
    for number in range(1000):
        places.survive(f"place {number}", 1.0)
    assert len(places.to_json()["survived"]) <= 128
    assert places.survived_s("place 999") == 1.0
