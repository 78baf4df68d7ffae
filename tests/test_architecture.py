"""The rules for code: which folder may import which, and what has only one place."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from reading import read_yaml

ROOT = Path(__file__).resolve().parents[1]
STAGES = read_yaml(ROOT / "dvc.yaml")["stages"]
# Module -> its file. A package is the module of its `__init__.py`.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", ""): path
    for package in ("benchmarks", "pipeline", "superglue_sift")
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), feature_version=(3, 9)) for name, path in FILES.items()}
# Folders and modules from the lowest floor up. A module imports from its own floor and from those
# below it. It stands on the last floor that names it or one of its folders.
FLOORS = [
    "superglue_sift.errors superglue_sift.files superglue_sift.environment superglue_sift.progress"
    " superglue_sift.torch_compat superglue_sift.matches",
    "superglue_sift.geometry",
    "superglue_sift.features",
    "superglue_sift.network",
    "superglue_sift.guided superglue_sift.scene",
    "superglue_sift.matcher superglue_sift.match_result superglue_sift.drawing",
    "superglue_sift",  # programs: apps, interop, onnx
    "pipeline.errors pipeline.params",
    "pipeline.provenance pipeline.workers pipeline.distributed",
    "pipeline.served_model pipeline.tracking",
    "pipeline.fetch",
    "pipeline.keypoints",
    "pipeline.train",
    "pipeline.evaluate",
    "pipeline",  # export, and commands that no stage imports
    "benchmarks",
]
# What the library may import of other projects, and inside functions of its extras
LIBRARY = {"PIL", "cv2", "numpy", "safetensors", "scipy", "superglue_sift", "tifffile", "torch"}
LIBRARY |= {"tqdm"}
LIBRARY |= set(getattr(sys, "stdlib_module_names", ()))
EXTRAS = {"flask", "h5py", "hloc", "onnx", "onnxscript", "pillow_heif", "pycolmap", "werkzeug"}


def nodes(kind):
    """(module, node) of all nodes of a kind, in all files."""
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kind))


def list_imports(tree):
    """Names of modules, or of what is in them, that a file imports, also inside functions."""
    names = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):  # imports are absolute (ruff's TID252)
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            waiting += ast.iter_child_nodes(node)
    return names


# Module -> modules of the project that it imports. The `__init__.py` of the library and of the
# pipeline import others only when they are asked for them.
GRAPH = {
    name: {*list_imports(tree)} & {*FILES} - {name, "pipeline", "superglue_sift"}
    for name, tree in TREES.items()
}


def is_in(module, folder):
    """Return whether a module is this one, or lies in this folder."""
    return f"{module}.".startswith(f"{folder}.")


def find_floor(module):
    """The number of the floor of a module: that of the longest name that holds it."""
    floors = [
        (len(name), number)
        for number, floor in enumerate(FLOORS)
        for name in floor.split()
        if is_in(module, name)
    ]
    return max(floors)[1]


def test_folders_import_downwards_only():
    upwards = [
        (name, imported)
        for name, modules in GRAPH.items()
        for imported in modules
        if find_floor(imported) > find_floor(name)
    ]
    assert upwards == []


def test_imports_run_in_no_circle():
    packages = {name for name, path in FILES.items() if path.stem == "__init__"}
    try:
        TopologicalSorter({name: GRAPH[name] - packages for name in GRAPH}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 does not list its own modules")
def test_the_library_stands_alone():
    imports = [(name, node.module) for name, node in nodes(ast.ImportFrom)]
    imports += [(name, alias.name) for name, node in nodes(ast.Import) for alias in node.names]
    wrong = [
        (name, imported)
        for name, imported in imports
        if is_in(name, "superglue_sift") and imported.split(".")[0] not in LIBRARY | EXTRAS
    ]
    assert wrong == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_folders_that_it_imports(stage):
    """Files at the top of a package are followed no further: they change no result."""
    start = f"pipeline.{stage}"
    waiting = [name for name in FILES if is_in(name, start)]
    imported = set()
    while waiting:
        name = waiting.pop()
        if name not in imported and (name.count(".") > 1 or name == start):
            imported.add(name)
            waiting += GRAPH[name]
    deps = {ROOT / name for name in STAGES[stage]["deps"]}
    files = {FILES[name] for name in imported}
    assert [file for file in files if not deps & {file, *file.parents}] == []


def test_only_the_matcher_selects_keypoints_and_adds_guided_matches():
    """What the pipeline measures is what users get, so it has no path of its own."""
    steps = {"select_keypoints", "add_guided_matches", "match_pairs"}
    used = [(name, node.id) for name, node in nodes(ast.Name) if node.id in steps]
    used += [(name, node.attr) for name, node in nodes(ast.Attribute) if node.attr in steps]
    assert [name for name, _ in used if name.startswith("pipeline")] == []


def test_square_roots_have_the_same_bits_on_every_processor():
    """`Tensor.sqrt` is MKL's, whose last bits differ between vendors."""
    modules = []
    for name, node in nodes(ast.Attribute):
        if node.attr in ("sqrt", "sqrt_") and ast.unparse(node.value) not in ("np", "math"):
            modules.append(name)
    assert modules == ["superglue_sift.torch_compat"]


def test_no_file_that_is_loaded_can_run_code():
    """Nothing is unpickled, and no text of a file is evaluated."""
    forbidden = {"torch.load", "torch.save", "eval", "exec", "pickle.load", "pickle.loads"}
    wrong = []
    for name, node in nodes(ast.Call):
        pickles = [ast.unparse(word.value) for word in node.keywords if word.arg == "allow_pickle"]
        if ast.unparse(node.func) in forbidden or {*pickles} - {"False"}:
            wrong.append(f"{name}:{node.lineno} {ast.unparse(node.func)}")
    assert wrong == []
