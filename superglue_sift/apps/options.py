"""The command line of `superglue-match`: its options, and which of them go together."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from superglue_sift import __version__, scenes
from superglue_sift.apps import many
from superglue_sift.errors import RequestError, check_range
from superglue_sift.features import ENLARGED_TO
from superglue_sift.files import check_writable
from superglue_sift.images import EXTENSIONS, STORED, UPRIGHT

BAD_IMAGES = "bad_images.csv"  # of --out-dir
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
RULES = ("accept", "strict", "likely", "network_keypoints")  # fields of `scenes.Rules`

# What is matched, `args.source`
TWO = "two images"
FILES = "more than two images"
FOLDER = "a folder"
VIDEO = "a video"
LIST = "--pairs"
CAMERA = "--camera"
PAGE = "--serve"
DATABASE = "--colmap of an existing database"
GOES_WITH = {  # option: sources
    "every": (VIDEO, CAMERA),
    "frames": (VIDEO, CAMERA),
    "pairing": (FOLDER, FILES, DATABASE),
    "k": (FOLDER, FILES, VIDEO, CAMERA, DATABASE),
    "colmap": (FOLDER, LIST, DATABASE),
    "dry_run": (DATABASE,),
    "out_dir": (TWO, FILES, FOLDER, VIDEO, LIST, CAMERA, PAGE),
    "out": (TWO,),
    "json": (TWO,),
}
NEEDS = {  # option: options, of which it needs one
    **dict.fromkeys(("features", "pictures", "json_files"), ("out_dir",)),
    **dict.fromkeys(RULES, ("scene",)),
    "homography": ("out", "out_dir"),
}
RANGES = {
    **dict.fromkeys(("max_keypoints", "k", "every", "frames"), (1, math.inf)),
    **dict.fromkeys(("accept", "network_keypoints"), (1, math.inf)),
    **dict.fromkeys(("resize", "likely"), (0, math.inf)),
    **dict.fromkeys(("threshold", "strict"), (0, 1)),
    "port": (0, 65535),  # 0: any free one
}

# The help is the definition: heading, `--option VALUE  text`. VALUE chooses the type; without it
# the option is a flag, and `--[no-]option` is one with two sides.
TYPES = {"FILE": Path, "DIR": Path, "N": int, "P": float}
DEFAULTS = {
    "device": "auto",
    "frame": UPRIGHT,
    "refine": True,
    "precision": "float32",
    "port": 8010,
}
OPTIONS = f"""
what to match
--pairs FILE  text file, `a b` in each line; names with spaces in "quotes"
--root DIR  folder of the images in --pairs (default: that of the file)
--camera N  camera N of this machine, until Ctrl-C or --frames
--pairing auto|exhaustive|sequential|nearest  pairs of a folder: all; each image with the K before
  it by name, or with the K most similar; or auto (default): all pairs of up to
  {many.MAX_EXHAUSTIVE} images, else the K most similar
--k N  for sequential and video (default 5) and nearest (default 20)
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
--max-keypoints N  maximum number of keypoints per image (default 1024, with --scene 8192)
--threshold P  minimum probability of a match (default: the model's own, else 0.2)
--resize N  reduce images to this longer side (default 1024, with --scene 1600), and enlarge those
  below {ENLARGED_TO} px; 0: neither
--[no-]scene  photographs of one place: accept or reject pairs, then fill them (default with
  --colmap, else --no-scene)
--accept N  with --scene: minimum number of strict matches of one geometry (default {scenes.ACCEPT})
--strict P  with --scene: matches above this confidence are strict (default {scenes.STRICT})
--likely N  with --scene: skip pairs with fewer classical matches of one geometry (default
  {scenes.LIKELY}; 0: none)
--network-keypoints N  with --scene: number of keypoints that the network sees (default
  {scenes.NETWORK_KEYPOINTS})
--extractor MODULE:FUNCTION  required for non-SIFT models: allows this code to run
--device NAME  auto (default: a GPU if there is one), cpu, cuda or cuda:N
--frame upright|stored  frame of coordinates: upright (default), rotated according to EXIF, like
  cv2.imread; or stored, as in the file. Pictures are always upright, a COLMAP database is always of
  stored pixels
--[no-]refine  align matches, and keypoints of --colmap, by the pixels of the images (default)
--precision float32|bfloat16  of the network's layers; bfloat16 is faster on GPUs and on CPUs with
  AMX

a page for the browser (pip install 'superglue-sift[serve]')
--serve  drop two images and move the threshold
--port N  on 127.0.0.1 (default 8010)
"""


def parse(argv: Optional[Sequence[str]], about: str) -> argparse.Namespace:
    """Parse the command line. about: a title, a blank line, examples.

    Raises RequestError for invalid options. `source` of the result is one of those above.
    """
    title, _, examples = about.partition("\n\n")
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
        given = getattr(args, name) not in (None, False)
        if given and not any(getattr(args, other) for other in others):
            raise RequestError(f"{_spell(name)} goes with {' or '.join(map(_spell, others))}")
    if args.frame == STORED and args.source in (VIDEO, CAMERA, PAGE):
        reason = "a video and the page are shown upright"
        raise RequestError(f"--frame stored goes with photographs: {reason}")


def _check_files(args: argparse.Namespace) -> None:
    """Check what is written, and optional packages, before any work. Raises RequestError."""
    if args.out and args.out.suffix.lower() not in PICTURES:
        raise RequestError(f"--out {args.out}: must end in .png, .jpg or .webp")
    if args.colmap and args.colmap.exists() and args.source != DATABASE:
        fix = "name another, or leave out the photographs to match the features that it holds"
        raise RequestError(f"--colmap {args.colmap}: exists already; {fix}")
    for path in filter(None, (args.out, args.json, args.colmap)):
        check_writable(path)
    if args.out_dir:
        check_writable(args.out_dir / BAD_IMAGES, named=args.out_dir)
    if args.colmap:
        from superglue_sift.interop import colmap

        colmap.library()
    if args.serve:
        from superglue_sift.apps import serve

        serve.library()
