"""dvc.yaml against the imports of its stages: `python tests/import_closure.py` names what differs
(exit 1).

A stage depends on packages (folders) or single files that together hold every module its command
imports, but for `CHANGES_NO_OUTPUT`.
"""

import ast
import re
import sys
from pathlib import Path

from reading import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "superglue_sift")
# Modules and packages that change no byte of an output, given the parameters, which DVC compares by
# value.
CHANGES_NO_OUTPUT = (
    "pipeline.errors",
    "pipeline.launch",
    "pipeline.mlflow_store",
    "pipeline.params",
    "pipeline.served_model",
    "pipeline.tracking",
    "pipeline.workers",  # results of others, in their order
    "superglue_sift.errors",
    # The same on every processor: tests/golden/test_processor.py holds its effect
    "superglue_sift.environment",
    "superglue_sift.progress",
)
# Modules by which one stage only prints, or refuses to go on
ONLY_SAYS = {"fetch": ("pipeline.provenance",)}  # what the initial weights were trained on


def module_file(module):
    """The file of a module; None for a name inside a module and for modules of other projects."""
    base = module.replace(".", "/")
    found = (path for path in (f"{base}.py", f"{base}/__init__.py") if (ROOT / path).is_file())
    return next(found, None)


def imports(path, into_functions=True):
    """Modules (or names in them) of the project that the file imports, except under `if
    TYPE_CHECKING`.
    """
    names = []
    waiting = [ast.parse((ROOT / path).read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):  # imports are absolute (ruff's TID252)
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not is_typing and (into_functions or not isinstance(node, ast.FunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return [name for name in names if name.split(".")[0] in PACKAGES]


def closure(modules, without=CHANGES_NO_OUTPUT):
    """Module name -> path, for these modules and all that they import of the project, also in
    functions.

    Modules of `without` and the functions in `__init__.py` of the two packages are not followed.
    """
    found = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if path is None or name in found or name.startswith(without):
            continue
        found[name] = path
        waiting += imports(path, into_functions=name not in PACKAGES)
    return found


def modules_in(command):
    """The modules of the project that a command runs: `python -m pipeline.launch pipeline.train`
    runs two.
    """
    found = re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})\.[a-z_.]+", command)
    return [
        f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name for name in found
    ]


def covers(dependency, path):
    """Whether the file, or its package, is this dependency."""
    return path == dependency or path.startswith(dependency + "/")


def differences(tree):
    """One line for each file that no dependency of its stage contains, and for each useless
    dependency.
    """
    lines = []
    for name, stage in tree["stages"].items():
        held = [path for path in stage["deps"] if path.split("/")[0] in PACKAGES]
        modules = closure(modules_in(stage["cmd"]), CHANGES_NO_OUTPUT + ONLY_SAYS.get(name, ()))
        files = sorted(path for path in modules.values() if not path.endswith("__init__.py"))
        lines += [
            f"{name}: deps lack {path}"
            for path in files
            if not any(covers(dependency, path) for dependency in held)
        ]
        lines += [
            f"{name}: deps hold {dependency}, of which nothing can change the output"
            for dependency in held
            if not any(covers(dependency, path) for path in files)
        ]
    return lines


def main():
    tree = read_yaml(ROOT / "dvc.yaml")
    lines = differences(tree)
    print("\n".join(lines) or "dvc.yaml: the dependencies hold all that the stages import")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
