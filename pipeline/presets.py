"""Copy a preset to params.yaml and show the change: `python -m pipeline.presets use NAME`.

`presets/sample.yaml` is a whole params.yaml that explains its keys. Another preset has only the
values that differ from it. A params.yaml that holds the preset already keeps its edited keys.
`--images` names a folder of images. The digest of its files goes into `fetch.content`, so that a
changed folder is fetched again.
"""

from __future__ import annotations

import difflib
import io
import os
from pathlib import Path
from typing import Any, List, Mapping, MutableMapping, Optional

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import PlainScalarString

from pipeline import errors, params
from pipeline.errors import RequestError, spell_command
from pipeline.params import flatten
from superglue_sift.files import json_digest, write_atomic

FOLDER = Path(__file__).resolve().parents[1] / "presets"
DEFAULT = "sample"


def read(name: str) -> str:
    """Return a preset as the text of a whole params.yaml. Raises RequestError for an unknown one.

    The text is that of `sample`, with its comments, under the heading of the preset and with the
    values of the preset.
    """
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    if name not in names:
        raise RequestError(f"preset {name}: not in {FOLDER.name}/; there are {', '.join(names)}")
    base, text = ((FOLDER / f"{file}.yaml").read_text("utf-8") for file in (DEFAULT, name))
    if name == DEFAULT:
        return base
    # A heading is all lines above the first empty one.
    heading = text.partition("\n\n")[0]
    yaml = _make_yaml()
    tree = yaml.load(base.partition("\n\n")[2])
    _change(tree, yaml.load(text))
    return f"{heading}\n\n{_dump(yaml, tree)}"


def _make_yaml() -> YAML:
    """Return a reader and writer that keeps comments, quotes and long lines as they are."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


def _dump(yaml: YAML, tree: Any) -> str:
    """Return the text of a tree that `yaml` has loaded."""
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def _change(tree: MutableMapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Put the values of `changes` in place of those of `tree`, at any depth."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and key in tree:
            _change(tree[key], value)
        else:
            # A plain string would get the quotes of the one before, which DVC removes again.
            tree[key] = PlainScalarString(value) if type(value) is str else value


def render(name: str, images: str = "", val_images: str = "", text: str = "") -> str:
    """Return the text of params.yaml for a preset.

    Args:
        images, val_images: the user's folders, zips, lists or annotation files.
        text: a params.yaml of this preset, whose edited keys are kept. If "", use the preset
            itself.

    Raises:
        RequestError: the preset is unknown or takes no folder, a folder is missing or empty, or
            there are too few or too small images.
    """
    text = text or read(name)
    yaml = _make_yaml()
    tree = yaml.load(text)
    # Only a preset of one's own images takes a folder.
    takes_images = tree["fetch"]["source"] == "folder"
    if images and not takes_images:
        raise RequestError(
            f"preset {name}: takes no folder of images; leave the preset out, or use the preset"
            " folder"
        )
    if takes_images and not images:
        example = spell_command("repro", images="~/photos")
        raise RequestError(f"preset {name}: needs a folder of images; {example}")
    if not images:
        return text
    # Write the paths of the user's images and a digest of their content into the section `fetch`.
    from pipeline.fetch import dataset

    # Unlike that of Path, this `expanduser` keeps a ~ without a home.
    path, val_path = (
        each and str(Path(os.path.expanduser(each)).resolve()) for each in (images, val_images)
    )
    tree["fetch"].update(path=path, val_path=val_path)
    sections = params.parse(tree, f"preset {name}")
    # Refuse a folder of too few images before any stage runs.
    held = dataset.open_and_split_local(sections.fetch)[1]
    tree["fetch"]["content"] = json_digest([container.contents for container in held.values()])
    return _dump(yaml, tree)


def refresh(path: Path) -> bool:
    """Update `fetch.content` in the params.yaml at `path`. Return whether it changed."""
    fetch = params.load(path).fetch
    if fetch.source != "folder":
        return False
    text = path.read_text(encoding="utf-8")
    return write(path, render(params.preset(path), fetch.path, fetch.val_path, text))


def write(path: Path, text: str) -> bool:
    """Replace the file at `path` and print the difference.

    Returns:
        False if the file has this text already.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == text:
        return False
    write_atomic(path, text)
    # Print only the changed keys, without the positions of a unified diff.
    names = (f"{path} before", f"{path} now")
    lines = difflib.unified_diff(_flat(before), _flat(text), *names, n=0, lineterm="")
    print("\n".join(line for line in lines if not line.startswith("@@")))
    return True


def _flat(text: str) -> List[str]:
    """Return lines such as `train.lr: 0.0001`, so that a difference names its section.

    A text that is no YAML is returned in its own lines.
    """
    try:
        flat = flatten(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, AttributeError):
        return text.splitlines()
    return [f"{key}: {value}" for key, value in flat.items()]


def main(argv: Optional[List[str]] = None) -> int:
    parser = errors.make_parser("pipeline.presets", __doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the file written")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("refresh", help="look at the folders of images again")
    chosen = commands.add_parser("use", help="copy a preset to params.yaml and show the change")
    add = chosen.add_argument
    add("name", nargs="?", default="", help="the preset; 'folder' when --images is given")
    add("--images", default="", help="folder of training images")
    add("--val-images", default="", help="folder of held-out images")
    args = parser.parse_args(argv)
    # Refresh: only the digest of the folders may change.
    if args.command == "refresh":
        refresh(args.params)
        return 0
    if args.val_images and not args.images:
        raise RequestError("VAL_IMAGES (--val-images) goes with IMAGES (--images): name those too")
    # Use: a file of the same preset keeps its edited keys.
    name = args.name or ("folder" if args.images else DEFAULT)
    text = ""
    if args.params.exists() and params.preset(args.params) == name:
        params.load(args.params)  # the user's edits may be wrong, and are reported as such
        text = args.params.read_text(encoding="utf-8")
    if not write(args.params, render(name, args.images, args.val_images, text)):
        print(f"{args.params} already holds preset {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
