"""Match photographs with a trained model: two images, a folder, a list of pairs, a video, a camera.

  superglue-match A.jpg B.jpg --out matches.png       two images: a picture, the numbers of matches
  superglue-match A.jpg B.jpg --json matches.json     keypoints, matches, scores, homography
  superglue-match A.jpg B.jpg --out m.png --homography     also A warped onto B: m_overlay.jpg,
                                                           m_blink.gif
  superglue-match photos/ --out-dir found             all pairs of a folder
  superglue-match photos/*.jpg --out-dir found        all pairs of these files
  superglue-match photos/ --out-dir found --pairing nearest --k 10       with the 10 most similar
  superglue-match photos/ --out-dir found --pairing sequential --k 5     with the 5 before it
  superglue-match photos/ --out-dir found --scene     photographs of one place: pairs.csv lists the
                                                      accepted pairs
  superglue-match photos/ --out-dir found --colmap database.db     also a COLMAP database
  superglue-match --pairs pairs.txt --root photos --out-dir found  a pair `a.jpg b.jpg` in each line
  superglue-match walk.mp4 --out-dir found --every 10 --pictures   frames 0, 10, 20, ...
  superglue-match --camera 0 --out-dir found --frames 100
  superglue-match --serve                             a local page for the browser

In --out-dir each pair has a file A_B_matches.npz: keypoints0 (M, 2), keypoints1 (N, 2), matches
(M,) with -1 for none, match_confidence (M,); aligned0, aligned1 (M, 2), positions aligned by the
pixels around them, deviations (M,) in px, NaN where alignment failed, and correlations (M,);
made_from: digests of both images, weights, settings, versions. The same command resumes where it
was stopped; pairs with other inputs are computed again. Unreadable images are listed in
bad_images.csv, the others are matched, and the exit code is 1. DIR is never searched for
photographs. Keypoints are pixels of the images, rotated upright according to EXIF or, with --frame
stored, as in the file: x right, y down, (0, 0) the centre of the first pixel. Each result states
its frame.
"""

from __future__ import annotations

from superglue_sift import threads

if __name__ == "__main__":
    threads.wait_passively()  # before torch is imported

import argparse
import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import ContextManager, Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift import __version__, errors, scenes
from superglue_sift.apps import many, results, retrieval
from superglue_sift.errors import RequestError, WorkError, check_range
from superglue_sift.extractors import DEFAULT
from superglue_sift.files import check_writable, file_sha256, write_csv
from superglue_sift.images import EXTENSIONS, FRAMES, STORED, UPRIGHT
from superglue_sift.matcher import Matcher
from superglue_sift.sift import WEAK
from superglue_sift.weights import shipped_weights

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
RULES = ("accept", "strict", "likely", "network_keypoints")  # fields of `scenes.Rules`
BAD_IMAGES = "bad_images.csv"  # of --out-dir
# Of options; port 0: any free one.
RANGES = {
    "threshold": (0, 1),
    "strict": (0, 1),
    "resize": (0, math.inf),
    "likely": (0, math.inf),
    "port": (0, 65535),
}
# Options from 1 on
COUNTS = ("max_keypoints", "k", "every", "frames", "accept", "network_keypoints")


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the command line. Raises RequestError for invalid options."""
    title, _, examples = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        "superglue-match", description=title, epilog="examples:\n" + examples
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "inputs", nargs="*", type=Path, help="two or more images, or a folder, or a video"
    )
    parser.add_argument("--version", action="version", version=f"superglue-sift {__version__}")
    _add_what(parser.add_argument_group("what to match"))
    _add_output(parser.add_argument_group("what to write"))
    _add_how(parser.add_argument_group("how to match"))
    page = parser.add_argument_group("a page for the browser (pip install 'superglue-sift[serve]')")
    page.add_argument("--serve", action="store_true", help="drop two images and move the threshold")
    page.add_argument("--port", type=int, default=8010, help="on 127.0.0.1 (default 8010)")
    args = parser.parse_args(argv)
    _check(args)
    return args


def _add_what(group) -> None:
    add = group.add_argument
    add(
        "--pairs",
        type=Path,
        metavar="FILE",
        help='text file, `a b` in each line; names with spaces in "quotes"',
    )
    add("--root", type=Path, help="folder of the images in --pairs (default: that of the file)")
    add(
        "--camera", type=int, metavar="N", help="camera N of this machine, until Ctrl-C or --frames"
    )
    pairing = (
        "pairs of a folder: all; each image with the K before it by name, or with the K most"
        " similar; or auto "
    )
    pairing += (
        f"(default): all pairs of up to {many.MAX_EXHAUSTIVE} images, else the K most similar"
    )
    add("--pairing", choices=("auto", "exhaustive", *many.NEIGHBOURS), help=pairing)
    add("--k", type=int, help="for sequential and video (default 5) and nearest (default 20)")
    add(
        "--every",
        type=int,
        metavar="N",
        help="use every N-th frame of a video or camera (default 1)",
    )
    add("--frames", type=int, metavar="N", help="use at most N frames of a video or camera")


def _add_output(group) -> None:
    add = group.add_argument
    add("--out", type=Path, help="for two images: picture of the matches (png, jpg or webp)")
    add("--json", type=Path, help="for two images: keypoints and matches")
    add(
        "--out-dir",
        type=Path,
        metavar="DIR",
        help="for any number of images: A_B_matches.npz for each pair",
    )
    add("--pictures", action="store_true", help="with --out-dir: also A_B_matches.jpg")
    add("--json-files", action="store_true", help="with --out-dir: also A_B_matches.json")
    warped = (
        "also the first image warped onto the second, A_B_overlay.jpg, and both blinking,"
        " A_B_blink.gif"
    )
    add("--homography", action="store_true", help=warped)
    database = "for a folder or --pairs: also a COLMAP database, ready to map "
    add(
        "--colmap",
        type=Path,
        metavar="FILE",
        help=database + "(pip install 'superglue-sift[colmap]')",
    )
    add(
        "--features",
        type=Path,
        metavar="DIR",
        help="folder of the features (default: OUT-DIR/features)",
    )


def _add_how(group) -> None:
    add = group.add_argument
    add("--model", type=Path, help="model file (default: the shipped weights)")
    add(
        "--max-keypoints",
        type=int,
        help="maximum number of keypoints per image (default 1024, with --scene 8192)",
    )
    add(
        "--threshold",
        type=float,
        help="minimum probability of a match (default: the model's own, else 0.2)",
    )
    add(
        "--resize",
        type=int,
        help="reduce images to this longer side (default 1024, with --scene 1600; 0: never)",
    )
    place = (
        "photographs of one place: accept or reject pairs, then fill them (default with --colmap,"
        " else --no-scene)"
    )
    add("--scene", action=argparse.BooleanOptionalAction, help=place)
    accept = (
        f"with --scene: minimum number of strict matches of one geometry (default {scenes.ACCEPT})"
    )
    add("--accept", type=int, metavar="N", help=accept)
    strict = f"with --scene: matches above this confidence are strict (default {scenes.STRICT})"
    add("--strict", type=float, metavar="P", help=strict)
    skip = (
        "with --scene: skip pairs with fewer classical matches of one geometry (default"
        f" {scenes.LIKELY}; 0: none)"
    )
    add("--likely", type=int, metavar="N", help=skip)
    few = (
        "with --scene: number of keypoints that the network sees (default"
        f" {scenes.NETWORK_KEYPOINTS})"
    )
    add("--network-keypoints", type=int, metavar="N", help=few)
    add(
        "--extractor",
        metavar="MODULE:FUNCTION",
        help="required for non-SIFT models: allows this code to run",
    )
    add("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    frame = (
        "frame of coordinates: upright (default), rotated according to EXIF, like cv2.imread; or"
        " stored, as in the "
    )
    frame += "file. Pictures are always upright, a COLMAP database is always of stored pixels"
    add("--frame", default=UPRIGHT, choices=FRAMES, help=frame)
    exact = "align matches, and keypoints of --colmap, by the pixels of the images (default)"
    add("--refine", action=argparse.BooleanOptionalAction, default=True, help=exact)
    faster = "of the network's layers; bfloat16 is faster on GPUs and on CPUs with AMX"
    add("--precision", default="float32", choices=("float32", "bfloat16"), help=faster)


def _check(args: argparse.Namespace) -> None:
    for name, (least, most) in {**RANGES, **dict.fromkeys(COUNTS, (1, math.inf))}.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), least, most)
    args.scene = args.colmap is not None if args.scene is None else args.scene
    for name in RULES:
        if getattr(args, name) is not None and not args.scene:
            raise RequestError(f"--{name.replace('_', '-')} goes with --scene")
    if args.out and args.out.suffix.lower() not in PICTURES:
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    _check_inputs(args)
    _check_files(args)


def _check_inputs(args: argparse.Namespace) -> None:
    asked = [len(args.inputs) > 0, args.pairs is not None, args.camera is not None, args.serve]
    one = args.inputs[0] if len(args.inputs) == 1 else None
    if one is not None and one.suffix.lower() in EXTENSIONS and not one.is_dir():
        raise RequestError(
            f"{one}: one image; matching needs two: superglue-match {one} OTHER{one.suffix}"
        )
    folder = next((path for path in args.inputs if path.is_dir()), None)
    if len(args.inputs) > 1 and folder is not None:
        raise RequestError(f"{folder}: a folder among {len(args.inputs)} inputs; name it alone")
    if sum(asked) != 1:
        sources = "two images, a folder, a video, --pairs FILE, --camera N or --serve"
        raise RequestError(f"name {sources}; see --help for examples")
    _check_choice(args)
    if args.frame == STORED and (
        args.serve or args.camera is not None or (one is not None and not one.is_dir())
    ):
        raise RequestError(
            "--frame stored goes with photographs: a video and the page are shown upright"
        )


def _check_choice(args: argparse.Namespace) -> None:
    """Refuse options that choose frames or pairs where there is nothing to choose."""
    moving = args.camera is not None or (len(args.inputs) == 1 and not args.inputs[0].is_dir())
    many_images = len(args.inputs) > 2 or (len(args.inputs) == 1 and not moving)
    for name in ("every", "frames"):
        if getattr(args, name) and not moving:
            raise RequestError(f"--{name} goes with a video or --camera")
    if args.pairing and not many_images:
        raise RequestError("--pairing goes with a folder or more than two images")
    if args.k and not (many_images or moving):
        raise RequestError("--k goes with a folder, more than two images, a video or --camera")


def _check_files(args: argparse.Namespace) -> None:
    if not args.out_dir and not args.serve and len(args.inputs) != 2:
        raise RequestError("--out-dir DIR: name the folder for the results")
    for name in ("features", "pictures", "json_files", "colmap"):
        if getattr(args, name) and not args.out_dir:
            raise RequestError(f"--{name.replace('_', '-')} goes with --out-dir DIR")
    if (len(args.inputs) != 2 or args.out_dir) and (args.out or args.json):
        raise RequestError(
            "--out and --json are for two images; with --out-dir, use --pictures --json-files"
        )
    if args.homography and not (args.out or args.out_dir):
        raise RequestError("--homography needs --out or --out-dir")
    if args.colmap and not (args.pairs or (len(args.inputs) == 1 and args.inputs[0].is_dir())):
        raise RequestError("--colmap needs a folder or --pairs")
    if args.colmap and args.colmap.exists():
        raise RequestError(
            f"--colmap {args.colmap}: exists already; delete it or name another database"
        )
    for path in filter(None, (args.out, args.json, args.colmap)):
        check_writable(path)
    if args.out_dir:
        check_writable(args.out_dir / BAD_IMAGES, named=args.out_dir)
    _check_packages(args)


def _check_packages(args: argparse.Namespace) -> None:
    """Check optional packages before any work. Raises RequestError if one is missing."""
    if args.colmap:
        from superglue_sift.interop import colmap

        colmap.library()
    if args.serve:
        from superglue_sift.apps import serve

        serve.library()


def load(args: argparse.Namespace) -> Matcher:
    """Load the matcher."""
    names = (
        "max_keypoints",
        "resize",
        "threshold",
        "precision",
        "extractor",
        "scene",
        "refine",
        "frame",
    )
    options = {name: getattr(args, name) for name in names}
    rules = {name: getattr(args, name) for name in RULES if getattr(args, name) is not None}
    return Matcher.load(args.model, args.device, **options, **rules)


def match_two(args: argparse.Namespace) -> int:
    """Match two images; print a summary and write the requested files."""
    matcher = load(args)
    started = time.perf_counter()
    sides = matcher.extract_all(args.inputs)
    extracted = time.perf_counter()
    found = matcher.match(*sides)
    matched = time.perf_counter()
    fitted = found.fits()
    print(
        f"keypoints {len(found.keypoints0)} and {len(found.keypoints1)}, matches"
        f" {len(found.matches)}"
    )
    print(", ".join(f"{name} inliers {int(fit.inliers.sum())}" for name, fit in fitted.items()))
    if found.deviations is not None:
        known = found.deviations[np.isfinite(found.deviations)]
        size = (
            f", by their deviations to {np.median(known):.2f} px at the median"
            if len(known)
            else ""
        )
        print(f"aligned {len(known)} of {len(found.matches)} matches{size}")
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    written = []
    if args.json:
        about = {f"image{side}": str(path) for side, path in enumerate(args.inputs)}
        about["model"] = str(args.model or shipped_weights())
        results.write_json(args.json, found, fitted, about)
        written.append(args.json)
    if args.out:
        results.write_picture(args.out, found, fitted)
        written.append(args.out)
    H_0to1 = fitted["homography"].model
    if args.out and args.homography and H_0to1 is not None:
        written += results.write_overlay(args.out.with_suffix(""), found, H_0to1)
    for path in written:
        print(f"written {path}")
    return 0


def match_many(args: argparse.Namespace) -> int:
    """Match any number of pairs into --out-dir."""
    matcher = load(args)
    if matcher.extractor is None:
        name = matcher.model.config.extractor
        raise RequestError(
            f"--extractor {name}: required, since the model needs this code to find keypoints"
        )
    pairing = args.pairing or "auto"
    if matcher.extractor.name != DEFAULT.name and pairing == "nearest":
        raise RequestError("--pairing nearest compares SIFT features; use exhaustive or sequential")
    store = many.FeatureStore(matcher, args.features or args.out_dir / "features")
    camera = args.camera is not None
    settings = settings_of(args, matcher)
    output = many.Output(
        args.out_dir, args.json_files, args.pictures, args.homography, camera, settings
    )
    bad = {}
    expansion = None
    if args.pairs:
        pairs, bad = listed(args, store)
        total = len(pairs)
    elif camera or (len(args.inputs) == 1 and not args.inputs[0].is_dir()):
        pairs = many.sequential(open_video(args), args.k or many.NEIGHBOURS["sequential"])
        total = None
    else:
        photos, bad = many.prepare(named_inputs(args), store)
        pairs, total = many.choose_pairs(photos, store, pairing, args.k)
        if (
            matcher.rules
            and pairing == "auto"
            and many.resolved(photos, store, "auto") == "nearest"
        ):
            expansion = retrieval.Expansion(photos)
    listing = contextlib.nullcontext()
    if matcher.rules:
        listing = results.pair_list(args.out_dir, root_of(args))
    with database(args, store) as add, listing as add_row:
        run = many.Run(store, output, list(filter(None, (add, add_row, expansion))))
        run.match(pairs, total)
        total = (total or 0) + expand(run, expansion) if expansion else total
    report(run, total)
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    path = args.out_dir / BAD_IMAGES
    path.unlink(missing_ok=True)
    if bad:
        write_csv(path, [("image", "reason"), *bad.items()])
        images = "1 image" if len(bad) == 1 else f"{len(bad)} images"
        raise WorkError(f"{images} cannot be read, the others are matched; see {path}")
    return 0


def expand(run: many.Run, expansion: retrieval.Expansion) -> int:
    """Match the pairs that accepted pairs propose; returns their number."""
    count = 0
    for _ in range(retrieval.ROUNDS):
        more = expansion.proposed()
        run.match(more, len(more))
        count += len(more)
    return count


def settings_of(args: argparse.Namespace, matcher: Matcher) -> Dict[str, object]:
    """All inputs of a pair's matches except the images, for `results.made_from`."""
    extractor = matcher.extractor or DEFAULT
    return {
        "weights": file_sha256(args.model or shipped_weights()),
        "extractor": f"{extractor.name} {extractor.code}".strip(),
        "threshold": matcher.threshold,
        "precision": args.precision,
        **{name: getattr(matcher, name) for name in ("max_keypoints", "resize", "refine", "frame")},
        **({"scene": dataclasses.asdict(matcher.rules), "contrast": WEAK} if matcher.rules else {}),
    }


def report(run: many.Run, total: Optional[int]) -> None:
    """Print the numbers of matched and existing pairs, and of other pairs in the folder."""
    words = [f"{run.matched} pairs matched"]
    if total and run.matched < total:
        words[0] += f" of {total}, the others before"
    if run.again:
        words.append(f"{run.again} of them again, since their inputs changed")
    if run.completed:
        words.append(f"{run.completed} of the others were completed")
    folder = run.output.folder
    print(f"{'; '.join(words)}: {folder}")
    others = sum(1 for _ in folder.glob(f"*_{many.MATCHES}")) - run.matched - run.before
    if others > 0:
        print(f"{folder} also holds {others} pairs of other commands, which are kept")


def database(
    args: argparse.Namespace, store: many.FeatureStore
) -> ContextManager[Optional[many.Adding]]:
    """The context of the --colmap database, if requested."""
    if args.colmap is None:
        return contextlib.nullcontext()
    from superglue_sift.interop import colmap

    return colmap.database_of(args.colmap, root_of(args), store, args.refine)


def root_of(args: argparse.Namespace) -> Path:
    """The folder below which images are named: the one of the command, or of its list, or of all
    its files.
    """
    if args.pairs:
        return args.root or args.pairs.parent
    if len(args.inputs) < 2:
        return args.inputs[0] if args.inputs else Path()
    return Path(
        os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in args.inputs])
    )


def named_inputs(args: argparse.Namespace) -> List[many.Item]:
    """The images of a folder, or those of the command line."""
    if len(args.inputs) == 1:
        return many.photos_in(args.inputs[0], args.out_dir)
    given = {Path(os.path.abspath(path)): path for path in args.inputs}
    if len(given) < 2:
        raise RequestError(f"{args.inputs[0]}: named twice; matching needs two images")
    items = many.named(list(given), root_of(args))
    return [item._replace(image=given[Path(str(item.image))]) for item in items]


def listed(args: argparse.Namespace, store: many.FeatureStore) -> Tuple:
    """Pairs from --pairs without unreadable images; and these with the reasons."""
    pairs = many.listed_pairs(args.pairs, root_of(args))
    photos, bad = many.prepare(
        list(dict.fromkeys(photo for pair in pairs for photo in pair)), store
    )
    readable = set(photos)
    return [pair for pair in pairs if readable.issuperset(pair)], bad


def open_video(args: argparse.Namespace):
    """The frames of the video or camera. Raises RequestError if it cannot be opened."""
    if args.camera is None and not args.inputs[0].is_file():
        raise RequestError(f"{args.inputs[0]}: no such folder or video")
    capture = cv2.VideoCapture(args.camera if args.camera is not None else str(args.inputs[0]))
    if not capture.isOpened():
        name = args.inputs[0] if args.camera is None else f"--camera {args.camera}"
        raise RequestError(f"{name}: OpenCV cannot open it as a video")
    return many.frames(capture, args.every or 1, args.frames)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry point of the command."""
    args = parse(argv)
    if args.serve:
        from superglue_sift.apps import serve

        return serve.run(load(args), args.port)
    try:
        return match_many(args) if args.out_dir else match_two(args)
    except OSError as error:
        if error.filename is None:
            raise
        raise RequestError(f"{error.filename}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(errors.exit_code(main))
