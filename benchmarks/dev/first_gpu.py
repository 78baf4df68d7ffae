"""Run everything that waits for a GPU, in one call that can be repeated.

    python -m benchmarks.dev.first_gpu --images packed/train --val-images packed/val [--budget 9]
    python -m benchmarks.dev.first_gpu ... --device cpu    the same parts with fewer steps

The first parts train the weights of preset `pretrained` from scratch on the photographs that
`benchmarks.dev.pack` packed, and evaluate them beside the shipped weights. The next parts run tests
marked `gpu`. They train with `run.deterministic`, stop that training, resume it, and compare it
with an unbroken one and with the CPU's curve, then train in float16 and compiled. The last parts
are the tables of speed.

Each part is a command with a time limit. Its output (`NN-name.log`) and its line of `done.json` are
written at once, and what is worth keeping is copied to the small folder OUT/back. Nothing is
downloaded. Another call does not repeat the parts that succeeded, and resumes the training of the
weights. Without --images there are no weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import pandas as pd
from ruamel.yaml import YAML

from pipeline import params, presets
from pipeline.errors import STOPPED
from superglue_sift.files import write_atomically
from superglue_sift.network.weights import find_shipped_weights
from superglue_sift.torch_compat import describe_missing_compiler

CLONE = Path(__file__).resolve().parents[2]
GRACE = 60  # seconds to save after SIGTERM
# Factor for the limits of a rehearsal on a CPU, which other work may keep busy.
PATIENCE = 8
# Files of OUT that are not copied to OUT/back
LARGE = shutil.ignore_patterns("back", "data", "step-*", "mlflow*", "*.jsonl", "*.png", "*.jpg")

# A rehearsal trains preset `pretrained` with fewer and smaller pairs. It saves after each step.
REHEARSED: Dict[str, Any] = {
    "fetch.limit": 8,
    "keypoints.max_keypoints": 256,
    "train.batch": 4,
    "train.steps": 12,
    "train.max_keypoints": 256,
    "train.warmup_steps": 2,
    "train.decay_start": 4,
    "train.val_pairs": 4,
    "train.val_every": 6,
    "run.save_every": 1,
    "evaluate.max_keypoints": 256,
    "evaluate.pairs_per_image": 2,
}


class Part(NamedTuple):
    """A command with its limit in seconds.

    Attributes:
        folder: the folder under OUT in which it runs, or "" for this one.
        until: pattern of files under OUT. When a new file matches it, SIGTERM stops the command, as
            it stops a preempted job.
        expected: exit codes that count as success.
        missing: what this machine lacks for the part, or "".
        figures: pattern of the lines with its figures. By default it is the last line.
    """

    name: str
    seconds: float
    words: str
    folder: str = ""
    until: str = "nothing"
    expected: Sequence[int] = (0,)
    missing: str = ""
    figures: str = ""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the parts that have not succeeded yet, within the budget. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=Path, default=Path("reports/first-gpu"))
    add("--images", type=Path, metavar="FOLDER", help="photographs to train the weights on")
    add("--val-images", type=Path, metavar="FOLDER", help="photographs no weights were trained on")
    add("--budget", type=float, default=20.0, help="minutes of this call (default 20)")
    add("--compare", action="store_true", help="only compare the trainings that are in OUT")
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    if args.compare:
        return compare_trainings(out)
    small = args.device == "cpu"
    write_params(out, small, args.images, args.val_images)
    end = time.monotonic() + 60 * args.budget
    file = out / "done.json"
    rows: Dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    for number, part in enumerate(list_parts(out, args.device)):
        left = end - time.monotonic()
        if part.folder == "weights" and not args.images:
            continue
        if rows.get(part.name, "").startswith("ok") or left <= 0:
            continue
        limit = min(part.seconds * (PATIENCE if small else 1), left)
        log = out / f"{number:02d}-{part.name}.log"
        skipped = f"SKIP: {part.missing}" if part.missing else ""
        rows[part.name] = skipped or run_part(part, limit, log, small)
        write_atomically(file, json.dumps(rows, indent=1) + "\n")
        print(f"{part.name}: {rows[part.name]}", flush=True)
        shutil.copytree(out, out / "back", ignore=LARGE, dirs_exist_ok=True)
    return int(any(line.startswith("FAILED") for line in rows.values()))


def write_params(
    out: Path, small: bool, images: Optional[Path], val_images: Optional[Path]
) -> None:
    """Write OUT/NAME/params.yaml of each training.

    `weights` is preset `pretrained`. The others are preset `sample` with a larger network. A
    rehearsal has preset `ci` for these, and a few steps of a few pairs for the weights.
    """
    # Both devices compute in float32. `portable` would be slower on a CPU.
    curve: Dict[str, Any] = {"train.precision": "float32", "run.log_every": 1, "run.save_every": 10}
    large = {
        "keypoints.max_keypoints": 512,
        "keypoints.views_per_image": 12,
        "train.batch": 64,
        "train.model.layers": 9,
        "train.optimizer": "adam",
        "train.max_keypoints": 512,
        "train.model.neighbours": False,
        "train.steps": 100,
        "train.val_every": 100,
        "train.val_pairs": 8,
        "run.save_every": 25,
    }
    preset = "ci" if small else "sample"
    curve.update({} if small else large)
    # Only with `deterministic` a GPU computes the same bytes twice.
    for name in ("curve", "whole", "cpu"):
        write_preset(out / name, preset, {**curve, "run.deterministic": True})
    write_preset(out / "float16", preset, {**curve, "train.precision": "float16"})
    write_preset(out / "compiled", preset, {**curve, "run.compile": True})
    if images:
        weights = {
            "fetch.source": "folder",
            "fetch.path": str(images.resolve()),
            "fetch.val_path": str(val_images.resolve()) if val_images else "",
            "run.save_every": 100,
        }
        weights.update(REHEARSED if small else {})
        write_preset(out / "weights", "pretrained", weights)


def write_preset(folder: Path, preset: str, changes: Dict[str, Any]) -> None:
    """Write FOLDER/params.yaml, a preset with other values, and check it.

    Args:
        folder: FOLDER.
        preset: name of the preset.
        changes: the other values, such as `{"train.steps": 8}`.
    """
    tree = YAML(typ="safe", pure=True).load(presets.read_preset(preset))
    for name, value in changes.items():
        *path, key = name.split(".")
        functools.reduce(dict.get, path, tree)[key] = value
    write_atomically(folder / "params.yaml", json.dumps(tree, indent=1))  # JSON is YAML, too.
    params.load(folder / "params.yaml")


def list_parts(out: Path, device: str) -> List[Part]:
    """List all parts in order."""
    small = device == "cpu"
    shipped = shlex.quote(str(find_shipped_weights()))
    trained = f"--model checkpoints/best.safetensors --also shipped_weights={shipped}"
    scores = r"^(SuperGlue|shipped|ratio)\D+\d+ +\d+\."  # matches, precision, recall
    tests = "tests/fetch" if small else "tests"
    train = "pipeline.launch pipeline.train --keypoints ../curve/data/keypoints"
    saved = "curve/checkpoints/*/step-*.json"
    stopped = (0, STOPPED)  # A training that is stopped has saved, and ends with this code.
    size = "--dim 16 --layers 1 --keypoints 64 --seconds 0.5" if small else "--dim 256"
    table = f"benchmarks --device {device} {size} --only"
    rows = " ms | share |SKIP|FAILED"
    return [
        Part("weights-fetch", 120, "pipeline.fetch", "weights"),
        Part("weights-keypoints", 400, "pipeline.keypoints", "weights"),
        Part("weights-train", 1500, "pipeline.launch pipeline.train", "weights"),
        Part("weights-evaluate", 300, f"pipeline.evaluate {trained}", "weights", figures=scores),
        Part("doctor", 30, "pipeline.doctor"),
        Part("tests", 120, f"pytest -q -m gpu {tests}"),
        Part("fetch", 30, "pipeline.fetch", "curve"),
        Part("keypoints", 90, "pipeline.keypoints", "curve"),
        Part("train-killed", 50, train, "curve", saved, stopped),
        Part("train-resumed", 60, train, "curve"),
        Part("train-whole", 60, train, "whole"),
        Part("train-cpu", 60, train, "cpu", expected=stopped),
        Part("compare", 10, f"benchmarks.dev.first_gpu --compare --out {shlex.quote(str(out))}"),
        Part("train-float16", 60, train, "float16", missing="needs a GPU" if small else ""),
        Part("train-compiled", 240, train, "compiled", missing=describe_missing_compiler(device)),
        Part("parity", 50, f"{table} parity", figures=rows),
        Part("speed", 90, f"{table} step,sinkhorn,latency,files", figures=rows),
        Part("decoders", 60, f"{table} decoders,views", figures=rows),
        Part("modes", 200, f"{table} modes", figures=rows),
        Part("onnx", 120, f"{table} onnx", figures=rows),
    ]


def run_part(part: Part, seconds: float, log: Path, small: bool) -> str:
    """Run a part.

    Args:
        part: the part.
        seconds: its limit.
        log: file for its output. Its folder is OUT.
        small: whether this is a rehearsal on a CPU.

    Returns:
        A line with `ok` or what went wrong, the seconds and the figures.
    """
    out = log.parent
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{out / 'mlflow.db'}", **os.environ}
    environment["PYTHONPATH"] = f"{CLONE}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    if small or part.folder == "cpu":
        environment.update(CUDA_VISIBLE_DEVICES="", NPROC_PER_NODE="1")
    before = len(list(out.glob(part.until)))
    begun = time.monotonic()
    end = begun + seconds
    stopped = ""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", *shlex.split(part.words)],
            cwd=out / part.folder if part.folder else CLONE,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            late = time.monotonic() > end
            if not stopped and (late or len(list(out.glob(part.until))) > before):
                process.terminate()
                stopped = ", time is over" if late else ", stopped"
                end = time.monotonic() + GRACE
            elif late:
                process.kill()
            time.sleep(0.1)
    code = process.returncode
    outcome = "ok" if code in part.expected else f"FAILED with exit code {code}"
    if stopped and code == STOPPED and outcome != "ok":
        outcome = "UNFINISHED"  # It has saved, and another call resumes it.
    lines = log.read_text(errors="replace").splitlines()
    figure_lines = [line for line in lines if part.figures and re.search(part.figures, line)]
    figures = " | ".join(" ".join(line.split()) for line in figure_lines or lines[-1:])
    return f"{outcome}{stopped}, {time.monotonic() - begun:.0f} s: {figures}"


def compare_trainings(out: Path) -> int:
    """Compare the training `curve` with the CPU's losses and with the unbroken training.

    Prints the losses of each step. Returns 0 if the bytes of the resumed and the unbroken weights
    are equal, else 1.
    """
    losses = pd.DataFrame(
        {
            name: pd.read_csv(next((out / name / "reports").rglob("train.csv"))).loss
            for name in ("cpu", "curve")
        }
    ).dropna()
    print(losses.to_string())
    difference = (losses.cpu / losses.curve - 1).abs().max()
    ends = []
    for name in ("curve", "whole"):
        last = max((out / name).glob("checkpoints/*/step-*.safetensors"), key=lambda f: f.name)
        ends.append((last.name, last.read_bytes()))
    equal = ends[0] == ends[1]
    print(
        f"{len(losses)} steps: losses differ by {difference:.2e} at most; the resumed training has"
        f" {'the bytes' if equal else 'OTHER BYTES than those'} of the unbroken one"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
