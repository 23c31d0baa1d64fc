"""Reading a checkpoint directory and checking that every byte is there."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path
from typing import BinaryIO

from resilience_sdk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    decode_manifest,
    find_size_fault,
)
from resilience_sdk.checkpoint.trust import check_directory, open_trusted

_CHUNK = 1 << 20
# Far above any real one: a few names per rank. A garbage file must not fill the memory.
_LARGEST_MANIFEST = 256 << 20


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint directory; raises `InvalidCheckpointError` with the reason."""
    check_directory(directory)
    try:
        with open_trusted(directory / MANIFEST_NAME) as file:
            return decode_manifest(file.read(_LARGEST_MANIFEST))
    except OSError as error:
        raise InvalidCheckpointError(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from error


def verify_checkpoint(directory: Path) -> Manifest:
    """Return the manifest after reading every file; raises `InvalidCheckpointError` with the reason."""
    manifest = read_manifest(directory)
    # Sizes of all files first: the common tear is found without reading gigabytes.
    fault = find_size_fault(manifest, _sizes(directory, manifest))
    if fault is not None:
        raise InvalidCheckpointError(fault)
    for name in manifest.directories:
        check_directory(directory / name)
    for entry in manifest.files:
        with open_trusted(directory / entry.name) as file:
            _verify_content(file, entry)
    return manifest


def _sizes(directory: Path, manifest: Manifest) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in manifest.files:
        with contextlib.suppress(OSError):
            sizes[entry.name] = (directory / entry.name).stat(follow_symlinks=False).st_size
    return sizes


def _verify_content(file: BinaryIO, entry: FileEntry) -> None:
    crc = 0
    try:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    except OSError as error:
        raise InvalidCheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    if crc != entry.crc32:
        raise InvalidCheckpointError(f"{entry.name} does not match its checksum")
