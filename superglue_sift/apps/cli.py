"""Match photographs with a trained model.

    superglue-match a.jpg b.jpg --out matches.png       two images (`pair` may be left out)
    superglue-match folder photos/ --out-dir found      all pairs of a folder
    superglue-match list pairs.txt --out-dir found      the pairs of a text file
    superglue-match database database.db                the features of a COLMAP database
    superglue-match serve                               a page for the browser

`superglue-match COMMAND --help` lists the options of a command. docs/matching.md describes the
files that are written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from superglue_sift import __version__, scene
from superglue_sift.apps import folder, pairing, results
from superglue_sift.errors import Parser, RequestError, WorkError, import_extra
from superglue_sift.features.extraction import ENLARGED_TO
from superglue_sift.features.images import FRAMES
from superglue_sift.features.photo_folder import check_masks, find_mask
from superglue_sift.files import FileName, name_below, write_atomically
from superglue_sift.matcher import MAX_KEYPOINTS, NETWORK_KEYPOINTS, RESIZE, Matcher
from superglue_sift.network.weights import find_shipped_weights
from superglue_sift.progress import Progress

COMMANDS = ("pair", "folder", "list", "database", "serve")
# Options that are arguments of `Matcher.load`. Each command has some of them.
SETTINGS = (
    "device", "max_keypoints", "network_keypoints", "resize", "threshold", "extractor", "refine",
    "scene", "frame", "accept", "min_matches",
)  # fmt: skip


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return the exit code."""
    words = add_command(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    return args.run(args)


def add_command(words: Sequence[str]) -> List[str]:
    """Put `pair` before two images, and `folder` before photographs with `--out-dir`.

    Args:
        words: the words of the command line. If they begin with a command, or if all of them are
            options, they stay as they are.
    """
    if all(word.startswith("-") for word in words) or words[0] in COMMANDS:
        return list(words)
    is_folder = os.path.isdir(words[0]) or any(word.startswith("--out-dir") for word in words)
    return ["folder" if is_folder else "pair", *words]


# --- commands


def match_pair(args: argparse.Namespace) -> int:
    """Match two images, and print a summary.

    Raises:
        RequestError: If an output would overwrite an image, or an image cannot be read.
    """
    for path in (args.out, args.json):
        if path and path.resolve() in [image.resolve() for image in args.images]:
            raise RequestError(f"{path}: is an input, and would be overwritten; name another")
    mask_files: List[Optional[Path]] = [None, None]
    if args.masks:
        root = find_common_folder(args.images)
        check_masks(args.masks, root)
        mask_files = [find_mask(args.masks, name_below(path, root)) for path in args.images]
    matcher = load_matcher(args)
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        features = list(pool.map(matcher.extract, args.images, mask_files))
    extracted = time.perf_counter()
    result = matcher.match(*features)
    matched = time.perf_counter()
    print(result.summarize())
    print(f"keypoints {extracted - started:.2f} s, matching {matched - extracted:.2f} s")
    if args.out:
        result.show().save(args.out)
        print(f"written {args.out}")
    if args.json:
        names = {"image0": str(args.images[0]), "image1": str(args.images[1])}
        model = str(args.model or find_shipped_weights())
        write_atomically(args.json, results.make_json(result, **names, model=model))
        print(f"written {args.json}")
    return 0


def match_folder(args: argparse.Namespace) -> int:
    """Match pairs of a folder, or of some images."""
    if len(args.photos) == 1:
        return _match_photos(args, args.photos[0], pairing=args.pairing, k=args.k)
    root = find_common_folder(args.photos)
    return _match_photos(args, root, images=args.photos, pairing=args.pairing, k=args.k)


def match_list(args: argparse.Namespace) -> int:
    """Match the pairs of a text file."""
    return _match_photos(args, args.root or args.pairs.parent, pairs=args.pairs)


def _match_photos(args: argparse.Namespace, root: Path, **photos: Any) -> int:
    """Match pairs of photographs into a folder, and print what was done.

    Args:
        args: the options.
        root: folder of the photographs.
        photos: arguments of `folder.match_folder` that say what to match.

    Returns:
        The exit code.

    Raises:
        WorkError: If some photographs cannot be read, after the others are matched.
    """
    # Photographs for COLMAP show one place, unless --no-scene says otherwise.
    if args.scene is None:
        args.scene = args.colmap is not None
    report = folder.match_folder(
        load_matcher(args),
        root,
        args.out_dir,
        masks=args.masks,
        features=args.features,
        pictures=args.pictures,
        json_files=args.json_files,
        colmap=args.colmap,
        camera_per=args.camera_per,
        refine_keypoints=args.refine is not False,
        **photos,
    )
    print(f"{report.matched} pairs matched: {args.out_dir}")
    if report.unchanged:
        print(f"{report.unchanged} pairs were matched before with these settings, and are kept")
    if report.other_results:
        print(f"{report.other_results} results of other pairs are in {args.out_dir}")
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    if report.bad_images:
        count = len(report.bad_images)
        table = args.out_dir / folder.BAD_IMAGES
        raise WorkError(f"{count} of {report.photos + count} images cannot be read; see {table}")
    return 0


def match_database(args: argparse.Namespace) -> int:
    """Match the features of a COLMAP database, and write the matches into it.

    Raises:
        RequestError: If the file is no database with SIFT features, or another program writes it.
        WorkError: If some images were left out, after the others are matched.
    """
    import_extra("pycolmap", "colmap")
    from superglue_sift.interop.colmap import DatabaseFeatures

    pairing.check_pairing(args.pairing, args.k)
    matcher = load_matcher(args)
    with DatabaseFeatures(args.database, matcher.max_keypoints) as database:
        pairs = pairing.choose_pairs(database.photos, database, args.pairing, args.k)
        new_pairs = [pair for pair in pairs if not database.has_matches(*pair)]
        counts = f"{len(database.photos)} images with features, {len(pairs)} pairs"
        print(f"{args.database}: {counts}, {len(new_pairs)} of them without matches")
        if len(new_pairs) < len(pairs):
            print("matches that the database has are kept, whatever they were made from")
        for name, reason in database.left_out.items():
            print(f"left out: {name}: {reason}", file=sys.stderr)
        matcher = matcher.use_one_core_per_pair()
        # The database has no pixels, so positions cannot be refined.
        to_match = [] if args.dry_run else new_pairs
        features = ((database(photo0), database(photo1)) for photo0, photo1 in to_match)
        matched_count = 0
        # Threads that match must end before the database is closed. Each pair is written at once,
        # so that a stopped command resumes after it.
        with contextlib.closing(matcher.match_batch(features)) as pair_results:
            shown = Progress(pair_results, total=len(to_match), desc="matching", unit="pairs")
            for result, pair in zip(shown, to_match):
                database.write_matches(*pair, result)
                matched_count += len(result.matches) > 0
    if to_match:
        counts = f"{len(to_match)} pairs matched, {matched_count} of them with matches"
        print(f"{counts}: {args.database}")
    else:
        print("nothing is written")
    if database.left_out:
        names = ", ".join(database.left_out)
        raise WorkError(f"{args.database}: {len(database.left_out)} images are left out: {names}")
    return 0


def serve_page(args: argparse.Namespace) -> int:
    """Serve the page for the browser."""
    import_extra("flask", "serve")
    from superglue_sift.apps import serve

    return serve.serve_page(load_matcher(args))


def load_matcher(args: argparse.Namespace) -> Matcher:
    """Load the matcher by the options of a command. An option that is None has its default."""
    settings: Dict[str, Any] = {name: getattr(args, name, None) for name in SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    return Matcher.load(args.model, **settings)


def find_common_folder(paths: Sequence[FileName]) -> Path:
    """Return the folder that holds all files, at any depth."""
    return Path(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]))


# --- the command line


def make_parser() -> Parser:
    """Create the parser of the command line, with a parser for each command."""
    parser = Parser("superglue-match", description=str(__doc__).splitlines()[0])
    parser.add_argument("--version", action="version", version=f"superglue-sift {__version__}")
    parser.epilog = (
        "Two images need no command: superglue-match a.jpg b.jpg --out matches.png."
        " superglue-match COMMAND --help lists the options of a command."
    )
    names = "{" + ",".join(COMMANDS) + "}"
    commands = parser.add_subparsers(title="commands", dest="command", metavar=names, required=True)

    def add_parser(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        # An abbreviated --out would be --out-dir.
        command = commands.add_parser(
            name, help=about, description=f"Match {about}.", allow_abbrev=False
        )
        command.set_defaults(run=run)
        return command

    pair = add_parser("pair", match_pair, "two images")
    pair.add_argument("images", nargs=2, type=Path, metavar="IMAGE")
    pair.add_argument("--out", metavar="FILE", type=Path, help="picture of the matches")
    json_help = "keypoints, matches, scores and homography as JSON"
    pair.add_argument("--json", metavar="FILE", type=Path, help=json_help)
    _add_photo_options(pair)
    _add_settings(pair)

    photos = add_parser("folder", match_folder, "the photographs of a folder, each pair to a file")
    photos_help = "a folder, or two or more images"
    photos.add_argument("photos", nargs="+", type=Path, metavar="PHOTOS", help=photos_help)
    _add_pairing(photos)

    pairs = add_parser("list", match_list, "the pairs of a text file, each to a file")
    pairs_help = 'text file, `a b` in each line; names with spaces in "quotes"'
    pairs.add_argument("pairs", type=Path, metavar="PAIRS", help=pairs_help)
    root_help = "folder of the images (default: that of the text file)"
    pairs.add_argument("--root", metavar="DIR", type=Path, help=root_help)

    for command in (photos, pairs):
        _add_folder_outputs(command)
        _add_photo_options(command)
        _add_settings(command)

    database = add_parser(
        "database", match_database, "the features of a COLMAP database, into this database"
    )
    database_help = "COLMAP database; pairs that have matches are left out"
    database.add_argument("database", type=Path, metavar="DATABASE", help=database_help)
    dry_run_help = "print what would be matched, and write nothing"
    database.add_argument("--dry-run", action="store_true", help=dry_run_help)
    _add_pairing(database)
    _add_settings(database)
    database.set_defaults(scene=True)

    serve = add_parser("serve", serve_page, "two images on a page in the browser")
    _add_refine(serve)
    _add_settings(serve)
    return parser


def _add_pairing(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose pairs of photographs."""
    pairing_help = (
        "exhaustive: all pairs; sequential: each image with the K before it; nearest: with the K"
        f" most similar; auto (default): all pairs of up to {pairing.MAX_EXHAUSTIVE} images, else"
        " nearest"
    )
    parser.add_argument(
        "--pairing", choices=pairing.PAIRINGS, default=pairing.AUTO, help=pairing_help
    )
    k_help = "for sequential (default 5) and nearest (default 20); with auto: nearest"
    parser.add_argument("--k", metavar="K", type=int, help=k_help)


def _add_folder_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which files are written for a folder or a list."""
    group = parser.add_argument_group("outputs")
    out_dir_help = "folder of the results, A_B_matches.npz for each pair"
    group.add_argument("--out-dir", metavar="DIR", type=Path, required=True, help=out_dir_help)
    group.add_argument("--pictures", action="store_true", help="also write A_B_matches.jpg")
    group.add_argument("--json-files", action="store_true", help="also write A_B_matches.json")
    features_help = "folder of the features (default: OUT-DIR/features)"
    group.add_argument("--features", metavar="DIR", type=Path, help=features_help)
    colmap_help = "also write a new COLMAP database; implies --scene and refines its keypoints"
    group.add_argument("--colmap", metavar="FILE", type=Path, help=colmap_help)
    camera_help = (
        "which images share a camera (default: those whose EXIF data name the same one; each other"
        " image has its own)"
    )
    group.add_argument("--camera-per", choices=("folder", "image"), help=camera_help)


def _add_photo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for files of photographs."""
    group = parser.add_argument_group("photographs")
    masks_help = "folder of masks, NAME.jpg.png for NAME.jpg; black pixels give no keypoint"
    group.add_argument("--masks", metavar="DIR", type=Path, help=masks_help)
    frame_help = (
        "coordinates of the image rotated according to EXIF (upright, the default), or of the"
        " pixels as in the file (stored)"
    )
    group.add_argument("--frame", choices=FRAMES, help=frame_help)
    _add_refine(group)


def _add_refine(group: argparse._ActionsContainer) -> None:
    """Add the option that turns refinement on or off."""
    refine_help = "refine positions by the pixels (default without --scene)"
    group.add_argument("--refine", action=argparse.BooleanOptionalAction, help=refine_help)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the matcher."""
    group = parser.add_argument_group("matcher")
    model_help = "model file (default: the shipped weights)"
    group.add_argument("--model", metavar="FILE", type=Path, help=model_help)
    threshold_help = "minimum probability of a match (default: the model's own)"
    group.add_argument("--threshold", metavar="P", type=float, help=threshold_help)
    keypoints_help = (
        f"keypoints of an image, at most (default {MAX_KEYPOINTS}, with --scene"
        f" {scene.MAX_KEYPOINTS})"
    )
    group.add_argument("--max-keypoints", metavar="N", type=int, help=keypoints_help)
    network_help = (
        f"keypoints that the network gets, at most (default {NETWORK_KEYPOINTS}, with --scene"
        f" {scene.NETWORK_KEYPOINTS})"
    )
    group.add_argument("--network-keypoints", metavar="N", type=int, help=network_help)
    resize_help = (
        f"longer side in px to which images are reduced (default {RESIZE}, with --scene"
        f" {scene.RESIZE}); those below {ENLARGED_TO} are enlarged; 0 does neither"
    )
    group.add_argument("--resize", metavar="PX", type=int, help=resize_help)
    scene_help = "photographs of one place: accept or reject each pair, and add epipolar matches"
    group.add_argument("--scene", action=argparse.BooleanOptionalAction, help=scene_help)
    accept_help = (
        "with --scene: minimum probability that both images show one place (default"
        f" {scene.ACCEPT})"
    )
    group.add_argument("--accept", metavar="P", type=float, help=accept_help)
    min_matches_help = (
        "with --scene: skip pairs with fewer inliers of the ratio test (default"
        f" {scene.MIN_MATCHES})"
    )
    group.add_argument("--min-matches", metavar="N", type=int, help=min_matches_help)
    extractor_help = "the extractor of a model that was not trained on SIFT"
    group.add_argument("--extractor", metavar="MODULE:FUNCTION", help=extractor_help)
    device_help = "auto (default: a GPU if there is one), cpu, cuda or cuda:N"
    group.add_argument("--device", metavar="NAME", help=device_help)
