"""The walk that CONTRIBUTING.md draws through the library is the one that its code takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Runs a module, and prints the files of the library in which a function was called.
WATCH = """
import inspect, json, runpy, sys, threading

entered = set()

def watch(frame, event, _):
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
    if event == "call" and is_function:
        entered.add(code.co_filename)

sys.argv = sys.argv[1:]
threading.setprofile(watch)
sys.setprofile(watch)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
finally:
    sys.setprofile(None)
print(json.dumps(sorted(entered)))
"""
# Entered for a message, a file or the environment alone
LEFT_OUT = {
    "__init__", "__main__", "apps/folder", "apps/pairing", "apps/results", "environment", "errors",
    "files", "progress", "torch_compat",
}  # fmt: skip


@pytest.mark.slow
def test_two_files_to_a_picture(tmp_path, photo):
    row = re.search(
        r"^\| two files to a picture \|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    listed = set(re.findall(r"`([\w/]+)`", row.group(1)))
    for name, view in (("a.png", photo), ("b.png", photo[:, 40:])):
        cv2.imwrite(str(tmp_path / name), view)
    words = ["superglue_sift", "a.png", "b.png", "--out", "m.png", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    library = ROOT / "superglue_sift"
    paths = [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]
    inside = [path for path in paths if library in path.parents]
    entered = {path.relative_to(library).with_suffix("").as_posix() for path in inside}
    assert listed == entered - LEFT_OUT
