"""A workspace as a container has it, and the programs of docker/ at work in it."""

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

DOCKER = Path(__file__).resolve().parents[1] / "docker"
PATIENCE = 120  # seconds: a guard, for a busy machine

TRAINER = """
    import signal, sys, time
    def save(*_):
        time.sleep(0.5)
        open("checkpoint", "w").write("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    open("started", "w").close()
    time.sleep(300)
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_workspace(tmp_path, monkeypatch):
    """A clone whose trainer saves when it is asked to stop, with a `dvc` that only runs it."""
    folder = tmp_path / "workspace"
    (folder / "pipeline").mkdir(parents=True)
    (folder / ".dvc/tmp").mkdir(parents=True)
    (folder / ".git").mkdir()  # a clone's code is its owner's
    for name in ("__init__", "doctor", "presets", "report"):
        (folder / "pipeline" / f"{name}.py").touch()
    (folder / "pipeline/launch.py").write_text(textwrap.dedent(TRAINER))
    dvc = f"""#!/bin/sh
        echo $$ >{shlex.quote(str(tmp_path))}/dvc.pid
        trap 'echo dvc got SIGTERM' TERM
        {shlex.quote(sys.executable)} -m pipeline.launch && echo ok
    """
    write_program(tmp_path / "bin/dvc", dvc)
    monkeypatch.setenv(
        "PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    return folder


def start(workspace, program, *words):
    return subprocess.Popen(
        [sys.executable, str(DOCKER / f"{program}.py"), *words],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": "."},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(workspace, program, *words):
    """Run a file of docker/ in a workspace. Returns its exit code and output."""
    process = start(workspace, program, *words)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out + err
