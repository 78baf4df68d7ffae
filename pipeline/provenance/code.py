"""Digest of the code that can change an output, for checkpoints, shards and dvc.yaml.

It covers a module and its imports, which are read from the source. `CHANGES_NO_OUTPUT` lists exceptions: code that
starts, tracks or displays a stage, or checks a request.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "superglue_sift")

# Modules and packages that change no byte of an output, given the parameters, which are compared by value.
CHANGES_NO_OUTPUT = (
    "pipeline.errors",
    "pipeline.files",  # a file is written whole or not at all, with the bytes it is given
    "pipeline.launch",
    "pipeline.parameters",
    "pipeline.provenance.code",
    "pipeline.processes.machine",
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
    """Digest (16 hexadecimal digits) of these modules and all that they import of the project.

    Comments, docstrings, layout, quotes, the texts of `raise`, `assert`, `print` and `warnings.warn`, and Python's
    version do not count. without: modules or packages to leave out in addition to `CHANGES_NO_OUTPUT`.
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
    """Module name -> path below `root`, for these modules and all that they import of the project, also in functions.

    The modules and packages of `without` and the `__init__.py` of the two packages are not followed.
    """
    found: Dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = module_file(name, root)
        if name in found or path is None or any(name == other or name.startswith(other + ".") for other in without):
            continue
        found[name] = path
        parts = name.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        if name not in PACKAGES:
            waiting += imports(root / path, name)
    return found


def module_file(module: str, root: Path = ROOT) -> str | None:
    """The file of a module; None for a name inside a module, a package without __init__.py, other projects' modules."""
    if module.split(".")[0] not in PACKAGES:
        return None
    base = module.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (root / path).is_file()), None)


def imports(path: Path, module: str) -> List[str]:
    """Modules (or names in them) of the project that the file imports, except under `if TYPE_CHECKING`."""
    names: List[str] = []
    for node in _running(ast.parse(path.read_text(encoding="utf-8")), into_functions=module not in PACKAGES):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:  # imports are absolute (ruff's TID252)
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


# Fields of the syntax tree that do not affect execution, or that some versions of Python lack.
_SILENT_FIELDS = ("ctx", "kind", "type_comment", "type_ignores")


def _meaning(node: Any) -> Iterator[str]:
    """The syntax tree as words, without empty fields, which depend on Python's version."""
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
    """Whether the node is a docstring or a statement that only prints or warns."""
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
