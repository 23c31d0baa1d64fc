"""Programs that destroy their process group end with 0 and without a word of ours, by each way in."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bench.clean_ends import WAYS, end_of


@pytest.mark.slow
def test_ten_programs_end_cleanly(tmp_path):
    """`python -m tests.bench --only clean_ends` runs a hundred each way; two at a time, which makes ends rougher."""
    chosen = [*WAYS, *WAYS, *list(WAYS)[:2]]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda number: end_of(chosen[number], tmp_path / str(number)), range(len(chosen))))
    assert [(way, end.code, end.ours) for way, end in zip(chosen, ends, strict=True)] == [
        (way, 0, ()) for way in chosen
    ]
