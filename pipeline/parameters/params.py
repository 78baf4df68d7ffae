"""Loading params.yaml: typed, frozen sections, and one clear line for what is wrong with the file.

Every section in the file is checked, so that a misspelt key of the last stage is reported before the first one runs.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Dict, List, Type, Union, get_args

from pydantic import ValidationError

from pipeline.errors import RequestError, typed
from pipeline.parameters.schema import SECTIONS, FetchParams, Section


def load(section: str, path: Union[str, Path] = "params.yaml") -> Any:
    """One section of the file at `path`, checked together with all its others; RequestError in one line."""
    sections = load_all(path)
    if section not in sections:
        raise RequestError(f"{path}: the section '{section}' is missing")
    return sections[section]


def load_all(path: Union[str, Path] = "params.yaml") -> Dict[str, Section]:
    """Every section present in the file at `path`, by name."""
    return parse(_read(Path(path)), str(path))


def parse(tree: Any, origin: str) -> Dict[str, Section]:
    """Check a tree of plain dicts; `origin` is the file name the messages begin with."""
    if not isinstance(tree, dict):
        raise RequestError(f"{origin}: must hold the sections {', '.join(SECTIONS)}")
    sections: Dict[str, Section] = {}
    problems: List[str] = []
    for name, values in tree.items():
        if name not in SECTIONS:
            problems.append(f"{name}: unknown section{_near(str(name), list(SECTIONS))}")
            continue
        try:
            sections[name] = SECTIONS[name].model_validate(values)
        except ValidationError as error:
            # a misspelt key first: that its right name is missing follows from it
            found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
            problems += [_problem(name, SECTIONS[name], each) for each in found]
    asked, stored = (getattr(sections.get(name), "max_keypoints", None) for name in ("train", "keypoints"))
    if not problems and asked is not None and stored is not None and asked > stored:
        limit = f"keypoints.max_keypoints ({stored})"
        problems = [f"train.max_keypoints = {asked}: must be at most {limit}, what a view stores"]
    if problems:
        first = " ".join(problems[0].split())  # one line, whatever a key is made of
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RequestError(f"{origin}: {first}{more}")
    return sections


def preset(path: Union[str, Path]) -> str:
    """The preset a params.yaml began as, which its first line names; "" where it names none."""
    found = re.match(r"# Preset ([\w.-]+):", Path(path).read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def data_name(sections: Dict[str, Section]) -> str:
    """What the training images are called: their source, or their folder; "" without a section fetch."""
    fetch = sections.get("fetch")
    if not isinstance(fetch, FetchParams):
        return ""
    return Path(fetch.path).name if fetch.source == "folder" else fetch.source


def flatten(name: str, values: Union[Section, Dict[str, Any]]) -> Dict[str, Any]:
    """`{"train.lr": 0.0001, "keypoints.homography.scale_min": 0.5, ...}`; `name` is that of the section."""
    tree = values.model_dump() if isinstance(values, Section) else values
    flat: Dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(f"{name}.{key}", value) if isinstance(value, dict) else {f"{name}.{key}": value})
    return flat


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
    """`train.lr = -1: must be a number above 0, at most 10`, from one pydantic error."""
    location = [str(part) for part in error["loc"]]
    key = ".".join([section, *location])
    if error["type"] == "value_error":
        return f"{key}.{error['ctx']['error']}"
    owner: Any = model
    field: Any = None
    for part in location:
        owner = owner if field is None else field.annotation
        field = owner.model_fields.get(part)
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{_near(location[-1], list(owner.model_fields))}"
    if field is None:
        return f"{key} = {_short(error['input'])}: must hold keys with values"
    if error["type"] == "missing":
        return f"{key} is missing: must be {_allowed(field)}"
    return f"{key} = {_short(error['input'])}: must be {_allowed(field)}"


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}


def _allowed(field: Any) -> str:
    """The permitted values of a field as text, from its type and its limits."""
    if get_args(field.annotation):
        return "one of " + ", ".join(str(choice) for choice in get_args(field.annotation))
    words = [
        f"{word} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, word in _LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    words += [f"matching {limit.pattern}" for limit in field.metadata if getattr(limit, "pattern", None)]
    keys = ", ".join(getattr(field.annotation, "model_fields", ()))
    kind = _KINDS.get(field.annotation, f"a section of keys: {keys}")
    return " ".join([kind, ", ".join(words)]).strip()


def _near(name: str, known: List[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
