"""The house rules: who may import whom, how large a room may be, and what lives in one place alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

from pipeline.runtime.code import imports

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("pipeline", "superglue_sift")
    for path in (ROOT / package).rglob("*.py")
)
TREES = {name: ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 9)) for name in FILES}

STAGES = {"fetch", "keypoints", "train", "evaluate", "export"}
# Whatever a room does, it may raise the project's errors, write a file and ask for a difference between the stacks.
GROUND = {"errors", "files", "stack"}
# What the library may import: nothing of the project but itself, and of others these alone.
LIBRARY = {"cv2", "numpy", "safetensors", "superglue_sift", "torch", *getattr(sys, "stdlib_module_names", ())}
# Rooms of `pipeline`, and what each may import besides itself and the library. A name with a dot is that module alone.
# Files that are not listed are stages and tools, which may import every room.
ROOMS: Dict[str, Set[str]] = {
    "errors": set(),
    "files": set(),
    "stack": set(),
    "schema": set(),
    "params": {"schema"},
    "images": set(),
    "features": set(),
    "runtime": set(),
    "views": set(),
    "pairs": {"features"},
    "report": {"evaluation.metrics"},
    "extraction": {"images", "views", "features", "runtime", "params", "schema"},
    "training": {"pairs", "features", "runtime", "params", "schema"},
    "evaluation": {
        "images", "views", "features", "pairs", "runtime", "report", "params", "schema",
    },
}  # fmt: skip

# What is larger than the rule, by name, with the reason it is better so.
LONG_FILES: Dict[str, str] = {}
LONG_FUNCTIONS: Dict[str, str] = {}
DEEP_FUNCTIONS: Dict[str, str] = {}
CROSSING_IMPORTS: Dict[Tuple[str, str], str] = {}
WORK_AT_IMPORT: Dict[str, str] = {}

# A thing and the one file it lives in.
HOMES = {
    "SIFT_create": "superglue_sift/sift.py",
    "torch.distributed": "pipeline/runtime/distributed.py",
    "DistributedDataParallel": "pipeline/runtime/distributed.py",
    "DataParallel": "pipeline/training/objective.py",
    "mlflow": "pipeline/runtime/mlflow_store.py",
    "torchrun": "pipeline/launch.py",
}
# NVIDIA's DALI has two: it decodes images for the keypoint stage and carries batches for training.
DALI_HOMES = ("pipeline/images/dali.py", "pipeline/pairs/dali.py")


def module_of(name: str) -> str:
    """`pipeline/views/render.py` -> `pipeline.views.render`."""
    return name[: -len(".py")].replace("/", ".").replace(".__init__", "")


def room_of(module: str) -> str:
    """`pipeline.views.render` -> `views`, `pipeline.train` -> `train`, `pipeline` -> ``."""
    return [*module.split("."), ""][1]


def crossings(name: str) -> List[str]:
    """Modules of other rooms that the file imports."""
    module = module_of(name)
    found = []
    for other in imports(ROOT / name, module):
        is_file = any((ROOT / (other.replace(".", "/") + end)).exists() for end in (".py", "/__init__.py"))
        if is_file and other.startswith("pipeline.") and room_of(other) != room_of(module):
            found.append(other)
    return found


def allowed(room: str, other: str) -> bool:
    """May a file of `room` import the module `other`?"""
    target = other.split(".", 1)[1]
    if room_of(other) in GROUND:
        return True
    if room not in ROOMS:  # a stage or a tool
        return room_of(other) in ROOMS or (room not in STAGES and room_of(other) not in STAGES)
    return any(
        target == name or target.startswith(name + ".") or name.startswith(target + ".")
        for name in ROOMS[room]
    )


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 does not list its own modules")
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("superglue_sift/")])
def test_the_library_stands_alone(name: str) -> None:
    words = [word for word, _ in called(TREES[name], lookups=False)]
    assert {word.split(".")[0] for word in words} - LIBRARY == set(), name


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("pipeline/")])
def test_a_room_imports_only_what_it_may(name: str) -> None:
    room = room_of(module_of(name))
    wrong = [
        other
        for other in crossings(name)
        if not allowed(room, other) and (name, other) not in CROSSING_IMPORTS
    ]
    assert wrong == [], f"{name} may not import {', '.join(wrong)}"


def test_every_room_is_known() -> None:
    folders = {path.name for path in (ROOT / "pipeline").iterdir() if (path / "__init__.py").exists()}
    assert folders - set(ROOMS) == set(), "say in ROOMS what the new room may import"
    missing = {path.name for path in (ROOT / "pipeline").iterdir() if any(path.glob("*.py"))} - folders
    assert missing == set(), "a room without an __init__.py"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[Tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from functions(node, f"{prefix}{node.name}.")


def depth(node: ast.AST) -> int:
    """How many blocks stand inside each other; `elif` counts as its `if`, a function inside starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_block = isinstance(
            child, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith)
        )
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (is_block and not is_elif))
    return deepest


@pytest.mark.parametrize("name", FILES)
def test_rooms_stay_small(name: str) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= 400 or name in LONG_FILES, f"{name} has {lines} lines"
    for function, node in functions(TREES[name]):
        size = node.end_lineno - node.lineno + 1
        key = f"{name}:{function}"
        assert size <= 50 or key in LONG_FUNCTIONS, f"{key} has {size} lines"
        assert depth(node) <= 3 or key in DEEP_FUNCTIONS, f"{key} nests {depth(node)} blocks"


def test_exceptions_are_needed_and_explained() -> None:
    keys = {f"{name}:{function}" for name in FILES for function, _ in functions(TREES[name])}
    assert set(LONG_FILES) <= set(FILES)
    assert {*LONG_FUNCTIONS, *DEEP_FUNCTIONS} <= keys
    assert {name for name, _ in CROSSING_IMPORTS} | set(WORK_AT_IMPORT) <= set(FILES)
    reasons = [LONG_FILES, LONG_FUNCTIONS, DEEP_FUNCTIONS, CROSSING_IMPORTS, WORK_AT_IMPORT]
    assert all(len(reason) > 20 for each in reasons for reason in each.values())


@pytest.mark.parametrize("name", FILES)
def test_names_say_what_a_file_is_for(name: str) -> None:
    assert Path(name).stem not in ("utils", "util", "helpers", "common", "misc")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert ast.get_docstring(TREES[name]), f"{name} does not say what it is for"
    plain = not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(TREES[name]))
    assert plain or "from __future__ import annotations" in text, (
        f"{name}: annotations must not run on Python 3.9"
    )


@pytest.mark.parametrize("name", FILES)
def test_nothing_happens_at_import(name: str) -> None:
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in TREES[name].body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guarded = isinstance(node, ast.If) and re.search("__name__|TYPE_CHECKING", ast.unparse(node.test))
        runs_nothing = isinstance(node, quiet) or docstring or guarded
        assert runs_nothing or name in WORK_AT_IMPORT, f"{name}:{node.lineno} does work at import"


def called(tree: ast.AST, lookups: bool = True) -> Iterator[Tuple[str, ast.AST]]:
    """Dotted names that are imported or, with `lookups`, looked up, as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        elif lookups and isinstance(node, ast.Attribute):
            yield ast.unparse(node), node


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_unpickled(name: str) -> None:
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    for word, node in called(TREES[name]):
        where = f"{name}:{node.lineno}"
        assert word.split(".")[0] not in modules, f"{where} uses {word}"
        assert word not in ("torch.load", "torch.save", "numpy.load", "torch.hub.load"), (
            f"{where} uses {word}"
        )
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False", f"{name}:{node.value.lineno} allows pickle"


@pytest.mark.parametrize("name", FILES)
def test_each_thing_has_one_home(name: str) -> None:
    for word, node in called(TREES[name]):
        where = f"{name}:{node.lineno} uses {word}"
        first, last = word.split(".")[0], word.split(".")[-1]
        assert last not in ("SIFT_create", "SIFT") or name == HOMES["SIFT_create"], where
        assert first != "mlflow" or name == HOMES["mlflow"], where
        assert first != "nvidia" or name in DALI_HOMES, where
        assert not word.startswith(("torch.distributed", "torch.nn.parallel")) or name in (
            HOMES["torch.distributed"],
            HOMES["torchrun"],
        ), where
        parallel = last in ("DataParallel", "DistributedDataParallel")
        assert not parallel or name == HOMES[last], where


@pytest.mark.parametrize("name", FILES)
def test_torchrun_is_started_in_one_place(name: str) -> None:
    starts = [
        node.lineno
        for node in ast.walk(TREES[name])
        if (
            isinstance(node, ast.Constant)
            and node.value in ("torch.distributed.run", "torch.distributed.launch")
        )
        or (isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "'torchrun'")
    ]
    assert not starts or name == HOMES["torchrun"], f"{name}:{starts[0]} starts torchrun"


@pytest.mark.parametrize("name", FILES)
def test_the_code_runs_on_python_39_too(name: str) -> None:
    """Grammar is checked when the trees are made; these are the additions of the standard library."""
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func).split(".")[-1]
        options = {keyword.arg for keyword in node.keywords}
        assert function != "zip" or "strict" not in options, (
            f"{name}:{node.lineno} zip(strict=) is Python 3.10"
        )
        newer = {"slots", "kw_only"} & options if function == "dataclass" else set()
        assert not newer, f"{name}:{node.lineno} dataclass({newer}) is Python 3.10"


def tracked() -> List[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if done.returncode:
        pytest.skip("needs the git repository")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    registries = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "npm" + "js.org",
        "npm" + "js.com",
        "ana" + "conda.org",
    ]
    absolute = r"(?<![\w.])/wor" + r"k(?!\w)|\.py" + r"env/|/opt/(wheels|py" + "pi)"
    pattern = re.compile("|".join([absolute, *map(re.escape, registries)]))
    wrong = []
    for path in tracked():
        if path.suffix in (".png", ".jpg", ".safetensors") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{path.relative_to(ROOT)}: {found.group()}" for found in pattern.finditer(text)]
    assert wrong == []


def test_no_tracked_file_is_large() -> None:
    large = {
        path.relative_to(ROOT).as_posix(): path.stat().st_size
        for path in tracked()
        if path.is_file() and path.stat().st_size > 1 << 20
    }
    assert large == {}
