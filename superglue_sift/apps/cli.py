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
image0, image1 and made_from name the photographs, and what the matches were made from.

A pair is done if its file was made from the same photographs and masks, with the same model and
settings. Other pairs are matched again, and a line says how many and why. So the same command goes
on where it was stopped. --overwrite matches all pairs again. If A_B_matches.json would be too long
for a file name, A and B are cut, and a digest follows them. Images that cannot be read are listed
in bad_images.csv, the others are matched, and the exit code is 1. Files that end in _matches.jpg
are pictures of matches, not photographs.

Keypoints are in pixels of the images, rotated upright according to EXIF or, with --frame stored, as
in the file. x is to the right and y down, and (0, 0) is the centre of the first pixel. Each result
states its frame.
"""

from __future__ import annotations

import argparse
import glob
import inspect
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from superglue_sift import __version__
from superglue_sift.apps import folder, pairing, results
from superglue_sift.errors import Parser, RequestError, WorkError, import_extra
from superglue_sift.features.features import ENLARGED_TO
from superglue_sift.features.images import FRAMES
from superglue_sift.features.photo_folder import find_mask
from superglue_sift.files import FileName, check_writable, name_below, write_atomic
from superglue_sift.geometry import verification
from superglue_sift.matcher import MAX_KEYPOINTS, NETWORK_KEYPOINTS, Matcher
from superglue_sift.network.weights import find_shipped_weights
from superglue_sift.progress import Progress

PICTURES = (".png", ".jpg", ".jpeg", ".webp")

# Uses of the command. Each has its own parser, with the options that it takes
# (`make_use_parser`).
TWO_IMAGES = "two images without --out-dir"
FILES = "images with --out-dir"
FOLDER = "a folder"
LIST = "--pairs"
DATABASE = "--colmap of an existing database"
PAGE = "--serve"
USES = (TWO_IMAGES, FILES, FOLDER, LIST, DATABASE, PAGE)
TO_FOLDER = (FILES, FOLDER, LIST)
WITH_PHOTOS = (TWO_IMAGES, *TO_FOLDER)

# Kinds of options
A_FILE: Dict[str, Any] = {"metavar": "FILE", "type": Path}
A_FOLDER: Dict[str, Any] = {"metavar": "DIR", "type": Path}
A_NUMBER: Dict[str, Any] = {"metavar": "N", "type": int}
A_PROBABILITY: Dict[str, Any] = {"metavar": "P", "type": float}
A_FLAG: Dict[str, Any] = {"action": "store_true"}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return the exit code."""
    use, settings, options = parse_command(argv)
    # If all pairs of a database have matches, no matcher is loaded.
    if use == DATABASE:
        return match_database(settings, **options)
    matcher = Matcher.load(**settings)
    if use == PAGE:
        from superglue_sift.apps import serve

        return serve.serve_page(matcher)
    if use == TWO_IMAGES:
        return match_two_images(matcher, settings["path"], **options)
    return match_photos(matcher, **options)


def match_two_images(
    matcher: Matcher,
    model: Optional[Path],
    images: Sequence[Path],
    masks: Optional[Path],
    out: Optional[Path],
    json: Optional[Path],
) -> int:
    """Match two images, and print a summary.

    Args:
        matcher: the matcher.
        model: the model file that the JSON names. If None, it is that of the shipped weights.
        images: the two files.
        masks: folder of masks.
        out: picture to write.
        json: file to write with keypoints and matches.

    Returns:
        The exit code.
    """
    started = time.perf_counter()
    if masks:
        root = find_common_folder(images)
        folder.check_masks(images, masks, root)
        mask_files = [find_mask(masks, name_below(path, root)) for path in images]
        features = matcher.extract_all(list(map(matcher.extract, images, mask_files)))
    else:
        features = matcher.extract_all(images)
    extracted = time.perf_counter()
    result = matcher.match(*features)
    matched = time.perf_counter()
    print(result.summarize())
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    if out:
        result.show().save(out)
        print(f"written {out}")
    if json:
        names = {"image0": str(images[0]), "image1": str(images[1])}
        write_atomic(
            json, results.make_json(result, **names, model=str(model or find_shipped_weights()))
        )
        print(f"written {json}")
    return 0


def match_photos(matcher: Matcher, out_dir: Path, **options: Any) -> int:
    """Match pairs of photographs into a folder, and print what was done.

    Args:
        matcher: the matcher.
        out_dir: folder of the results.
        options: further arguments of `match_folder`.

    Returns:
        The exit code.

    Raises:
        WorkError: If some photographs cannot be read, after the others are matched.
    """
    report = folder.match_folder(matcher, out=out_dir, **options)
    print(f"{report.matched} pairs matched: {out_dir}")
    if report.unchanged:
        unchanged = f"{report.unchanged} pairs were matched before with these settings"
        print(f"{unchanged}, and are kept; --overwrite matches them again")
    if report.other_results:
        print(
            f"{report.other_results} results of other pairs are in {out_dir}, and stay as they are"
        )
    if options.get("colmap"):
        print(f"{options['colmap']}: in pixels as stored in the files, as COLMAP reads them")
    if report.bad_images:
        count = len(report.bad_images)
        images = f"{count} of {report.photos + count} images"
        has_pairs = report.matched + report.unchanged
        outcome = "the others are matched" if has_pairs else "no pair is left to match"
        raise WorkError(f"{images} cannot be read, {outcome}; see {out_dir / folder.BAD_IMAGES}")
    return 0


def match_database(
    settings: Dict[str, Any], colmap: Path, pairing_name: str, k: Optional[int], dry_run: bool
) -> int:
    """Match the features of an existing COLMAP database, and write the matches into it.

    Args:
        settings: arguments of `Matcher.load`.
        colmap: the database.
        pairing_name: how to choose pairs, one of `pairing.PAIRINGS`.
        k: number of images that each is matched with.
        dry_run: print what would be matched, and write nothing.

    Returns:
        The exit code.

    Raises:
        RequestError: If the file is no database with SIFT features, or another program writes it.
    """
    from superglue_sift.interop.colmap import DatabaseFeatures

    # The matcher is loaded later, if at all, so its default number is taken here.
    default = verification.MAX_KEYPOINTS if settings["scene"] else MAX_KEYPOINTS
    with DatabaseFeatures(colmap, settings.get("max_keypoints") or default) as database:
        pairs = pairing.choose_pairs(database.photos, database, pairing_name, k)
        new_pairs = [pair for pair in pairs if not database.has_matches(*pair)]
        counts = f"{len(database.photos)} images with features, {len(pairs)} pairs"
        print(f"{colmap}: {counts}, {len(new_pairs)} of them without matches")
        if len(new_pairs) < len(pairs):
            print("matches that the database has are kept, whatever they were made from")
        if database.images_without_features:
            names = ", ".join(database.images_without_features)
            print(f"without features, left out: {names}", file=sys.stderr)
        # An error about features that cannot be matched comes before hours of work.
        database.check_features(new_pairs)
        if dry_run or not new_pairs:
            print("nothing is written")
            return 0
        matcher = Matcher.load(**settings)
        matcher.use_one_core_per_pair()
        # The database has no pixels, so positions cannot be refined.
        features = ((database(photo0), database(photo1)) for photo0, photo1 in new_pairs)
        results_in_order = matcher.match_batch(features)
        matched_count = 0
        # Each pair is written at once, so that a stopped command goes on after it.
        shown = Progress(results_in_order, total=len(new_pairs), desc="matching", unit="pairs")
        for result, pair in zip(shown, new_pairs):
            database.write_matches(*pair, result)
            matched_count += len(result.matches) > 0
    print(f"{len(new_pairs)} pairs matched, {matched_count} of them with matches: {colmap}")
    return 0


# --- the command line


def parse_command(argv: Optional[Sequence[str]]) -> Tuple[str, Dict[str, Any], Dict[str, Any]]:
    """Parse and check the command line before a model is loaded.

    Returns:
        The use of the command, the arguments of `Matcher.load`, and the arguments of the function
        of this use.

    Raises:
        RequestError: If options are wrong.
    """
    # The parser of all options says which use is meant. The parser of this use refuses the options
    # of other uses.
    args = make_use_parser(None).parse_args(argv)
    inputs = [path for pattern in args.inputs for path in _expand_pattern(pattern)]
    use = _find_use(inputs, args.pairs, args.colmap, args.serve, args.out_dir)
    args = make_use_parser(use).parse_args(argv)
    options = vars(args)
    del options["inputs"]
    _check_options(use, **options)
    # Photographs for COLMAP show one place, unless --no-scene says otherwise.
    if args.scene is None:
        options["scene"] = bool(options.get("colmap"))
    outputs = (options.get(name) for name in ("out", "json", "colmap"))
    _check_outputs(inputs, [path for path in outputs if path])
    # Options with the name of an argument of `Matcher.load` are its settings. Without them, its
    # defaults hold.
    names = inspect.signature(Matcher.load).parameters.keys() & options.keys()
    refine = options.get("refine")
    settings = {name: options.pop(name) for name in names}
    settings = {name: value for name, value in settings.items() if value is not None}
    return (
        use,
        {"path": options.pop("model"), **settings},
        _prepare_arguments(use, inputs, refine, options),
    )


def _prepare_arguments(
    use: str, inputs: List[Path], refine: Optional[bool], options: Dict[str, Any]
) -> Dict[str, Any]:
    """Check files, folders and packages, and return the arguments of the function of a use.

    Args:
        use: one of USES.
        inputs: the images, or a folder.
        refine: the option --refine.
        options: all other options that are no settings of the matcher.

    Raises:
        RequestError: If a file, a folder or a package is missing or wrong.
    """
    if use == PAGE:
        import_extra("flask", "serve")
        return {}
    if use == DATABASE:
        import_extra("pycolmap", "colmap")
        pairing.check_pairing(options["pairing"], options["k"])
        return {"pairing_name": options.pop("pairing"), **options}
    if use == TWO_IMAGES:
        out = options["out"]
        if out and out.suffix.lower() not in PICTURES:
            raise RequestError(f"--out {out}: must end in .png, .jpg or .webp")
        folder.check_folder_request(masks=options["masks"])
        return {"images": inputs, **options}
    # Photographs are named below one folder.
    if use == LIST:
        root = options.pop("root")
        options["folder"] = options["pairs"].parent if root is None else root
    elif use == FOLDER:
        options["folder"] = inputs[0]
    else:
        options.update(folder=find_common_folder(inputs), images=inputs)
    if options.get("colmap"):
        options["refine_keypoints"] = refine is not False
    checked = ("features", "masks", "colmap", "pairing", "k")
    arguments = {name: options[name] for name in checked if name in options}
    folder.check_folder_request(out=options["out_dir"], **arguments)
    return options


def make_use_parser(use: Optional[str]) -> Parser:
    """Create the parser of the options of a use, or if it is None of the options of all uses."""
    title, _, examples = str(__doc__).partition("\n\n")
    parser = Parser("superglue-match", description=title)
    parser.epilog = "examples:\n" + examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="*", type=Path, help="two or more images, or a folder")
    parser.add_argument("--version", action="version", version=f"superglue-sift {__version__}")
    _add_inputs(_OptionGroup(parser, "what to match", use))
    _add_outputs(_OptionGroup(parser, "what to write", use))
    _add_settings(_OptionGroup(parser, "how to match", use))
    page = "a page for the browser (pip install 'superglue-sift[serve]')"
    group = _OptionGroup(parser, page, use)
    group.add_option("--serve", (PAGE,), **A_FLAG, help="drop two images and move the threshold")
    return parser


class _OptionGroup:
    """A group of options. The parser of a use takes its options, and refuses those of others."""

    def __init__(self, parser: Parser, title: str, use: Optional[str]) -> None:
        self._group = parser.add_argument_group(title)
        self._use = use

    def add_option(self, name: str, uses: Sequence[str] = USES, **options: Any) -> None:
        """Add an option.

        Args:
            name: the option, such as "--out".
            uses: the uses that take it.
            options: arguments of argparse's `add_argument`.
        """
        if self._use is None or self._use in uses:
            self._group.add_argument(name, **options)
            return
        message = f"{name} goes with {' or '.join(uses)}, not with {self._use}"
        names = [name, name.replace("--", "--no-")]
        self._group.add_argument(*names, action=_Refusal, default=argparse.SUPPRESS, help=message)


class _Refusal(argparse.Action):
    """An option that another use takes. Its help is the error message."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs="?", **options)

    def __call__(self, parser: argparse.ArgumentParser, *_values: Any) -> None:
        parser.error(str(self.help))


def _add_inputs(group: _OptionGroup) -> None:
    """Add the options that say what to match."""
    names = 'text file, `a b` in each line; names with spaces in "quotes"'
    group.add_option("--pairs", (LIST,), **A_FILE, help=names)
    root = "folder of the images in --pairs (default: that of the file)"
    group.add_option("--root", (LIST,), **A_FOLDER, help=root)
    group.add_option(
        "--masks",
        WITH_PHOTOS,
        **A_FOLDER,
        help="folder of masks, NAME.jpg.png for NAME.jpg as in COLMAP: black pixels give no"
        " keypoint",
    )
    group.add_option(
        "--pairing",
        (FILES, FOLDER, DATABASE),
        choices=pairing.PAIRINGS,
        default=pairing.AUTO,
        help="pairs of a folder: all; each image with the K before it by name, or with the K most"
        f" similar; or auto (default): all pairs of up to {pairing.MAX_EXHAUSTIVE} images, else the"
        " K most similar",
    )
    k = "for sequential (default 5) and nearest (default 20); with auto: nearest"
    group.add_option("--k", (FILES, FOLDER, DATABASE), **A_NUMBER, help=k)


def _add_outputs(group: _OptionGroup) -> None:
    """Add the options that say what to write."""
    out = "for two images: picture of the matches (png, jpg or webp)"
    group.add_option("--out", (TWO_IMAGES,), **A_FILE, help=out)
    group.add_option(
        "--json", (TWO_IMAGES,), **A_FILE, help="for two images: keypoints and matches"
    )
    out_dir = "for any number of images: A_B_matches.npz for each pair"
    group.add_option("--out-dir", TO_FOLDER, **A_FOLDER, help=out_dir)
    overwrite = "with --out-dir: also match pairs again whose files fit"
    group.add_option("--overwrite", TO_FOLDER, **A_FLAG, help=overwrite)
    group.add_option("--pictures", TO_FOLDER, **A_FLAG, help="with --out-dir: also A_B_matches.jpg")
    group.add_option(
        "--json-files", TO_FOLDER, **A_FLAG, help="with --out-dir: also A_B_matches.json"
    )
    features = "folder of the features (default: OUT-DIR/features)"
    group.add_option("--features", TO_FOLDER, **A_FOLDER, help=features)
    group.add_option(
        "--colmap",
        (FOLDER, LIST, DATABASE),
        **A_FILE,
        help="for a folder or --pairs: also a COLMAP database, ready to map (pip install"
        " 'superglue-sift[colmap]'). Without photographs: match the features of an existing"
        " database, only pairs that have no matches yet",
    )
    group.add_option(
        "--camera-per",
        (FOLDER, LIST),
        choices=("folder", "image"),
        help="with --colmap: one camera for each folder or image (default: as COLMAP does, one for"
        " all images whose EXIF data name the same camera, and one for each of the others)",
    )
    dry_run = "with an existing database: say what would be matched, and write nothing"
    group.add_option("--dry-run", (DATABASE,), **A_FLAG, help=dry_run)


def _add_settings(group: _OptionGroup) -> None:
    """Add the options that say how to match."""
    group.add_option("--model", **A_FILE, help="model file (default: the shipped weights)")
    group.add_option(
        "--max-keypoints",
        **A_NUMBER,
        help=f"maximum number of keypoints per image (default {MAX_KEYPOINTS}, with --scene"
        f" {verification.MAX_KEYPOINTS})",
    )
    group.add_option(
        "--network-keypoints",
        **A_NUMBER,
        help="maximum number of them that the network sees, selected for each pair (default"
        f" {NETWORK_KEYPOINTS}, with --scene {verification.NETWORK_KEYPOINTS})",
    )
    threshold = "minimum probability of a match (default: the model's own, else 0.2)"
    group.add_option("--threshold", **A_PROBABILITY, help=threshold)
    group.add_option(
        "--resize",
        **A_NUMBER,
        help="reduce images to this longer side (default 1024, with --scene 1600), and enlarge"
        f" those below {ENLARGED_TO} px; 0 does neither",
    )
    group.add_option(
        "--scene",
        action=argparse.BooleanOptionalAction,
        help="photographs of one place: accept or reject each pair, then add guided matches"
        " (default with --colmap, else --no-scene)",
    )
    accept = f"minimum probability that both images show one place (default {verification.ACCEPT})"
    group.add_option("--accept", **A_PROBABILITY, help=f"with --scene: {accept}")
    group.add_option(
        "--likely",
        **A_NUMBER,
        help="with --scene: skip pairs with fewer classical matches of one geometry (default"
        f" {verification.LIKELY}); 0 skips none",
    )
    extractor = "required for non-SIFT models: allows this code to run"
    group.add_option("--extractor", metavar="MODULE:FUNCTION", help=extractor)
    device = "auto (default: a GPU if there is one), cpu, cuda or cuda:N"
    group.add_option("--device", metavar="NAME", default="auto", help=device)
    group.add_option(
        "--frame",
        WITH_PHOTOS,
        choices=FRAMES,
        help="frame of coordinates: upright (default), rotated according to EXIF, like cv2.imread;"
        " or stored, as in the file. Pictures are always upright, a COLMAP database is always of"
        " stored pixels",
    )
    group.add_option(
        "--refine",
        (*WITH_PHOTOS, PAGE),
        action=argparse.BooleanOptionalAction,
        help="refine positions by the pixels of the images: those of matches (default without"
        " --scene), and those of keypoints of --colmap (default)",
    )


def _expand_pattern(path: Path) -> Sequence[Path]:
    """Return the files of a pattern such as `*.jpg`, which Windows does not expand.

    A path that fits no file is returned as it is.
    """
    # A file may have brackets or stars in its name, and is then no pattern.
    files = [] if path.exists() else sorted(glob.glob(str(path)))
    return [*map(Path, files)] or [path]


def find_common_folder(paths: Sequence[FileName]) -> Path:
    """Return the folder that holds all files, at any depth."""
    return Path(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]))


def _find_use(
    inputs: Sequence[Path],
    pairs: Optional[Path],
    colmap: Optional[Path],
    serve: bool,
    out_dir: Optional[Path],
) -> str:
    """Return the use of the command, one of USES.

    Raises:
        RequestError: If the options name nothing to match, or several things.
    """
    uses = [LIST] * bool(pairs) + [PAGE] * serve + [FILES] * bool(inputs)
    # Without photographs, --colmap names a database to match.
    if not uses and colmap:
        return DATABASE
    if len(uses) != 1:
        wanted = "two images, a folder, --pairs FILE, --colmap FILE or --serve"
        raise RequestError(f"name {wanted}; see --help for examples")
    if uses != [FILES]:
        return uses[0]
    folders = [path for path in inputs if path.is_dir()]
    if folders and len(inputs) > 1:
        raise RequestError(f"{folders[0]}: is a folder; name one folder alone, or only images")
    if len(inputs) > 1:
        return TWO_IMAGES if len(inputs) == 2 and not out_dir else FILES
    if folders:
        return FOLDER
    reason = "is one image" if inputs[0].exists() else "no such folder"
    raise RequestError(f"{inputs[0]}: {reason}; name two images or a folder")


def _check_options(use: str, **options: Any) -> None:
    """Raise RequestError for an option that lacks another one which it needs.

    `Matcher` and `match_folder` check the ranges of their arguments.
    """
    if use in TO_FOLDER and not options["out_dir"]:
        raise RequestError("--out-dir DIR: name the folder for the results")
    if options.get("camera_per") and not options["colmap"]:
        raise RequestError("--camera-per goes with --colmap")
    is_scene = options["scene"] or (options["scene"] is None and options.get("colmap"))
    for name in ("accept", "likely"):
        if options[name] is not None and not is_scene:
            raise RequestError(f"--{name} goes with --scene")


def _check_outputs(inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Raise RequestError if an output would overwrite an image, or cannot be written."""
    photos = [path.resolve() for path in inputs]
    for path in outputs:
        if path.resolve() in photos:
            raise RequestError(f"{path}: is an input, and would be overwritten; name another")
        check_writable(path)
