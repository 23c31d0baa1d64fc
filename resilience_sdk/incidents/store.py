"""Incidents: what went wrong, one directory each, under `RUN_DIR/incidents`.

    0001-hang/report.json        the record, stable keys; missing is null, never absent
              report.md          the same for a person (see `report`)
              stacks/rank-N.txt  what every reachable rank was doing
              pages/rank-N.json  the last reading of its page

Monitors and launchers of several nodes may write at once. A number is claimed by an exclusive mkdir of a
hidden directory, which is filled and then renamed: readers see whole incidents only, and a writer that dies
half-way costs a number, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event, parse_lines
from resilience_sdk.core.plain_file import open_to_read, read_bytes
from resilience_sdk.core.redaction import redact, redact_text
from resilience_sdk.incidents.record import KINDS, Evidence, Incident, from_event, injected_faults, render_markdown
from resilience_sdk.system import same_device
from resilience_sdk.system.file_lock import file_lock

# After these nothing of this run goes on, so there is no recovery to wait for.
_FINAL_ACTIONS = frozenset({"stop", "none"})
_ID = re.compile(r"(\d{4,})-[a-z]+")
_CLAIM = re.compile(r"\.(\d{4,})")
_MAX_KEPT = 16
_TRY_EVERY_S = 1.0
_MOST_STACK_CHARACTERS = 1 << 20
_PATIENCE_S = 2.0


_MOST_RANKS = 16  # asked for an injected fault
_RANK_FILE = re.compile(r"-rank(\d+)-\d+\.jsonl$")
_TAIL = 1 << 18  # bytes of a rank's journal: nothing that it has done since the fault takes more


class IncidentStore:
    """The incidents of one run directory. Safe with several writers on several nodes.

    Holds nothing but what could not be written. One thread keeps and writes that.

    New directories and files are as private as the `incidents` directory itself is.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, explain: Callable[[str], str] | None = None) -> None:
        """Use `run_dir/incidents`. `explain` gives a cause its sentence in report.md: `taxonomy.meaning`."""
        self.path = Path(run_dir) / "incidents"
        self._explain = explain
        self._kept: list[tuple[Callable[[], Incident], Callable[[Incident], None]]] = []
        self._tried_at = float("-inf")

    def create(
        self,
        kind: str,
        incident: Incident,
        stacks: Mapping[int, str] | None = None,
        pages: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Incident:
        """Write a new incident and return it with its id, e.g. `0001-hang`.

        `stacks` and `pages` are by global rank. Control characters and secrets do not reach the disk.
        Raises OSError when the directory cannot be written.
        """
        if kind not in KINDS:
            raise ValueError(f"incident kind {kind!r} is none of {', '.join(KINDS)}")
        same_device.check(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, claim = self._claim()
        injected = _injected(self.path.parent / "journal", incident)
        told = (*incident.evidence, *(one for one in injected if one not in incident.evidence))
        incident = attrs.evolve(incident, id=f"{number:04d}-{kind}", kind=kind, evidence=told)
        incident = Incident.from_json(redact(incident.to_json()))
        try:
            self._fill(claim, incident, stacks or {}, pages or {})
            claim.rename(self.path / f"{number:04d}-{kind}")
        except OSError:
            shutil.rmtree(claim, ignore_errors=True)  # its number is free again
            raise
        _sync_directory(self.path)
        return incident

    def _fill(
        self,
        claim: Path,
        incident: Incident,
        stacks: Mapping[int, str],
        pages: Mapping[int, Mapping[str, Any]],
    ) -> None:
        for folder, suffix, texts in (
            (
                "stacks",
                "txt",
                {rank: redact_text(printable(text)[:_MOST_STACK_CHARACTERS]) for rank, text in stacks.items()},
            ),
            ("pages", "json", {rank: _json_text(redact(page)) for rank, page in pages.items()}),
        ):
            self._make_directory(claim / folder)
            for rank, text in texts.items():
                self._write(claim / folder / f"rank-{int(rank)}.{suffix}", text)
        self._write_reports(claim, incident)

    def create_once(
        self,
        kind: str,
        incident: Incident,
        stacks: Mapping[int, str] | None = None,
        pages: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        same: Callable[[Incident], bool],
    ) -> tuple[Incident, bool]:
        """Return the incident that is the `same` if another writer was first, else a new one; and whether it is new.

        Writers of several nodes wait for one another here, for two seconds at most. Raises like `create`.
        """
        same_device.check(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path / ".lock"):  # a file: NFS has no exclusive locks on directories
            for other in self.all():
                if other.kind == kind and same(other):
                    return other, False
            return self.create(kind, incident, stacks, pages), True

    def keep(
        self, kind: str, incident: Incident, *texts: Mapping[int, Any], written: Callable[[Incident], None]
    ) -> None:
        """Keep what `create` could not write (the same arguments) until `write_kept` can; that then calls `written`."""
        if len(self._kept) < _MAX_KEPT:
            self._kept.append((lambda: self.create(kind, incident, *texts), written))

    def write_kept(self, *, at_once: bool = True) -> None:
        """Try to write what was kept, unless it was tried a moment ago and need not be `at_once`. Never raises."""
        if not self._kept or (not at_once and time.monotonic() - self._tried_at < _TRY_EVERY_S):
            return
        self._tried_at = time.monotonic()
        with contextlib.suppress(OSError):
            while self._kept:
                create, written = self._kept[0]
                written(create())
                self._kept.pop(0)

    def all(self) -> list[Incident]:
        """Return every incident by number; one whose report is unreadable is there too and says so."""
        return [self._read(path) for _, path in sorted(self._directories())]

    def all_told(self, events: Iterable[Mapping[str, Any]]) -> list[Incident]:
        """Return every incident by number: those that are here, and those of which `events` of the journal tell."""
        found = (from_event(event) for event in events if event.get("event") == Event.INCIDENT.value)
        told = {incident.id: incident for incident in found if incident is not None}
        known = told | {incident.id: incident for incident in self.all()}
        return [known[name] for name in sorted(known, key=_place)]

    def of_attempt(self, attempt: int, since: float, *kinds: str) -> list[Incident]:
        """Return those of these kinds of an attempt, oldest first; `since` (Unix seconds) leaves out earlier jobs."""
        return [
            known
            for known in self.all()
            if known.kind in kinds and known.attempt == attempt and (known.detected_at or 0.0) >= since
        ]

    def bad_numbers(self, attempt: int, since: float, raised: str) -> Incident | None:
        """Return the incident that ranks have written of the numbers that they left over; `raised` is the type.

        Their end is no crash beside it. None where that was not why, or where the training went on.
        """
        if not raised.endswith("NumericsError"):
            return None
        found = [known for known in self.of_attempt(attempt, since, "numerics") if known.action != "none"]
        return found[-1] if found else None

    def get(self, incident_id: str) -> Incident:
        """Return one incident; raise KeyError when there is none of that id."""
        return self._read(self._directory(incident_id))

    def update(self, incident_id: str, **changes: Any) -> Incident:
        """Change fields of an incident and return it; readers see the old or the new record, never a mix.

        Raises KeyError for an unknown id, TypeError for an unknown field, OSError when it cannot be written.
        """
        directory = self._directory(incident_id)
        with _locked(directory):
            changed = attrs.evolve(self._read(directory), **changes)
            incident = Incident.from_json(redact(changed.to_json()))
            self._write_reports(directory, incident)
        return incident

    def mark_recovered(self, incident_id: str, at: float, *, lost_steps: int | None = None) -> Incident:
        """Note that every rank of the next attempt has beaten at Unix time `at`; raises like `update`."""
        detected_at = self.get(incident_id).detected_at
        took = None if detected_at is None else max(0.0, at - detected_at)
        return self.update(incident_id, recovered_at=at, recovery_s=took, lost_steps=lost_steps)

    def open_recoveries(self) -> list[Incident]:
        """Return the incidents after which the run should have gone on and has not yet."""
        return [i for i in self.all() if i.recovered_at is None and i.action not in _FINAL_ACTIONS]

    def _directories(self) -> Iterator[tuple[int, Path]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                found = _ID.fullmatch(entry.name)
                if found and entry.is_dir(follow_symlinks=False):
                    yield int(found[1]), Path(entry.path)

    def _directory(self, incident_id: str) -> Path:
        path = self.path / incident_id
        if not _ID.fullmatch(incident_id) or not path.is_dir():
            raise KeyError(f"no incident {incident_id!r} in {self.path}")
        return path

    def _claim(self) -> tuple[int, Path]:
        """Take the next number for this process and return the hidden directory that holds it.

        The second look is needed: another writer may have claimed, filled and renamed the same number
        between our first look and our mkdir. After the mkdir a network file system cannot serve us a
        stale listing of this directory any more.
        """
        number = self._highest_number() + 1
        while True:
            claim = self.path / f".{number:04d}"
            try:
                self._make_directory(claim)
            except FileExistsError:
                number += 1
                continue
            if number not in {taken for taken, _ in self._directories()}:
                return number, claim
            claim.rmdir()
            number += 1

    def _highest_number(self) -> int:
        numbers = [
            int(found[1]) for name in os.listdir(self.path) if (found := _ID.fullmatch(name) or _CLAIM.fullmatch(name))
        ]
        return max(numbers, default=0)

    def _read(self, directory: Path) -> Incident:
        kind = directory.name.partition("-")[2]
        try:
            data = json.loads(read_bytes(directory / "report.json"))
            if not isinstance(data, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            evidence = (Evidence("incident", f"report.json cannot be read: {error}"),)
            return Incident(id=directory.name, kind=kind, evidence=evidence)
        return attrs.evolve(Incident.from_json(data), id=directory.name, kind=kind)

    def _write_reports(self, directory: Path, incident: Incident) -> None:
        meaning = self._explain(incident.cause) if self._explain and incident.cause else None
        self._write(directory / "report.md", render_markdown(incident, meaning=meaning))
        self._write(directory / "report.json", _json_text(incident.to_json()))

    def _mode(self) -> int:
        return self.path.stat().st_mode & 0o777

    def _make_directory(self, path: Path) -> None:
        os.mkdir(path, 0o700)
        os.chmod(path, self._mode() | 0o700)  # the umask does not decide who reads a shared run

    def _write(self, path: Path, text: str) -> None:
        """Write a whole file: a temporary one beside it, fsync, rename."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, self._mode() & 0o666 | 0o600)
                file.write(text.encode("utf-8", "backslashreplace"))
                file.flush()
                os.fsync(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _place(name: str | None) -> tuple[int, str]:
    """Return the place of an id among others: by number, whatever a journal says."""
    found = _ID.fullmatch(name or "")
    return int(found[1]) if found else 0, name or ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file or directory against other writers; go on without after two seconds.

    A frozen holder, or a file system without locks, must not stop a launcher: what is at stake is one
    field of a report, or a report that is written twice.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(file_lock(path, patience_s=_PATIENCE_S))
        yield


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _injected(journal: Path, incident: Incident) -> Iterator[Evidence]:
    """Yield that a fault was injected in this attempt: the verdict is the same, and nobody need look on.

    Into a culprit; or into a victim, or where nobody is named into any rank, if no rank outlives it. A rank tells of it
    in a file of its own, so that the journal of a large job need not be read. Of several processes that were that rank
    in an attempt of that number, of other jobs too, the newest is meant.
    """
    named = [culprit.rank for culprit in incident.culprits[:_MOST_RANKS]]
    others = list(incident.victims[:_MOST_RANKS])
    if not named and not others:
        others = _ranks_that_tell(journal)
    for rank in dict.fromkeys((*named, *others)):
        yield from injected_faults(
            _newest_process(journal, rank, incident.attempt), of_others=bool(named) and rank not in named
        )


def _ranks_that_tell(journal: Path) -> list[int]:
    found = (_RANK_FILE.search(path.name) for path in journal.glob("*-rank*-*.jsonl"))
    return sorted({int(one[1]) for one in found if one is not None})[:_MOST_RANKS]


def _newest_process(journal: Path, rank: int, attempt: int | None) -> list[Mapping[str, Any]]:
    newest: list[Mapping[str, Any]] = []
    for path in journal.glob(f"*-rank{rank}-*.jsonl"):
        with contextlib.suppress(OSError), open_to_read(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            events = [e for e in parse_lines(file.read()) if e is not None and e.get("attempt") == attempt]
            if events and (not newest or events[-1]["t"] > newest[-1]["t"]):
                newest = list(events)
    return newest
