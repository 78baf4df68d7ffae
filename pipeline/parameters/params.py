"""Loading params.yaml: typed, frozen sections, and one line about the first error.

All sections are checked, so that a misspelt key of the last stage is reported before the first one
runs.
"""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Sequence, Type, get_args

from pydantic import ValidationError

from pipeline.errors import RequestError, spell_command
from pipeline.parameters.schema import SECTIONS, FetchParams, Section, TrainOptions

NO_OPTIONS: Mapping[str, Any] = {}


def load(section: str, path: Path, options: Mapping[str, Any] = NO_OPTIONS) -> Any:
    """One section of the file at `path`; all are checked. Raises RequestError."""
    sections = load_all(path, options)
    if section not in sections:
        raise RequestError(f"{path}: the section '{section}' is missing")
    return sections[section]


def load_all(path: Path, options: Mapping[str, Any] = NO_OPTIONS) -> Dict[str, Any]:
    """Every section in the file at `path`, by name. options: `TrainOptions` from a command line."""
    return parse(_read(path), str(path), options)


def usual_file() -> Path:
    """params.yaml here, else the project's."""
    here = Path("params.yaml")
    return here if here.is_file() else Path(__file__).resolve().parents[2] / "params.yaml"


def asks_for_portable(words: Sequence[str]) -> bool:
    """Whether `train.precision` is `portable` in the file that a command line names with --params.

    Called before torch is loaded. Errors of the file are left to `load`.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--params", type=Path, default=usual_file())
    try:
        return _read(parser.parse_known_args(words)[0].params)["train"]["precision"] == "portable"
    except (RequestError, LookupError, TypeError):
        return False


def parse(tree: Any, origin: str, options: Mapping[str, Any] = NO_OPTIONS) -> Dict[str, Any]:
    """Check a tree of plain dicts, some or all of the sections of a file. origin: file name for
    messages.
    """
    if not isinstance(tree, dict):
        raise RequestError(f"{origin}: must have the sections {', '.join(SECTIONS)}")
    sections: Dict[str, Section] = {}
    train = tree.get("train")
    for name in TrainOptions.model_fields:
        if isinstance(train, dict) and name in train:
            raise RequestError(
                f"{origin}: train.{name}: not a key; set it in TRAIN_OPTIONS, as {flag(name)}"
            )
    for name, values in _complete(tree, options).items():
        if name not in SECTIONS:
            raise RequestError(
                f"{origin}: {_word(name)}: unknown section{_near(str(name), list(SECTIONS))}"
            )
        try:
            sections[name] = SECTIONS[name].model_validate(values)
        except ValidationError as error:
            # a misspelt key first: it explains why the right one is missing
            first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
            raise RequestError(f"{origin}: {_problem(name, SECTIONS[name], first)}") from None
    used, stored = (
        getattr(sections.get(name), "max_keypoints", 0) for name in ("train", "keypoints")
    )
    if used > stored > 0:
        limit = f"keypoints.max_keypoints ({stored})"
        raise RequestError(
            f"{origin}: train.max_keypoints = {used}: must be at most {limit}, what a view stores"
        )
    return sections


def option_parser() -> Parser:
    """Parser of `TrainOptions`; its result has only the options given."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    for name, field in TrainOptions.model_fields.items():
        kind: Any = field.annotation
        text = f"{field.description} (default: {field.default})"
        if kind is bool:
            add(flag(name), action="store_true", help=field.description)
        elif get_args(kind):
            add(flag(name), choices=get_args(kind), help=text)
        else:
            add(flag(name), type=kind, metavar="N", help=text)
    return parser


class Parser(argparse.ArgumentParser):
    """A wrong argument is a RequestError."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def flag(name: str) -> str:
    """An option of a training as on its command line."""
    return "--" + name.replace("_", "-")


def _complete(tree: Dict[Any, Any], options: Mapping[str, Any]) -> Dict[Any, Any]:
    """The tree with the views of `keypoints` and `evaluate`, and with the options of the
    training.
    """
    views = tree.get("views")
    full = dict(tree)
    if isinstance(tree.get("keypoints"), dict) and "views" in tree:
        full["keypoints"] = {"views": views, **tree["keypoints"]}
    if isinstance(tree.get("train"), dict):
        full["train"] = {**tree["train"], **options}
    if isinstance(tree.get("evaluate"), dict):
        full["evaluate"] = {
            **tree["evaluate"],
            "views": _merge(views, tree["evaluate"].get("views", {})),
        }
    return full


def _merge(tree: Any, changes: Any) -> Any:
    if not (isinstance(tree, dict) and isinstance(changes, dict)):
        return changes
    return {**tree, **{key: _merge(tree.get(key), value) for key, value in changes.items()}}


def preset(path: Path) -> str:
    """The preset named in the first line of a params.yaml; "" without one."""
    match = re.match(r"# Preset ([\w.-]+):", path.read_text(encoding="utf-8"))
    return match[1] if match else ""


def data_name(sections: Dict[str, Section]) -> str:
    """Name of the training images: their source or folder; "" without a section fetch."""
    fetch = sections.get("fetch")
    if not isinstance(fetch, FetchParams):
        return ""
    return Path(fetch.path).name if fetch.source == "folder" else fetch.source


def _read(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(
            f"{path}: no such file; `{spell_command('repro', preset='sample')}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise RequestError(
            f"{path}{where}: is not valid YAML: {getattr(error, 'problem', error)}"
        ) from None


def _problem(section: str, model: Type[Section], error: Any) -> str:
    """`train.lr = -1: must be greater than 0`, from one pydantic error."""
    *path, last = [section, *(_word(part) for part in error["loc"])]
    key = ".".join([*path, last])
    kind = error["type"]
    if kind == "value_error":
        return f"{key}.{error['ctx']['error']}"
    if kind == "missing":
        return f"{key} is missing; copy its line from presets/sample.yaml"
    if kind == "extra_forbidden":
        owner: Any = model
        for name in path[1:]:
            owner = owner.model_fields[name].annotation
        known = [name for name in owner.model_fields if name not in TrainOptions.model_fields]
        return f"{key}: unknown key{_near(last, known)}"
    rule = re.sub("^(Input|String) should", "must", error["msg"])
    if kind == "model_type":
        rule = "must hold keys with values"
    return f"{key} = {_word(repr(error['input']))}: {rule}"


def _near(name: str, known: List[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _word(value: Any) -> str:
    """In one line, also a key with line breaks, and short."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
