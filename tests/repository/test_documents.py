"""README and docs: Python blocks and commands run, links lead somewhere, a promise has a test.

A command that cannot run here must at least have options that exist.
"""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "pretrained/README.md"]
DOCUMENTS += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
# Blocks and commands run in a folder of their own, with the packages of this clone.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
# Packages of other projects that a block may need. Without them the block is skipped.
OPTIONAL = {"kornia", "onnxruntime", "pycolmap", "poselib"}
# Programs of others, and why no test runs them as the documents do. Their options are their own.
FOREIGN = {
    "colmap": "COLMAP's own program",
    "curl": "needs a served model",
    "docker": "needs a container engine; docker/ci.sh builds and tries the images",
    "dvc": "tests/train/test_resume_dvc.py and the tests of dvc.yaml run it",
    "git": "changes the clone",
    "mlflow": "tests/tracking/test_served_model.py serves a model",
    "pip": "requirements/test-bounds.sh installs the wheel",
    "pre-commit": "changes the clone",
    "srun": "needs a cluster; tests/faults/test_nodes.py starts nodes",
    "torchrun": "tests/faults/test_launch.py starts it",
}
OWN = re.compile(r"make |superglue-match |(\w+=\S* )*(\.venv/bin/)?python -m ")
# Commands of this project that run for real, each in a folder with photographs
RUN = re.compile(r"superglue-match |python -m superglue_sift\.onnx ")
# ... but for these, which need what no folder of a test has
NOT_RUN = ("models/superglue.safetensors", "superglue-match serve", "kaze")


def blocks_of(document):
    """The Python blocks of a document, in their order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def photographs(tmp_path, monkeypatch, color_photo):
    """A working folder with the photographs a to d, which the documents name."""
    import cv2
    from skimage import data

    monkeypatch.chdir(tmp_path)
    for names, photo in (("ab", color_photo), ("cd", data.coffee())):
        height, width = photo.shape[:2]
        turn = cv2.getRotationMatrix2D((width / 2, height / 2), 8, 0.95)
        views = photo, cv2.warpAffine(photo, turn, (width, height))
        for name, view in zip(names, views):
            cv2.imwrite(f"{name}.jpg", view[:, :, ::-1])
            cv2.imwrite(f"{name.upper()}.jpg", view[:, :, ::-1])
    return tmp_path


def names_around_blocks():
    """What the text around the blocks takes as given: cameras, features, imported packages."""
    import cv2
    import torch

    from superglue_sift import Matcher

    rng = np.random.default_rng(0)
    K = np.array([[500.0, 0, 225], [0, 500, 150], [0, 0, 1]])
    matcher = Matcher.load(device="cpu")
    return {
        "cv2": cv2,
        "torch": torch,
        "np": np,
        "K0": K,
        "K1": K,
        "width": 200,
        "height": 100,
        "keypoints": rng.uniform(0, 100, (20, 2)).astype(np.float32),
        "scores": rng.uniform(0, 1, 20).astype(np.float32),
        "descriptors": rng.normal(size=(20, 64)).astype(np.float32),
        "matcher": matcher,
        "result": matcher.match("a.jpg", "b.jpg"),
    }


def missing_packages(block):
    """Packages that the block imports and that are not installed."""
    imported = set(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE))
    return [name for name in imported & OPTIONAL if importlib.util.find_spec(name) is None]


def run_module(*words):
    """Run `python -m` with these words in the working folder."""
    subprocess.run([sys.executable, "-m", *words], check=True, env=ENVIRONMENT)


def make_tutorial_photos():
    """The six photographs of the tutorial, rendered by its notebook."""
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    exec(next(cell for cell in cells if "def render" in cell), {})


def make_pairs_folder():
    """A folder in the layout of HPatches with one pair, whose homography is a rotation."""
    import cv2

    folder = Path("hpatches/v_chelsea")
    folder.mkdir(parents=True)
    photo = cv2.imread("a.jpg")
    height, width = photo.shape[:2]
    H = np.vstack([cv2.getRotationMatrix2D((width / 2, height / 2), 10, 0.9), [0, 0, 1]])
    cv2.imwrite(str(folder / "1.png"), photo)
    cv2.imwrite(str(folder / "2.png"), cv2.warpPerspective(photo, H, (width, height)))
    np.savetxt(folder / "H_1_2", H)


def make_files(block):
    """Make the files that a block opens, by the commands that the text before it names."""
    if "superglue.onnx" in block:
        run_module("superglue_sift.onnx", "superglue.onnx")
    if "photos" in block and not Path("photos").exists():
        make_tutorial_photos()
    if "database.db" in block:
        run_module("superglue_sift", "photos", "--out-dir", "results", "--colmap", "database.db")
    if "pairs.csv" in block:
        make_pairs_folder()
        out = ["--out", "reports/evaluate", "--max-keypoints", "300"]
        run_module("pipeline.evaluate", "--pairs", "hpatches", *out)


@pytest.mark.slow
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks_of(name)])
def test_every_python_block_runs(document, photographs):
    names = names_around_blocks()
    skipped = []
    for number, block in enumerate(blocks_of(document), 1):
        missing = missing_packages(block)
        if missing:
            skipped.append(f"block {number} needs {', '.join(missing)}")
            continue
        make_files(block)
        exec(compile(block, f"{document}, block {number}", "exec"), names)
    if skipped:
        pytest.skip("; ".join(skipped))


def anchors_of(path):
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_to_a_file_or_a_heading_leads_somewhere(document):
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_every_promise_names_tests_that_exist():
    """Each row of the table names its tests as pytest does, so that they can be run by name."""
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    table = text.split("# What is promised")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    missing = []
    for row in rows:
        tests = re.findall(r"`(tests/[^`:]+)::(?:(\w+)::)?(\w+)`", row)
        assert tests, f"no test is named for: {row}"
        for name, group, function in tests:
            indent = "    " if group else ""
            definition = f"\n{indent}def {function}("
            before, is_there, _ = (ROOT / name).read_text().partition(definition)
            # A test of a class has the name of the class before its own.
            classes = re.findall(r"^class (\w+)", before, re.MULTILINE)
            if not is_there or (group and classes[-1:] != [group]):
                missing.append(function)
            # A star says that the test is slow. Its marks stand in the lines above it, or are those
            # of all tests of the file.
            is_slow = "slow" in before.rpartition("\n\n")[2].lower()
            is_slow |= "pytestmark = pytest.mark.slow" in before
            assert (f"::{function}` *" in row) == is_slow, function
    assert missing == []


# --- commands


def lines_of(document):
    """The commands in a document's blocks, without comments, with continued lines joined."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*", "", line).strip()
            # Other lines are output, or text.
            if OWN.match(f"{command} ") or command.partition(" ")[0] in FOREIGN:
                yield command


def inline_commands_of(document):
    """The commands of this project that stand within the text."""
    text = (ROOT / document).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [code for code in re.findall(r"`([^`]+)`", text) if OWN.match(f"{code} ")]


COMMANDS = [(document, line) for document in DOCUMENTS for line in lines_of(document)]
INLINE = [" ".join(code.split()) for name in DOCUMENTS for code in inline_commands_of(name)]
EVERY = [*dict.fromkeys([line for _, line in COMMANDS] + INLINE)]


@functools.cache
def read_help(module):
    """What `python -m MODULE --help` prints, with that of its subcommands."""

    def print_help(*words):
        command = [sys.executable, "-m", module, *words, "--help"]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = print_help()
    match = re.search(r"^\s*\{([\w,-]+)\}", text, re.MULTILINE)
    subcommands = match[1].split(",") if match else ()
    return text + "".join(map(print_help, subcommands))


def module_of(command):
    """The module of this project that a command runs, or None."""
    if "superglue-match" in command.split()[0]:
        return "superglue_sift"
    # `pipeline.launch` passes its options on to the module that it launches.
    name = r"((?:superglue_sift|pipeline|benchmarks)(?:\.[a-z_.]+)?)(?!\S)"
    modules = re.findall(rf"-m {name}", command)
    launched = re.findall(rf"pipeline\.launch {name}", command)
    return [*modules, *launched][-1] if modules else None


def options_of(command):
    """The long options of a command, after the last module that it names."""
    return re.findall(r"(?<!\S)(--[a-z][\w-]*)", command.rpartition(" -m ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in EVERY if module_of(line)])
def test_every_option_of_a_command_exists(command):
    options = re.findall(r"--[a-z][\w-]*", read_help(module_of(command)))
    assert set(options_of(command)) <= {*options, "--help"}


@pytest.mark.parametrize("command", [line for line in EVERY if line.startswith("make ")])
def test_every_target_of_make_exists(command):
    words = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        rule = rf"^{name} \?=" if is_variable else rf"^{name}:"
        assert re.search(rule, makefile, re.MULTILINE) or f"$({name})" in makefile, word


@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({name for name, line in COMMANDS if RUN.match(line)}))
def test_every_command_of_matching_runs(document, photographs):
    make_tutorial_photos()
    for name, line in COMMANDS:
        if name != document or not RUN.match(line) or any(word in line for word in NOT_RUN):
            continue
        if "colmap.db" in line and not Path("colmap.db").exists():
            pytest.importorskip("pycolmap").extract_features("colmap.db", "photos")
        python = shlex.quote(sys.executable)
        command = line.replace("superglue-match", f"{python} -m superglue_sift", 1)
        command = re.sub(r"^python ", f"{python} ", command)
        done = subprocess.run(command, shell=True, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.slow
def test_a_folder_of_pairs_is_evaluated_as_the_page_says(photographs):
    make_pairs_folder()
    (line,) = [line for _, line in COMMANDS if "--model M --pairs PAIRS" in line]
    words = line.split("-m ")[1].replace("--model M ", "").replace("PAIRS", "hpatches").split()
    words[words.index("--out") + 1] = "reports"
    subprocess.run([sys.executable, "-m", *words], check=True, env=ENVIRONMENT)
    assert Path("reports/index.html").is_file()
