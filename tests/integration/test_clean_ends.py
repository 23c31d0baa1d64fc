"""Programs that destroy their process group end with 0 and without a word of ours, by each way in."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bench.clean_ends import WAYS, end_of


@pytest.mark.slow
def test_programs_end_cleanly_each_way(tmp_path):
    """`python -m tests.bench --only clean_ends` runs a hundred each way; two at a time, which makes ends rougher."""
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda way: end_of(way, tmp_path), WAYS))
    assert [(way, end.code, end.ours) for way, end in zip(WAYS, ends, strict=True)] == [(way, 0, ()) for way in WAYS]
