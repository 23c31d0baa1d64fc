"""Plain text that a pattern needs is never asked for in vain: a line that fits holds it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.attribution.exceptions import exception_rules
from resilience_sdk.attribution.log_signs import LiteralIndex, all_required, required_literals, signs

_PATTERNS = sorted(
    {pattern.pattern for sign in signs() for pattern in sign.patterns}
    | {rule.message.pattern for rule in exception_rules() if rule.message}
)


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("Bus error", ("bus error",)),
        (r"\bBus error\b", ("bus error",)),
        (r"(?i)OOM", ("oom",)),
        (r"a{0,3}bcd?", ("bc",)),
        (r"[^]a]+xyz", ("xyz",)),
        (r"x\.y\(z", ("x.y(z",)),
        ("one|two", ("one", "two")),
        ("(one|two)s?", ("one", "two")),
        ("(?P<rank>\\d+) gone(?! home)", (" gone",)),
        ("(maybe)?", ("",)),
        (r"\d+", ("",)),
        ("abc|\\d", ("",)),
    ],
)
def test_what_a_pattern_needs(pattern, literals):
    """The longest run of plain text outside of what is optional, of every alternative."""
    assert required_literals(pattern) == literals


@settings(max_examples=150, deadline=None)
@given(pattern=st.sampled_from(_PATTERNS), data=st.data())
def test_whatever_fits_holds_one_of_the_texts(pattern, data):
    """Of the patterns of the rules: no text fits one that the literals would have kept from being tried."""
    text = data.draw(st.from_regex(re.compile(pattern)))
    match = re.search(pattern, text)
    assert match is not None
    assert any(literal in match[0].lower() for literal in required_literals(pattern))
    assert all(any(literal in match[0].lower() for literal in group) for group in all_required(pattern))


@given(st.lists(st.text("abc ", max_size=6), min_size=1, max_size=8), st.lists(st.text("abc ", max_size=30)))
def test_the_index_finds_what_a_plain_search_finds(literals, texts):
    """Its answer is that of looking for every literal, in order."""
    index = LiteralIndex(literals)
    for text in texts * 2:
        assert index.candidates(text) == [n for n, literal in enumerate(literals) if literal in text]
