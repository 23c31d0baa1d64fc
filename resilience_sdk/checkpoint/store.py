"""The directory of checkpoints as rank 0 keeps it: clean, verify, select, begin, commit, retire."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from resilience_sdk.checkpoint.commit import begin, check_directory, clean_leftovers, commit, delete, open_trusted
from resilience_sdk.checkpoint.history import CheckpointId, Rollback
from resilience_sdk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    Selection,
    decode_manifest,
    find_deletable,
    find_size_fault,
    select_newest,
    step_name,
)
from resilience_sdk.checkpoint.writer_lease import WriterHold

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


class CheckpointStore:
    """The checkpoints of one run directory. Only rank 0 changes anything here, from one thread.

    Every method may raise `OSError` unless it says otherwise.
    """

    def __init__(self, directory: Path, *, keep: int, group_readable: bool, read_only: bool = False) -> None:
        self.directory = directory
        self.hold: WriterHold | None = None
        """What keeps other processes from writing here; None where nothing does."""
        self.directory_mode, self.file_mode = (0o750, 0o640) if group_readable else (0o700, 0o600)
        self._keep = keep
        self._is_clean = read_only
        self._unshared: set[str] = set()
        # Names of those whose every byte this process has written or read and found right.
        self._known_good: set[str] = set()

    def clean(self) -> None:
        """Remove what killed writers left; once, before the first own save."""
        if not self._is_clean:
            self.directory.mkdir(mode=self.directory_mode, exist_ok=True)
            clean_leftovers(self.directory, self._in_flight())
            self._is_clean = True

    def _in_flight(self) -> set[str]:
        return self._unshared if self.hold is None else self.hold.in_flight

    def find_newest(
        self,
        quarantined: Mapping[CheckpointId, str] | None = None,
        rollbacks: Sequence[Rollback] = (),
        *,
        may_clean: bool = True,
    ) -> Selection:
        """Return the newest checkpoint of which every byte is there, and why newer ones were skipped.

        `quarantined` ones are taken only if there is nothing else, those that a rollback leaves behind never.
        """
        if may_clean:
            self.clean()
        reasons = quarantined or {}

        def examine(name: str) -> Manifest:
            manifest = self._examine(name)
            for back in rollbacks:
                if why := back.why_bad(manifest.step, manifest.created_at):
                    raise InvalidCheckpointError(why, rolled_back=True)
            return manifest

        selection = select_newest(
            os.listdir(self.directory),
            examine,
            lambda name, manifest: reasons.get(CheckpointId(name, manifest.created_at)),
        )
        if selection.name is not None:
            self._known_good.add(selection.name)
        return selection

    def _examine(self, name: str) -> Manifest:
        check_directory(self.directory)
        return verify_checkpoint(self.directory / name)

    def begin(self, step: int, token: str) -> Path:
        """Make and return the unfinished directory of a save; raises `CheckpointError` if another process took over."""
        if self.hold is not None:
            self.hold.check()
        self.clean()
        self._in_flight().add(token)
        return begin(self.directory, step, token, mode=self.directory_mode)

    def commit(self, unfinished: Path, manifest: Manifest, token: str) -> Path:
        """Give an unfinished checkpoint its name; return its path."""
        path = commit(unfinished, manifest, token, mode=self.file_mode)
        self._in_flight().discard(token)
        self._known_good.add(path.name)
        return path

    def retire(self, token: str) -> list[str]:
        """Delete what is no longer needed and return the names; never raises, what stays is tried again."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        doomed = find_deletable(names, self._known_good, self._keep)
        deleted = [name for name in doomed if delete(self.directory / name, token)]
        self._known_good.difference_update(deleted)
        return deleted

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or would be. Never raises."""
        return self.directory / step_name(step)
