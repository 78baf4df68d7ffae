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
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("benchmarks", "pipeline", "superglue_sift")
    for path in (ROOT / package).rglob("*.py")
)
TREES = {name: ast.parse((ROOT / name).read_text(), feature_version=(3, 9)) for name in FILES}

STAGES = {"fetch", "keypoints", "train", "evaluate", "export"}
# What every package may import: errors, and types of parameters.
GROUND = {"errors", "params"}
# What the library may import: nothing of the project but itself, and of others these alone.
LIBRARY = {"PIL", "cv2", "numpy", "safetensors", "scipy", "superglue_sift", "torch", "tqdm"}
LIBRARY |= set(getattr(sys, "stdlib_module_names", ()))
# ... and of its extras inside functions, so that it works without them, as test_library.py
# imports it.
EXTRAS = {"flask", "h5py", "hloc", "onnx", "onnxscript", "pillow_heif", "pycolmap", "werkzeug"}
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
    "fetch": {"provenance"},
    "keypoints": {"fetch.dataset", "fetch.decoders", "provenance", "workers"},
    "train": {"keypoints.store", "distributed", "tracking", "provenance", "workers"},
    "evaluate": {"fetch.dataset", "keypoints.views", "tracking"} | {"provenance", "workers"},
}


def module_of(name):
    """`pipeline/keypoints/views.py` -> `pipeline.keypoints.views`."""
    return name[: -len(".py")].replace("/", ".").replace(".__init__", "")


def package_of(module):
    """`pipeline.keypoints.views` -> `keypoints`, `pipeline.train` -> `train`, `pipeline` -> ``."""
    return [*module.split("."), ""][1]


def crossings(name):
    """Modules of other packages of `pipeline` that the file imports."""
    own = package_of(module_of(name))
    others = map(module_of, imported(name))
    return [each for each in others if each.startswith("pipeline.") and package_of(each) != own]


def allowed(package, other):
    """Whether a file of `package` may import the module `other`."""
    target = other.split(".", 1)[1]
    if any(target == name or name.startswith(target + ".") for name in GROUND):
        return True
    if package not in MAY_IMPORT:  # a command; of the stages, `export` alone is one
        return package not in STAGES or package_of(other) not in STAGES
    allowed = MAY_IMPORT[package]
    return any(
        target == name or target.startswith(name + ".") or name.startswith(target + ".")
        for name in allowed
    )


def imported(name):
    """Files of the project that the file imports, also inside functions."""
    found = set()
    for other in imports(ROOT / name, module_of(name)):
        path = other.replace(".", "/")
        found |= {path + end for end in (".py", "/__init__.py") if path + end in TREES}
    return found - {name}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 does not list its own modules")
def test_the_library_stands_alone():
    wrong = [
        f"{name}:{node.lineno} imports {word}"
        for name in FILES
        if name.startswith("superglue_sift/")
        for word, node in called(TREES[name])
        if word.split(".")[0] not in LIBRARY | EXTRAS
    ]
    assert wrong == []


def test_a_package_imports_only_what_it_may():
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if name.startswith("pipeline/")
        for other in crossings(name)
        if not allowed(package_of(module_of(name)), other)
    ]
    assert wrong == []


def test_the_network_stands_below_the_rest_of_the_library():
    network = ("superglue", "sinkhorn", "batch", "ground_truth")
    below = {f"superglue_sift/network/{name}.py" for name in network}
    ground = ("features/sift", "geometry/two_view", "matches", "torch_compat", "errors", "files")
    below |= {f"superglue_sift/{name}.py" for name in ground}
    ours = [name for name in FILES if name.startswith("superglue_sift/")]
    wrong = [(name, imported(name) & set(ours) - below) for name in ours if name in below]
    apps = {name for name in FILES if name.startswith("superglue_sift/apps/")}
    wrong += [
        (name, imported(name) & apps)
        for name in FILES
        if name.startswith("superglue_sift/interop/")
    ]
    assert [one for one in wrong if one[1]] == []


def test_imports_run_in_no_circle():
    graph = {name: imported(name) for name in FILES if not name.endswith("__init__.py")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_every_package_is_known():
    folders = {path.parent for path in (ROOT / "pipeline").glob("*/*.py")}
    unknown = {path.name for path in folders} - set(MAY_IMPORT)
    assert unknown == set(), "say in MAY_IMPORT what the new package may import"
    missing = [path.name for path in folders if not (path / "__init__.py").exists()]
    assert missing == [], "a package without an __init__.py"


@pytest.mark.parametrize("package", ["superglue_sift", "pipeline"])
def test_the_maps_name_what_exists(package):
    """The docstring of each package names its modules and folders; CONTRIBUTING the folders."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for init in sorted((ROOT / package).rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        modules = {path.stem for path in init.parent.glob("*.py") if not path.stem.startswith("__")}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        left_out = (modules | folders) - set(re.findall(r"\w+", docstring))
        left_out |= folders - set(re.findall(r"\w+", contributing))
        assert left_out == set(), f"{init} or CONTRIBUTING.md leaves them out"


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
    wrong = [name for name in FILES if re.search(r"\b(utils?|helpers|common|misc)\.py$", name)]
    for name in FILES:
        lines = len((ROOT / name).read_text().splitlines())
        wrong += [f"{name} has {lines} lines"] if lines > 700 else []
        functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef)]
        for node in functions:
            size = node.end_lineno - node.lineno + 1
            wrong += [f"{name}:{node.name} has {size} lines"] if size > 70 else []
            wrong += [f"{name}:{node.name} nests {depth(node)} blocks"] if depth(node) > 3 else []
    assert wrong == []


def test_one_statement_a_line():
    """`a, b = x, y` is two statements, except where one value is an earlier target: a swap."""
    for name in FILES:
        for node in ast.walk(TREES[name]):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts):
                written = {ast.unparse(element) for element in target.elts}
                read = {ast.unparse(each) for each in ast.walk(node.value)}
                starred = any(isinstance(each, ast.Starred) for each in ast.walk(node))
                assert written & read or starred, f"{name}:{node.lineno} packs a tuple"


def test_square_roots_have_the_same_bits_on_every_processor():
    """`Tensor.sqrt` is MKL's, whose last bits differ between vendors."""
    found = []
    for name in FILES:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Attribute) and node.attr in ("sqrt", "sqrt_"):
                found += [] if ast.unparse(node.value) in ("np", "math") else [name]
    assert found == ["superglue_sift/torch_compat.py"]


def test_no_file_that_is_loaded_can_run_code():
    """Nothing is unpickled, and no text of a file is evaluated."""
    forbidden = {"torch.load", "torch.save", "eval", "exec", "pickle.load", "pickle.loads"}
    wrong = []
    for name in FILES:
        for node in ast.walk(TREES[name]):
            if not isinstance(node, ast.Call):
                continue
            pickles = [word for word in node.keywords if word.arg == "allow_pickle"]
            allowed = [word for word in pickles if ast.unparse(word.value) != "False"]
            if ast.unparse(node.func) in forbidden or allowed:
                wrong.append(f"{name}:{node.lineno} {ast.unparse(node.func)}")
    assert wrong == []


def test_nothing_happens_at_import():
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for name in FILES:
        for node in TREES[name].body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            guarded = isinstance(node, ast.If) and re.search(
                "__name__|TYPE_CHECKING", ast.unparse(node.test)
            )
            # Only before OpenCV is loaded can it be told which processor code to leave out.
            prepares = ast.unparse(node) == "environment.prepare_opencv()"
            runs_nothing = isinstance(node, quiet) or docstring or guarded or prepares
            assert runs_nothing, f"{name}:{node.lineno} does work at import"


def called(tree):
    """Dotted names that are imported, as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def tracked():
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if done.returncode:
        pytest.skip("needs the git repository")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_tracked_file_is_large():
    """The shipped weights alone may be: 8 MB at most, so that a clone stays quick."""
    weights = ROOT / "pretrained/superglue-sift.safetensors"
    assert weights.stat().st_size < 8e6
    large = {
        path.relative_to(ROOT).as_posix(): path.stat().st_size
        for path in tracked()
        if path.is_file() and path != weights and path.stat().st_size > 1 << 20
    }
    assert large == {}
