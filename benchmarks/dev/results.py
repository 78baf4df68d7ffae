"""Measure the tables of the documents, and write them into the pages.

    python -m benchmarks.dev.results --data DIR
    python -m benchmarks.dev.results --data DIR --only summary,oxford

A table stands in README.md, docs/ or pretrained/ between the lines `<!-- table NAME -->` and
`<!-- end NAME -->`. Its last line says from which commit, date and processor it is. The program
measures the tables whose data it finds below DIR, with the commit that is checked out. Any other
table stays as it is, and the program says which data it lacked. Results of a commit are kept in
--work, so that another call goes on where this one ended.

DIR holds any of these folders, each at its top or one folder deeper:

- `coco/train` and `coco/val`: COCO's photographs. Half of `coco/val` is tested on.
- `oxford_affine`: the sequences of Oxford, as in HPatches
- `strecha`: photographs with `pairs_with_gt.txt` and `cameras_gt.txt`
"""

from __future__ import annotations

import argparse
import datetime
import functools
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy.spatial import KDTree

from pipeline import errors, presets
from pipeline.errors import RequestError
from pipeline.evaluate.metrics import name_metric
from superglue_sift import Matcher, MatchResult
from superglue_sift.features.images import read_gray
from superglue_sift.files import write_atomically
from superglue_sift.geometry import two_view
from superglue_sift.matcher import MAX_KEYPOINTS, NETWORK_KEYPOINTS, RESIZE

ROOT = Path(__file__).resolve().parents[2]
MATCHERS = {
    "superglue": "SuperGlue",
    "ratio_test": "ratio test",
    "mutual_nn": "mutual nearest neighbors",
    "true_matches": "true matches (bound)",
}
BASELINES = {**MATCHERS, "nn": "nearest neighbors"}
PAIR = ("superglue", "ratio_test")  # what a cell with two values compares
# Headings of metrics, by their name, estimator and whether matches are refined
HOMOGRAPHIES = {
    ("precision", "", False): "P",
    ("recall", "", False): "R",
    ("recall_at_ratio_precision", "", False): "R@P",
    ("auc_5", "ransac", False): "AUC@5 RANSAC",
    ("auc_5", "ransac", True): "refined",
    ("auc_5", "dlt", False): "AUC@5 least squares",
    ("auc_5", "dlt", True): "refined ",  # a heading of its own for pandas
}
WORDS = {
    "P": "precision",
    "R": "recall",
    "R@P": "recall at the ratio test's precision",
    "refined": "AUC@5 RANSAC, refined matches",
    "refined ": "AUC@5 least squares, refined matches",
}
POSES = {
    ("precision", "", False): "P",
    ("matching_score", "", False): "MS",
    ("matching_score_at_ratio_precision", "", False): "MS@P",
    ("auc_5", "poselib", False): "AUC@5 PoseLib",
    ("auc_5", "poselib", True): "refined",
    ("auc_20", "poselib", True): "AUC@20, refined",
}
DISTURBANCES = {
    ("precision", "", False): "P",
    ("recall", "", False): "R",
    ("recall_at_ratio_precision", "", False): "R@P",
    ("auc_5", "ransac", True): "AUC@5 RANSAC, refined",
}
# Pairs of photographs of Herz-Jesus-P25, and the sizes that the second one gets
PAIRS_OF_SIZES = ((3, 4), (6, 7), (10, 11), (14, 15), (2, 4), (20, 22))
SIDES = (384, 512, 640, 768, 1024, 1536, 2048, 4096)  # px, longer side
SAME_PX = 3.0  # a match is the same up to this distance, in px of an image of 1,024 px
VIEWS = {"width": 640, "height": 480, "max_keypoints": 512, "pairs_per_image": 2}


class Missing(Exception):
    """The data of a table are missing. The message names them."""


class Bench:
    """Run commands whose results are kept, one folder each, as long as the commit is the same.

    Args:
        data: folder of the data sets.
        work: folder of the results.
        commit: the commit that is checked out.
    """

    def __init__(self, data: Path, work: Path, commit: str):
        self.data = data
        self.work = work.resolve()
        self.commit = commit

    def find(self, name: str) -> Path:
        """Return the folder of a data set. Raises Missing if there is none."""
        folders = [self.data / name, *sorted(self.data.glob(f"*/{name}"))]
        for folder in folders:
            if folder.is_dir():
                return folder.resolve()
        raise Missing(f"{self.data} has no folder {name}")

    def run(self, name: str, *words: Any) -> Path:
        """Run `python -m WORDS` with its results in the folder `name`, unless that is done.

        `{out}` among the words is that folder. What the command prints is in its file `printed`.
        Raises RequestError if the command fails.
        """
        folder = self.work / name
        command = ["-m", *(str(word).replace("{out}", str(folder)) for word in words)]
        receipt = {"commit": self.commit, "command": command}
        receipt_file = folder / "receipt.json"
        if receipt_file.is_file() and json.loads(receipt_file.read_text()) == receipt:
            return folder
        print(f"{name}: python {' '.join(command)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise RequestError(f"{name}: the command above ended with {done.returncode}")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        write_atomically(folder / "printed", done.stdout)
        write_atomically(receipt_file, json.dumps(receipt))
        return folder

    def fetch(self, name: str, train: Path, held_out: Path, **evaluate: Any) -> Tuple[Path, Path]:
        """List photographs as the stage `fetch` does. Half of `held_out` is tested on.

        Returns:
            The file of parameters, with the keys `evaluate`, and the folder of the images.
        """
        yaml = YAML()
        parameters = yaml.load(presets.read_preset("folder"))
        paths = {"path": str(train), "val_path": str(held_out)}
        parameters["fetch"].update(paths)
        parameters["evaluate"].update(evaluate)
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "params.yaml"
        with file.open("w", encoding="utf-8") as stream:
            yaml.dump(parameters, stream)
        images = self.run(
            f"{name}/images", "pipeline.fetch", "--params", file, "--out", "{out}",
            "--archives", folder / "archives", "--reports", folder / "reports",
        )  # fmt: skip
        return file, images


# --- from the files of an evaluation to tables


def format_percent(value: Optional[float]) -> str:
    """Return a fraction in percent, and "-" for a metric that is not defined."""
    return "-" if value is None or pd.isna(value) else f"{100 * value:.1f}"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a table of text as Markdown. Its index is the first column."""
    rows = [[str(frame.columns.name or ""), *frame.columns], ["---"] * (1 + len(frame.columns))]
    rows += [[str(index), *row] for index, *row in frame.itertuples(name=None)]
    return "\n".join(f"| {' | '.join(str(cell).strip() for cell in row)} |" for row in rows)


def make_metrics_table(folder: Path, headings: Dict[Tuple[str, str, bool], str]) -> str:
    """Return the metrics of each matcher in percent, and the gain over the ratio test."""
    values = json.loads((folder / "metrics.json").read_text())
    rows = {
        title: [format_percent(values.get(f"{matcher}.{name_metric(*key)}")) for key in headings]
        for matcher, title in MATCHERS.items()
        if f"{matcher}.precision" in values
    }
    # The difference from the ratio test, with the interval of resampled scenes.
    differences = pd.read_csv(folder / "differences.csv")
    differences = differences[differences.baseline == "ratio_test"].set_index("metric")
    names = [name_metric(*key) for key in headings]
    rows["SuperGlue minus ratio test"] = [
        format_gain(differences.loc[name]) if name in differences.index else "-" for name in names
    ]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(headings.values()))
    return to_markdown(table.rename_axis(columns="in %"))


def format_gain(row: pd.Series) -> str:
    """Return a difference in points, with its 95 % interval where there are enough scenes."""
    value = f"{100 * row.value:+.1f}"
    has_interval = row.verdict != "too few"
    return f"{value} ({100 * row.low:+.1f} to {100 * row.high:+.1f})" if has_interval else value


def make_robustness_table(
    folder: Path, headings: Dict[Tuple[str, str, bool], str], zoom: bool
) -> pd.DataFrame:
    """Return a row for each disturbance, or for each magnification if `zoom`.

    A cell has the value of SuperGlue and that of the ratio test.
    """
    rows = pd.read_csv(folder / "robustness.csv")
    rows = rows[(rows.condition == "zoom") == zoom]
    cells = rows.set_index(["condition", "level", "metric", "matcher"]).value
    lines = {}
    for condition, level in dict.fromkeys(zip(rows.condition, rows.level)):
        name = f"{level:g}" if zoom else f"{condition} {level:g}"
        lines[name] = [
            " \\| ".join(
                format_percent(cells.get((condition, level, name_metric(*key), m))) for m in PAIR
            )
            for key in headings
        ]
    return pd.DataFrame.from_dict(lines, orient="index", columns=list(headings.values()))


# --- the tables, by their names


def evaluate_coco(bench: Bench) -> Path:
    """Evaluate the network alone on views of COCO's held-out photographs, also disturbed ones."""
    return evaluate_views(bench, "coco/report", "--robustness", 12)


def evaluate_users(bench: Bench) -> Path:
    """Evaluate the same views, matched as `superglue-match` does by default."""
    return evaluate_views(
        bench, "users", "--max-keypoints", MAX_KEYPOINTS, "--network-keypoints", NETWORK_KEYPOINTS,
        "--resize", RESIZE,
    )  # fmt: skip


def evaluate_views(bench: Bench, name: str, *options: Any) -> Path:
    """Evaluate views of COCO's held-out photographs. The results are in the folder `name`."""
    train = bench.find("coco/train")
    held_out = bench.find("coco/val")
    file, images = bench.fetch("coco", train, held_out, **VIEWS)
    words = "--params", file, "--images", images, "--bound", *options, "--out", "{out}"
    return bench.run(name, "pipeline.evaluate", *words)


def evaluate_oxford(bench: Bench, *options: Any) -> Path:
    """Evaluate the sequences of Oxford, as `superglue-match` matches them."""
    name = "-".join(["oxford", *(str(option).strip("-") for option in options)])
    pairs = bench.find("oxford_affine")
    words = "--pairs", pairs, "--bound", *options, "--out", "{out}"
    return bench.run(name, "pipeline.evaluate", *words)


def make_short_table(folder: Path, matchers: Sequence[str], refined: bool) -> str:
    """Return six metrics and the matches between unrelated photographs, for README.

    Args:
        folder: the report of an evaluation.
        matchers: the matchers, in the order of the columns.
        refined: whether the homographies are of refined matches.
    """
    values = json.loads((folder / "metrics.json").read_text())
    auc_titles = {
        "ransac": "AUC@10 of the homography, RANSAC",
        "dlt": "AUC@10, least squares, weighted by confidence",
        "confident": "AUC@10, least squares, equal weights of the most confident matches",
    }
    titles = {
        "precision": "precision",
        "recall": "recall",
        "recall_at_ratio_precision": "recall at the ratio test's precision",
        **{name_metric("auc_10", name, refined): title for name, title in auc_titles.items()},
    }
    rows = {
        title: [format_percent(values.get(f"{matcher}.{metric}")) for matcher in matchers]
        for metric, title in titles.items()
    }
    title = "matches between two photographs with nothing in common (a number, not %)"
    rows[title] = [f"{values[f'{matcher}.negative_matches']:.1f}" for matcher in matchers]
    heads = [MATCHERS[matcher] for matcher in matchers]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return to_markdown(table.rename_axis(columns="in %"))


def summary(bench: Bench) -> str:
    """Return the table of README: what `superglue-match` does, beside the ratio test."""
    return make_short_table(evaluate_users(bench), PAIR, refined=True)


def users(bench: Bench) -> str:
    """Return the same results with those of other matchers, and with intervals."""
    return make_metrics_table(evaluate_users(bench), HOMOGRAPHIES)


def network(bench: Bench) -> str:
    """Return the results of the network alone, which gets all of 512 keypoints."""
    matchers = ("superglue", "ratio_test", "mutual_nn")
    return make_short_table(evaluate_coco(bench), matchers, refined=False)


def weights(bench: Bench) -> str:
    """Return the table of the model card: the gain over the best baseline of each metric."""
    folder = evaluate_coco(bench)
    values = json.loads((folder / "metrics.json").read_text())
    differences = pd.read_csv(folder / "differences.csv")
    rows = {}
    for key, heading in HOMOGRAPHIES.items():
        metric = name_metric(*key)
        cells = [format_percent(values.get(f"{matcher}.{metric}")) for matcher in PAIR]
        # The best baseline is the one from which SuperGlue differs least.
        best = differences[differences.metric == metric].sort_values("value").iloc[0]
        title = BASELINES.get(best.baseline, best.baseline)
        rows[WORDS.get(heading, heading)] = [*cells, format_gain(best), title]
    heads = [*(MATCHERS[matcher] for matcher in PAIR), "gain over the best baseline", "which is"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return to_markdown(table.rename_axis(columns="in %"))


def disturbances(bench: Bench) -> str:
    """Blur, noise, light and JPEG."""
    return to_markdown(make_robustness_table(evaluate_coco(bench), DISTURBANCES, zoom=False))


def rotation(bench: Bench) -> str:
    """Views that are rotated up to an angle."""
    train = bench.find("coco/train")
    held_out = bench.find("coco/val")
    rows = {}
    for degrees in (0, 45, 90, 180):
        name = f"rotation-{degrees}"
        views = {"homography": {"rotation_deg": float(degrees)}}
        file, images = bench.fetch(name, train, held_out, **VIEWS, views=views)
        folder = bench.run(
            f"{name}/report", "pipeline.evaluate", "--params", file, "--images", images,
            "--no-refine", "--estimators", "ransac", "--out", "{out}",
        )  # fmt: skip
        values = json.loads((folder / "metrics.json").read_text())
        names = ("precision", "recall", "recall_at_ratio_precision", "auc_ransac_5")
        rows[f"{degrees}"] = [
            " \\| ".join(format_percent(values.get(f"{matcher}.{metric}")) for matcher in PAIR)
            for metric in names
        ]
    heads = ["P", "R", "R@P", "AUC@5 RANSAC"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return to_markdown(table.rename_axis(columns="rotation up to, degrees"))


def zoom(bench: Bench) -> str:
    """Photographs of buildings with magnified parts of them."""
    buildings = bench.find("strecha")
    views = {"homography": {"max_upscale": 5.0}}
    sizes = {"width": 768, "height": 512, "max_keypoints": 1024, "pairs_per_image": 1}
    train = bench.find("coco/train")
    file, images = bench.fetch("zoom", train, buildings, **sizes, views=views)
    folder = bench.run(
        "zoom/report", "pipeline.evaluate", "--params", file, "--images", images,
        "--robustness", 20, "--no-refine", "--estimators", "ransac", "--out", "{out}",
    )  # fmt: skip
    headings = dict(list(DISTURBANCES.items())[:3])
    table = make_robustness_table(folder, headings, zoom=True)
    return to_markdown(table.rename_axis(columns="magnification"))


def oxford(bench: Bench) -> str:
    """Return the metrics of all pairs of Oxford."""
    return make_metrics_table(evaluate_oxford(bench), HOMOGRAPHIES)


def sequences(bench: Bench) -> str:
    """Each sequence of Oxford."""
    pairs = pd.read_csv(evaluate_oxford(bench) / "pairs.csv")
    names = {key: title for key, title in MATCHERS.items() if key in set(pairs.matcher)}
    recall = pairs.pivot_table(index="scene", columns="matcher", values="recall", sort=True)
    precision = pairs.pivot_table(index="scene", columns="matcher", values="precision", sort=True)
    shown = [key for key in names if key != "true_matches"]
    cells = pd.DataFrame(
        {
            names[key]: [
                f"{format_percent(p)}; {format_percent(r)}"
                for p, r in zip(precision[key], recall[key])
            ]
            for key in shown
        },
        index=recall.index,
    )
    return to_markdown(cells.rename_axis(index=None, columns="precision; recall, %"))


def selection(bench: Bench) -> str:
    """Right matches on Oxford, where the network sees all keypoints, or a quarter of them."""
    rows = {}
    for most, count in ((1024, 1024), (2048, 2048), (4096, 1024)):
        options = "--no-refine", "--max-keypoints", most, "--network-keypoints", count
        rows[f"{most:,}"] = [f"{count:,}", *count_right_matches(evaluate_oxford(bench, *options))]
    heads = ["of them for the network", *(f"right matches, {MATCHERS[name]}" for name in PAIR)]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return to_markdown(table.rename_axis(columns="keypoints of an image"))


def count_right_matches(folder: Path) -> List[str]:
    """Return the right matches of a pair at the ratio test's precision for each matcher of PAIR."""
    values = json.loads((folder / "metrics.json").read_text())
    pairs = pd.read_csv(folder / "pairs.csv")
    true_matches = pairs[pairs.matcher == PAIR[0]].true_matches.mean()
    metric = "recall_at_ratio_precision"
    return [f"{values[f'{name}.{metric}'] * true_matches:.0f}" for name in PAIR]


def buildings(bench: Bench) -> str:
    """Pairs of photographs of buildings with known cameras."""
    images = bench.find("strecha")
    folder = bench.run(
        "buildings", "pipeline.evaluate", "--poses", images / "pairs_with_gt.txt",
        "--images", images, "--out", "{out}",
    )  # fmt: skip
    return make_metrics_table(folder, POSES)


def file_sizes(bench: Bench) -> str:
    """Return how many matches there are if the second file of a pair has another size."""
    folder = bench.find("strecha")
    matcher = Matcher.load()
    heads = ["matches", "the same matches", "refined matches"]
    counts = pd.DataFrame(0.0, index=SIDES, columns=heads)
    for numbers in PAIRS_OF_SIZES:
        paths = [folder / f"Herz-Jesus-P25_{number:04}.jpg" for number in numbers]
        image0, image1 = (resize_to(read_gray(path), RESIZE) for path in paths)
        features0 = matcher.extract(image0)
        result = matcher.match(features0, image1)
        for side in SIDES:
            resized = matcher.match(features0, resize_to(image1, side))
            refined = int(np.isfinite(resized.deviations).sum())
            counts.loc[side] += [len(resized.scores), count_found_again(result, resized), refined]
    totals = counts.loc[RESIZE]
    percents = (100 * counts / totals).round().astype(int).astype(str)
    percents.columns = [f"{name}, % of {totals[name]:,.0f}" for name in heads]
    percents.index = [f"{side:,}" for side in SIDES]
    return to_markdown(percents.rename_axis(columns="longer side of the second file, px"))


def resize_to(image: np.ndarray, side: int) -> np.ndarray:
    """Resize an image (H, W) uint8, so that its longer side is `side` px."""
    scale = side / max(image.shape)
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return cv2.resize(image, None, fx=scale, fy=scale, interpolation=method)


def count_found_again(result: MatchResult, resized: MatchResult) -> int:
    """Count the matches of `result` that `resized` has, too.

    A match is found again if `resized` has a match that is at most SAME_PX away along each axis of
    both images.
    """
    H_resized_to_1 = two_view.map_to_resized(resized.size1, result.size1)
    points1 = two_view.transform(resized.points1, H_resized_to_1)
    tree = KDTree(np.hstack([resized.points0, points1]))
    positions = np.hstack([result.points0, result.points1])
    return int(np.isfinite(tree.query(positions, p=np.inf, distance_upper_bound=SAME_PX)[0]).sum())


def scenes(bench: Bench) -> str:
    """COLMAP models of two places, from our matches and from COLMAP's, over five seeds."""
    images = bench.find("strecha")
    folder = bench.run(
        "scenes", "benchmarks.dev.scenes", images, "--cameras", images / "cameras_gt.txt",
        "--ways", "superglue", "stored", "colmap", "--seeds", 5,
    )  # fmt: skip
    return (folder / "printed").read_text().strip()


def collections(bench: Bench) -> str:
    """How many right pairs are refused, and wrong ones accepted, among known cameras."""
    images = bench.find("strecha")
    folder = bench.run(
        "collections", "benchmarks.dev.verification", "--check", images, images / "cameras_gt.txt"
    )
    return "```\n" + (folder / "printed").read_text().rstrip() + "\n```"


def places(bench: Bench) -> str:
    """How often one place or two are taken for the other, by weights that are learned again."""
    photographs = bench.find("coco/val"), bench.find("coco/train")
    folder = bench.run("places", "benchmarks.dev.verification", *photographs)
    # The last block counts the places from which nothing was learned.
    block = (folder / "printed").read_text().rstrip().split("\n\n")[-1]
    table = pd.read_csv(io.StringIO(block), sep=r"\s{2,}", engine="python", index_col=0)
    shown = [name for name in table if name.split()[-1] in ("pairs", "right", "0.5", "0.9", "0.98")]
    return to_markdown(table[shown].rename_axis(index=None, columns=""))


def sample(bench: Bench) -> str:
    """The sample, whose metrics are in git: `make repro` writes them."""
    values = json.loads((ROOT / "reports" / "evaluate" / "metrics.json").read_text())
    names = ("precision", "recall", "recall_at_ratio_precision", "auc_ransac_5", "auc_dlt_5")
    titles = {"shipped_weights": "shipped weights", **MATCHERS}
    order = ["superglue", "shipped_weights", "ratio_test", "mutual_nn"]
    rows = {
        titles[key]: [format_percent(values.get(f"{key}.{name}")) for name in names]
        for key in order
    }
    heads = ["P", "R", "R@P", "AUC@5 RANSAC", "AUC@5 least squares"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=heads)
    return to_markdown(table.rename_axis(columns="in %"))


def speed(bench: Bench) -> str:
    """Return what the benchmark prints on this processor."""
    groups = "step,sinkhorn,latency,files,modes"
    folder = bench.run("speed", "benchmarks", "--device", "cpu", "--only", groups)
    return "```\n" + (folder / "printed").read_text().rstrip() + "\n```"


TABLES: Dict[str, Callable[[Bench], str]] = {
    function.__name__: function
    for function in (
        summary, users, network, weights, disturbances, rotation, zoom, oxford, sequences,
        selection, buildings, file_sizes, scenes, collections, places, sample, speed,
    )
}  # fmt: skip


# --- into the pages


def find_pages(name: str) -> List[Path]:
    """Return the pages that have a table."""
    pages = [ROOT / "README.md", ROOT / "pretrained" / "README.md"]
    pages += sorted((ROOT / "docs").glob("*.md"))
    return [page for page in pages if f"<!-- table {name} -->" in page.read_text(encoding="utf-8")]


def replace_table(page: Path, name: str, content: str) -> None:
    """Replace a table of a page."""
    text = page.read_text(encoding="utf-8")
    begin = f"<!-- table {name} -->"
    end = f"<!-- end {name} -->"
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    write_atomically(page, f"{before}{begin}\n{content}\n{end}{after}")


def read_origin(page: Path, name: str) -> str:
    """Return the line that says where the table of a page is from."""
    between = page.read_text(encoding="utf-8").split(f"<!-- table {name} -->")[1]
    lines = between.split(f"<!-- end {name} -->")[0].strip().splitlines()
    return lines[-1] if lines and lines[-1].startswith("Measured") else "It is empty."


@functools.cache
def name_processor() -> str:
    """Return the name of the processor and the number of its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{re.sub(r'[(](R|TM)[)]', '', name)}, {os.cpu_count()} cores"


def read_commit() -> str:
    """Return the commit. Raises RequestError if the code has changes that are not in it."""
    measured = ("superglue_sift", "pipeline", "pretrained/*.safetensors")
    command = ["git", "status", "--porcelain", "--", *measured]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changed:
        raise RequestError(f"commit first, so that the tables name a commit: {changed.split()[1]}")
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure the tables and write them. Returns 1 if a table lacks its data, else 0."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder of the data sets")
    add("--only", default="", metavar="NAMES", help=f"of: {', '.join(TABLES)}; with commas")
    add("--work", type=Path, default=Path("results"), help="folder of the results that are kept")
    options = parser.parse_args(argv)
    names = options.only.split(",") if options.only else list(TABLES)
    bench = Bench(options.data, options.work, read_commit())
    today = datetime.date.today().isoformat()
    measured = f"Measured at commit {bench.commit}, {today}, {name_processor()}."
    lacking = 0
    for name in names:
        pages = find_pages(name)
        if not pages:
            print(f"SKIP {name}: no page has this table")
            continue
        try:
            table = TABLES[name](bench)
        except Missing as missing:
            lacking = 1
            print(f"SKIP {name}: {missing}. The table stays: {read_origin(pages[0], name)}")
            continue
        for page in pages:
            replace_table(page, name, f"\n{table}\n\n{measured}\n")
            print(f"{name}: written to {page.relative_to(ROOT)}", flush=True)
    return lacking


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
