"""Which files of the project a stage imports, and dvc.yaml's dependencies brought up to date with that.

`python tests/import_closure.py` names what differs (exit 1); `--write` rewrites the lists in dvc.yaml.

Imports are read from the source, also those inside functions. Left out: imports under `if TYPE_CHECKING`,
which never run, and what `pipeline/__init__.py` offers lazily to users of the package, which no stage asks for.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Set

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pipeline"


def modules_in(cmd: str) -> List[str]:
    """The modules of the project a command runs: `python -m pipeline.launch pipeline.train` runs two."""
    return re.findall(rf"(?<![\w./-]){PACKAGE}\.[a-z_.]+", cmd)


def closure(*modules: str, root: Path = ROOT) -> List[str]:
    """Sorted paths, relative to the repository, of these modules and all they import of the project."""
    seen: Set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _file(module, root)
        if path is None or path in seen:
            continue
        seen.add(path)
        waiting += _parents(module)
        waiting += imports(root / path, module)
    return sorted(seen)


def imports(path: Path, module: str) -> List[str]:
    """Modules (or names in them) that the file at `path` imports of the project."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: List[str] = []
    for node in _running(tree, into_functions=module != PACKAGE):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(node, path, module)
            names += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] == PACKAGE]


def expected(cmd: str, present: List[str], root: Path = ROOT) -> List[str]:
    """The deps of a stage: its data as listed, then the closure of what its command runs."""
    data = [name for name in present if not name.startswith(f"{PACKAGE}/")]
    return data + closure(*modules_in(cmd), root=root)


def _running(node: ast.AST, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not into_functions:
            continue
        yield child
        yield from _running(child, into_functions)


def _absolute(node: ast.ImportFrom, path: Path, module: str) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - (path.name == "__init__.py")
    return ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))


def _parents(module: str) -> List[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _file(module: str, root: Path) -> str | None:
    """The file of a module; None for a name inside one, or a package without an __init__.py."""
    base = Path(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if (root / candidate).is_file():
            return candidate.as_posix()
    return None


def differences(tree: Dict, root: Path = ROOT) -> List[str]:
    """One line for each dependency that is missing from a stage, or too many."""
    lines = []
    for name, stage in tree["stages"].items():
        present = list(stage["deps"])
        wanted = expected(stage["cmd"], present, root)
        lines += [f"{name}: deps lack {path}" for path in wanted if path not in present]
        lines += [
            f"{name}: deps hold {path}, which it does not import" for path in present if path not in wanted
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite the lists in dvc.yaml")
    write = parser.parse_args().write
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    path = ROOT / "dvc.yaml"
    tree = yaml.load(path.read_text(encoding="utf-8"))
    lines = differences(tree)
    print("\n".join(lines) or "dvc.yaml: the dependencies equal what the stages import")
    if write and lines:
        for stage in tree["stages"].values():
            # in place: a list's items are replaced, the comments around it stay
            wanted = expected(stage["cmd"], list(stage["deps"]))
            stage["deps"][:] = wanted
        with path.open("w", encoding="utf-8") as stream:
            yaml.dump(tree, stream)
        return 0
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
