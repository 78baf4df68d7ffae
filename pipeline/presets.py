"""Write a preset into params.yaml and show the change: `python -m pipeline.presets use NAME`.

`presets/sample.yaml` is complete and explains every key; the other presets list only what differs from it. The written
file keeps the comments and may be edited by hand. `--images` names a folder of images; the digest of its file names and
sizes goes into `fetch.content`, so that a changed folder is fetched again.
"""

from __future__ import annotations

import argparse
import difflib
import io
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline import errors
from pipeline.errors import RequestError, typed
from pipeline.files import write_atomic
from pipeline.parameters import params
from pipeline.parameters.schema import FetchParams, flatten

FOLDER = Path(__file__).resolve().parents[1] / "presets"
BASE = "sample"


def names() -> List[str]:
    """Names of the presets, the default first."""
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (name != BASE, name))


def describe(name: str) -> str:
    """The purpose of a preset, from the first line of its comment."""
    return _split(_text(name))[0].splitlines()[0].partition(": ")[2]


def render(name: str, images: str = "", val_images: str = "") -> str:
    """The text of params.yaml for a preset; `images` and `val_images`: folders of the user's images.

    Raises RequestError for an unknown preset, a missing or empty folder, too few or too small images, or a preset that
    takes no folder.
    """
    header = _split(_text(name))[0]
    tree = _yaml().load(_split(_text(BASE))[1])
    if name != BASE:
        _merge(tree, _yaml().load(_text(name)))
    folders: Tuple[str, ...] = ()
    if tree["fetch"]["source"] == "folder":
        if not images:
            raise RequestError(f"preset {name}: needs a folder of images; {typed('repro', images='~/photos')}")
        folders = _folder(images), _folder(val_images) if val_images else ""
    elif images or val_images:
        raise RequestError(f"preset {name}: takes no folder of images; leave the preset out, or use the preset folder")
    return _text_of(header, tree, folders, f"presets/{name}.yaml")


def refresh(path: Path) -> bool:
    """Update `fetch.content` in the file at `path`. Returns whether it changed."""
    fetch = params.load("fetch", path)
    if fetch.source != "folder":
        return False
    header, body = _split(path.read_text(encoding="utf-8"))
    return write(path, _text_of(header, _yaml().load(body), (fetch.path, fetch.val_path), str(path)))


def write(path: Path, text: str) -> bool:
    """Replace the file at `path` and print the difference. Returns False if it is equal already."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == text:
        return False
    write_atomic(path, text)
    lines = difflib.unified_diff(_flat(before), _flat(text), f"{path} before", f"{path} now", n=0, lineterm="")
    print("\n".join(line for line in lines if not line.startswith("@@")))
    return True


def _flat(text: str) -> List[str]:
    """Lines such as `train.lr: 0.0001`, so that a difference names its section; raw lines if that fails."""
    try:
        flat = flatten(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, AttributeError):
        return text.splitlines()
    return [f"{key}: {value}" for key, value in flat.items()]


def _text_of(header: str, tree: Any, folders: Tuple[str, ...], origin: str) -> str:
    """The text of a params.yaml. folders: of the user's images, which are checked: RequestError."""
    if folders:
        from pipeline.fetch import containers, splits
        from pipeline.views.homography import smallest_images

        tree["fetch"].update(path=folders[0], val_path=folders[1], content=containers.digest(*folders))
    stream = io.StringIO()
    _yaml().dump(tree, stream)
    sections = params.parse_file(YAML(typ="safe", pure=True).load(stream.getvalue()), origin)
    if folders:
        splits.require_usable(*splits.own(cast(FetchParams, sections["fetch"])), smallest_images(sections))
    return (f"{header}\n\n" if header else "") + stream.getvalue()


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


def _split(text: str) -> Tuple[str, str]:
    """The comment at the start of a file, and the rest after the empty line."""
    head, _, body = text.partition("\n\n")
    if all(line.startswith("#") for line in head.splitlines()):
        return head, body
    return "", text


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


def _merge(tree: Any, changes: Dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.presets", description=str(__doc__).splitlines()[0])
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the file written")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the presets")
    commands.add_parser("refresh", help="look at the folders of images again")
    use = commands.add_parser("use", help="write a preset into params.yaml and show the change")
    use.add_argument("name", nargs="?", default="", help="the preset; 'folder' when --images is given")
    use.add_argument("--images", default="", help="folder of training images")
    use.add_argument("--val-images", default="", help="folder of held-out images")
    args = parser.parse_args(argv)
    if args.command == "list":
        print("\n".join(f"{name:14} {describe(name)}" for name in names()))
    elif args.command == "refresh":
        refresh(args.params)
    else:
        if args.val_images and not args.images:
            raise RequestError("VAL_IMAGES (--val-images) goes with IMAGES (--images): name the training images too")
        name = args.name or ("folder" if args.images else BASE)
        if not write(args.params, render(name, args.images, args.val_images)):
            print(f"{args.params} already holds preset {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
