"""The rules for code: which package may import which, how large a file may be, and what has only
one place.
"""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from import_closure import imports

ROOT = Path(__file__).resolve().parents[1]
# Module -> its file, relative to the repository. A package is the module of its `__init__.py`.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", ""): path
    for package in ("benchmarks", "pipeline", "superglue_sift")
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), feature_version=(3, 9)) for name, path in FILES.items()}
# Module -> modules of the project that it imports, also inside functions.
GRAPH = {name: {*imports(path)} & {*FILES} - {name} for name, path in FILES.items()}

# What every package may import: errors, and types of parameters.
GROUND = {"errors", "params"}
# What the library may import: nothing of the project but itself, and of others these alone.
LIBRARY = {
    "PIL",
    "cv2",
    "numpy",
    "safetensors",
    "scipy",
    "superglue_sift",
    "tifffile",
    "torch",
    "tqdm",
}
LIBRARY |= set(getattr(sys, "stdlib_module_names", ()))
# ... and of its extras inside functions, so that it works without them, as test_library.py
# imports it.
EXTRAS = {"flask", "h5py", "hloc", "onnx", "onnxscript", "pillow_heif", "pycolmap", "werkzeug"}
# The network, and the modules of the library that it may import.
NETWORK = "network.superglue network.perceptron network.sinkhorn network.batch"
NETWORK += " network.ground_truth features.sift geometry.two_view matches torch_compat errors files"
# Packages and modules of `pipeline`, and what each may import besides itself, GROUND and the
# library. A name with a dot is that module alone. Files at the top that are not listed are
# commands, which may import every package.
MAY_IMPORT = {
    "errors": set(),
    "params": set(),
    "provenance": set(),
    "distributed": {"workers"},
    "workers": set(),
    "mlflow_store": {"evaluate.metrics", "provenance", "served_model"},
    "served_model": set(),
    "tracking": {"mlflow_store", "provenance"},
    # A stage may read what an earlier stage writes with that stage's own code: the list of images,
    # the store of keypoints, and the views that are also evaluated.
    "fetch": {"provenance", "workers"},
    "keypoints": {"fetch.dataset", "fetch.decoders", "provenance", "workers"},
    "train": {"keypoints.store", "distributed", "tracking", "provenance", "workers"},
    "evaluate": {"fetch.dataset", "keypoints.views", "tracking", "provenance", "workers"},
    "export": {"provenance", "tracking", "workers"},
}


def nodes(kind):
    """(module, node) of all nodes of a kind, in all files."""
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kind))


def may_import(package, other):
    """Whether a file of a package of `pipeline` may import the module `other` of `pipeline`."""
    allowed = {package} | GROUND | MAY_IMPORT[package]
    # `fetch.dataset` may be imported as a name of its package
    return any(
        f"{other}.".startswith(f"{name}.") or name.startswith(f"{other}.") for name in allowed
    )


def test_a_package_of_the_pipeline_imports_only_what_it_may():
    folders = {path.parent.name for path in (ROOT / "pipeline").glob("*/*.py")}
    assert folders <= {*MAY_IMPORT}, "say in MAY_IMPORT what the new package may import"
    wrong = []
    for name, others in GRAPH.items():
        top, *rest = name.split(".")
        if top == "pipeline" and rest and rest[0] in MAY_IMPORT:
            within = (other.split(".", 1)[1] for other in others if other.startswith("pipeline."))
            wrong += [
                f"{name} imports {other}" for other in within if not may_import(rest[0], other)
            ]
    assert wrong == []


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 does not list its own modules")
def test_the_library_stands_alone():
    used = [(name, node.module) for name, node in nodes(ast.ImportFrom)]
    used += [(name, alias.name) for name, node in nodes(ast.Import) for alias in node.names]
    ours = [(name, other) for name, other in used if name.startswith("superglue_sift")]
    wrong = [pair for pair in ours if pair[1].split(".")[0] not in LIBRARY | EXTRAS]
    assert wrong == []


def test_only_the_matcher_selects_keypoints_and_adds_guided_matches():
    """What the pipeline measures is what users get, so it has no path of its own."""
    steps = {"select_keypoints", "add_guided_matches", "match_pairs"}
    used = [(name, node.id) for name, node in nodes(ast.Name) if node.id in steps]
    used += [(name, node.attr) for name, node in nodes(ast.Attribute) if node.attr in steps]
    assert [name for name, _ in used if name.startswith("pipeline")] == []


def test_the_network_stands_below_the_rest_of_the_library():
    below = {f"superglue_sift.{name}" for name in NETWORK.split()}
    wrong = {name: GRAPH[name] - below for name in below}
    for name in GRAPH:
        if name.startswith("superglue_sift.interop."):
            wrong[name] = {other for other in GRAPH[name] if ".apps." in other}
    assert {name: others for name, others in wrong.items() if others} == {}


def test_imports_run_in_no_circle():
    packages = {name for name, path in FILES.items() if path.stem == "__init__"}
    try:
        TopologicalSorter({name: GRAPH[name] - packages for name in GRAPH}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def depth(node):
    """How deep blocks are nested; `elif` counts as its `if`, an inner function from 0."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_block = isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try))
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child) + (is_block and not is_elif))
    return deepest


def test_files_and_functions_stay_small_and_have_a_subject():
    """Ruff counts statements and branches, but no lines of a file or of a function."""
    wrong = [name for name in FILES if re.search(r"\b(utils?|helpers|common|misc)$", name)]
    for name, path in FILES.items():
        lines = len(path.read_text().splitlines())
        wrong += [f"{name} has {lines} lines"] if lines > 700 else []
    for name, node in nodes(ast.FunctionDef):
        size = node.end_lineno - node.lineno + 1
        wrong += [f"{name}:{node.name} has {size} lines"] if size > 70 else []
        wrong += [f"{name}:{node.name} nests {depth(node)} blocks"] if depth(node) > 3 else []
    assert wrong == []


def test_square_roots_have_the_same_bits_on_every_processor():
    """`Tensor.sqrt` is MKL's, whose last bits differ between vendors."""
    found = []
    for name, node in nodes(ast.Attribute):
        if node.attr in ("sqrt", "sqrt_") and ast.unparse(node.value) not in ("np", "math"):
            found.append(name)
    assert found == ["superglue_sift.torch_compat"]


def test_no_file_that_is_loaded_can_run_code():
    """Nothing is unpickled, and no text of a file is evaluated."""
    forbidden = {"torch.load", "torch.save", "eval", "exec", "pickle.load", "pickle.loads"}
    wrong = []
    for name, node in nodes(ast.Call):
        pickles = [ast.unparse(word.value) for word in node.keywords if word.arg == "allow_pickle"]
        if ast.unparse(node.func) in forbidden or {*pickles} - {"False"}:
            wrong.append(f"{name}:{node.lineno} {ast.unparse(node.func)}")
    assert wrong == []


def test_nothing_happens_at_import():
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    # Only before OpenCV is loaded can it be told which processor code to leave out.
    allowed = r"if .*(__name__|TYPE_CHECKING)|environment.prepare_opencv\(\)$|['\"]"
    for name, tree in TREES.items():
        for node in tree.body:
            is_quiet = isinstance(node, quiet) or re.match(allowed, ast.unparse(node))
            assert is_quiet, f"{name}:{node.lineno} does work at import"


def test_no_tracked_file_is_large():
    """The shipped weights alone may be: 8 MB at most, so that a clone stays quick."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        pytest.skip("needs the git repository")
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if (ROOT / name).is_file()]
    large = {path.name: path.stat().st_size for path in paths if path.stat().st_size > 1 << 20}
    assert [*large] == ["superglue-sift.safetensors"] and max(large.values()) < 8e6
