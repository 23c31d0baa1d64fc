"""Parts of pages that are made from the code."""

import pytest
from generated_docs import CURE, DOCS, TABLES, cell, replaced


@pytest.mark.parametrize(("page", "name"), TABLES, ids=lambda text: text)
def test_every_table_is_what_the_code_says(page, name):
    """No default, name or limit stands in two places."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert replaced(text, name, TABLES[page, name]()) == text, CURE


def test_only_what_stands_between_the_marks_is_replaced():
    """Twice the same is once."""
    page = "before\n<!-- a: generated -->\n\nold\n\n<!-- a: end -->\nafter\n"
    once = replaced(page, "a", "new")
    assert once == "before\n<!-- a: generated -->\n\nnew\n\n<!-- a: end -->\nafter\n"
    assert replaced(once, "a", "new") == once


def test_a_page_without_a_mark_is_an_error():
    """Nothing of it is lost."""
    with pytest.raises(ValueError, match="not enough values"):
        replaced("<!-- a: generated -->\nold\n", "a", "new")


def test_a_bar_does_not_end_a_cell():
    """As in `a|b`."""
    assert cell("a|b") == "a\\|b"
