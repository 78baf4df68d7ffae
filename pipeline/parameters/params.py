"""Loading params.yaml: typed, frozen sections, and one line about the first error.

All sections are checked, so that a misspelt key of the last stage is reported before the first one runs.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Type, Union, get_args

from pydantic import ValidationError

from pipeline.errors import RequestError, typed
from pipeline.parameters.schema import SECTIONS, FetchParams, Section, TrainOptions

NO_OPTIONS: Mapping[str, Any] = {}


def load(section: str, path: Union[str, Path] = "params.yaml", options: Mapping[str, Any] = NO_OPTIONS) -> Any:
    """One section of the file at `path`; all are checked. Raises RequestError."""
    sections = load_all(path, options)
    if section not in sections:
        raise RequestError(f"{path}: the section '{section}' is missing")
    return sections[section]


def load_all(path: Union[str, Path] = "params.yaml", options: Mapping[str, Any] = NO_OPTIONS) -> Dict[str, Section]:
    """Every section in the file at `path`, by name.

    options: `TrainOptions` from a command line; they override those of `train.options`.
    """
    return parse_file(_read(Path(path)), str(path), options)


def parse_file(tree: Any, origin: str, options: Mapping[str, Any] = NO_OPTIONS) -> Dict[str, Section]:
    """`parse` for the content of a params.yaml."""
    if isinstance(tree, dict) and "views" not in tree and ("keypoints" in tree or "evaluate" in tree):
        raise RequestError(f"{origin}: the section 'views' is missing")
    return parse(tree, origin, options)


def parse(tree: Any, origin: str, options: Mapping[str, Any] = NO_OPTIONS) -> Dict[str, Section]:
    """Check a tree of plain dicts. origin: file name for messages."""
    if not isinstance(tree, dict):
        raise RequestError(f"{origin}: must have the sections {', '.join(SECTIONS)}")
    tree = _completed(tree, origin, options)
    sections: Dict[str, Section] = {}
    problems: List[str] = []
    for name, values in sorted(
        tree.items(), key=lambda item: item[0] != "views"
    ):  # first: other sections repeat its errors
        if name not in SECTIONS:
            problems.append(f"{name}: unknown section{_near(str(name), list(SECTIONS))}")
            continue
        try:
            sections[name] = SECTIONS[name].model_validate(values)
        except ValidationError as error:
            # a misspelt key first: it explains why the right one is missing
            found = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
            if problems and "views" in tree and "views" not in sections:
                found = [item for item in found if item["loc"][:1] != ("views",)]
            problems += [_problem(name, SECTIONS[name], item) for item in found]
    asked, stored = (getattr(sections.get(name), "max_keypoints", None) for name in ("train", "keypoints"))
    if not problems and asked is not None and stored is not None and asked > stored:
        limit = f"keypoints.max_keypoints ({stored})"
        problems = [f"train.max_keypoints = {asked}: must be at most {limit}, what a view stores"]
    if problems:
        first = " ".join(problems[0].split())  # one line, also for a key with line breaks
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RequestError(f"{origin}: {first}{more}")
    return {name: sections[name] for name in tree}


def option_parser() -> argparse.ArgumentParser:
    """Parser of `TrainOptions`, for command lines and for `train.options`; its result has only the options given."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, field in TrainOptions.model_fields.items():
        kind: Any = field.annotation
        option, text = "--" + name.replace("_", "-"), f"{field.description} (default: {field.default})"
        if kind is bool:
            parser.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=field.description)
        elif get_args(kind):
            parser.add_argument(option, choices=get_args(kind), default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(option, type=kind, metavar="N", default=argparse.SUPPRESS, help=text)
    return parser


def flag(name: str, value: Any) -> str:
    """An option of a training as on its command line; `no --name` for a flag that is off."""
    option = "--" + name.replace("_", "-")
    return (option if value else f"no {option}") if isinstance(value, bool) else f"{option} {value}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def _completed(tree: Dict[str, Any], origin: str, options: Mapping[str, Any]) -> Dict[str, Any]:
    """The tree with the keys that sections take from others, and with the options of the training."""
    views, keypoints, train, evaluate = (tree.get(name) for name in ("views", "keypoints", "train", "evaluate"))
    shared = keypoints if isinstance(keypoints, dict) else {}
    sizes = {name: shared[name] for name in ("width", "height", "max_keypoints") if name in shared}
    full = dict(tree)
    if isinstance(keypoints, dict) and "views" in tree:
        full["keypoints"] = {"views": views, **keypoints}
    if isinstance(train, dict):
        limit = {name: value for name, value in sizes.items() if name == "max_keypoints"}
        full["train"] = {**limit, **_options(train.get("options"), origin), **train, **options}
    if isinstance(evaluate, dict):
        full["evaluate"] = {**sizes, **evaluate, "views": _merged(views, evaluate.get("views", {}))}
    return full


def _options(text: Any, origin: str) -> Dict[str, Any]:
    try:
        return vars(option_parser().parse_args(shlex.split(text) if isinstance(text, str) else []))
    except (RequestError, ValueError) as error:
        raise RequestError(f"{origin}: train.options: {error}") from None


def _merged(tree: Any, changes: Any) -> Any:
    if not (isinstance(tree, dict) and isinstance(changes, dict)):
        return changes
    return {**tree, **{key: _merged(tree.get(key), value) for key, value in changes.items()}}


def preset(path: Union[str, Path]) -> str:
    """The preset named in the first line of a params.yaml; "" without one."""
    match = re.match(r"# Preset ([\w.-]+):", Path(path).read_text(encoding="utf-8"))
    return match.group(1) if match else ""


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
        raise RequestError(f"{path}: no such file; `{typed('repro', preset='sample')}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise RequestError(f"{path}{where}: is not valid YAML: {getattr(error, 'problem', error)}") from None


def _problem(section: str, model: Type[Section], error: Any) -> str:
    """`train.lr = -1: must be greater than 0`, from one pydantic error."""
    *path, last = [section, *(str(part) for part in error["loc"])]
    key, kind = ".".join([*path, last]), error["type"]
    if kind == "value_error":
        return f"{key}.{error['ctx']['error']}"
    if kind == "extra_forbidden":
        owner: Any = model
        for name in path[1:]:
            owner = owner.model_fields[name].annotation
        known = [name for name in owner.model_fields if name not in TrainOptions.model_fields]
        return f"{key}: unknown key{_near(last, known)}"
    if kind == "missing":
        return f"{key} is missing"
    rule = "must hold keys with values"
    if kind != "model_type":
        rule = re.sub("^(Input|String) should", "must", error["msg"])
    return f"{key} = {_short(error['input'])}: {rule}"


def _near(name: str, known: List[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
