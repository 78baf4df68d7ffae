"""What tests read: JSON, YAML, and all files of a folder, to be compared with another one's."""

import json

from ruamel.yaml import YAML


def read_json(path):
    return json.loads(path.read_text())


def read_yaml(path):
    """The tree of a YAML file."""
    return YAML(typ="safe", pure=True).load(path)


def read_files(folder):
    """Name below the folder -> bytes, of all files."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
