"""The manifest of a checkpoint: its parts, and the proof that all are there. Pure.

It is written last and read first. A checkpoint without a whole manifest does not exist.

The checksums are CRC-32. They guard against what storage does (a torn, truncated, zeroed or rotten file), not
against a person: whoever can rewrite a payload can rewrite its manifest, which is why `commit` looks at
owners instead. CRC-32 runs at several GB/s on any CPU, where SHA-256 needs special instructions to get half
as far, and every byte is summed twice (at the save and again before a resume).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

# Each checkpoint says the oldest format that can read it: 1 = plain files, 2 = also files in directories, such as those
# of torch.distributed.checkpoint in `sharded/`.
FORMAT = 2
MANIFEST_NAME = "manifest.json"
SHARDED = "sharded"

# Plain names only: a manifest must not be able to point out of its own directory.
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}/\.?)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_INTEGER_FIELDS = ("step", "world_size")


def is_listable(name: str) -> bool:
    """Tell whether a manifest may list a file of this name, relative to its directory."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST_NAME


class InvalidCheckpointError(Exception):
    """A checkpoint that must not be loaded; the text is the reason, in words for a person."""

    def __init__(self, reason: str, *, untrusted: bool = False, rolled_back: bool = False) -> None:
        """Keep `reason`. The marked are whole: somebody else could have written it, or a rollback left it behind."""
        super().__init__(reason)
        self.reason = reason
        self.untrusted = untrusted
        self.rolled_back = rolled_back


@attrs.frozen
class FileEntry:
    """One file of a checkpoint: its plain name, its size in bytes and the CRC-32 of its content."""

    name: str
    size: int
    crc32: int

    def to_json(self) -> list[Any]:
        """Return the entry as a JSON array."""
        return [self.name, self.size, self.crc32]

    @classmethod
    def from_json(cls, value: Any) -> FileEntry:
        """Return the entry that `to_json` described; raises `InvalidCheckpointError` for anything else."""
        shape = isinstance(value, (list, tuple)) and len(value) == 3
        if not shape or not isinstance(value[0], str) or not all(_is_count(item) for item in value[1:]):
            raise InvalidCheckpointError("the manifest lists a file in a way that cannot be read")
        if not is_listable(value[0]):
            raise InvalidCheckpointError(f"the manifest lists a file with the forbidden name {value[0]!r}")
        return cls(name=value[0], size=value[1], crc32=value[2])


@attrs.frozen
class Manifest:
    """What one checkpoint consists of.

    `step` counts completed steps, `world_size` the ranks that wrote it, `created_at` is in Unix seconds, and
    `versions` names the software that wrote it (for people; nothing depends on it). `nan` names a tensor of it that
    holds a NaN, and None says that none was found. `digests`: what a resume compares its state with (see `digests`):
    `shared` by name, and `ranks`, one mapping for each; empty where nobody took any.
    """

    step: int
    world_size: int
    files: tuple[FileEntry, ...]
    created_at: float = 0.0
    versions: Mapping[str, str] = attrs.field(factory=dict)
    nan: str | None = None
    digests: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def why_bad(self) -> str | None:
        """Return why it had better not be resumed though it is whole, or None."""
        return None if self.nan is None else f"it holds NaN in {self.nan}"

    @property
    def size(self) -> int:
        """Bytes of all files together, the manifest itself left out."""
        return sum(entry.size for entry in self.files)

    @property
    def format(self) -> int:
        """The oldest format whose readers understand this checkpoint."""
        return 2 if self.directories else 1

    @property
    def directories(self) -> tuple[str, ...]:
        """The names of the directories that files are in, in order."""
        return tuple(sorted({entry.name.partition("/")[0] for entry in self.files if "/" in entry.name}))

    def names(self) -> frozenset[str]:
        """Return the names of all files."""
        return frozenset(entry.name for entry in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as a JSON document that carries its own checksum."""
    body = {
        "format": manifest.format,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created_at": manifest.created_at,
        "versions": dict(manifest.versions),
        "files": [entry.to_json() for entry in manifest.files],
    }
    if manifest.nan is not None:
        body["nan"] = manifest.nan
    if manifest.digests:
        body["digests"] = dict(manifest.digests)
    return (json.dumps({"crc32": zlib.crc32(_canonical(body)), "manifest": body}) + "\n").encode()


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`; raises `InvalidCheckpointError` with the reason when it is not whole."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidCheckpointError("its manifest is torn or not ours") from None
    body = document.get("manifest") if isinstance(document, dict) else None
    if not isinstance(body, dict) or document.get("crc32") != zlib.crc32(_canonical(body)):
        raise InvalidCheckpointError("its manifest does not match its own checksum")
    if not _is_count(body.get("format")) or not 1 <= body["format"] <= FORMAT:
        raise InvalidCheckpointError(
            f"its format is {body.get('format')!r}, and this version reads 1 to {FORMAT}: read it with the version "
            f"that wrote it"
        )
    if not all(_is_count(body.get(name)) for name in _INTEGER_FIELDS) or not isinstance(body.get("files"), list):
        raise InvalidCheckpointError("its manifest lacks fields")
    files = tuple(FileEntry.from_json(item) for item in body["files"])
    if not files or len({entry.name for entry in files}) != len(files):
        raise InvalidCheckpointError("its manifest lists no file, or one file twice")
    return Manifest(
        step=body["step"],
        world_size=body["world_size"],
        files=files,
        created_at=float(body.get("created_at") or 0.0),
        versions=dict(body.get("versions") or {}),
        nan=nan if isinstance(nan := body.get("nan"), str) else None,
        digests=found if isinstance(found := body.get("digests"), dict) else {},
    )


def find_size_fault(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Return why files of the given sizes cannot be this checkpoint, or None. Extra files do no harm."""
    for entry in manifest.files:
        size = sizes.get(entry.name)
        if size is None:
            return f"{entry.name} is missing"
        if size != entry.size:
            return f"{entry.name} has {size} bytes instead of {entry.size}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


_STEP_NAME = re.compile(r"step-(?P<step>\d{8,18})")


@attrs.frozen
class Skipped:
    """A checkpoint that a resume passed over.

    `untrusted`: whole, but somebody else could have written it. `rolled_back`: whole, but of after the numbers went
    bad. `quarantined`: whole, but the run fails after it; `created_at` (Unix seconds) then tells which writing of that
    step is meant.
    """

    name: str
    step: int
    why: str
    untrusted: bool = False
    rolled_back: bool = False
    quarantined: bool = False
    created_at: float | None = None

    @property
    def damaged(self) -> bool:
        """Whether it is not what was written."""
        return not (self.untrusted or self.rolled_back or self.quarantined)


@attrs.frozen
class Selection:
    """The outcome: the checkpoint to load (None = none is valid) and the newer ones that were skipped."""

    name: str | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` completed steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for, or None when it is no checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match["step"])
    return step if step_name(step) == name else None


def select_newest(
    names: Iterable[str],
    examine: Callable[[str], Manifest],
    distrust: Callable[[str, Manifest], str | None] = lambda _name, _manifest: None,
) -> Selection:
    """Return the newest checkpoint among the directory entries `names` that `examine` accepts.

    `examine` returns the manifest of a valid checkpoint and raises `InvalidCheckpointError` otherwise. It is
    asked from the newest down and only until one is valid, since a full examination reads every byte.
    `distrust` returns why a valid one is in quarantine, or None; if there is nothing else, the newest of these is
    taken after all, first of those without a NaN: to start from nothing would be worse.
    """
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    skipped: list[Skipped] = []
    last_resort: tuple[Skipped, Manifest] | None = None
    for name in sorted(steps, key=lambda item: steps[item], reverse=True):
        try:
            manifest = examine(name)
            if manifest.step != steps[name]:
                raise InvalidCheckpointError(f"its manifest is that of step {manifest.step}")
        except InvalidCheckpointError as error:
            skipped.append(Skipped(name, steps[name], error.reason, error.untrusted, error.rolled_back))
            continue
        why = distrust(name, manifest)
        if why is None:
            return Selection(name, manifest, tuple(skipped))
        item = Skipped(name, steps[name], why, quarantined=True, created_at=manifest.created_at)
        # A failure that came soon after it may have another reason; a NaN stays.
        if last_resort is None or (last_resort[1].nan is not None and manifest.nan is None):
            last_resort = item, manifest
        skipped.append(item)
    if last_resort is not None:
        item, manifest = last_resort
        return Selection(item.name, manifest, tuple(other for other in skipped if other is not item))
    return Selection(None, None, tuple(skipped))


# A bad checkpoint is often noticed only after it was loaded: its predecessor must still be there.
LEAST_KEPT = 2


def find_deletable(
    names: Iterable[str], known_good: Collection[str], keep: int, spoiled: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the checkpoints that may go, oldest first.

    `known_good` are those whose bytes this process has written or verified itself. The newest `keep` of them
    stay (never fewer than two), and so does everything that is not older than these: an unverified newer
    one may be good, an invalid newer one is evidence. With fewer than that known good, nothing is deleted. Of the
    `spoiled`, which are whole and hold a NaN, not more than the newest `keep` stay.
    """
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    good = sorted((steps[name] for name in known_good if name in steps), reverse=True)
    least = max(keep, LEAST_KEPT)
    kept = good[:least]
    bad = sorted((name for name in spoiled if name in steps), key=lambda name: steps[name], reverse=True)
    doomed = set(bad[least:])
    if len(kept) == least:
        doomed |= {name for name, step in steps.items() if step < kept[-1]}
    return tuple(sorted(doomed, key=lambda name: steps[name]))
