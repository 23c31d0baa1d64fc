"""The SDK as its users have it: installed in four ways, and used from a directory that is not the clone.

Every day that is a whole job for the wheel, and import and doctor for the others: their jobs are of the lane `release`.

Nothing but the copy under test can be imported in these environments (see `installs`), so whatever process of the SDK
works there has found it where it was loaded from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import installs
import pytest
from accounts import account_of
from harness import SCRIPTS
from installs import PROJECT, Installation
from receiver import receiving

pytestmark = pytest.mark.slow
# The wheel is what most users have. Of what differs between the kinds (where package and command lie, which files
# came along) the doctor sees enough every day.
OTHER_KINDS = ("editable", "target", "sdist")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Sources, and the source distribution and the wheel that were built from them."""
    folder = tmp_path_factory.mktemp("built")
    sources = installs.copy_of_the_sources(folder)
    return sources, *installs.build(sources, folder)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory that has nothing to do with the SDK, but a folder of its name, as the parent of a clone has."""
    place = tmp_path / "elsewhere"
    (place / "resilience_sdk").mkdir(parents=True)
    return place


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variable that gives a job a page directory of its own."""
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    yield {"RESILIENCE_PAGE_DIR": str(folder)}
    assert not list(folder.glob("resilience-*/*")), "a page directory was left behind"


@pytest.fixture(scope="session")
def install(built: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installation]:
    """Install in one of these ways, once, and make sure that it is this copy which is imported."""

    @cache
    def install(kind: str) -> Installation:
        made = installs.install(kind, tmp_path_factory.mktemp(kind), *built)
        code, out, err = made.run(made.python, "-c", "import resilience_sdk as it; print(it.__file__)", where=Path("/"))
        assert code == 0, err
        assert made.place in Path(out.strip()).parents
        return made

    return install


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_each_kind_is_imported_and_examined(kind: str, install: Callable[[str], Installation], elsewhere: Path) -> None:
    """From where it was installed, by its command; processes of its own find it, and so do files that came along."""
    made = install(kind)
    doctor(made, elsewhere)
    provided(made, elsewhere.parent)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["wheel", *(pytest.param(kind, marks=pytest.mark.release) for kind in OTHER_KINDS)])
def test_a_job_of_each_kind(
    kind: str, install: Callable[[str], Installation], elsewhere: Path, pages: dict[str, str]
) -> None:
    """Doctor, and under the supervisor a preflight, a death, a stall and a resume, which a webhook is told of."""
    made = install(kind)
    doctor(made, elsewhere, "compute")
    provided(made, elsewhere.parent)
    run_dir, told = elsewhere / "run", elsewhere / "told"
    with receiving() as receiver:
        code, _, screen = made.run(
            *(made.resilience, "supervise", "--run-dir", run_dir, "--"),
            *(made.resilience, "run", "--nproc-per-node", "2", "--preflight", "--stuck-after", "2"),
            *("--initial-heartbeat-timeout", "60", "--term-grace", "1"),
            *("--webhook-url", receiver.url, "--webhook-events", "incident,finished"),
            *(SCRIPTS / "installed.py", told),
            where=elsewhere,
            timeout_s=200,
            **pages,
        )
        assert code == 0, screen
        events = [json.loads(request.body)["event"] for request in receiver.wait_for(lambda taken: len(taken) >= 3)]
    assert "itself" not in screen, screen  # neither the preflight nor a probe nor the exporter has failed
    assert made.place in Path(told.read_text()).parents
    assert [event.get("kind", event["event"]) for event in events] == ["crash", "hang", "finished"]
    code, out, err = made.run(made.resilience, "why", run_dir, "--json", where=elsewhere)
    assert code == 0, err
    incidents = json.loads(out)["incidents"]
    assert [(each["kind"], each["culprits"][0]["rank"]) for each in incidents] == [("crash", 1), ("hang", 1)]
    assert [each["lost_steps"] is not None for each in incidents] == [True, True]


@pytest.mark.parametrize("kind", [pytest.param("editable", marks=pytest.mark.release), "wheel"])
def test_the_place_of_nvidias_extension(
    kind: str, install: Callable[[str], Installation], elsewhere: Path, pages: dict[str, str]
) -> None:
    """Its launcher is a program there, whose ranks import it; nothing of that name is found without."""
    made = install(kind)
    code, _, err = made.run(made.python, "-c", "import nvidia_resiliency_ext", where=elsewhere)
    assert code == 1
    assert "No module named 'nvidia_resiliency_ext'" in err
    code, out, err = made.run(made.resilience, "nvrx", where=elsewhere)
    assert code == 0, err
    script = elsewhere / "job.py"
    script.write_text("from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient as it; print(it.__module__)")
    path = os.pathsep.join((out.strip(), str(made.resilience.parent), os.environ["PATH"]))
    code, out, err = made.run("ft_launcher", script, where=elsewhere, PATH=path, **pages)
    assert (code, out) == (0, "resilience_sdk.adapters.nvrx.client\n"), err


def doctor(made: Installation, where: Path, *also: str) -> None:
    """The doctor looks at everything, and nothing of it fails by a fault of the SDK."""
    run = ("doctor", "--json", *(f"--{name}" for name in also), "--patience", "10", "--run-dir", where / "run")
    code, out, err = made.run(made.resilience, *run, where=where)
    assert code == 0, out + err
    findings = json.loads(out)["findings"]
    assert [finding for finding in findings if finding["check"] in ("probe", "answers")] == []
    seen = {finding["probe"] for finding in findings}
    assert {"gpu", "host", "kernel", "processes", "network", "rendezvous", "storage", "software", *also} <= seen


def provided(made: Installation, where: Path) -> None:
    """The files for Prometheus and Grafana came along."""
    code, out, err = made.run(made.python, "-m", "resilience_sdk.telemetry", "--files", where=where)
    assert code == 0, err
    assert [Path(line).name for line in out.splitlines()] == ["alerts.yml", "alerts_test.yml", "grafana.json"]
    assert all(Path(line).is_file() for line in out.splitlines())


@pytest.mark.release  # .ci/run begins with the demo of an editable installation
@pytest.mark.timeout(600)
def test_the_demo_keeps_every_promise(tmp_path: Path, install: Callable[[str], Installation], elsewhere: Path) -> None:
    """A hung, a killed and a preempted training end with the bits of the undisturbed one; the reports say what was."""
    made = install("target")
    words = ("demo", "--json", "--keep", tmp_path / "runs")
    code, out, err = made.run(made.resilience, *words, where=elsewhere, timeout_s=550)
    assert out, err
    document = json.loads(out)
    assert document["ok"], json.dumps(document, indent=1) + err
    assert code == 0
    assert [run["name"] for run in document["runs"]] == ["undisturbed", "hung", "killed", "preempted"]
    assert len({run["parameters_sha256"] for run in document["runs"]}) == 1
    assert [run["resumed_at_step"] for run in document["runs"][:3]] == [None, 25, 75]
    assert document["runs"][3]["resumed_at_step"] > 60
    assert document["runs"][3]["incidents"][0]["lost_steps"] == 0
    accounts = {run["name"]: account_of(tmp_path / "runs" / run["name"] / "run") for run in document["runs"]}
    assert accounts["hung"]["hang"] > 0
    assert accounts["killed"]["replayed"] > 0


_STRICT_PYRIGHT = {
    "typeCheckingMode": "strict",
    "enableTypeIgnoreComments": False,  # mypy's
    "reportUnnecessaryTypeIgnoreComment": True,
}
_STRICT_MYPY = """
[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
ignore_missing_imports = true
"""
_CHECKERS = {
    "mypy": ("uses.py", "misuses.py", "--python-executable"),
    "pyright": ("--project", ".", "--pythonpath"),
}


@pytest.mark.parametrize("checker", _CHECKERS)
def test_type_checkers_know_what_users_write(
    checker: str, tmp_path: Path, install: Callable[[str], Installation]
) -> None:
    """`tests/typing` has no error where it is right; each mistake in it is one, for else its comment is not needed."""
    made = install("wheel")
    programs = tmp_path / "programs"
    shutil.copytree(PROJECT / "tests/typing", programs)
    (programs / "mypy.ini").write_text(_STRICT_MYPY)
    (programs / "pyrightconfig.json").write_text(json.dumps(_STRICT_PYRIGHT))
    command = [sys.executable, "-m", checker, *_CHECKERS[checker], made.python]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_distributions_hold(built: tuple[Path, Path, Path]) -> None:
    """A user finds documentation, examples and constraints in the source distribution; rules and dashboard in both."""
    sources, sdist, wheel = built
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in in_wheel if name.endswith(".dist-info/METADATA"))
    shown = {str(path.relative_to(sources)) for name in ("docs", "examples") for path in files_below(sources / name)}
    assert shown
    assert shown <= in_sdist
    assert {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md", "constraints.txt"} <= in_sdist
    assert not [name for name in in_sdist | in_wheel if name.startswith("tests") or "__pycache__" in name]
    package = {
        f"resilience_sdk/{path.relative_to(root)}"
        for root in (sources / "resilience_sdk", sources)
        for path in files_below(root / "adapters" if root == sources else root)
    }
    assert package == {name for name in in_wheel if ".dist-info/" not in name}
    provided = {
        f"resilience_sdk/telemetry/provided/{name}" for name in ("alerts.yml", "alerts_test.yml", "grafana.json")
    }
    assert provided <= in_wheel & in_sdist
    links = dict(line.removeprefix("Project-URL: ").split(", ") for line in metadata.splitlines() if "-URL: " in line)
    assert set(links) == {"Documentation", "Source", "Issues", "Changelog"}
    assert all(address.startswith("https://") for address in links.values())
    # A package index shows the README, and has none of the files that it links to.
    shown = set(re.findall(r"\]\((?!#)([^)\s]+)\)", metadata.partition("\n\n")[2]))
    files = f"{links['Source']}/blob/main/"
    assert len(shown) > 10
    assert not [address for address in shown if not address.startswith("https://")]
    missing = [
        address
        for address in shown
        if address.startswith(files) and not (sources / address[len(files) :].partition("#")[0]).is_file()
    ]
    assert not missing


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, without following links."""
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names if not name.endswith(".pyc")]
