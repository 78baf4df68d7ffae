"""Run everything that waits for a GPU, in one call that can be repeated.

    python -m benchmarks.first_gpu --images packed/train --val-images packed/val [--budget 9]
    python -m benchmarks.first_gpu ... --device cpu    the same parts, a thousandth of the steps

The first parts train the weights of preset `pretrained` from scratch on the photographs that
`benchmarks.pack` packed, and evaluate them beside the shipped weights. The next parts run the tests
marked `gpu`. They train with `run.deterministic`, stop that training, resume it, and compare it
with an unbroken one and with the CPU's curve, then train in float16 and compiled. The last parts
are the tables of speed.

Each part is a command with a time limit. Its output (`NN-name.log`) and its line of `done.json` are
written at once, and what is worth keeping is copied to the small folder OUT/back. Nothing is
downloaded. Another call does not repeat the parts that succeeded, and resumes the training of the
weights. Without --images there are no weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from ruamel.yaml import YAML

from benchmarks.command import make_parser
from pipeline import params, presets
from pipeline.errors import STOPPED
from superglue_sift.files import write_atomic
from superglue_sift.network.weights import shipped_weights
from superglue_sift.torch_compat import no_compiler

CLONE = Path(__file__).resolve().parents[1]
GRACE = 60  # seconds to save after SIGTERM
# A rehearsal on a CPU gets this many times the limits, since other work may keep the CPU busy
PATIENCE = 8


class Part(NamedTuple):
    """A command with its limit in seconds.

    folder: the folder under OUT in which it runs, or "" for this one.
    until: pattern of files under OUT. When a new file matches it, SIGTERM stops the command, as it
        stops a preempted job.
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
    parser = make_parser("first_gpu", __doc__)
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
        return compare(out)
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
        rows[part.name] = skipped or run(part, limit, log, small)
        write_atomic(file, json.dumps(rows, indent=1) + "\n")
        print(f"{part.name}: {rows[part.name]}", flush=True)
        bring_back(out)
    return int(any(line.startswith("FAILED") for line in rows.values()))


def bring_back(out: Path) -> None:
    """Copy what is worth keeping to OUT/back: models, reports, logs, curves."""
    for pattern in ("done.json", "*.log", "*/checkpoints/best.*", "*/reports/**/*"):
        for path in out.glob(pattern):
            if path.is_file() and path.suffix not in (".jsonl", ".png", ".jpg"):
                target = out / "back" / path.relative_to(out)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


def write_params(
    out: Path, small: bool, images: Optional[Path], val_images: Optional[Path]
) -> None:
    """Write OUT/NAME/params.yaml of each training.

    `weights` is preset `pretrained`. The others are preset `sample` with a larger network.
    """
    # the short training, by the same kernels on each device: `portable` is slower on a CPU
    curve = read("sample")
    keypoints = 64 if small else 512
    steps = 8 if small else 100
    curve["keypoints"].update(max_keypoints=keypoints, views_per_image=4 if small else 12)
    curve["train"].update(batch=4 if small else 64, layers=2 if small else 9, optimizer="adam")
    curve["train"].update(max_keypoints=keypoints, neighbours=False, precision="float32")
    curve["train"].update(steps=steps, val_every=steps, val_pairs=8)
    curve["run"].update(log_every=1, save_every=2 if small else 25)
    # only with `deterministic` a GPU computes the same bytes twice
    for name in ("curve", "whole", "cpu"):
        write(out / name, {**curve, "run": {**curve["run"], "deterministic": True}})
    write(out / "float16", {**curve, "train": {**curve["train"], "precision": "float16"}})
    # compiling takes a minute or more for each layer
    compiled = {**curve["train"], "layers": 1 if small else 9}
    write(out / "compiled", {**curve, "train": compiled, "run": {**curve["run"], "compile": True}})
    if not images:
        return
    weights = read("pretrained")
    weights["fetch"].update(path=str(images.resolve()))
    weights["fetch"].update(val_path=str(val_images.resolve()) if val_images else "")
    weights["run"].update(save_every=2 if small else 100)
    if small:
        weights["fetch"].update(limit=8)
        weights["train"].update(batch=4, steps=6, max_keypoints=256, val_pairs=4, val_every=3)
        weights["train"].update(warmup_steps=1, decay_start=2, precision="float32")
        weights["evaluate"].update(pairs_per_image=1, max_keypoints=128)
    write(out / "weights", weights)


def read(preset: str) -> Dict[str, Any]:
    return YAML(typ="safe", pure=True).load(presets.read(preset))


def write(folder: Path, tree: Dict[str, Any]) -> None:
    """Write checked parameters."""
    write_atomic(folder / "params.yaml", json.dumps(tree, indent=1))  # JSON is YAML
    params.load(folder / "params.yaml")


def list_parts(out: Path, device: str) -> List[Part]:
    """List all parts in order."""
    small = device == "cpu"
    trained = f"--model checkpoints/best.safetensors --also shipped={shipped_weights()}"
    scores = r"^(SuperGlue|shipped|ratio)\D+\d+ +\d+\."  # matches, precision, recall
    tests = "tests/fetch" if small else "tests"
    train = "pipeline.launch pipeline.train --keypoints ../curve/data/keypoints"
    saved = "curve/checkpoints/*/step-*.json"
    stopped = (0, STOPPED)  # a training that is stopped has saved, and ends with this code
    lacks_gpu = "needs a GPU" if small else ""
    size = "--dim 16 --layers 1 --keypoints 64 --seconds 0.5" if small else "--dim 256"
    table = f"benchmarks --device {device} {size}"
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
        Part("compare", 10, f"benchmarks.first_gpu --compare --out {out}"),
        Part("train-float16", 60, train, "float16", missing=lacks_gpu),
        Part("train-compiled", 240, train, "compiled", missing=no_compiler(device)),
        *(
            Part(name, limit, f"{table} --only {groups}", figures=" ms | MiB | share|SKIP|FAILED")
            for name, limit, groups in (
                ("parity", 50, "parity"),
                ("speed", 90, "step,sinkhorn,latency,files"),
                ("decoders", 60, "decoders,views"),
                ("modes", 200, "modes"),
                ("memory", 90, "memory"),
                ("onnx", 120, "onnx"),
            )
        ),
    ]


def run(part: Part, seconds: float, log: Path, small: bool) -> str:
    """Run a part. Returns `ok` or what went wrong, the seconds and the figures."""
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
            [sys.executable, "-m", *part.words.split()],
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
        outcome = "UNFINISHED"  # it has saved, and another call resumes it
    lines = log.read_text(errors="replace").splitlines()
    found = [line for line in lines if part.figures and re.search(part.figures, line)]
    figures = " | ".join(" ".join(line.split()) for line in found or lines[-1:])
    return f"{outcome}{stopped}, {time.monotonic() - begun:.0f} s: {figures}"


def compare(out: Path) -> int:
    """Compare the training `curve` with the CPU's losses and with the unbroken training.

    Prints the losses of each step. Returns 0 if the bytes of the resumed and the unbroken weights
    are equal, else 1.
    """
    losses = []
    for name in ("cpu", "curve"):
        file = next((out / name / "reports").rglob("train.csv"))
        losses.append(np.atleast_1d(np.genfromtxt(file, delimiter=",", names=True))["loss"])
    steps = min(map(len, losses))
    cpu, own = (each[:steps] for each in losses)
    for step, (first, second) in enumerate(zip(cpu, own), 1):
        print(f"step {step}: {first:.5f} on the CPU, {second:.5f} on the device")
    ends = []
    for name in ("curve", "whole"):
        last = max((out / name).glob("checkpoints/*/step-*.safetensors"), key=lambda f: f.name)
        ends.append((last.name, last.read_bytes()))
    equal = ends[0] == ends[1]
    away = np.abs(cpu / own - 1).max()
    print(
        f"{steps} steps: losses differ by {away:.2e} at most; the resumed training has"
        f" {'the bytes' if equal else 'OTHER BYTES than those'} of the unbroken one"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
