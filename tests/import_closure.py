"""dvc.yaml against the imports of its stages: `python tests/import_closure.py` names what differs (exit 1).

A stage depends on packages (folders) or single files that together hold every module its command imports, but for
`CHANGES_NO_OUTPUT` of `pipeline.provenance.code`.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Dict, List

from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where it is started by hand

from pipeline.provenance.code import CHANGES_NO_OUTPUT, PACKAGES, closure

ROOT = Path(__file__).resolve().parents[1]


def modules_in(command: str) -> List[str]:
    """The modules of the project that a command runs: `python -m pipeline.launch pipeline.train` runs two."""
    found = re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})\.[a-z_.]+", command)
    return [f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name for name in found]


def code_of(cmd: str, root: Path = ROOT) -> List[str]:
    """Files whose change can change the output of a command: what it imports, with more in it than a docstring."""
    files = closure(modules_in(cmd), CHANGES_NO_OUTPUT, root)
    return sorted(path for name, path in files.items() if name not in PACKAGES and _says_something(root / path))


def _says_something(path: Path) -> bool:
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


def covers(dependency: str, path: str) -> bool:
    """Whether the file, or its package, is this dependency."""
    return path == dependency or path.startswith(dependency + "/")


def differences(tree: Dict, root: Path = ROOT) -> List[str]:
    """One line for each file that no dependency of its stage contains, and for each useless dependency."""
    lines = []
    for name, stage in tree["stages"].items():
        held = [path for path in stage["deps"] if path.split("/")[0] in PACKAGES]
        files = code_of(stage["cmd"], root)
        lines += [
            f"{name}: deps lack {path}" for path in files if not any(covers(dependency, path) for dependency in held)
        ]
        lines += [
            f"{name}: deps hold {dependency}, of which nothing can change the output"
            for dependency in held
            if not any(covers(dependency, path) for path in files)
        ]
    return lines


def main() -> int:
    tree = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    lines = differences(tree)
    print("\n".join(lines) or "dvc.yaml: the dependencies hold all that the stages import")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
