"""Which code can change an output: the one definition behind checkpoints, shards and dvc.yaml.

What a module imports is found in its source, so a new import counts from the day it is written. Left out is what
`CHANGES_NO_OUTPUT` names: how a stage is started, tracked, shown and refused.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "superglue_sift")

# Modules and rooms that no byte of an output depends on, given the parameters, which are compared by value.
CHANGES_NO_OUTPUT = (
    "pipeline.errors",
    "pipeline.files",  # a file is written whole or not at all, with the bytes it is given
    "pipeline.launch",
    "pipeline.parameters",
    "pipeline.provenance.code",
    "pipeline.processes.faults",
    "pipeline.processes.machine",
    "pipeline.processes.memory",
    "pipeline.provenance.made_from",
    "pipeline.processes.prefetch",  # results of others, in their order
    "superglue_sift.progress",
    "superglue_sift.threads",
    "pipeline.processes.signals",
    "pipeline.tracking",
    "pipeline.train.live_line",
    "pipeline.provenance.workspace_lock",
    "superglue_sift.errors",
    "superglue_sift.files",
)


def code_digest(modules: Sequence[str], without: Sequence[str] = (), root: Path = ROOT) -> str:
    """16 hexadecimal digits that stand for what these modules and all they import of the project do.

    Neither comments, docstrings, layout and type of quotes nor the texts of `raise`, `assert`, `print` and
    `warnings.warn` count, nor Python's version. `without`: modules or rooms left out besides `CHANGES_NO_OUTPUT`.
    """
    return _digest(tuple(modules), tuple(without), root)


@functools.cache
def _digest(modules: Tuple[str, ...], without: Tuple[str, ...], root: Path) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(closure(modules, (*CHANGES_NO_OUTPUT, *without), root).items()):
        if name in PACKAGES:  # a list of public names
            continue
        digest.update(f"\n{name}\n".encode())
        for token in _meaning(ast.parse((root / path).read_text(encoding="utf-8"))):
            digest.update(f"{token} ".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def closure(modules: Sequence[str], without: Sequence[str] = (), root: Path = ROOT) -> Dict[str, str]:
    """Module name -> path below `root`, of these modules and all they import of the project, functions included.

    Neither the modules and rooms of `without` nor the public names of the two packages' `__init__.py` are followed.
    """
    found: Dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = module_file(name, root)
        if name in found or path is None or any(name == room or name.startswith(room + ".") for room in without):
            continue
        found[name] = path
        parts = name.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        if name not in PACKAGES:
            waiting += imports(root / path, name)
    return found


def module_file(module: str, root: Path = ROOT) -> str | None:
    """The file of a module; None for a name inside one, a package without an __init__.py, a module of others."""
    if module.split(".")[0] not in PACKAGES:
        return None
    base = module.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (root / path).is_file()), None)


def imports(path: Path, module: str) -> List[str]:
    """Modules (or names in them) that the file imports of the project; not those under `if TYPE_CHECKING`."""
    names: List[str] = []
    for node in _running(ast.parse(path.read_text(encoding="utf-8")), into_functions=module not in PACKAGES):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:  # imports are absolute: ruff holds it (TID252)
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def _running(node: ast.AST, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not into_functions:
            continue
        yield child
        yield from _running(child, into_functions)


# Fields of the syntax tree that say nothing about what runs, or that some versions of Python lack.
_SILENT_FIELDS = ("ctx", "kind", "type_comment", "type_ignores")


def _meaning(node: Any) -> Iterator[str]:
    """The syntax tree as words. Empty fields are left out: which of them there are depends on Python's version."""
    if isinstance(node, list):
        for item in node:
            if not _is_message(item):
                yield from _meaning(item)
        yield "."
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(_without_text(node)):
            if name not in _SILENT_FIELDS and value is not None and value != []:
                yield name
                yield from _meaning(value)
    else:
        yield f"{type(node).__name__}:{node!r}"


def _is_message(node: Any) -> bool:
    """A docstring, or a statement that only says something."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str)
    called = value.func if isinstance(value, ast.Call) else None
    return (isinstance(called, ast.Name) and called.id == "print") or (
        isinstance(called, ast.Attribute) and called.attr == "warn" and getattr(called.value, "id", "") == "warnings"
    )


def _without_text(node: ast.AST) -> ast.AST:
    """`raise X("why")` as `raise X`, `assert so, "why"` as `assert so`; Python 3.12's f-strings as all others'."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ast.Raise(exc=node.exc.func, cause=node.cause)
    if isinstance(node, ast.Assert):
        return ast.Assert(test=node.test, msg=None)
    if isinstance(node, ast.JoinedStr):
        return ast.JoinedStr(values=[part for part in node.values if getattr(part, "value", None) != ""])
    return node
