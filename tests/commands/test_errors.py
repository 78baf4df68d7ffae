"""Errors of a request are one line, with exit code 2, in every command."""

import importlib

import pytest
from reading import read_error

from pipeline import errors

COMMANDS = ["superglue_sift.apps.cli", "superglue_sift.onnx", "pipeline.presets"]


@pytest.mark.parametrize("module", COMMANDS)
def test_an_unknown_option_is_one_line(module, capsys):
    assert errors.run(importlib.import_module(module).main, ["--nonsense"]) == 2
    assert read_error(capsys).endswith("--help")
