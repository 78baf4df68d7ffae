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
pixels around them, deviations (M,) in px, NaN where alignment failed, and correlations (M,); with
--scene pair_score; frame and turned; made_from: digests of both images, weights, settings,
versions. The same command resumes where it was stopped; pairs with other inputs are computed again.
Unreadable images are listed in bad_images.csv, the others are matched, and the exit code is 1. DIR
is never searched for photographs. Keypoints are pixels of the images, rotated upright according to
EXIF or, with --frame stored, as in the file: x right, y down, (0, 0) the centre of the first pixel.
Each result states its frame.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from superglue_sift import __version__
from superglue_sift.apps import folder, pairing, results
from superglue_sift.apps.pairing import CAMERA, DATABASE, FILES, FOLDER, LIST, PAGE, TWO, VIDEO
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import ENLARGED_TO
from superglue_sift.features.images import EXTENSIONS, STORED, UPRIGHT
from superglue_sift.files import check_writable, write_atomic
from superglue_sift.geometry import verification
from superglue_sift.matcher import MAX_KEYPOINTS, NETWORK_KEYPOINTS, Matcher
from superglue_sift.network.weights import shipped_weights
from superglue_sift.progress import Progress

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
RULES = ("accept", "likely")  # fields of `verification.Rules`

GOES_WITH = {  # option: sources
    "every": (VIDEO, CAMERA),
    "frames": (VIDEO, CAMERA),
    "pairing": (FOLDER, FILES, DATABASE),
    "k": (FOLDER, FILES, VIDEO, CAMERA, DATABASE),
    "colmap": (FOLDER, LIST, DATABASE),
    "dry_run": (DATABASE,),
    "out_dir": (TWO, FILES, FOLDER, VIDEO, LIST, CAMERA),
    "out": (TWO,),
    "json": (TWO,),
}
NEEDS = {  # option: options, of which it needs one
    **dict.fromkeys(("features", "pictures", "json_files"), ("out_dir",)),
    **dict.fromkeys(RULES, ("scene",)),
    "homography": ("out", "out_dir"),
    "root": ("pairs",),
    "port": ("serve",),
}
RANGES = {
    **dict.fromkeys(("max_keypoints", "network_keypoints"), (1, math.inf)),
    **dict.fromkeys(("k", "every", "frames"), (1, math.inf)),
    **dict.fromkeys(("resize", "likely"), (0, math.inf)),
    **dict.fromkeys(("threshold", "accept"), (0, 1)),
    "port": (0, 65535),  # 0: any free one
}

# The help is the definition: heading, `--option VALUE  text`. VALUE chooses the type; without it
# the option is a flag, and `--[no-]option` is one with two sides.
TYPES = {"FILE": Path, "DIR": Path, "N": int, "P": float}
DEFAULTS = {"device": "auto", "frame": UPRIGHT, "refine": True, "precision": "float32"}
PORT = 8010
OPTIONS = f"""
what to match
--pairs FILE  text file, `a b` in each line; names with spaces in "quotes"
--root DIR  folder of the images in --pairs (default: that of the file)
--camera N  camera N of this machine, until Ctrl-C or --frames
--pairing auto|exhaustive|sequential|nearest  pairs of a folder: all; each image with the K before
  it by name, or with the K most similar; or auto (default): all pairs of up to
  {pairing.MAX_EXHAUSTIVE} images, else the K most similar
--k N  for sequential and video (default 5) and nearest (default 20); with auto: nearest
--every N  use every N-th frame of a video or camera (default 1)
--frames N  use at most N frames of a video or camera

what to write
--out FILE  for two images: picture of the matches (png, jpg or webp)
--json FILE  for two images: keypoints and matches
--out-dir DIR  for any number of images: A_B_matches.npz for each pair
--pictures  with --out-dir: also A_B_matches.jpg
--json-files  with --out-dir: also A_B_matches.json
--homography  also the first image warped onto the second, A_B_overlay.jpg, and both blinking,
  A_B_blink.gif
--colmap FILE  for a folder or --pairs: also a COLMAP database, ready to map (pip install
  'superglue-sift[colmap]'). Without photographs: match the features of an existing database, only
  pairs that have no matches yet
--dry-run  with an existing database: say what would be matched, and write nothing
--features DIR  folder of the features (default: OUT-DIR/features)

how to match
--model FILE  model file (default: the shipped weights)
--max-keypoints N  maximum number of keypoints per image (default {MAX_KEYPOINTS}, with --scene
  {verification.MAX_KEYPOINTS})
--network-keypoints N  maximum number of them that the network sees, the likely ones of each pair
  (default {NETWORK_KEYPOINTS}, with --scene {verification.NETWORK_KEYPOINTS})
--threshold P  minimum probability of a match (default: the model's own, else 0.2)
--resize N  reduce images to this longer side (default 1024, with --scene 1600), and enlarge those
  below {ENLARGED_TO} px; 0: neither
--[no-]scene  photographs of one place: accept or reject pairs, then fill them (default with
  --colmap, else --no-scene)
--accept P  with --scene: minimum probability that both show one place (default
  {verification.ACCEPT})
--likely N  with --scene: skip pairs with fewer classical matches of one geometry (default
  {verification.LIKELY}; 0: none)
--extractor MODULE:FUNCTION  required for non-SIFT models: allows this code to run
--device NAME  auto (default: a GPU if there is one), cpu, cuda or cuda:N
--frame upright|stored  frame of coordinates: upright (default), rotated according to EXIF, like
  cv2.imread; or stored, as in the file. Pictures are always upright, a COLMAP database is always of
  stored pixels
--[no-]refine  align matches (but not with --scene), and keypoints of --colmap, by the pixels of the
  images (default)
--precision float32|bfloat16  of the network's layers; bfloat16 is faster on GPUs and on CPUs with
  AMX

a page for the browser (pip install 'superglue-sift[serve]')
--serve  drop two images and move the threshold
--port N  on 127.0.0.1 (default {PORT})
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry point of the command."""
    args = parse(argv)
    if args.serve:
        from superglue_sift.apps import serve

        return serve.run(load(args), PORT if args.port is None else args.port)
    if args.source == DATABASE:
        return match_database(args)
    return folder.match_many(args, load(args)) if args.out_dir else match_two(args)


def load(args: argparse.Namespace) -> Matcher:
    """Load the matcher. Raises RequestError if its extractor would have to be allowed."""
    settings = (*folder.SETTINGS, *RULES, "precision", "extractor", "scene")
    asked = {name: getattr(args, name) for name in settings}
    matcher = Matcher.load(args.model, args.device, **asked)
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
    print(found.summarize(fitted))
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    if args.homography and fitted["homography"].model is None:
        print("no homography, so no overlay")
    about = {f"image{side}": str(path) for side, path in enumerate(args.inputs)}
    about["model"] = str(args.model or shipped_weights())
    paths = _paths(args)
    picture = args.out.suffix.lower() if args.out else ""
    for ending, content in results.files_of(found, fitted, about, paths, picture).items():
        write_atomic(paths[ending], content)
        print(f"written {paths[ending]}")
    return 0


def match_database(args: argparse.Namespace) -> int:
    """Match the features of an existing COLMAP database, and write the matches into it."""
    from superglue_sift.interop.colmap_stored import StoredFeatures

    default = verification.MAX_KEYPOINTS if args.scene else MAX_KEYPOINTS
    with StoredFeatures(args.colmap, args.max_keypoints or default) as stored:
        pairs, total = pairing.choose_pairs(stored.photos, stored, args.pairing or "auto", args.k)
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
            accepted += len(result.matches) > 0
    print(f"{len(waiting)} pairs matched, {accepted} of them with matches: {args.colmap}")
    return 0


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the command line; `source` of the result is one of those of `pairing`.

    Raises RequestError for invalid options.
    """
    title, _, examples = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser("superglue-match", description=title)
    parser.epilog = "examples:\n" + examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "inputs", nargs="*", type=Path, help="two or more images, or a folder, or a video"
    )
    parser.add_argument("--version", action="version", version=f"superglue-sift {__version__}")
    for section in OPTIONS.replace("\n  ", " ").strip().split("\n\n"):
        heading, *rows = section.splitlines()
        group = parser.add_argument_group(heading)
        for row in rows:
            _add_option(group, *row.split("  ", 1))
    parser.set_defaults(**DEFAULTS)
    args = parser.parse_args(argv)
    args.scene = args.colmap is not None if args.scene is None else args.scene
    for name, (least, most) in RANGES.items():
        if getattr(args, name) is not None:
            check_range(_spell(name), getattr(args, name), least, most)
    args.source = _source(args)
    _check_together(args)
    _check_files(args)
    return args


def _add_option(group: Any, option: str, text: str) -> None:
    """Add `--option VALUE` to a group of argparse."""
    name, _, value = option.partition(" ")
    if "[no-]" in name:
        how: Dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif not value:
        how = {"action": "store_true"}
    elif "|" in value:
        how = {"choices": value.split("|")}
    else:
        how = {"metavar": value, "type": TYPES.get(value, str)}
    group.add_argument(name.replace("[no-]", ""), help=text, **how)


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _source(args: argparse.Namespace) -> str:
    """What is matched. Raises RequestError if nothing is, or more than one thing."""
    named = {LIST: args.pairs, CAMERA: args.camera}
    sources = [source for source, value in named.items() if value is not None]
    sources += [PAGE] * args.serve + [FILES] * bool(args.inputs)
    if not sources and args.colmap:
        return DATABASE
    if len(sources) != 1:
        wanted = "two images, a folder, a video, --pairs FILE, --camera N, --colmap FILE or --serve"
        raise RequestError(f"name {wanted}; see --help for examples")
    folder = next((path for path in args.inputs if path.is_dir()), None)
    if len(args.inputs) > 1:
        if folder is not None:
            raise RequestError(f"{folder}: a folder among {len(args.inputs)} inputs; name it alone")
        return TWO if len(args.inputs) == 2 else FILES
    if sources != [FILES]:
        return sources[0]
    one = args.inputs[0]
    if folder is None and one.suffix.lower() in EXTENSIONS:
        fix = f"matching needs two: superglue-match {one} OTHER{one.suffix}"
        raise RequestError(f"{one}: one image; {fix}")
    return FOLDER if folder is not None else VIDEO


def _check_together(args: argparse.Namespace) -> None:
    """Raise RequestError for an option that does not go with the others."""
    if not args.out_dir and args.source not in (TWO, PAGE, DATABASE):
        raise RequestError("--out-dir DIR: name the folder for the results")
    if args.out_dir and (args.out or args.json):
        fix = "with --out-dir, use --pictures --json-files"
        raise RequestError(f"--out and --json are for two images; {fix}")
    for name, sources in GOES_WITH.items():
        if getattr(args, name) and args.source not in sources:
            raise RequestError(f"{_spell(name)} goes with {' or '.join(sources)}")
    for name, others in NEEDS.items():
        value = getattr(args, name)
        given = value is not None and value is not False  # 0 is a number
        if given and not any(getattr(args, other) for other in others):
            raise RequestError(f"{_spell(name)} goes with {' or '.join(map(_spell, others))}")
    if args.k and args.pairing == "exhaustive":
        raise RequestError("--k goes with --pairing sequential, nearest or auto")
    if args.frame == STORED and args.source in (VIDEO, CAMERA, PAGE):
        reason = "a video and the page are shown upright"
        raise RequestError(f"--frame stored goes with photographs: {reason}")


def _paths(args: argparse.Namespace) -> Dict[str, Path]:
    """The files to write for two images, by the endings of `results`."""
    paths = {results.PICTURE: args.out, results.JSON: args.json}
    if args.out and args.homography:
        for ending in results.OVERLAYS:
            paths[ending] = args.out.with_name(f"{args.out.stem}_{ending}")
    return {ending: path for ending, path in paths.items() if path}


def _check_files(args: argparse.Namespace) -> None:
    """Check what is written, and optional packages, before any work. Raises RequestError."""
    if args.out and args.out.suffix.lower() not in PICTURES:
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    if args.colmap and args.colmap.exists() and args.source != DATABASE:
        fix = "name another, or leave out the photographs to match the features that it holds"
        raise RequestError(f"--colmap {args.colmap}: exists already; {fix}")
    taken = dict.fromkeys((path.resolve() for path in args.inputs), "an input")
    for path in filter(None, (*_paths(args).values(), args.colmap)):
        if path.resolve() in taken:
            what = taken[path.resolve()]
            raise RequestError(f"{path}: is {what}, and would be overwritten; name another")
        taken[path.resolve()] = "another result"
        check_writable(path)
    tables = (
        args.out_dir / name for name in (results.PAIR_LIST, folder.BAD_IMAGES) if args.out_dir
    )
    if args.pairs and args.pairs.resolve() in {path.resolve() for path in tables}:
        raise RequestError(f"{args.pairs}: a table of results would overwrite it; rename it")
    if args.features:
        check_writable(args.features / folder.BAD_IMAGES, named=args.features)
    if args.out_dir:
        check_writable(args.out_dir / folder.BAD_IMAGES, named=args.out_dir)
    if args.colmap:
        import_extra("pycolmap", "colmap")
    if args.serve:
        import_extra("flask", "serve")
