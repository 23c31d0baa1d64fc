from __future__ import annotations

import contextlib
import json
import zlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.checkpoint.manifest import (
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    decode_manifest,
    encode_manifest,
    find_size_fault,
)

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,10}", fullmatch=True).filter(lambda name: name != "manifest.json")
ENTRIES = st.builds(FileEntry, NAMES, st.integers(0, 2**50), st.integers(0, 2**32 - 1))
FILES = st.lists(ENTRIES, min_size=1, max_size=5, unique_by=lambda entry: entry.name).map(tuple)
MANIFESTS = st.builds(
    Manifest, st.integers(0, 10**9), st.integers(1, 10**5), FILES, nan=st.none() | st.just("model.0.weight of rank 1")
)
ONE = Manifest(120, 2, (FileEntry("state.pt", 10, 7), FileEntry("rank-00000.json", 3, 9)))


@given(MANIFESTS)
def test_a_manifest_survives_its_text(manifest):
    """What is decoded is what was encoded."""
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.data())
def test_a_manifest_torn_at_any_byte_is_refused(data):
    """A strict prefix is never taken for a manifest, but for a missing last line feed."""
    text = encode_manifest(ONE)
    end = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(InvalidCheckpointError):
        decode_manifest(text[:end])


@given(st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(data):
    """No single damaged byte can change what a manifest says."""
    text = bytearray(encode_manifest(ONE))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidCheckpointError):
        assert decode_manifest(bytes(text)) == ONE


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    """Bytes that are no manifest give a reason, never another exception."""
    with pytest.raises(InvalidCheckpointError):
        decode_manifest(data)


@pytest.mark.parametrize(
    "name", ["../state.pt", "/etc/passwd", ".hidden", "", "a/b/c", ".a/b", "a/../b", "a/..", "manifest.json"]
)
def test_a_manifest_cannot_point_out_of_its_directory(name):
    """File names with a path, hidden ones, and the manifest's own are refused even with a right checksum."""
    with pytest.raises(InvalidCheckpointError, match="forbidden"):
        decode_manifest(encode_manifest(attrs.evolve(ONE, files=(FileEntry(name, 1, 1),))))


def test_deep_nesting_is_refused():
    """A document that is nested too deep to parse is garbage like any other."""
    with pytest.raises(InvalidCheckpointError):
        decode_manifest(b"[" * 100_000)


def test_another_format_names_the_cure():
    """A checkpoint of another format says which version to use."""
    text = encode_manifest(ONE).replace(b'"format": 1', b'"format": 3')
    body = text[text.index(b'"manifest": ') + 12 : -2]
    crc = zlib.crc32(json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(InvalidCheckpointError, match="version that wrote it"):
        decode_manifest(b'{"crc32": %d, "manifest": %s}' % (crc, body))


def test_sizes_decide_before_checksums():
    """A missing or shorter file is named with the numbers; extra files do no harm."""
    whole = {"state.pt": 10, "rank-00000.json": 3, "notes.txt": 1}
    assert find_size_fault(ONE, whole) is None
    assert find_size_fault(ONE, {**whole, "state.pt": 9}) == "state.pt has 9 bytes instead of 10"
    assert find_size_fault(ONE, {"state.pt": 10}) == "rank-00000.json is missing"
