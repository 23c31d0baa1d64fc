"""The taxonomy is complete, closed and readable."""

from resilience_sdk.attribution import taxonomy
from resilience_sdk.incidents import ACTIONS


def test_every_cause_has_category_action_and_meaning():
    """No line of the data is cut short, and every default action is one that incidents know."""
    assert len(taxonomy.causes()) == 72
    for name, cause in taxonomy.causes().items():
        assert name == cause.cause
        assert cause.action in ACTIONS
        assert cause.category
        assert taxonomy.meaning(name) == cause.meaning != ""
        assert cause.persistence in ("transient", "persistent", "mixed")
        assert cause.cap >= 0
        assert cause.explains <= set(taxonomy.causes())
        assert name not in cause.explains


def test_an_xid_stands_for_one_cause():
    """A number in two tables would be read by whichever comes last."""
    numbers = [number for table in taxonomy.cause_tables().values() for number in table.get("xid", ())]
    assert len(numbers) == len(set(numbers)) > 20


def test_a_cause_nobody_knows_is_unknown():
    """A name from another version does not raise: it is `unknown`, whose action is to restart."""
    assert taxonomy.lookup("made_up").cause == "unknown"
    assert taxonomy.lookup("made_up").action == "restart"
