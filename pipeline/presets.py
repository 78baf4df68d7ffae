"""Copy a preset to params.yaml and show the change: `python -m pipeline.presets use NAME`.

`presets/sample.yaml` is a whole params.yaml that explains its keys. Any other preset has only the
values that differ from it. A params.yaml that has the preset already keeps its edited keys.
`--images` names a folder of images. The digest of its files goes into `fetch.content`, so that a
changed folder is fetched again.
"""

from __future__ import annotations

import dataclasses
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
from superglue_sift.files import compute_json_digest, write_atomically

FOLDER = Path(__file__).resolve().parents[1] / "presets"
DEFAULT = "sample"


def read_preset(name: str) -> str:
    """Read a preset, and return it as the text of a whole params.yaml.

    The text is that of `sample`, with its comments, under the heading of the preset and with the
    values of the preset.

    Raises:
        RequestError: If there is no such preset.
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
    _apply_changes(tree, yaml.load(text))
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


def _apply_changes(tree: MutableMapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Replace values of `tree` by those of `changes`, at any depth."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and key in tree:
            _apply_changes(tree[key], value)
        else:
            # A str would get the quotes of the value that it replaces, which DVC removes again.
            tree[key] = PlainScalarString(value) if type(value) is str else value


def render_params(name: str, images: str = "", val_images: str = "", text: str = "") -> str:
    """Return the text of params.yaml for a preset and the user's images.

    Args:
        name: name of the preset.
        images, val_images: the user's folders, zips, lists or annotation files, or "".
        text: the text of a params.yaml of this preset, whose edited keys are kept. If "", use the
            preset itself.

    Raises:
        RequestError: If the preset is unknown or takes no folder, if a folder is missing or empty,
            or if there are too few or too small images.
    """
    text = text or read_preset(name)
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

    # `Path.expanduser` raises without a home.
    path, val_path = (
        folder and str(Path(os.path.expanduser(folder)).resolve())
        for folder in (images, val_images)
    )
    tree["fetch"].update(path=path, val_path=val_path)
    sections = params.parse(tree, f"preset {name}")
    # Refuse a folder of too few images before any stage runs.
    entries, _ = dataset.list_local_images(sections.fetch)
    tree["fetch"]["content"] = compute_json_digest(list(map(dataclasses.astuple, entries)))
    return _dump(yaml, tree)


def rewrite_fetch_content(path: Path) -> bool:
    """Update `fetch.content` in the params.yaml at `path`. Return whether the file has changed."""
    fetch = params.load(path).fetch
    if fetch.source != "folder":
        return False
    text = path.read_text(encoding="utf-8")
    return write_params(
        path, render_params(params.read_preset_name(path), fetch.path, fetch.val_path, text)
    )


def write_params(path: Path, text: str) -> bool:
    """Write a params.yaml and print the difference.

    Args:
        path: the file, which need not exist.
        text: its new content.

    Returns:
        False if the file has this text already.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == text:
        return False
    write_atomically(path, text)
    # Print only the changed keys, without the positions of a unified diff.
    names = (f"{path} before", f"{path} now")
    lines = difflib.unified_diff(
        _flatten_text(before), _flatten_text(text), *names, n=0, lineterm=""
    )
    print("\n".join(line for line in lines if not line.startswith("@@")))
    return True


def _flatten_text(text: str) -> List[str]:
    """Return lines such as `train.lr: 0.0001`, so that a difference names its section.

    A text that is no YAML is only divided into its lines.
    """
    try:
        values = flatten(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, AttributeError):
        return text.splitlines()
    return [f"{key}: {value}" for key, value in values.items()]


def main(argv: Optional[List[str]] = None) -> int:
    """Write params.yaml as the command line says, and return the exit code."""
    parser = errors.make_parser("pipeline.presets", __doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the file written")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("refresh", help="look at the folders of images again")
    use = commands.add_parser("use", help="copy a preset to params.yaml and show the change")
    add = use.add_argument
    add("name", nargs="?", default="", help="the preset; 'folder' when --images is given")
    add("--images", default="", help="folder of training images")
    add("--val-images", default="", help="folder of held-out images")
    args = parser.parse_args(argv)
    if args.command == "refresh":
        rewrite_fetch_content(args.params)
        return 0
    if args.val_images and not args.images:
        use.error("--val-images needs --images")
    if not (args.name or args.images):
        use.error("the name of a preset or --images is required")
    # A file of the same preset keeps its edited keys.
    name = args.name or "folder"
    text = ""
    if args.params.exists() and params.read_preset_name(args.params) == name:
        params.load(args.params)  # Reject wrong edits
        text = args.params.read_text(encoding="utf-8")
    if not write_params(args.params, render_params(name, args.images, args.val_images, text)):
        print(f"{args.params} already holds preset {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
