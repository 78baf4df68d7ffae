"""The first half hour on a GPU: everything that needs one, in order; a failing part does not stop the others.

    python -m benchmarks.dev.first_gpu --device cuda [--images FOLDER] [--out reports/first-gpu]
    python -m benchmarks.dev.first_gpu --device cpu          the same code in the same order, small

Each part is a command of its own with a time limit. Its output and result are written at once (`NN-name.log`, and a
line of `summary.md`), and the next part follows in any case. Nothing is downloaded: photographs come from --images or
from those that ship inside scikit-image. On a GPU the limits add up to 28 minutes, and the training of real weights
takes what the other parts leave of it. Where the GPU is available for less time, run the same command with a smaller
--budget again: parts that succeeded are not repeated (`done.json`), a part that was skipped or ran out of the budget
is. Trained weights are saved in OUT/real, and a second run resumes from them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ruamel.yaml import YAML

from pipeline import presets
from pipeline.files import write_atomic
from pipeline.parameters import params

PYTHON = [sys.executable, "-m"]
GRACE = 60  # seconds to save after SIGTERM
PATIENCE = 4  # a rehearsal on a CPU gets this many times the limits, since other work may keep the CPU busy
MIN_LEFT = 5.0  # no part starts with fewer seconds of the budget left


class Part(NamedTuple):
    """A command (or a function that returns lines) with its limit in seconds.

    until: a pattern under OUT; when a file matches it, SIGTERM stops the command, as it stops a preempted job.
    expected: exit codes that count as success.
    skipped: exit codes of a part that cannot run here; its last line says why.
    grows: whether it may take what the budget has left besides the limits of the parts after it.
    """

    name: str
    seconds: float
    work: Any
    until: str = ""
    expected: Sequence[int] = (0,)
    environment: Optional[Dict[str, str]] = None
    skipped: Sequence[int] = ()
    grows: bool = False


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.first_gpu", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--images", default="", help="folder of photographs; default: those inside scikit-image")
    parser.add_argument("--out", type=Path, default=Path("reports/first-gpu"))
    parser.add_argument("--minutes", type=float, help="of training real weights; default: what is left, on a CPU 0.5")
    parser.add_argument(
        "--budget", type=float, default=28.0, help="minutes of this call; what is left comes in the next"
    )
    parser.add_argument("--only", default="", help="parts by name, separated by commas, done again if they were done")
    args = parser.parse_args(argv)
    if args.budget <= 0 or (args.minutes or 1) <= 0:
        parser.error("--budget and --minutes must be above 0")
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = parts(args.out, args.device, _sizes(args))
    wanted = [name for name in args.only.split(",") if name]
    unknown = [name for name in wanted if name not in {part.name for part in chosen}]
    if unknown:
        parser.error(f"--only {unknown[0]}: no such part; there are {', '.join(part.name for part in chosen)}")
    _all(chosen, wanted, args)
    return 0


def _all(chosen: List[Part], wanted: List[str], args: argparse.Namespace) -> None:
    """Run the parts within the budget; summary.md keeps those of earlier calls."""
    file, end = args.out / "done.json", time.monotonic() + 60 * args.budget
    kept: Dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    done = kept.get(args.device, {})
    for number, part in enumerate(chosen):
        if part.name not in wanted if wanted else done.get(part.name, {}).get("well"):
            continue
        left = end - time.monotonic()
        if part.grows:
            part = part._replace(seconds=max(part.seconds, left - sum(each.seconds for each in chosen[number + 1 :])))
        if left < MIN_LEFT:
            row, well = f"| {part.name} | 0 | left for the next call: {60 * args.budget:.0f} s are over |", False
        else:
            row, well = run(part._replace(seconds=min(part.seconds, left)), args, number)
            well = well and (part.seconds <= left or "time is over" not in row)
        done[part.name] = {"row": row, "well": well}
        write_atomic(file, json.dumps({**kept, args.device: done}, indent=1) + "\n")
        rows = [done[each.name]["row"] for each in chosen if each.name in done]
        write_atomic(args.out / "summary.md", "\n".join(["| part | s | outcome |", "|---|---|---|", *rows, ""]))
        print(row, flush=True)


def _sizes(args: argparse.Namespace) -> Dict[str, Any]:
    """The settings that differ between a GPU and the rehearsal on a CPU, and the parameter files."""
    small = args.device == "cpu"
    steps, keypoints, batch, limit = (8, 64, 4, 6) if small else (200, 512, 64, 0)
    text = presets.render("folder" if args.images else "sample", args.images)
    base = {name: dict(values) for name, values in YAML(typ="safe", pure=True).load(text).items()}
    base["fetch"]["limit"] = limit
    base["keypoints"].update(width=320, height=240, max_keypoints=keypoints, views_per_image=4 if small else 12)
    curve = {"steps": steps, "batch": batch, "max_keypoints": keypoints, "init_from": "", "neighbours": False,
             "layers": 2 if small else 9, "optimizer": "adam", "val_every": steps, "val_pairs": 8,
             "min_keypoints": 0, "options": f"--log-every 1 --save-every {max(steps // 4, 1)}"}  # fmt: skip
    real = {**curve, "steps": 40 if small else 1_000_000, "options": "", "val_every": 5 if small else 500,
            "val_pairs": 8 if small else 512}  # fmt: skip
    for name, changes in (("curve", curve), ("real", real)):
        tree = {**base, "train": {**base["train"], **changes}}
        write_atomic(args.out / f"{name}.yaml", json.dumps(tree, indent=1))
        params.load_all(args.out / f"{name}.yaml")
    return {"small": small, "minutes": args.minutes, "steps": steps}


def parts(out: Path, device: str, sizes: Dict[str, Any]) -> List[Part]:
    """All parts, in order."""
    small = sizes["small"]
    table = [*PYTHON, "pipeline.benchmark", "--device", device, "--no-tracking", "--replace"]
    table += ["--params", str(out / "curve.yaml"), "--fetched", str(out / "images")]
    table += ["--dim", "16", "--iterations", "5", "--seconds", "0.5", "--rounds", "2"] if small else ["--dim", "256"]
    stage = ["--params", str(out / "curve.yaml")]
    images, kept = ["--images", str(out / "images")], ["--keypoints", str(out / "keypoints")]
    same = [*kept, "--deterministic"]  # only then a GPU computes the same bytes twice
    on_cpu, minutes, file = {"CUDA_VISIBLE_DEVICES": ""}, sizes["minutes"], str(out / "superglue.onnx")
    # the shipped network takes minutes to export: one core translates 9 + 9 layers and 100 iterations, one by one
    model = ["--model", str(out / "whole" / "checkpoints" / "best.safetensors")] if small else []
    found = [
        Part("doctor", 30, [*PYTHON, "pipeline.doctor"], expected=(0, 2)),
        Part("launches", 40, [*PYTHON, "benchmarks.dev.launches", "--precision", "bfloat16", "--captured",
                              *(["--pairs", "4", "--keypoints", "128", "--iterations", "2"] if small else [])]),
        Part("tests", 120, [*PYTHON, "pytest", "-q", "-m", "gpu", *(["tests/test_dali.py"] if small else [])]),
        Part("parity", 50, [*table, "--only", "parity", "--out", str(out / "parity")]),
        Part("fetch", 30, [*PYTHON, "pipeline.fetch", *stage, "--out", str(out / "images"),
                            "--archives", str(out / "archives"), "--reports", str(out / "fetch")]),
        Part("keypoints", 90, [*PYTHON, "pipeline.keypoints", *stage, *images, "--out", str(out / "keypoints"),
                               "--reports", str(out / "keypoints-report")]),
        Part("train-cpu", 60, _train(out, "curve", "cpu", same), expected=(0, 143), environment=on_cpu),
        Part("train-killed", 50, _train(out, "curve", "curve", same), "curve/checkpoints/step-*.json", (0, 143)),
        Part("train-resumed", 60, _train(out, "curve", "curve", same)),
        Part("train-whole", 60, _train(out, "curve", "whole", same)),
        Part("curves", 10, lambda: compared(out)),
        Part("step-graph", 70, [*PYTHON, "benchmarks.dev.step_graph", *stage, *kept,
                                *(["--steps", "2"] if small else ["--steps", "40", "--batch", "128"])]),
        Part("modes", 230, [*table, "--only", "modes,decoders", "--out", str(out / "modes")]),
        Part("gpu", 210, [*table, "--only", "gpu,loader,batches,memory", "--out", str(out / "gpu")]),
        Part("onnx", 180, [*PYTHON, "superglue_sift.onnx", file, *model], skipped=(2,)),
        Part("onnx-times", 30, [*PYTHON, "benchmarks.dev.onnx_times", file, "--device", device, *model], skipped=(2,)),
        Part("real", 60 * (minutes or (0.5 if small else 5.0)), _train(out, "real", "real", kept), expected=(0, 143),
             grows=minutes is None and not small),
        Part("figures", 60, [*PYTHON, "pipeline.train", "--validate-only", "--params", str(out / "real.yaml"), *kept,
                             "--out", str(out / "real" / "checkpoints"), "--reports", str(out / "real" / "reports")]),
    ]  # fmt: skip
    patience = {part.name: PATIENCE if small and part.name != "real" else 1 for part in found}
    return [part._replace(seconds=patience[part.name] * part.seconds) for part in found]


def _train(out: Path, file: str, name: str, kept: List[str]) -> List[str]:
    folders = ["--out", str(out / name / "checkpoints"), "--reports", str(out / name / "reports" / "train")]
    return [*PYTHON, "pipeline.launch", "pipeline.train", "--params", str(out / f"{file}.yaml"), *kept, *folders]


def run(part: Part, args: argparse.Namespace, number: int) -> Tuple[str, bool]:
    """Run a part; its line of the summary (name, seconds, result, last line) and whether it need not be repeated."""
    log = args.out / f"{number:02d}-{part.name}.log"
    begun = time.monotonic()
    try:
        if callable(part.work):
            lines, well = part.work()
            log.write_text("\n".join(lines) + "\n")
            outcome = "ok" if well else "FAILED"
        else:
            outcome = _command(part, args, log)
    except Exception as error:  # a failing part does not stop the others
        outcome = f"failed: {type(error).__name__}: {error}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    last = lines[-1].strip()[-160:].replace("|", "/") if lines else ""
    row = f"| {part.name} | {time.monotonic() - begun:.0f} | {outcome}: {last} |"
    return row, outcome.startswith("ok")


def _command(part: Part, args: argparse.Namespace, log: Path) -> str:
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})}
    environment.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{(args.out / 'mlflow.db').resolve()}")
    environment.update(part.environment or {})
    before = set(args.out.glob(part.until)) if part.until else set()
    with log.open("w") as stream:
        process = subprocess.Popen(part.work, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        ended = _watched(process, part, lambda: bool(part.until) and bool(set(args.out.glob(part.until)) - before))
    code = process.returncode
    word = "ok" if code in part.expected else "SKIP" if code in part.skipped else "FAILED"
    return f"{word} ({ended}, exit code {code})"


def _watched(process: subprocess.Popen, part: Part, seen: Callable[[], bool]) -> str:
    """Wait for the end; send SIGTERM when the time is over or the file of `until` exists."""
    end = time.monotonic() + part.seconds
    ended = "ended"
    while process.poll() is None:
        over = time.monotonic() > end
        if ended == "ended" and (over or seen()):
            process.send_signal(signal.SIGTERM)
            ended, end = ("time is over" if over else "stopped"), time.monotonic() + GRACE
        elif ended != "ended" and over:
            process.kill()
            return "killed"
        time.sleep(0.1)
    return ended


def compared(out: Path) -> Tuple[List[str], bool]:
    """Compare the losses of a training on the device and on the CPU, and the bytes of resumed and unbroken weights.

    Returns the lines, and whether the bytes are equal.
    """
    found = []
    for name in ("cpu", "curve"):
        with next((out / name / "reports").rglob("train.csv")).open() as stream:
            found.append({int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)})
    steps = sorted(set(found[0]) & set(found[1]))
    lines = [f"step {step}: {found[0][step]:.5f} on the CPU, {found[1][step]:.5f} on the device" for step in steps]
    away = max((abs(found[0][step] - found[1][step]) / abs(found[0][step]) for step in steps), default=float("nan"))
    how_far = f"{len(steps)} steps, largest relative difference of the loss {away:.2e}"
    both = [max((out / name / "checkpoints").glob("step-*.safetensors"), default=None) for name in ("curve", "whole")]
    ends = [path.stem if path else "no checkpoint" for path in both]
    if None in both or ends[0] != ends[1]:
        return [*lines, f"{how_far}; no bytes to compare: resumed {ends[0]}, unbroken {ends[1]}"], False
    same = both[0].read_bytes() == both[1].read_bytes()
    word = "the bytes" if same else "OTHER BYTES"
    return [*lines, f"{how_far}; resumed, {word} of the unbroken training at {ends[1]}"], same


if __name__ == "__main__":
    raise SystemExit(main())
