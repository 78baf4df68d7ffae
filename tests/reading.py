"""What tests read: JSON, YAML, the error of a command, and all files of a folder."""

import json

from ruamel.yaml import YAML


def read_json(path):
    return json.loads(path.read_text())


def read_yaml(path):
    """The tree of a YAML file."""
    return YAML(typ="safe", pure=True).load(path)


def read_error(capture):
    """The one line in which a command refused a request, without a traceback."""
    text = capture.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text
    return line


def read_files(folder):
    """Name below the folder -> bytes, of all files."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
