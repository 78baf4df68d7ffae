"""The house rules: who may import whom, how large a room may be, and what lives in one place alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

from pipeline.provenance.code import imports

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("benchmarks", "pipeline", "superglue_sift")
    for path in (ROOT / package).rglob("*.py")
)
TREES = {name: ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 9)) for name in FILES}

STAGES = {"fetch", "keypoints", "train", "evaluate", "export"}
# Whatever a room does, it may raise the project's errors, write a file, name the type of its parameters and ask for a
# difference between the stacks.
GROUND = {"errors", "files", "schema", "stack"}
# What the library may import: nothing of the project but itself, and of others these alone.
LIBRARY = {"cv2", "numpy", "safetensors", "scipy", "superglue_sift", "torch", *getattr(sys, "stdlib_module_names", ())}
# ... and of its extras inside functions, so that it works without them (tests/test_library.py imports it so).
EXTRAS = {"PIL", "flask", "h5py", "hloc", "onnx", "onnxruntime", "onnxscript", "pycolmap", "werkzeug"}
# Rooms of `pipeline`, and what each may import besides itself and the library. A name with a dot is that module alone.
# Files that are not listed are stages and tools, which may import every room.
ROOMS: Dict[str, Set[str]] = {
    "errors": set(),
    "files": set(),
    "stack": set(),
    "schema": set(),
    "params": set(),
    "images": set(),
    "features": set(),
    "runtime": set(),
    "tracking": {"runtime", "evaluation.champion"},
    "views": set(),
    "pairs": {"features", "runtime.machine", "runtime.signals"},
    "report": {"runtime.repro"},
    "extraction": {"images", "views", "features", "runtime", "params"},
    "training": {"pairs", "features", "runtime", "tracking", "params"},
    "evaluation": {"images", "views", "features", "pairs", "runtime", "report", "params"},
}  # fmt: skip

# A thing and the one file it lives in.
HOMES = {
    "SIFT": "superglue_sift/sift.py",
    "SIFT_create": "superglue_sift/sift.py",
    "torch.distributed": "pipeline/processes/distributed.py",
    "DistributedDataParallel": "pipeline/processes/distributed.py",
    "DataParallel": "pipeline/train/objective.py",
    "torchrun": "pipeline/launch.py",
}
# The store, the model that is served, and MLflow's monitors of the machine.
MLFLOW_HOMES = tuple(f"pipeline/tracking/{name}.py" for name in ("mlflow_store", "matcher_model", "system_metrics"))
# NVIDIA's DALI has three: it decodes images for the keypoint stage, carries batches for training, and is compared.
DALI_HOMES = ("pipeline/image_sets/dali_decoder.py", "pipeline/train/pairs/dali_loader.py", "benchmarks/dali_views.py")


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
    return any(target == name or target.startswith(name + ".") or name.startswith(target + ".") for name in ROOMS[room])


def imported(name: str) -> Set[str]:
    """Files of the project that the file imports, also inside functions."""
    found = set()
    for other in imports(ROOT / name, module_of(name)):
        path = other.replace(".", "/")
        found |= {path + end for end in (".py", "/__init__.py") if path + end in TREES}
    return found - {name}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 does not list its own modules")
def test_the_library_stands_alone() -> None:
    wrong = [
        f"{name}:{node.lineno} imports {word}"
        for name in FILES
        if name.startswith("superglue_sift/")
        for word, node in called(TREES[name], lookups=False)
        if word.split(".")[0] not in LIBRARY | EXTRAS
    ]
    assert wrong == []


def test_a_room_imports_only_what_it_may() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if name.startswith("pipeline/")
        for other in crossings(name)
        if not allowed(room_of(module_of(name)), other)
    ]
    assert wrong == []


def test_no_package_imports_the_bench() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name in FILES
        if not name.startswith("benchmarks/")
        for word, node in called(TREES[name], lookups=False)
        if word.split(".")[0] == "benchmarks"
    ]
    assert wrong == []


def test_imports_run_in_no_circle() -> None:
    graph = {name: imported(name) for name in FILES if not name.endswith("__init__.py")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


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
    """How many blocks stand inside each other; `elif` counts as its `if`, a function inside starts from scratch."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_block = isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith))
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (is_block and not is_elif))
    return deepest


def test_rooms_stay_small() -> None:
    wrong = []
    for name in FILES:
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        wrong += [f"{name} has {lines} lines"] if lines > 400 else []
        for function, node in functions(TREES[name]):
            size = node.end_lineno - node.lineno + 1
            wrong += [f"{name}:{function} has {size} lines"] if size > 50 else []
            wrong += [f"{name}:{function} nests {depth(node)} blocks"] if depth(node) > 3 else []
    assert wrong == []


def test_names_say_what_a_file_is_for() -> None:
    for name in FILES:
        assert Path(name).stem not in ("utils", "util", "helpers", "common", "misc"), name
        assert ast.get_docstring(TREES[name]), f"{name} does not say what it is for"


def test_nothing_happens_at_import() -> None:
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for name in FILES:
        for node in TREES[name].body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            guarded = isinstance(node, ast.If) and re.search("__name__|TYPE_CHECKING", ast.unparse(node.test))
            runs_nothing = isinstance(node, quiet) or docstring or guarded
            assert runs_nothing, f"{name}:{node.lineno} does work at import"


def called(tree: ast.AST, lookups: bool = True) -> Iterator[Tuple[str, ast.AST]]:
    """Dotted names that are imported or, with `lookups`, looked up, as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        elif lookups and isinstance(node, ast.Attribute):
            yield ast.unparse(node), node


def test_nothing_is_unpickled() -> None:
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    functions = ("torch.load", "torch.save", "numpy.load", "torch.hub.load")
    for name in FILES:
        for word, node in called(TREES[name]):
            fine = word.split(".")[0] not in modules and word not in functions
            assert fine, f"{name}:{node.lineno} uses {word}"
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", f"{name}:{node.value.lineno} allows pickle"


def homes_of(word: str) -> Tuple[str, ...]:
    """The files that may use a thing; () where all may."""
    first, last = word.split(".")[0], word.split(".")[-1]
    if last in HOMES:
        return (HOMES[last],)
    if word.startswith(("torch.distributed", "torch.nn.parallel")):
        return (HOMES["torch.distributed"], HOMES["torchrun"])
    return {"mlflow": MLFLOW_HOMES, "nvidia": DALI_HOMES}.get(first, ())


def test_each_thing_has_one_home() -> None:
    """The bench, which measures them, may use all."""
    wrong = [
        f"{name}:{node.lineno} uses {word}"
        for name in FILES
        if not name.startswith("benchmarks/")
        for word, node in called(TREES[name])
        if homes_of(word) and name not in homes_of(word)
    ]
    assert wrong == []


def test_torchrun_is_started_in_one_place() -> None:
    starters = {
        name
        for name in FILES
        for node in ast.walk(TREES[name])
        if (isinstance(node, ast.Constant) and node.value in ("torch.distributed.run", "torch.distributed.launch"))
        or (isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "'torchrun'")
    }
    assert starters <= {HOMES["torchrun"]}


def test_the_code_runs_on_python_39_too() -> None:
    """Grammar is checked when the trees are made; these are annotations, and additions of the standard library."""
    for name in FILES:
        nodes = list(ast.walk(TREES[name]))
        defining = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in nodes)
        future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in nodes)
        assert future or not defining, f"{name}: its annotations would be evaluated"
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).split(".")[-1]
            options = {keyword.arg for keyword in node.keywords}
            newer = {"zip": {"strict"}, "dataclass": {"slots", "kw_only"}}.get(function, set()) & options
            assert not newer, f"{name}:{node.lineno} {function}({newer}) is Python 3.10"


def tracked() -> List[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode:
        pytest.skip("needs the git repository")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_tracked_file_is_large() -> None:
    """The shipped weights alone may be: 8 MB at most, so that a clone stays quick."""
    weights = ROOT / "pretrained" / "superglue-sift.safetensors"
    assert weights.stat().st_size < 8e6
    large = {
        path.relative_to(ROOT).as_posix(): path.stat().st_size
        for path in tracked()
        if path.is_file() and path != weights and path.stat().st_size > 1 << 20
    }
    assert large == {}
