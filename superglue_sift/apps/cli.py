"""Match photographs with a trained model: two images, a folder, a list of pairs, a COLMAP database.

  superglue-match A.jpg B.jpg --out matches.png       two images: a picture, the numbers of matches
  superglue-match A.jpg B.jpg --json matches.json     keypoints, matches, scores, homography
  superglue-match photos/ --out-dir found             all pairs of a folder
  superglue-match photos/*.jpg --out-dir found        all pairs of these files
  superglue-match photos/ --out-dir found --pairing nearest --k 10       with the 10 most similar
  superglue-match photos/ --out-dir found --pairing sequential --k 5     with the 5 before it
  superglue-match photos/ --out-dir found --scene     photographs of one place: pairs.csv lists the
                                                      accepted pairs
  superglue-match photos/ --out-dir found --colmap database.db     also a COLMAP database
  superglue-match --colmap database.db                match the features of a COLMAP database
  superglue-match --pairs pairs.txt --root photos --out-dir found  a pair `a.jpg b.jpg` in each line
  superglue-match --serve                             a local page for the browser

In --out-dir each pair has a file A_B_matches.npz. It holds keypoints0 (M, 2) and keypoints1 (N, 2),
matches (M,), which is -1 for a keypoint without a match, match_confidence (M,), frame and turned.
Refined matches also have their positions aligned0 and aligned1 (M, 2), deviations (M,) in px, which
are NaN where refinement failed, and correlations (M,). With --scene there is also pair_score.

A pair whose file exists is done. The same command resumes where it was stopped, and --overwrite
matches the pairs again. Images that cannot be read are listed in bad_images.csv, the others are
matched, and the exit code is 1. Files that end in _matches.jpg are pictures of matches, not
photographs.

Keypoints are in pixels of the images, rotated upright according to EXIF or, with --frame stored, as
in the file. x is to the right and y down, and (0, 0) is the centre of the first pixel. Each result
states its frame.
"""

from __future__ import annotations

import argparse
import glob
import inspect
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from superglue_sift import __version__
from superglue_sift.apps import folder, pairing
from superglue_sift.apps.pairing import DATABASE, FILES, FOLDER, LIST, PAGE, TWO
from superglue_sift.errors import Parser, RequestError, check_range, import_extra
from superglue_sift.features.features import ENLARGED_TO
from superglue_sift.features.images import FRAMES, find_mask
from superglue_sift.files import check_writable, name_below, write_atomic
from superglue_sift.geometry import verification
from superglue_sift.matcher import MAX_KEYPOINTS, NETWORK_KEYPOINTS, Matcher
from superglue_sift.network.weights import shipped_weights
from superglue_sift.progress import Progress

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
# Kinds of options
A_FILE: Dict[str, Any] = {"metavar": "FILE", "type": Path}
A_FOLDER: Dict[str, Any] = {"metavar": "DIR", "type": Path}
A_NUMBER: Dict[str, Any] = {"metavar": "N", "type": int}
A_PROBABILITY: Dict[str, Any] = {"metavar": "P", "type": float}
A_FLAG: Dict[str, Any] = {"action": "store_true"}
# Each of these options needs one of the sources or options in its line.
GOES_WITH = {
    "out": (TWO,),
    "json": (TWO,),
    "out_dir": (TWO, FILES, FOLDER, LIST),
    **dict.fromkeys(("pairing", "k"), (FOLDER, FILES, DATABASE)),
    "root": (LIST,),
    "frame": (TWO, FILES, FOLDER, LIST),  # the page shows photographs upright
    "colmap": (FOLDER, LIST, DATABASE),
    "dry_run": (DATABASE,),
    "refine": (TWO, FILES, FOLDER, LIST, PAGE),  # a database has no pixels
    "camera_per": ("--colmap",),
    "masks": (TWO, FILES, FOLDER, LIST),
    **dict.fromkeys(("features", "pictures", "json_files", "overwrite"), ("--out-dir",)),
    **dict.fromkeys(("accept", "likely"), ("--scene",)),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return the exit code."""
    args = parse(argv)
    # An existing database may need no matcher, so this function loads one itself if it must.
    if args.source == DATABASE:
        return match_database(args)
    if args.source == PAGE:
        from superglue_sift.apps import serve

        return serve.run(load(args))
    return folder.match_folder(args, load(args)) if args.out_dir else match_two(args)


def load(args: argparse.Namespace) -> Matcher:
    """Load the matcher that the options ask for.

    Raises RequestError if the model needs an extractor that is not allowed.
    """
    # Options with the name of a setting are passed on. Without them, the defaults hold.
    settings = inspect.signature(Matcher.load).parameters.keys() & vars(args).keys()
    given = {name: getattr(args, name) for name in settings}
    asked = {name: value for name, value in given.items() if value is not None}
    matcher = Matcher.load(args.model, **asked)
    # Without this check, each photograph would be listed as one that cannot be read.
    if matcher.extractor is None:
        name = matcher.model.config.extractor
        reason = "required, since the model needs this code to find keypoints"
        raise RequestError(f"--extractor {name}: {reason}")
    return matcher


def match_two(args: argparse.Namespace) -> int:
    """Match two images, print a summary and write the requested files; return the exit code."""
    matcher = load(args)
    started = time.perf_counter()
    images = args.inputs
    if args.masks:
        root = pairing.root_of(args)
        folder.check_masks(images, args.masks, root)
        masks = [find_mask(args.masks, name_below(path, root)) for path in images]
        images = list(map(matcher.extract, images, masks))
    features = matcher.extract_all(images)
    extracted = time.perf_counter()
    # Match, say what the matches fit, and write what is asked for.
    found = matcher.match(*features)
    matched = time.perf_counter()
    print(found.summarize())
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    if args.out:
        found.show().save(args.out)
        print(f"written {args.out}")
    if args.json:
        about = {"image0": str(args.inputs[0]), "image1": str(args.inputs[1])}
        about["model"] = str(args.model or shipped_weights())
        write_atomic(args.json, folder.json_of(found, about))
        print(f"written {args.json}")
    return 0


def match_database(args: argparse.Namespace) -> int:
    """Match the features of an existing COLMAP database, and write the matches into it.

    Returns the exit code. Raises RequestError as `StoredFeatures`.
    """
    from superglue_sift.interop.colmap import StoredFeatures

    # The matcher is loaded later, if at all, so its default number is taken here.
    default = verification.MAX_KEYPOINTS if args.scene else MAX_KEYPOINTS
    with StoredFeatures(args.colmap, args.max_keypoints or default) as stored:
        # Choose pairs as for a folder, and leave out those that have matches.
        pairs, total = pairing.choose_pairs(stored.photos, stored, args.pairing, args.k)
        waiting = [pair for pair in pairs if not stored.has_matches(*pair)]
        of = f"{len(stored.photos)} images with features, {total} pairs"
        print(f"{args.colmap}: {of}, {len(waiting)} of them without matches")
        if stored.without:
            print(f"without features, left out: {', '.join(stored.without)}", file=sys.stderr)
        if args.dry_run or not waiting:
            print("nothing is written")
            return 0
        matcher = load(args)
        matcher.use_one_core_per_pair()
        # The database has no pixels, so positions cannot be refined.
        features = ((stored(photo0), stored(photo1)) for photo0, photo1 in waiting)
        results = matcher.match_batch(features)
        accepted = 0
        # Each pair is written at once, so that a stopped command goes on after it.
        shown = Progress(results, total=len(waiting), desc="matching", unit="pairs")
        for found, pair in zip(shown, waiting):
            stored.add(*pair, found)
            accepted += len(found.matches) > 0
    print(f"{len(waiting)} pairs matched, {accepted} of them with matches: {args.colmap}")
    return 0


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the command line. `source` of the result is one of the sources of `pairing`.

    Raises RequestError for invalid options.
    """
    # The help text is the docstring of this module.
    title, _, examples = str(__doc__).partition("\n\n")
    parser = Parser("superglue-match", description=title)
    parser.epilog = "examples:\n" + examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="*", type=Path, help="two or more images, or a folder")
    parser.add_argument("--version", action="version", version=f"superglue-sift {__version__}")
    _add_inputs_and_outputs(parser)
    _add_settings(parser)
    # Complete what was given, then check it, so that a mistake is reported before the model loads.
    args = parser.parse_args(argv)
    args.inputs = [path for given in args.inputs for path in _expand(given)]
    # Photographs for COLMAP show one place, unless --no-scene says otherwise.
    args.scene = args.colmap is not None if args.scene is None else args.scene
    args.source = _source(args)
    _check_options(args)
    _check_files(args)
    return args


def _add_inputs_and_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to match and what to write."""
    add = parser.add_argument_group("what to match").add_argument
    names = 'text file, `a b` in each line; names with spaces in "quotes"'
    add("--pairs", **A_FILE, help=names)
    add("--root", **A_FOLDER, help="folder of the images in --pairs (default: that of the file)")
    add(
        "--masks",
        **A_FOLDER,
        help="folder of masks, NAME.jpg.png for NAME.jpg as in COLMAP: black pixels give no"
        " keypoint",
    )
    add(
        "--pairing",
        choices=("auto", "exhaustive", "sequential", "nearest"),
        help="pairs of a folder: all; each image with the K before it by name, or with the K most"
        f" similar; or auto (default): all pairs of up to {pairing.MAX_EXHAUSTIVE} images, else the"
        " K most similar",
    )
    k = "for sequential (default 5) and nearest (default 20); with auto: nearest"
    add("--k", **A_NUMBER, help=k)

    add = parser.add_argument_group("what to write").add_argument
    add("--out", **A_FILE, help="for two images: picture of the matches (png, jpg or webp)")
    add("--json", **A_FILE, help="for two images: keypoints and matches")
    out_dir = "for any number of images: A_B_matches.npz for each pair"
    add("--out-dir", **A_FOLDER, help=out_dir)
    add("--overwrite", **A_FLAG, help="with --out-dir: match pairs again whose file exists")
    add("--pictures", **A_FLAG, help="with --out-dir: also A_B_matches.jpg")
    add("--json-files", **A_FLAG, help="with --out-dir: also A_B_matches.json")
    add("--features", **A_FOLDER, help="folder of the features (default: OUT-DIR/features)")
    add(
        "--colmap",
        **A_FILE,
        help="for a folder or --pairs: also a COLMAP database, ready to map (pip install"
        " 'superglue-sift[colmap]'). Without photographs: match the features of an existing"
        " database, only pairs that have no matches yet",
    )
    add(
        "--camera-per",
        choices=("folder", "image"),
        help="with --colmap: one camera for each folder or image (default: as COLMAP does, one for"
        " all images whose EXIF data name the same camera, and one for each of the others)",
    )
    dry_run = "with an existing database: say what would be matched, and write nothing"
    add("--dry-run", **A_FLAG, help=dry_run)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to match, and that of the page."""
    add = parser.add_argument_group("how to match").add_argument
    add("--model", **A_FILE, help="model file (default: the shipped weights)")
    add(
        "--max-keypoints",
        **A_NUMBER,
        help=f"maximum number of keypoints per image (default {MAX_KEYPOINTS}, with --scene"
        f" {verification.MAX_KEYPOINTS})",
    )
    add(
        "--network-keypoints",
        **A_NUMBER,
        help="maximum number of them that the network sees, selected for each pair (default"
        f" {NETWORK_KEYPOINTS}, with --scene {verification.NETWORK_KEYPOINTS})",
    )
    threshold = "minimum probability of a match (default: the model's own, else 0.2)"
    add("--threshold", **A_PROBABILITY, help=threshold)
    add(
        "--resize",
        **A_NUMBER,
        help="reduce images to this longer side (default 1024, with --scene 1600), and enlarge"
        f" those below {ENLARGED_TO} px; 0 does neither",
    )
    add(
        "--scene",
        action=argparse.BooleanOptionalAction,
        help="photographs of one place: accept or reject each pair, then add guided matches"
        " (default with --colmap, else --no-scene)",
    )
    accept = f"minimum probability that both images show one place (default {verification.ACCEPT})"
    add("--accept", **A_PROBABILITY, help=f"with --scene: {accept}")
    add(
        "--likely",
        **A_NUMBER,
        help="with --scene: skip pairs with fewer classical matches of one geometry (default"
        f" {verification.LIKELY}); 0 skips none",
    )
    extractor = "required for non-SIFT models: allows this code to run"
    add("--extractor", metavar="MODULE:FUNCTION", help=extractor)
    device = "auto (default: a GPU if there is one), cpu, cuda or cuda:N"
    add("--device", metavar="NAME", default="auto", help=device)
    add(
        "--frame",
        choices=FRAMES,
        help="frame of coordinates: upright (default), rotated according to EXIF, like cv2.imread;"
        " or stored, as in the file. Pictures are always upright, a COLMAP database is always of"
        " stored pixels",
    )
    add(
        "--refine",
        action=argparse.BooleanOptionalAction,
        help="refine positions by the pixels of the images: those of matches (default without"
        " --scene), and those of keypoints of --colmap (default)",
    )
    page = "a page for the browser (pip install 'superglue-sift[serve]')"
    add = parser.add_argument_group(page).add_argument
    add("--serve", **A_FLAG, help="drop two images and move the threshold")


def _expand(path: Path) -> Sequence[Path]:
    """Return the files of a pattern such as `*.jpg`, which the command line of Windows does not
    expand.
    """
    # A file may have brackets or stars in its name, and is then no pattern.
    found = [] if path.exists() else sorted(glob.glob(str(path)))
    return [*map(Path, found)] or [path]


def _spell(name: str) -> str:
    """Return an option as the user types it."""
    return f"--{name.replace('_', '-')}"


def _source(args: argparse.Namespace) -> str:
    """Say what is matched. Raises RequestError if it is nothing, or more than one thing."""
    # List what is given, which must be exactly one source.
    sources = [LIST] * bool(args.pairs) + [PAGE] * args.serve + [FILES] * bool(args.inputs)
    # --colmap alone reads a database. With photographs it writes one.
    if not sources and args.colmap:
        return DATABASE
    if len(sources) != 1:
        wanted = "two images, a folder, --pairs FILE, --colmap FILE or --serve"
        raise RequestError(f"name {wanted}; see --help for examples")
    if sources != [FILES]:
        return sources[0]
    folders = [path for path in args.inputs if path.is_dir()]
    if folders and len(args.inputs) > 1:
        raise RequestError(f"{folders[0]}: is a folder; name one folder alone, or only images")
    if len(args.inputs) > 1:
        return TWO if len(args.inputs) == 2 else FILES
    if folders:
        return FOLDER
    reason = "is one image" if args.inputs[0].exists() else "no such folder"
    raise RequestError(f"{args.inputs[0]}: {reason}; name two images or a folder")


def _check_options(args: argparse.Namespace) -> None:
    """Raise RequestError for an option without those that it needs.

    `Matcher` checks the ranges of its settings.
    """
    if args.k is not None:
        check_range("--k", args.k, 1)
        if args.pairing == "exhaustive":
            raise RequestError("--k goes with --pairing sequential, nearest or auto")
    if not args.out_dir and args.source in (FILES, FOLDER, LIST):
        raise RequestError("--out-dir DIR: name the folder for the results")
    if args.out_dir and (args.out or args.json):
        fix = "with --out-dir, use --pictures --json-files"
        raise RequestError(f"--out and --json are for two images; {fix}")
    if args.camera_per and args.source == DATABASE:
        raise RequestError("--camera-per: an existing database has cameras; leave it out")
    # 0 is also a value that was given.
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    known = {args.source, *map(_spell, given)}
    for name in GOES_WITH:
        if name in given and known.isdisjoint(GOES_WITH[name]):
            raise RequestError(f"{_spell(name)} goes with {' or '.join(GOES_WITH[name])}")


def _check_files(args: argparse.Namespace) -> None:
    """Check the files to write, and optional packages, before any work. Raises RequestError."""
    if args.out and args.out.suffix.lower() not in PICTURES:
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    if args.masks and not args.masks.is_dir():
        raise RequestError(f"--masks {args.masks}: no such folder")
    # An earlier database would get its images twice.
    if args.colmap and args.colmap.exists() and args.source != DATABASE:
        fix = "name another, or leave out the photographs to match the features that it holds"
        raise RequestError(f"--colmap {args.colmap}: exists already; {fix}")
    # Results must not overwrite photographs, and their folders must be writable.
    inputs = [path.resolve() for path in args.inputs]
    for path in filter(None, (args.out, args.json, args.colmap)):
        if path.resolve() in inputs:
            raise RequestError(f"{path}: is an input, and would be overwritten; name another")
        check_writable(path)
    for directory in filter(None, (args.features, args.out_dir)):
        check_writable(directory / folder.BAD_IMAGES, named=directory)
    # The plain installation does not have these packages.
    if args.colmap:
        import_extra("pycolmap", "colmap")
    if args.serve:
        import_extra("flask", "serve")
