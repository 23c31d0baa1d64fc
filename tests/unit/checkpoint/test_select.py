from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.checkpoint.history import Rollback
from resilience_sdk.checkpoint.manifest import (
    LEAST_KEPT,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    find_deletable,
    select_newest,
    step_name,
    step_of,
)
from resilience_sdk.checkpoint.store import CheckpointStore

STEPS = st.lists(st.integers(0, 10**10), unique=True, max_size=8)
STRAY = st.sampled_from([".tmp-step-00000005-ab", "notes", "step-5", "step-000000000005", "step-0000000x"])


def examine_with(valid):
    def examine(name):
        step = step_of(name)
        if step not in valid:
            raise InvalidCheckpointError(f"{name} is torn")
        return Manifest(step, 1, (FileEntry("state.pt", 1, 1),))

    return examine


@given(st.integers(0, 10**15))
def test_a_step_and_its_name_are_one_to_one(step):
    """Every step has one name, which gives the step back."""
    assert step_of(step_name(step)) == step


@given(STEPS, st.lists(STRAY), st.data())
def test_the_newest_valid_one_is_taken_and_newer_ones_are_explained(steps, stray, data):
    """The choice is the highest valid step; exactly the higher ones are listed as skipped, each with a reason."""
    valid = {step for step in steps if data.draw(st.booleans())}
    names = data.draw(st.permutations([step_name(step) for step in steps] + stray))
    selection = select_newest(names, examine_with(valid))
    best = max(valid, default=None)
    assert selection.name == (None if best is None else step_name(best))
    newer = sorted((step for step in steps if best is None or step > best), reverse=True)
    assert [skipped.step for skipped in selection.skipped] == newer
    assert all("torn" in skipped.why for skipped in selection.skipped)


@given(STEPS, st.data())
def test_quarantined_ones_are_the_last_resort(steps, data):
    """The newest valid one outside the quarantine is taken; if there is none, the newest inside."""
    valid = {step for step in steps if data.draw(st.booleans())}
    bad = {step for step in valid if data.draw(st.booleans())}
    selection = select_newest(
        map(step_name, steps), examine_with(valid), lambda name, _: "it fails" if step_of(name) in bad else None
    )
    best = max(valid - bad, default=max(valid, default=None))
    assert selection.name == (None if best is None else step_name(best))
    assert selection.name not in {skipped.name for skipped in selection.skipped}


def test_a_checkpoint_under_a_wrong_name_is_skipped():
    """A directory that was renamed by hand does not pass for another step."""
    selection = select_newest(["step-00000007"], lambda name: Manifest(8, 1, (FileEntry("a", 1, 1),)))
    assert selection.name is None
    assert selection.skipped[0].why == "its manifest is that of step 8"


@given(STEPS, st.integers(1, 5), st.data())
def test_the_last_good_ones_are_never_deleted(steps, keep, data):
    """Whatever is known good, the newest two (or `keep`) of it stay, and only what is older than them goes."""
    names = [step_name(step) for step in steps]
    good = {name for name in names if data.draw(st.booleans())}
    deleted = find_deletable(data.draw(st.permutations(names)), good, keep)
    left = sorted((step_of(name) for name in good - set(deleted)), reverse=True)
    wanted = max(keep, LEAST_KEPT)
    newest = sorted(map(step_of, good), reverse=True)[:wanted]
    assert left[:wanted] == newest
    if len(newest) < wanted:
        assert deleted == ()
    else:
        assert set(deleted) == {name for name in names if step_of(name) < newest[-1]}


def test_unverified_newer_ones_stay():
    """One that this process has not verified counts as neither good nor old."""
    names = ["step-00000001", "step-00000002", "step-00000003", "step-00000009"]
    assert find_deletable(names, {names[1], names[2]}, 2) == ("step-00000001",)


@given(STEPS, st.integers(1, 5), st.data())
def test_what_holds_a_nan_deletes_nothing_that_does_not(steps, keep, data):
    """Those with a NaN count for nothing, however many come; of them no more than of the good ones stay."""
    names = [step_name(step) for step in steps]
    spoiled = {name for name in names if data.draw(st.booleans())}
    good = set(names) - spoiled
    deleted = set(find_deletable(names, good, keep, spoiled))
    assert deleted - spoiled == set(find_deletable(good, good, keep))
    assert len(spoiled - deleted) <= max(keep, LEAST_KEPT)


def test_where_nothing_else_is_left_one_without_a_nan_is_taken_first():
    """What failed soon after its resume may have had another reason."""
    nan = {9: "model.weight of rank 0"}
    files = (FileEntry("a", 1, 1),)
    selection = select_newest(
        map(step_name, (5, 7, 9)),
        lambda name: Manifest(step_of(name), 1, files, nan=nan.get(step_of(name))),
        lambda _name, manifest: manifest.why_bad or "the run failed soon after it",
    )
    assert selection.name == step_name(7)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_what_was_just_committed_stays_however_many_spoiled_ones_are_newer(tmp_path, rolled_back):
    """Behind a rollback steps are counted anew; those that it left behind are no others of which few may stay."""
    back = Rollback(85, "the loss was NaN", 1e12, 0)

    def commit(store, step):
        unfinished = store.begin(step, f"{step:08x}")
        (unfinished / "a").write_bytes(b"x")
        manifest = Manifest(step, 1, (FileEntry("a", 1, zlib.crc32(b"x")),), 1.0, nan="best of rank 0")
        path = store.commit(unfinished, manifest, f"{step:08x}")
        store.retire(f"{step:08x}")
        return path

    first = CheckpointStore(tmp_path, keep=2, group_readable=False)
    for step in (90, 100):
        commit(first, step)
    resumed = CheckpointStore(tmp_path, keep=2, group_readable=False)
    resumed.find_newest(rollbacks=[back] if rolled_back else [])
    assert commit(resumed, 81).exists()
    assert commit(resumed, 82).exists()
    assert (tmp_path / step_name(81)).exists() is rolled_back


@pytest.mark.parametrize("name", ["lost+found", "step-", "step--0000001", "step-00000001.bak"])
def test_strange_entries_are_never_deleted(name):
    """What is not named like a checkpoint is not ours."""
    assert find_deletable([name, "step-00000005", "step-00000006"], {"step-00000005", "step-00000006"}, 2) == ()
