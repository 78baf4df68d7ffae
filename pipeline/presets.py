"""Copy a preset to params.yaml and show the change: `python -m pipeline.presets use NAME`.

A preset is a whole params.yaml; `presets/sample.yaml` explains the keys. A params.yaml that holds
the preset already keeps its edited keys. `--images` names a folder of images; the digest of its
file names and sizes goes into `fetch.content`, so that a changed folder is fetched again.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline import errors
from pipeline.errors import RequestError, typed
from pipeline.files import write_atomic
from pipeline.parameters import params
from pipeline.parameters.schema import FetchParams, TrainParams, flatten

FOLDER = Path(__file__).resolve().parents[1] / "presets"
DEFAULT = "sample"
# What `--images` and `--val-images` write
IMAGES = ("fetch.path", "fetch.val_path", "fetch.content")


def names() -> List[str]:
    """Names of the presets, the default first."""
    return sorted(
        (path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (name != DEFAULT, name)
    )


def describe(name: str) -> str:
    """The purpose of a preset, from its first line."""
    return _text(name).splitlines()[0].partition(": ")[2]


def render(name: str, images: str = "", val_images: str = "", text: str = "") -> str:
    """The text of params.yaml for a preset; `images` and `val_images`: folders of the user's
    images.

    text: a params.yaml of this preset whose edited keys to keep; "": the preset itself.

    Raises RequestError for an unknown preset, a missing or empty folder, too few or too small
    images, or a preset that takes no folder.
    """
    origin = "params.yaml" if text else f"presets/{name}.yaml"
    text = text or _text(name)
    source = cast(Dict[str, Any], YAML(typ="safe", pure=True).load(text))["fetch"]["source"]
    if source != "folder":
        if images or val_images:
            raise RequestError(
                f"preset {name}: takes no folder of images; leave the preset out, or use the preset"
                " folder"
            )
        params.parse(YAML(typ="safe", pure=True).load(text), origin)
        return text
    if not images:
        raise RequestError(
            f"preset {name}: needs a folder of images; {typed('repro', images='~/photos')}"
        )
    return _with_images(text, _folder(images), _folder(val_images) if val_images else "", origin)


def refresh(path: Path) -> bool:
    """Update `fetch.content` in the file at `path`. Returns whether it changed."""
    fetch = params.load("fetch", path)
    if fetch.source != "folder":
        return False
    text = path.read_text(encoding="utf-8")
    return write(path, _with_images(text, fetch.path, fetch.val_path, str(path)))


def use(path: Path, name: str, images: str = "", val_images: str = "") -> None:
    """Write a preset to `path`, or these images into a file that holds the preset already; print
    what changed.
    """
    text = path.read_text(encoding="utf-8") if path.exists() and params.preset(path) == name else ""
    changed = write(path, render(name, images, val_images, text))
    usual = _flat(_text(name))
    edits = [line for line in _flat(path.read_text(encoding="utf-8")) if line not in usual]
    edits = [line for line in edits if line.partition(":")[0] not in IMAGES]
    if edits:
        print(
            f"{path} differs from preset {name}: {', '.join(edits)}; to start anew, delete {path}"
            " first"
        )
    elif not changed:
        print(f"{path} already holds preset {name}")


def require_unseen(path: Path) -> None:
    """Raises RequestError if the initial weights were trained on all photographs that would
    validate the training.
    """
    from pipeline.fetch import splits
    from pipeline.provenance import trained_on

    sections = params.load_all(path)
    fetch = cast(FetchParams, sections["fetch"])
    model = cast(TrainParams, sections["train"]).init_from
    if (
        fetch.source != "folder"
        or not model
        or "--keep-seen" in os.environ.get("TRAIN_OPTIONS", "")
    ):
        return
    seen = trained_on.read(Path(model)) or frozenset()
    names, held = splits.own(fetch)
    container = held[splits.container_of("val", held)]
    if all(container.entry(name, "val", "").photograph in seen for name in names["val"]):
        raise RequestError(
            f"{path}: {model} was trained on all photographs held out of {fetch.path}: set"
            ' train.init_from: "" (from scratch), hold out others (VAL_IMAGES=...), or keep them'
            " with TRAIN_OPTIONS=--keep-seen"
        )


def write(path: Path, text: str) -> bool:
    """Replace the file at `path` and print the difference. Returns False if it is equal already."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == text:
        return False
    write_atomic(path, text)
    lines = difflib.unified_diff(
        _flat(before), _flat(text), f"{path} before", f"{path} now", n=0, lineterm=""
    )
    print("\n".join(line for line in lines if not line.startswith("@@")))
    return True


def _flat(text: str) -> List[str]:
    """Lines such as `train.lr: 0.0001`, so that a difference names its section; raw lines if that
    fails.
    """
    try:
        flat = flatten(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, AttributeError):
        return text.splitlines()
    return [f"{key}: {repr(value) if value == '' else value}" for key, value in flat.items()]


def _with_images(text: str, images: str, val_images: str, origin: str) -> str:
    """The params.yaml with these folders of the user's images, which are checked: RequestError."""
    from pipeline.fetch import containers, splits
    from pipeline.views.homography import smallest_images

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    tree = yaml.load(text)
    tree["fetch"].update(
        path=images, val_path=val_images, content=containers.digest(images, val_images)
    )
    stream = io.StringIO()
    yaml.dump(tree, stream)
    sections = params.parse(YAML(typ="safe", pure=True).load(stream.getvalue()), origin)
    splits.require_usable(
        *splits.own(cast(FetchParams, sections["fetch"])), smallest_images(sections)
    )
    return stream.getvalue()


def _folder(path: str) -> str:
    """The absolute path of a folder, zip, list or annotation file that holds at least one image."""
    from pipeline.fetch.containers import open_container

    folder = Path(path).expanduser().resolve()
    open_container(folder)
    return str(folder)


def _text(name: str) -> str:
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names())}"
        raise RequestError(f"preset {name}: not in {FOLDER.name}/; {hint}")
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.presets", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the file written")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the presets")
    commands.add_parser("refresh", help="look at the folders of images again")
    chosen = commands.add_parser("use", help="copy a preset to params.yaml and show the change")
    chosen.add_argument(
        "name", nargs="?", default="", help="the preset; 'folder' when --images is given"
    )
    chosen.add_argument("--images", default="", help="folder of training images")
    chosen.add_argument("--val-images", default="", help="folder of held-out images")
    args = parser.parse_args(argv)
    if args.command == "list":
        print("\n".join(f"{name:14} {describe(name)}" for name in names()))
        return 0
    if args.command == "refresh":
        refresh(args.params)
    elif args.val_images and not args.images:
        raise RequestError(
            "VAL_IMAGES (--val-images) goes with IMAGES (--images): name the training images too"
        )
    else:
        use(
            args.params,
            args.name or ("folder" if args.images else DEFAULT),
            args.images,
            args.val_images,
        )
    require_unseen(args.params)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
