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
  superglue-match --colmap database.db                match the features of a COLMAP database
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
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import cv2

from superglue_sift import errors, scenes
from superglue_sift.apps import many, options, results, retrieval
from superglue_sift.apps.options import BAD_IMAGES, CAMERA, DATABASE, FOLDER, LIST, RULES, VIDEO
from superglue_sift.errors import RequestError, WorkError
from superglue_sift.extractors import DEFAULT
from superglue_sift.feature_store import FeatureStore, Item
from superglue_sift.files import file_sha256, write_atomic, write_csv
from superglue_sift.matcher import MAX_KEYPOINTS, Matcher
from superglue_sift.progress import Progress
from superglue_sift.sift import WEAK
from superglue_sift.weights import shipped_weights

SETTINGS = ("max_keypoints", "resize", "threshold", "refine", "frame")  # of `Matcher`


class Job(NamedTuple):
    """Pairs to match, their number and photographs if known, and unreadable files with reasons.

    expansion: proposes more pairs after these.
    """

    pairs: many.Pairs
    total: Optional[int]
    photos: Sequence[Item]
    bad: Dict[str, str]
    expansion: Optional[retrieval.Expansion] = None


def load(args: argparse.Namespace) -> Matcher:
    """Load the matcher. Raises RequestError if its extractor would have to be allowed."""
    asked = {name: getattr(args, name) for name in (*SETTINGS, "precision", "extractor", "scene")}
    rules = {name: getattr(args, name) for name in RULES if getattr(args, name) is not None}
    matcher = Matcher.load(args.model, args.device, **asked, **rules)
    if matcher.extractor is None:
        name = matcher.model.config.extractor
        reason = "required, since the model needs this code to find keypoints"
        raise RequestError(f"--extractor {name}: {reason}")
    return matcher


def match_two(args: argparse.Namespace) -> int:
    """Match two images; print a summary and write the requested files."""
    matcher = load(args)
    started = time.perf_counter()
    sides = matcher.extract_all(args.inputs)
    extracted = time.perf_counter()
    found = matcher.match(*sides)
    matched = time.perf_counter()
    fitted = found.fits()
    print(results.summary_of(found, fitted))
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    files: Dict[Path, bytes] = {}
    if args.json:
        about = {f"image{side}": str(path) for side, path in enumerate(args.inputs)}
        about["model"] = str(args.model or shipped_weights())
        files[args.json] = results.json_of(found, fitted, about)
    if args.out:
        files[args.out] = results.picture_of(found, fitted, args.out.suffix.lower())
    if args.homography:
        for ending, content in results.overlays_of(found, fitted["homography"].model).items():
            files[args.out.with_name(f"{args.out.stem}_{ending}")] = content
    for path, content in files.items():
        write_atomic(path, content)
        print(f"written {path}")
    return 0


def match_many(args: argparse.Namespace) -> int:
    """Match any number of pairs into --out-dir."""
    matcher = load(args)
    store = FeatureStore(matcher, args.features or args.out_dir / "features")
    wanted = [results.JSON] * args.json_files + [results.PICTURE] * args.pictures
    wanted += [results.OVERLAY, results.BLINK] * args.homography
    again = args.source == CAMERA
    output = many.Output(args.out_dir, wanted, settings_of(args, matcher), again)
    job = choose_job(args, store)
    total = job.total
    with contextlib.ExitStack() as stack:
        adding: List[many.Adding] = [job.expansion] if job.expansion else []
        if matcher.rules:
            adding.append(stack.enter_context(results.pair_list(args.out_dir, root_of(args))))
        if args.colmap:
            from superglue_sift.interop import colmap

            where = (args.colmap, root_of(args))
            database = colmap.database_of(*where, job.photos, store, args.refine)
            adding.append(stack.enter_context(database))
        run = many.Run(store, output, adding)
        run.match(job.pairs, total)
        if job.expansion:
            for _ in range(retrieval.ROUNDS):
                more = job.expansion.propose()
                run.match(more, len(more))
                total = (total or 0) + len(more)
    print(run.report(total))
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    path = args.out_dir / BAD_IMAGES
    path.unlink(missing_ok=True)
    if job.bad:
        write_csv(path, [("image", "reason"), *job.bad.items()])
        images = "1 image" if len(job.bad) == 1 else f"{len(job.bad)} images"
        raise WorkError(f"{images} cannot be read, the others are matched; see {path}")
    return 0


def match_database(args: argparse.Namespace) -> int:
    """Match the features of an existing COLMAP database, and write the matches into it."""
    from superglue_sift.interop.colmap_stored import StoredFeatures

    default = scenes.MAX_KEYPOINTS if args.scene else MAX_KEYPOINTS
    with StoredFeatures(args.colmap, args.max_keypoints or default) as stored:
        pairs, total = many.choose_pairs(stored.photos, stored, args.pairing or "auto", args.k)
        waiting = [pair for pair in pairs if not stored.has_matches(*pair)]
        of = f"{len(stored.photos)} images with features, {total} pairs"
        print(f"{args.colmap}: {of}, {len(waiting)} of them without matches")
        if stored.without:
            print(f"without features, left out: {', '.join(stored.without)}", file=sys.stderr)
        if args.dry_run or not waiting:
            print("nothing is written")
            return 0
        matcher = load(args)
        matcher.side_by_side()
        stored.start_writing()
        # the database has no pixels to align by
        sides = ((stored(photo0), stored(photo1)) for photo0, photo1 in waiting)
        found = matcher.match_batch(sides, refine=False)
        accepted = 0
        shown = Progress(found, total=len(waiting), desc="matching", unit="pairs")
        for result, pair in zip(shown, waiting):
            stored.add(*pair, result)
            accepted += result.accepted and len(result.matches) > 0
    print(f"{len(waiting)} pairs matched, {accepted} of them with matches: {args.colmap}")
    return 0


def settings_of(args: argparse.Namespace, matcher: Matcher) -> Dict[str, object]:
    """All inputs of a pair's matches except the images, for `results.made_from`."""
    extractor = matcher.extractor or DEFAULT
    return {
        "weights": file_sha256(args.model or shipped_weights()),
        "extractor": f"{extractor.name} {extractor.code}".strip(),
        "precision": args.precision,
        **{name: getattr(matcher, name) for name in SETTINGS},
        **({"scene": dataclasses.asdict(matcher.rules), "contrast": WEAK} if matcher.rules else {}),
    }


def choose_job(args: argparse.Namespace, store: FeatureStore) -> Job:
    """The pairs of the source. Computes the features of photographs."""
    if args.source in (VIDEO, CAMERA):
        pairs = many.sequential(open_video(args), args.k or many.NEIGHBOURS["sequential"])
        return Job(pairs, None, (), {})
    if args.source == LIST:
        listed = many.listed_pairs(args.pairs, root_of(args))
        every = dict.fromkeys(itertools.chain.from_iterable(listed))
        photos, bad = many.prepare(list(every), store)
        readable = set(photos)
        pairs = [pair for pair in listed if readable.issuperset(pair)]
        return Job(pairs, len(pairs), photos, bad)
    pairing = args.pairing or "auto"
    if not store.is_sift and pairing == "nearest":
        raise RequestError("--pairing nearest compares SIFT features; use exhaustive or sequential")
    photos, bad = many.prepare(named_inputs(args), store)
    expansion = None
    if pairing == "auto":
        many_photos = len(photos) > many.MAX_EXHAUSTIVE and store.is_sift
        pairing = "nearest" if many_photos else "exhaustive"
        if many_photos and store.matcher.rules:
            expansion = retrieval.Expansion(photos)
    pairs, total = many.choose_pairs(photos, store, pairing, args.k)
    return Job(pairs, total, photos, bad, expansion)


def root_of(args: argparse.Namespace) -> Path:
    """The folder below which images are named: of the command, or of its list or all its files."""
    if args.source == LIST:
        return args.root or args.pairs.parent
    if args.source == FOLDER:
        return args.inputs[0]
    folders = [os.path.dirname(os.path.abspath(path)) for path in args.inputs]
    return Path(os.path.commonpath(folders or [os.curdir]))


def named_inputs(args: argparse.Namespace) -> List[Item]:
    """The images of a folder, or those of the command line."""
    if args.source == FOLDER:
        return many.photos_in(args.inputs[0], args.out_dir)
    given = {Path(os.path.abspath(path)): path for path in args.inputs}
    if len(given) < 2:
        raise RequestError(f"{args.inputs[0]}: named twice; matching needs two images")
    items = many.name_photos(list(given), root_of(args))
    return [item._replace(image=given[Path(str(item.image))]) for item in items]


def open_video(args: argparse.Namespace) -> Iterator[Item]:
    """The frames of the video or camera. Raises RequestError if it cannot be opened."""
    source: Any = args.camera
    name = f"--camera {args.camera}"
    if args.source == VIDEO:
        source = name = str(args.inputs[0])
        if not args.inputs[0].is_file():
            raise RequestError(f"{name}: no such folder or video")
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise RequestError(f"{name}: OpenCV cannot open it as a video")
    return many.frames(capture, args.every or 1, args.frames)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry point of the command."""
    args = options.parse(argv, str(__doc__))
    if args.serve:
        from superglue_sift.apps import serve

        return serve.run(load(args), args.port)
    try:
        if args.source == DATABASE:
            return match_database(args)
        return match_many(args) if args.out_dir else match_two(args)
    except OSError as error:
        if error.filename is None:
            raise
        raise RequestError(f"{error.filename}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(errors.exit_code(main))
