"""The structure of the package, held by tests: floors, cycles, one reader of the environment, honest packaging."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "resilience_sdk"

# Which module or subpackage is on which floor. Imports point down, or stay within one entry.
FLOORS: dict[int, set[str]] = {
    0: {
        "_version",
        "cgroups",
        "clock",
        "console",
        "environ",
        "errors",
        "events",
        "faults",
        "file_lock",
        "hostinfo",
        "kernel_files",
        "settings",
        "short_names",
        "streams",
        "whole_file",
        "wire",
    },
    1: {"incidents", "job_config", "journal", "lease", "outcome", "rank_page", "run_directory"},
    2: {"attribution", "checkpoint", "hang", "heartbeats", "lanes", "numerics", "preemption", "straggler"},
    3: {"monitor", "session"},
    4: {"health", "launcher", "telemetry"},
    5: {"__main__", "adapters", "auto", "cli", "demo"},
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
# Same floor, and meant: (importer, imported)
NEIGHBOURS = {
    ("cgroups", "kernel_files"),
    ("environ", "errors"), ("settings", "environ"), ("settings", "events"), ("settings", "errors"),
    ("settings", "console"),
    ("faults", "console"), ("faults", "errors"), ("console", "errors"),
    ("lease", "run_directory"), ("incidents", "journal"),
    ("heartbeats", "lanes"), ("straggler", "lanes"), ("checkpoint", "straggler"), ("checkpoint", "lanes"),
    ("preemption", "attribution"),  # only preemption.account, for the place of a cause in the taxonomy
    ("preemption", "lanes"), ("numerics", "lanes"),
    ("session", "monitor"),  # only monitor.spawn: a rank starts the monitor of its node
    ("__main__", "cli"), ("cli", "demo"),
}  # fmt: skip
# The package itself wires its floors together: `lanes` asks it how recording starts, `checkpoint` whose job it is,
# `monitor` where it lies, and the demo's training script uses it as any user does.
ROOT_USERS = {"checkpoint", "demo", "lanes", "monitor"}


def _sources() -> list[tuple[str, Path]]:
    """Return (dotted module below resilience_sdk, file) of every module."""
    found = []
    for root, prefix in ((PACKAGE, ()), (ROOT / "adapters", ("adapters",))):
        for path in sorted(root.rglob("*.py")):
            parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def _imports(path: Path) -> set[str]:
    """Return what a file imports from our package, below `resilience_sdk`; typing-only imports do not count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
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
    return names


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


def test_session_uses_nothing_of_the_monitor_but_its_start():
    """A rank's process never loads the monitor's program."""
    used = {name for module, path in _sources() if module.startswith("session") for name in _imports(path)}
    assert {name for name in used if name.startswith("monitor")} <= {"monitor.spawn"}


def test_one_file_reads_the_environment():
    """`os.environ` and `os.getenv` appear in environ.py alone."""
    readers = []
    for module, path in _sources():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv", "environb")
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ):
                readers.append(module)
    assert set(readers) <= {"environ"}


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


@pytest.mark.parametrize("module", ["resilience_sdk", "resilience_sdk.heartbeats", "resilience_sdk.session"])
def test_importing_loads_no_torch(module: str):
    """The SDK waits for the user to import torch."""
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'pynvml', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_monitor_loads_neither_torch_nor_structlog():
    """The monitor's program needs the standard library, attrs and our package."""
    code = (
        "import sys, resilience_sdk.monitor.program; "
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("contextmanager" in ast.unparse(decorator) for decorator in node.decorator_list)
        and _unguarded_cleanup(node)
    ]
    assert not wrong
