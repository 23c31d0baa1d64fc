"""The structure of the package, held by tests: floors, cycles, one reader of the environment, honest packaging."""

import ast
import configparser
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "resilience_sdk"

# Which module or subpackage is on which floor. Imports point down, or stay within one entry.
FLOORS: dict[int, set[str]] = {
    0: {"_version", "begin", "errors", "system"},
    1: {"core", "torch_saves"},
    2: {"faults", "incidents", "recorder"},
    3: {"attribution", "checkpoint", "goodput", "hang", "heartbeats", "numerics", "preemption", "straggler"},
    4: {"cluster", "history", "postmortem"},
    5: {"monitor", "rank"},
    6: {"health", "launcher", "telemetry"},
    7: {"rehearse", "report"},
    8: {"__main__", "adapters", "auto", "cli", "dashboard", "demo"},
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
# Same floor, and meant: (importer, imported)
NEIGHBOURS = {
    ("recorder", "faults"),
    ("checkpoint", "straggler"),
    ("hang", "attribution"),  # hang.notices, workers and saves: which frames are the user's, and which ours
    ("postmortem", "cluster"),  # only postmortem.report: one node reports for all
    ("rank", "monitor"),  # only monitor.spawn: a rank starts the monitor of its node
    ("launcher", "telemetry"),  # only telemetry.sinks: whether there are those that are named
    ("__main__", "cli"), ("cli", "dashboard"), ("cli", "demo"),
}  # fmt: skip
# The package itself wires its floors together: `recorder` asks it how recording starts, `checkpoint` whose job it is,
# `monitor` where it lies, and the demo's training script uses it as any user does.
ROOT_USERS = {"checkpoint", "demo", "recorder", "system"}


def _sources() -> list[tuple[str, Path]]:
    """Return (dotted module below resilience_sdk, file) of every module."""
    found = []
    for root, prefix in ((PACKAGE, ()), (ROOT / "adapters", ("adapters",))):
        for path in sorted(root.rglob("*.py")):
            parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@cache
def _tree(path: Path) -> ast.Module:
    """Return the syntax of a file, which most of these tests look at."""
    return ast.parse(path.read_text())


def _names_type_checking(test: ast.expr) -> bool:
    return any("TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in ast.walk(test))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return what a file imports from our package, below `resilience_sdk`; typing-only imports do not count."""
    tree = _tree(path)
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and _names_type_checking(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "resilience_sdk":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("resilience_sdk."):
                names.add(node.module.removeprefix("resilience_sdk."))
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("resilience_sdk").removeprefix(".")
                for alias in node.names
                if alias.name.split(".")[0] == "resilience_sdk"
            }
    return frozenset(names)


def test_every_module_has_a_floor():
    """A new module is put on a floor on purpose."""
    assert {module.split(".")[0] for module, _ in _sources() if module} == set(FLOOR_OF)


def test_imports_point_down():
    """No module imports from a floor above its own, nor sideways except where it is meant."""
    wrong = []
    for module, path in _sources():
        if not module:
            continue  # the package itself, which wires everything
        own = module.split(".")[0]
        for imported in _imports(path):
            other = imported.split(".")[0]
            if other == own or (other not in FLOOR_OF and own in ROOT_USERS):
                continue
            down = FLOOR_OF.get(other, 99) < FLOOR_OF[own]
            if not down and (own, other) not in NEIGHBOURS:
                wrong.append(f"{module} (floor {FLOOR_OF[own]}) imports {imported} (floor {FLOOR_OF.get(other)})")
    assert not wrong


def test_rank_uses_nothing_of_the_monitor_but_its_start():
    """A rank's process never loads the monitor's program."""
    used = {name for module, path in _sources() if module.startswith("rank.") for name in _imports(path)}
    assert {name for name in used if name.startswith("monitor")} <= {"monitor.spawn"}


def test_one_file_reads_the_environment():
    """`os.environ` and `os.getenv` appear in core/environ.py alone."""
    readers = []
    for module, path in _sources():
        tree = _tree(path)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv", "environb")
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ):
                readers.append(module)
    assert set(readers) <= {"core.environ"}


OBLIQUE = {"what", "who", "whose", "whether", "where", "how", "which", "when", "from"}
# One name that users meet in several places.
SAME_NAME = {
    "Attached": "each adapter's `attach` returns one",
    "ResilienceCallback": "Lightning and Transformers both call theirs a callback",
}
SMALL_LINES = 130
# Small modules with one importer: the boundary that keeps each apart from it.
SMALL = {
    "adapters.deepspeed.engine_calls": "the shape of an optimizer that an engine is given, apart from the loop",
    "adapters.lightning.proof": "what is compared of a fit, apart from the fit",
    "adapters.megatron.limits": "what is said by arguments alone, which is tested without a training",
    "adapters.transformers.changes": "what is said of a resume that is not the same, apart from the resume",
    "adapters.transformers.evaluations": "how long evaluations take, which is tested without a training",
    "hang.unended": "the pure part of a watch: who holds a process, by its frames, threads and children",
    "hang.workers": "rules about stacks, which are tested without samples",
    "launcher.accelerate_config": "a file of Accelerate's, which is read without its command line",
    "goodput.plan": "the formulas of a plan, which are tested without its command",
    "launcher.node_look": "the look at a node, of which the job takes the facts alone",
    "rank.device_memory": "the only part of a session that asks a device",
    "health.probe_main": "the process of a probe, which must be cheap to start",
    "rank.held": "seen and written at the end alone, by the helper thread of a session that has enough to do",
    "rank.rehearsed_processes": "what other processes there are, apart from the trace of this one",
    "rank.rehearsed_records": "names of frameworks, apart from the trace of any loop",
    "rehearse.processes": "what a script is, before anything is judged",
    "rehearse.records": "what is logged, apart from what is seen of steps",
    "telemetry.sinks.console": "a sink is one file",
    "telemetry.sinks.history": "a sink is one file",
    "telemetry.sinks.mlflow": "a sink is one file",
    "telemetry.sinks.tensorboard": "a sink is one file",
    "telemetry.sinks.wandb": "a sink is one file",
    "rank.crash_dumps": "faulthandler as a whole process has it, apart from the session of a rank",
}


def test_a_module_says_what_it_is():
    """The first word of a module's docstring is what the module is, not a question."""
    first = {module: (ast.get_docstring(_tree(path)) or "").split()[:1] for module, path in _sources()}
    assert [module for module, words in first.items() if words and words[0].strip(",:").lower() in OBLIQUE] == []


def test_one_name_is_one_class():
    """No public class name stands for two things, but for those that users meet in several places."""
    places: dict[str, list[str]] = {}
    for module, path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1 and name not in SAME_NAME}
    assert twice == {}


# What somebody else calls by its name.
CALLED_FROM_OUTSIDE = {
    "_own_checkpoints": "`checkpoint` asks the package for it",
    "_poll": "torch's agent polls its workers with it",
    "_start_recording": "`recorder` asks the package for it",
}


def test_what_is_private_is_called():
    """A private function is named where it stands, or where one is that it overrides: else it is dead."""
    defined: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for module, path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list:
                defined.setdefault(node.name, set()).add(module)
            elif isinstance(node, (ast.Name, ast.Attribute)):
                named.setdefault(node.id if isinstance(node, ast.Name) else node.attr, set()).add(module)
    uncalled = {
        (name, module)
        for name, modules in defined.items()
        if name.startswith("_") and not name.startswith("__") and name not in CALLED_FROM_OUTSIDE
        for module in modules
        if not named.get(name, set()) & modules
    }
    assert uncalled == set()


def test_a_small_module_has_two_users_or_a_reason():
    """What one module alone uses lives in it, unless a boundary is between the two."""
    sources = dict(_sources())
    users: dict[str, set[str]] = {module: set() for module in sources}
    for module, path in sources.items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("resilience_sdk"):
                base = node.module.removeprefix("resilience_sdk").removeprefix(".")
                for name in (base, *(f"{base}.{alias.name}".removeprefix(".") for alias in node.names)):
                    users.get(name, set()).add(module)
    small = {
        module
        for module, path in sources.items()
        if path.name != "__init__.py"
        and len(users[module] - {module}) == 1
        and len(path.read_text().splitlines()) < SMALL_LINES
    }
    assert sorted(small) == sorted(SMALL)


# Who opens a file by another way than `core.plain_file`, how often, and why nothing can stand in its place there.
OWN_FILES = "made by this very call (O_EXCL, O_TMPFILE, a random name), so nothing else can have the name"
PACKAGE_DATA = "a file of the installed package"
OF_THE_KERNEL = "/proc, /sys or the kernel's log, which is a device and is never waited for"
OPEN_ALREADY = "a descriptor that is open"
OPENS = {
    "attribution.diagnosis": (1, "a pipe that the user's shell has opened for it"),
    "attribution.exceptions": (1, PACKAGE_DATA),
    "attribution.taxonomy": (1, PACKAGE_DATA),
    "checkpoint.commit": (3, f"{OWN_FILES}; {OPEN_ALREADY}"),
    "checkpoint.last_save": (1, "/dev/null"),
    "checkpoint.whole_directory": (3, "a directory to be synced; a mark in a directory that was just made"),
    "core.console": (4, "/dev/null; the file of the run directory for what the screen refuses, without waiting"),
    "core.early_signals": (1, OF_THE_KERNEL),
    "core.lease": (2, OWN_FILES),
    "core.plain_file": (1, "here it is done"),
    "core.port_holder": (2, OF_THE_KERNEL),
    "core.run_directory": (3, f"{OWN_FILES}; flags, whose time is set where they are there, which opens nothing"),
    "dashboard.app": (1, PACKAGE_DATA),
    "dashboard.pages": (1, PACKAGE_DATA),
    "demo.command": (3, "in a directory that it has just made"),
    "demo.train": (2, "in a directory that the demo has just made; sources of Python"),
    "health.checkup": (1, OPEN_ALREADY),
    "health.host": (1, OF_THE_KERNEL),
    "health.probe_main": (1, OPEN_ALREADY),
    "health.probes": (1, PACKAGE_DATA),
    "health.software": (1, "a module of an installed package"),
    "health.storage": (4, f"{OWN_FILES}; a file of the job's is read as the job reads it, in a process with a limit"),
    "health.watch": (1, OPEN_ALREADY),
    "incidents.store": (3, f"{OWN_FILES}; a directory to be synced"),
    "launcher.bounds": (3, OF_THE_KERNEL),
    "launcher.forkserver_main": (1, "what torch has named in a directory that it has just made, or /dev/null"),
    "monitor.activity": (2, OF_THE_KERNEL),
    "monitor.evidence": (4, f"{OF_THE_KERNEL}; {OPEN_ALREADY}; a rank's FIFO, without waiting"),
    "monitor.notices": (1, OPEN_ALREADY),
    "monitor.other_launchers": (1, OF_THE_KERNEL),
    "monitor.ranks": (2, OF_THE_KERNEL),
    "monitor.thread_waits": (3, OF_THE_KERNEL),
    "monitor.unended": (1, OF_THE_KERNEL),
    "postmortem.collect": (1, OF_THE_KERNEL),
    "rank.exceptions": (2, "an error file that is a device, /dev/null say; without waiting"),
    "rank.rehearsed_processes": (1, "a flag in a directory that the rehearsal has just made"),
    "rank.helper_thread": (3, "the FIFO that it makes, without waiting"),
    "recorder.page_directory": (1, OF_THE_KERNEL),
    "recorder.page_writer": (2, OWN_FILES),
    "rehearse.jobs": (1, "a flag in a directory that it has just made"),
    "report.page": (1, PACKAGE_DATA),
    "straggler.published": (2, f"{OPEN_ALREADY}; a directory whose mode is set"),
    "system.file_lock": (1, "a lock: opened for both directions without waiting, and never read"),
    "system.gloo_teardown": (2, OF_THE_KERNEL),
    "system.hostinfo": (2, OF_THE_KERNEL),
    "system.installation": (1, OF_THE_KERNEL),
    "system.kept_output": (2, "/dev/null; the file of the run directory for what the screen refuses, without waiting"),
    "system.linux": (1, OF_THE_KERNEL),
    "system.place_probe": (1, f"{OWN_FILES}; in a process with a limit"),
    "system.procfs": (3, OF_THE_KERNEL),
    "system.programs": (2, OWN_FILES),
    "system.storage_probe": (1, f"{OWN_FILES}; in a thread with a limit"),
    "telemetry.exporter": (2, "/dev/null"),
    "adapters.transformers.saving": (1, OWN_FILES),
}
OPENERS = {"plain", "private"}
OPENING_CALLS = {"os.open", "os.fdopen", "os.mkfifo", "io.open", "tempfile.mkstemp", "tempfile.TemporaryFile"}
OPENING_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "touch"}


def _opens(call: ast.Call) -> bool:
    """Tell whether a call opens a file, and not as `core.plain_file` does."""
    what = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if what == "open":
        return given.get("opener") not in OPENERS
    if not isinstance(call.func, ast.Attribute) or what in OPENING_CALLS:
        return what in OPENING_CALLS
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    mode = given.get("mode", first if isinstance(first, str) else "?").strip("'")
    return call.func.attr in OPENING_METHODS or (call.func.attr == "open" and set(mode) <= set("rwxabt+"))


def test_files_are_opened_in_one_place():
    """Nothing in place of a file blocks anybody: files are opened by `core.plain_file`, or it says here why not."""
    found = {
        module: sum(isinstance(node, ast.Call) and _opens(node) for node in ast.walk(_tree(path)))
        for module, path in _sources()
    }
    assert {module: count for module, count in found.items() if count} == {m: n for m, (n, _) in OPENS.items()}


def test_the_table_of_paths_names_tests_that_exist():
    """Each row of docs/design/paths.md has a cell for all that may happen, and each test that it names is there."""
    text = (ROOT / "docs/design/paths.md").read_text()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {9}
    assert all(cell.strip() for row in rows for cell in row)
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    files = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in files for name in re.findall(r"^ *def (test_[a-z0-9_]+)", source, re.MULTILINE)}
    assert len(named) > 40
    assert named - defined == set()


def test_setup_lists_every_package():
    """`setup.cfg` names exactly the packages on disk, so that a wheel holds all of them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = {line for line in config["options"]["packages"].split("\n") if line and not line.startswith("#")}
    on_disk = {"resilience_sdk"} | {
        "resilience_sdk." + ".".join(path.parent.relative_to(PACKAGE).parts)
        for path in PACKAGE.rglob("__init__.py")
        if path.parent not in (PACKAGE, PACKAGE / "adapters")
    }
    adapters = {
        ".".join(("resilience_sdk", *path.parent.relative_to(ROOT).parts))
        for path in (ROOT / "adapters").rglob("__init__.py")
    }
    assert listed == on_disk | adapters


def test_adapters_link_is_a_link():
    """`resilience_sdk/adapters` is the committed link to the top-level folder."""
    link = PACKAGE / "adapters"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "adapters"


@pytest.mark.parametrize("module", ["resilience_sdk", "resilience_sdk.heartbeats", "resilience_sdk.rank"])
def test_importing_loads_no_torch(module: str):
    """The SDK waits for the user to import torch."""
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'pynvml', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_monitor_loads_neither_torch_nor_structlog():
    """The monitor's program needs the standard library, attrs and our package."""
    code = (
        "import sys, resilience_sdk.monitor.main; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'structlog', 'yaml', 'numpy', 'pynvml'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def _unguarded_cleanup(function: ast.FunctionDef) -> bool:
    """Tell whether something follows a `yield` that an exception in the body would skip."""
    guarded = {
        id(inner)
        for block in ast.walk(function)
        if (isinstance(block, ast.Try) and block.finalbody) or isinstance(block, ast.With)
        for inner in ast.walk(block)
    }
    for node in ast.walk(function):
        for suite in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for here, after in zip(suite or [], (suite or [])[1:], strict=False) if isinstance(suite, list) else []:
                is_yield = isinstance(here, ast.Expr) and isinstance(here.value, ast.Yield)
                if is_yield and id(here) not in guarded and not isinstance(after, ast.Return):
                    return True
    return False


def test_generator_context_managers_restore_in_finally():
    """What a `@contextmanager` does after its `yield` stands in a finally or a with block."""
    wrong = [
        f"{module}.{node.name}"
        for module, path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef)
        and any("contextmanager" in ast.unparse(decorator) for decorator in node.decorator_list)
        and _unguarded_cleanup(node)
    ]
    assert not wrong
