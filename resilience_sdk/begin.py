"""The file that Python is given for a process of the SDK: it finds this copy of the package, and runs what it is told.

    begin.py CODE COUNT PATH... ARGUMENT...     COUNT paths to import from, see `system.programs`

It is run by its path and not by `-m`, so that nothing that is found elsewhere can be imported in our place. The package
is loaded from where it lies, without that place being searched for anything else: modules of the names of the standard
library's may lie there, too, and another copy of ours in what comes first on the path.
"""

import sys


def _begin() -> tuple[str, list[str]]:
    """Load the package, and leave `sys.path` and `sys.argv` as the code is to find them.

    Returns the code, and what the interpreter itself searches.
    """
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        # The directory of this file, put there by Python with links resolved; our modules would shadow the user's.
        del sys.path[0]
    # Only now, when they can be found in one place only.
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    package = os.path.dirname(os.path.abspath(__file__))
    name = os.path.basename(package)
    spec = PathFinder.find_spec(name, [os.path.dirname(package)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r} in {os.path.dirname(package)}", name=name)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    code, count, path = sys.argv[1], int(sys.argv[2]), list(sys.path)
    sys.path += [place for place in sys.argv[3 : 3 + count] if place not in sys.path]
    sys.argv[1 : 3 + count] = []
    return code, path


if __name__ == "__main__":
    _code, _path = _begin()
    # Named as this file, so that a stack shows whose frame it is.
    exec(  # noqa: S102 - it comes from the command line, as that of `python -c` does
        compile(_code, __file__, "exec"),
        {"__name__": "__main__", "os": sys.modules["os"], "sys": sys, "path": _path},
    )
