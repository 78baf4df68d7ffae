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
    "superglue_sift.files",  # a file is written whole or not at all, with the bytes it is given
    # The same on every processor: tests/golden/test_processor.py holds its effect
    "superglue_sift.environment",
    "superglue_sift.progress",
)


def module_file(module):
    """The file of a module; None for a name inside a module and for modules of other projects."""
    if module.split(".")[0] not in PACKAGES:
        return None
    base = module.replace(".", "/")
    return next(
        (path for path in (f"{base}.py", f"{base}/__init__.py") if (ROOT / path).is_file()), None
    )


def imports(path, module):
    """Modules (or names in them) of the project that the file imports, except under `if
    TYPE_CHECKING`.
    """
    names = []
    for node in _nodes(
        ast.parse(path.read_text(encoding="utf-8")), into_functions=module not in PACKAGES
    ):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.ImportFrom) and node.module
        ):  # imports are absolute (ruff's TID252)
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def _nodes(node, into_functions):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not into_functions:
            continue
        yield child
        yield from _nodes(child, into_functions)


def closure(modules):
    """Module name -> path, for these modules and all that they import of the project, also in
    functions.

    CHANGES_NO_OUTPUT and the `__init__.py` of the two packages are not followed.
    """
    found = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if (
            name in found
            or path is None
            or any(f"{name}.".startswith(f"{other}.") for other in CHANGES_NO_OUTPUT)
        ):
            continue
        found[name] = path
        parts = name.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        if name not in PACKAGES:
            waiting += imports(ROOT / path, name)
    return found


def modules_in(command):
    """The modules of the project that a command runs: `python -m pipeline.launch pipeline.train`
    runs two.
    """
    found = re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})\.[a-z_.]+", command)
    return [
        f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name for name in found
    ]


def code_of(command):
    """Files whose change can change the output of a command: what it imports, with more in it than
    a docstring.
    """
    files = closure(modules_in(command))
    return sorted(
        path for name, path in files.items() if name not in PACKAGES and _has_code(ROOT / path)
    )


def _has_code(path):
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


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
        files = code_of(stage["cmd"])
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
