"""Processes of the SDK run the copy of it that started them, wherever else they could find one."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import attr
import pytest

from resilience_sdk.system import installation, programs
from resilience_sdk.system.programs import Program

SITE = Path(attr.__file__).parent.parent
DECOY = "raise SystemExit('the wrong module was imported')\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory with a copy of the package, beside modules of the names of some of the standard library's."""
    root = tmp_path / "z-copy"
    copied(Path(installation.PACKAGE), root / "resilience_sdk")
    for name in ("json", "typing", "signal"):
        (root / f"{name}.py").write_text(DECOY)
    return root


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A directory with attrs, and beside it another package of our name."""
    root = tmp_path / "a-libraries"
    for name in ("attr", "attrs"):
        copied(SITE / name, root / name)
    (root / "resilience_sdk").mkdir()
    (root / "resilience_sdk/__init__.py").write_text(DECOY)
    return root


def copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def run(code: str, *path: Path, where: Path, flags: tuple[str, ...] = ("-I", "-S"), **env: str) -> str:
    """Run code in a Python that has the standard library and `path` to import from, and return what it prints."""
    begin = f"import sys, importlib, json, signal, typing; sys.path += {[str(each) for each in path]!r}; "
    done = subprocess.run(
        [sys.executable, *flags, "-c", begin + code],
        cwd=where, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [it for it in vars(programs).values() if isinstance(it, Program)])
def test_what_a_program_runs_is_there(program: Program) -> None:
    """A name in the table that nothing has would show when the process is needed."""
    _, module, _, function = program.code.partition(";")[0].split()
    assert callable(getattr(importlib.import_module(module), function))


_CHILD = (
    "import json, attr, resilience_sdk.core.clock as ours; print(json.dumps([ours.__file__, attr.__file__, sys.argv]))"
)


@pytest.mark.parametrize("isolated", [True, False])
def test_a_process_of_ours_runs_this_copy(isolated: bool, copy: Path, libraries: Path, tmp_path: Path) -> None:
    """Though PYTHONPATH names another one and the working directory holds a third, and whatever lies beside ours."""
    elsewhere = tmp_path / "elsewhere"
    for name in ("resilience_sdk", "json"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "__init__.py").write_text(DECOY)
    printed = run(
        "import subprocess; from resilience_sdk.system.programs import Program, command; "
        f"subprocess.run(command(Program({_CHILD!r}, isolated={isolated}), 'a word'), check=True)",
        copy,
        libraries,
        where=elsewhere,
        PYTHONPATH=str(libraries),
    )
    ours, theirs, words = json.loads(printed)
    assert Path(ours).parent == copy / "resilience_sdk" / "core"
    assert Path(theirs).parent == libraries / "attr"
    assert words[1:] == ["a word"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
def test_what_pythonpath_names_is_there_without_the_working_directory(libraries: Path, tmp_path: Path) -> None:
    """With PYTHONSAFEPATH the first entry of the path is no working directory, and must not be dropped as one."""
    (libraries / "only_here.py").write_text("print(__file__)")
    done = subprocess.run(
        programs.command(Program("import only_here")),
        cwd=tmp_path, env={"PYTHONPATH": str(libraries), "PYTHONSAFEPATH": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(libraries / "only_here.py"), done.stderr


def test_the_monitor_is_of_the_copy_that_starts_it(copy: Path, libraries: Path, tmp_path: Path) -> None:
    """Where attrs was found lies another copy, which comes first by name; and nothing is known of import hooks."""
    pages = tmp_path / "pages"
    pages.mkdir(mode=0o700)
    code = (
        "from pathlib import Path; from resilience_sdk.monitor import spawn; "
        f"pages = Path({str(pages)!r}); print(spawn.ensure_monitor(pages), spawn.read_state(pages)['pid'])"
    )
    started, pid = run(code, copy, libraries, where=tmp_path).split()
    with contextlib.suppress(ProcessLookupError):  # without a job it goes by itself
        os.kill(int(pid), signal.SIGKILL)
    assert started == "True"


def test_where_import_hooks_find_modules_is_on_the_path(copy: Path, libraries: Path, tmp_path: Path) -> None:
    """An editable installation is such a hook, and a child that does not load it still finds the module."""
    code = (
        "from importlib.machinery import PathFinder; "
        f"hook = type('Hook', (), {{'find_spec': lambda name, path=None, target=None: "
        f"PathFinder.find_spec(name, [{str(libraries)!r}]) if name in ('attr', 'attrs') else None}}); "
        "sys.meta_path.append(hook); from resilience_sdk.system import installation as it; "
        "print(json.dumps(it.import_path()))"
    )
    assert str(libraries) in json.loads(run(code, copy, where=tmp_path))


def test_the_working_directory_is_no_place_to_import_from(copy: Path, libraries: Path, tmp_path: Path) -> None:
    """Nor one that is gone any trouble."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os; from resilience_sdk.system import installation as it; "
        "before = it.import_path(); os.rmdir(os.getcwd()); print(json.dumps([before, it.import_path()]))"
    )
    before, after = json.loads(run(code, copy, libraries, where=gone, flags=("-E", "-S")))
    assert str(gone) not in before
    assert before == after
    assert {str(copy), str(libraries)} <= set(before)


def test_a_package_that_was_taken_away_is_named(copy: Path, libraries: Path, tmp_path: Path) -> None:
    """As when it is installed again while a job runs."""
    code = (
        "import shutil, subprocess; from resilience_sdk.system.programs import Program, command, installation; "
        "words = command(Program('pass', isolated=True)); shutil.rmtree(installation.PACKAGE); "
        "done = subprocess.run(words, capture_output=True, text=True); print(done.returncode, done.stderr)"
    )
    code, said = run(code, copy, libraries, where=tmp_path).split(maxsplit=1)
    assert code == "2"
    assert f"can't open file '{copy}/resilience_sdk/begin.py'" in said


def test_below_a_link_no_module_of_ours_hides_one_of_the_script(tmp_path: Path) -> None:
    """Python resolves links in the directory that it puts on the path of a worker, which has to go all the same."""
    (tmp_path / "link").symlink_to(installation.ROOT)
    (tmp_path / "train.py").write_text("import sys, wire, options; print(sys.path[0], wire.mine, options.mine)")
    for name in ("wire", "options"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("mine = True\n")
    command = [word.replace(installation.ROOT, str(tmp_path / "link")) for word in programs.command(programs.WORKER)]
    done = subprocess.run(
        [*command, "file", "train.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "RESILIENCE_DISABLE": "1"}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"{tmp_path} True True\n", 0), done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a zip file."""
    path = tmp_path_factory.mktemp("zip") / "resilience_sdk.zip"
    root = Path(installation.PACKAGE)
    with zipfile.ZipFile(path, "w") as file:
        for source in [*root.rglob("*.py"), *root.rglob("*.toml")]:
            file.write(source, source.relative_to(root.parent))
    return path


def python(archive: Path, *words: str, where: Path) -> tuple[int, str, str]:
    """Run Python with the SDK of the archive."""
    done = subprocess.run(
        [sys.executable, *words], cwd=where, capture_output=True, text=True, timeout=100,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(archive), "RESILIENCE_PAGE_DIR": str(where)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("resilience_sdk", "run", "--nproc-per-node", "2", "train.py"),
        ("resilience_sdk.launcher", "train.py"),
        ("resilience_sdk", "why"),
        ("resilience_sdk", "doctor"),
        ("resilience_sdk.telemetry", "runs"),
    ],
)
def test_no_command_works_from_a_zip_file(words: tuple[str, ...], archive: Path, tmp_path: Path) -> None:
    """One line names the file and the cure, and the exit code is that of bad usage."""
    (tmp_path / "train.py").write_text("print('trained')")
    code, out, err = python(archive, "-m", *words, where=tmp_path)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert str(archive) in err
    assert "install it with pip, or unpack it" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_a_script_goes_on_with_the_sdk_from_a_zip_file(archive: Path, tmp_path: Path) -> None:
    """It is not watched, which one line says; only saves that nobody would make are an error, before the first step."""
    (tmp_path / "train.py").write_text(
        "import resilience_sdk\n"
        "with resilience_sdk.heartbeat():\n    pass\n"
        "print('trained')\n"
        "try:\n    resilience_sdk.start_run(state={'n': object()})\n"
        "except resilience_sdk.ConfigError as error:\n    print(error)\n"
    )
    for words in (("train.py",), ("-m", "resilience_sdk.auto", "train.py")):
        code, out, err = python(archive, *words, where=tmp_path)
        assert code == 0, err
        trained, refused = out.splitlines()
        assert trained == "trained"
        assert str(archive) in refused
        (line,) = err.splitlines()
        assert line.startswith(f"resilience: switched off (resilience_sdk was imported from the archive {archive}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
