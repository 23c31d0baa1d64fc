"""Parts of pages that are made from the code."""

import pytest

from resilience_sdk.generated import cell, rewrite


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    """Twice the same is once."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- b -->\nafter\n")
    for _ in range(2):
        rewrite(page, "<!-- a -->\nnew\n<!-- b -->")
        assert page.read_text() == "before\n<!-- a -->\nnew\n<!-- b -->\nafter\n"


def test_a_page_without_a_mark_is_an_error_and_stays(tmp_path):
    """Nothing of it is lost."""
    page = tmp_path / "page.md"
    page.write_text("<!-- a -->\nold\n")
    with pytest.raises(ValueError, match="not enough values"):
        rewrite(page, "<!-- a -->\nnew\n<!-- b -->")
    assert page.read_text() == "<!-- a -->\nold\n"


def test_a_bar_does_not_end_a_cell():
    """As in `a|b`."""
    assert cell("a|b") == "a\\|b"
