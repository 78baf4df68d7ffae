"""Everything that waits for a GPU, in one call that can be repeated.

    python -m benchmarks.first_gpu --images packed [--out reports/first-gpu] [--budget 9]
    python -m benchmarks.first_gpu --images packed --device cpu --budget 30   the same, small

First the weights: the keypoints of the photographs (`benchmarks.pack`), the training of the preset
`pretrained` from scratch, and its evaluation beside the shipped weights. Then tests marked `gpu`; a
training that is stopped, resumed, and compared with an unbroken one and with the CPU's curve; the
same in float16, and compiled; the tables of speed with every way to train.

Each part is a command with a time limit. Its output (`NN-name.log`) and its line of `done.json` are
written at once, and what is worth keeping is copied to the small folder OUT/back. Nothing is
downloaded. Call it again with what is left of the time: a part that succeeded is not repeated, and
the training of the weights resumes. Without --images there are no weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from ruamel.yaml import YAML

from benchmarks.command import make_parser
from benchmarks.images import SAMPLE
from pipeline import params
from pipeline.files import write_atomic

GRACE = 60  # seconds to save after SIGTERM
# A rehearsal on a CPU gets this many times the limits, since other work may keep the CPU busy
PATIENCE = 4


class Part(NamedTuple):
    """A command with its limit in seconds.

    until: a pattern under OUT; when a new file matches it, SIGTERM stops the command, as it stops a
    preempted job. expected: exit codes that count as success. needs: a file that must exist.
    """

    name: str
    seconds: float
    command: List[str]
    until: str = "nothing"
    expected: Sequence[int] = (0,)
    needs: str = ""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the parts that have not succeeded yet, within the budget."""
    parser = make_parser("first_gpu", __doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=Path, default=Path("reports/first-gpu"))
    add("--images", type=Path, metavar="FOLDER", help="photographs to train the weights on")
    add("--budget", type=float, default=20.0, help="minutes of this call (default 20)")
    add("--compare", action="store_true", help="only compare the trainings that are in OUT")
    args = parser.parse_args(argv)
    if args.compare:
        return compare(args.out)
    small = args.device == "cpu"
    write_params(args.out, small, args.images)
    end = time.monotonic() + 60 * args.budget
    file = args.out / "done.json"
    rows: Dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    weights = list_weights(args.out) if args.images else []
    for number, part in enumerate([*weights, *list_parts(args.out, args.device)]):
        left = end - time.monotonic()
        if rows.get(part.name, "").startswith("ok") or left <= 0:
            continue
        if part.needs and not Path(part.needs).exists():
            rows[part.name] = f"SKIP: {part.needs} is missing"
            continue
        limit = min(part.seconds * (PATIENCE if small else 1), left)
        log = args.out / f"{number:02d}-{part.name}.log"
        rows[part.name] = run(part._replace(seconds=limit), log, small)
        write_atomic(file, json.dumps(rows, indent=1) + "\n")
        print(f"{part.name}: {rows[part.name]}", flush=True)
        bring_back(args.out)
    return int(any(line.startswith("FAILED") for line in rows.values()))


def bring_back(out: Path) -> None:
    """Copy what is worth keeping to OUT/back: models, reports, logs, tables."""
    for pattern in ("*.json", "*.log", "weights/checkpoints/best.*", "weights/reports/**/*"):
        for path in out.glob(pattern):
            if path.is_file() and path.suffix not in (".jsonl", ".png", ".jpg"):
                target = out / "back" / path.relative_to(out)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


def write_params(out: Path, small: bool, images: Optional[Path]) -> None:
    """Write the parameters of a short training, `curve.yaml` (preset `sample` with a larger
    network), of the same in float16 and compiled, and of the training of the weights.
    """
    base = YAML(typ="safe", pure=True).load(SAMPLE)
    keypoints = 64 if small else 512
    steps = 8 if small else 200
    base["keypoints"].update(max_keypoints=keypoints, views_per_image=4 if small else 12)
    base["evaluate"]["max_keypoints"] = keypoints
    base["train"].update(
        max_keypoints=keypoints,
        batch=4 if small else 64,
        layers=2 if small else 9,
        neighbours=False,
        precision="float32",  # the sample's is portable, which is slower
        optimizer="adam",
        val_pairs=8,
        steps=steps,
        val_every=steps,
    )
    # only with `deterministic` a GPU computes the same bytes twice
    base["run"].update(deterministic=True, log_every=1, save_every=2 if small else 50)
    write(out / "curve.yaml", base)
    base["run"].update(deterministic=False)
    write(out / "compiled.yaml", {**base, "run": {**base["run"], "compile": True}})
    write(out / "float16.yaml", {**base, "train": {**base["train"], "precision": "float16"}})
    if images:
        weights = YAML(typ="safe", pure=True).load(SAMPLE.with_name("pretrained.yaml"))
        weights["fetch"].update(path=str(images.resolve()), val_fraction=0.03)
        if small:  # a thousandth of the steps
            weights["fetch"].update(limit=12, val_fraction=0.3)
            weights["train"].update(batch=4, steps=6, max_keypoints=256, val_pairs=4, val_every=3)
            weights["train"].update(warmup_steps=1, decay_start=2, precision="float32")
            weights["evaluate"].update(pairs_per_image=1, max_keypoints=128)
        weights["run"].update(save_every=2 if small else 100)
        write(out / "weights.yaml", weights)


def write(path: Path, tree: Dict[str, Any]) -> None:
    """Write checked parameters."""
    write_atomic(path, json.dumps(tree, indent=1))  # JSON is YAML
    params.load(path)


def list_weights(out: Path) -> List[Part]:
    """The training of the weights. It is stopped at its limit, and resumed by the next call."""
    home = out / "weights"
    file = f"--params {out}/weights.yaml"
    images = f"--images {home}/images"
    best = f"{home}/checkpoints/best.safetensors"
    shipped = "--also shipped=pretrained/superglue-sift.safetensors"
    scored = f"--model {best} {images} --out {home}/reports/evaluate {shipped}"
    fetch = f"{file} --out {home}/images --archives {home}/archives --reports {home}/reports/fetch"
    keypoints = f"{file} {images} --out {home}/keypoints --reports {home}/reports/keypoints"
    folders = f"--out {home}/checkpoints --reports {home}/reports/train"
    return [
        Part("weights-fetch", 120, command(f"pipeline.fetch {fetch}")),
        Part("weights-keypoints", 400, command(f"pipeline.keypoints {keypoints}")),
        Part(
            "weights-train",
            1500,
            command(
                f"pipeline.launch pipeline.train {file} --keypoints {home}/keypoints {folders}"
            ),
        ),
        Part("weights-evaluate", 300, command(f"pipeline.evaluate {file} {scored}"), needs=best),
    ]


def list_parts(out: Path, device: str) -> List[Part]:
    """All parts, in order."""
    small = device == "cpu"
    file = f"--params {out}/curve.yaml"
    fetch = f"pipeline.fetch {file} --out {out}/images --archives {out}/archives"
    extract = f"pipeline.keypoints {file} --images {out}/images --out {out}/keypoints"
    size = "--dim 16 --seconds 0.5" if small else "--dim 256"
    table = f"benchmarks --device {device} {size}"
    rows = {
        "parity": 50,
        "step,sinkhorn,latency": 120,
        "peer,loader,memory": 200,
        "modes,views": 230,
    }
    stopped = (0, 143)
    tests = "tests/fetch" if small else "tests"
    saved = "curve/checkpoints/*/step-*.json"
    return [
        Part("doctor", 30, command("pipeline.doctor")),
        Part("tests", 120, command(f"pytest -q -m gpu {tests}")),
        Part("fetch", 30, command(f"{fetch} --reports {out}/fetch")),
        Part("keypoints", 90, command(f"{extract} --reports {out}/keypoints-report")),
        Part("train-cpu", 60, train(out, "cpu"), expected=stopped),
        Part("train-killed", 50, train(out, "curve"), saved, stopped),
        Part("train-resumed", 60, train(out, "curve")),
        Part("train-whole", 60, train(out, "whole")),
        Part("train-float16", 60, train(out, "float16")),
        Part("train-compiled", 240, train(out, "compiled")),
        Part("compare", 10, command(f"benchmarks.first_gpu --compare --out {out}")),
        *(
            Part(names, limit, command(f"{table} --only {names} --json {out}/{names}.json"))
            for names, limit in rows.items()
        ),
    ]


def command(words: str) -> List[str]:
    return [sys.executable, "-m", *words.split()]


def train(out: Path, name: str) -> List[str]:
    """The command of a training in OUT/name."""
    folders = f"--out {out}/{name}/checkpoints --reports {out}/{name}/reports/train"
    own = name if (out / f"{name}.yaml").is_file() else "curve"
    inputs = f"--params {out}/{own}.yaml --keypoints {out}/keypoints"
    return command(f"pipeline.launch pipeline.train {inputs} {folders}")


def run(part: Part, log: Path, small: bool) -> str:
    """Run a part; returns its outcome, seconds and last line, with `ok` at the start if it
    succeeded.
    """
    out = log.parent
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{(out / 'mlflow.db').resolve()}"}
    environment.update(os.environ)
    if small or part.name == "train-cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    before = len(list(out.glob(part.until)))
    begun = time.monotonic()
    end = begun + part.seconds
    stopped = ""
    with log.open("w") as stream:
        process = subprocess.Popen(
            part.command, env=environment, stdout=stream, stderr=subprocess.STDOUT
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
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2][-160:]
    return f"{outcome}{stopped}, {time.monotonic() - begun:.0f} s: {last}"


def compare(out: Path) -> int:
    """Print losses on the device and on the CPU, and whether resumed and unbroken weights are
    equal: 0, else 1.
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
    word = "the bytes" if ends[0] == ends[1] else "OTHER BYTES"
    away = np.abs(cpu / own - 1).max()
    print(
        f"{steps} steps, losses differ by {away:.2e} at most; resumed, {word} of the unbroken one"
    )
    return 0 if ends[0] == ends[1] else 1


if __name__ == "__main__":
    raise SystemExit(main())
