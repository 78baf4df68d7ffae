"""Variables by which libraries choose their code and their threads sleep are set in time."""

import io
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import params
from superglue_sift import environment

ROOT = Path(__file__).resolve().parents[1]
# Runs a stage as `python -m` does; prints the variables at the moment of each library's import
WATCH = """
import json, os, runpy, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy", "cv2"):
            variables.setdefault(name, dict(os.environ))

variables = {}
sys.meta_path.insert(0, Watch())
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit:
    print(json.dumps(variables))
"""


def run_python(*words, **variables):
    """Run a new process without the variables of this one that count; return what it prints."""
    names = (
        *environment.NETWORK,
        *environment.WAIT_VARIABLES,
        "OPENCV_IPP",
        "OPENCV_LOG_LEVEL",
        "OPENCV_CPU_DISABLE",
    )
    values = {name: value for name, value in os.environ.items() if name not in names}
    values.update(PYTHONPATH=str(ROOT), **variables)
    command = [sys.executable, *words]
    done = subprocess.run(command, env=values, capture_output=True, text=True)
    assert done.returncode == 0 and "WARN" not in done.stderr, done.stderr
    return done


def params_file(folder, precision):
    text = (ROOT / "presets/sample.yaml").read_text()
    changed, count = re.subn("^  precision: .*", f"  precision: {precision}", text, flags=re.M)
    assert count == 1
    (folder / "params.yaml").write_text(changed)
    return folder / "params.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "missing", "precision"),
    [
        ("pipeline.train", "--keypoints", "portable"),
        ("pipeline.evaluate", "--images", "&anchor portable"),
        ("pipeline.train", "--keypoints", "!!str 'portable'"),
        ("pipeline.evaluate", "--images", "float32 # not precision: portable"),
    ],
)
def test_a_portable_stage_sets_its_variables_before_torch_numpy_and_opencv(
    tmp_path, stage, missing, precision
):
    """Also what a launcher gave its ranks is replaced."""
    file = params_file(tmp_path, precision)
    words = [stage, "--params", str(file), missing, str(tmp_path / "missing")]
    printed = run_python("-c", WATCH, *words, OMP_NUM_THREADS="7").stdout
    variables = json.loads(printed.splitlines()[-1])
    assert set(variables) == {"torch", "numpy", "cv2"}
    for values in variables.values():
        network_values = {name: values.get(name) for name in environment.NETWORK}
        if params.load(file).train.precision == "portable":
            assert network_values == environment.NETWORK
        else:
            assert values["OMP_NUM_THREADS"] == "7" and "MKL_CBWR" not in values
    assert variables["cv2"]["OPENCV_IPP"] == "disabled"


def test_params_are_read_without_torch_and_numpy(tmp_path):
    """They decide what these libraries must find in the environment when they are loaded."""
    script = (
        "import sys; from pathlib import Path; from pipeline import params;"
        "params.load(Path(sys.argv[1]));"
        "print([name for name in ('torch', 'numpy', 'cv2') if name in sys.modules])"
    )
    file = params_file(tmp_path, "portable")
    assert run_python("-c", script, str(file)).stdout == "[]\n"


def test_a_process_is_prepared_if_torch_and_numpy_come_later():
    prepare = "environment.prepare_network(); print(environment.is_prepared())"
    early = f"from superglue_sift import environment; {prepare}"
    assert run_python("-c", early).stdout == "True\n"
    for library in ("numpy", "torch"):
        assert run_python("-c", f"import {library}; {early}").stdout == "False\n"
    # What a launcher gave the process counts, unless a variable was changed since
    inherited = {**environment.NETWORK, environment.PREPARED: "1"}
    assert run_python("-c", f"import numpy; {early}", **inherited).stdout == "True\n"
    changed = {**inherited, "OMP_NUM_THREADS": "4"}
    script = "from superglue_sift import environment; print(environment.is_prepared())"
    assert run_python("-c", script, **changed).stdout == "False\n"


def test_libraries_choose_their_code_by_the_variables_of_the_network():
    """Torch on a processor with AVX-512, and both of OpenBLAS: numpy's and OpenCV's."""
    script = (
        "import cv2, numpy, scipy.linalg, torch, threadpoolctl;"
        "print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads());"
        "print(*{one.get('architecture') for one in threadpoolctl.threadpool_info()"
        " if one['internal_api'] == 'openblas'})"
    )
    assert run_python("-c", script, **environment.NETWORK).stdout.split() == [
        "AVX2",
        "1",
        "Haswell",
    ]


def test_opencv_that_is_loaded_first_starts_without_ipp_and_without_a_warning():
    script = (
        "import cv2, superglue_sift;"
        "logging = getattr(cv2.utils, 'logging', cv2);"  # OpenCV 5, OpenCV 4
        "print(cv2.ipp.useIPP(), logging.setLogLevel(3))"
    )
    assert run_python("-c", script).stdout.split() == ["False", "3"]
    default = run_python("-c", "import cv2; print(cv2.ipp.useIPP())").stdout.split()
    assert default == ["True"]  # so the line above can fail


# How idle threads wait


def test_threads_of_the_command_sleep_unless_the_user_sets_a_variable(root):
    entry = 'superglue-match = "superglue_sift.__main__:command"'
    assert entry in (root / "pyproject.toml").read_text()
    for name in environment.WAIT_VARIABLES:
        variables = {name: "active", "OPENBLAS_NUM_THREADS": "3"}
        environment.wait_passively(variables)
        assert variables == {name: "active", "OPENBLAS_NUM_THREADS": "3"}
    # GNU's OpenMP, which torch loads, prints what it has read.
    words = ("-m", "superglue_sift", "--version")
    stderr = run_python(*words, OMP_DISPLAY_ENV="VERBOSE").stderr
    if "GOMP_SPINCOUNT" not in stderr:
        pytest.skip("this torch is not built with GNU's OpenMP")
    assert "GOMP_SPINCOUNT = '0'" in stderr


@pytest.mark.parametrize(
    "encoding, name, printed",
    [
        ("cp1252", "\u5199\u771f.jpg", b"\\u5199\\u771f.jpg"),  # a pipe on Windows
        ("utf8", "a\udcff.jpg", b"a\xff.jpg"),  # a name on Linux that is not UTF-8
    ],
)
def test_names_that_the_output_cannot_show_are_no_error(monkeypatch, encoding, name, printed):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    command = SimpleNamespace(main=lambda _: print(name))
    monkeypatch.setitem(sys.modules, "command", command)
    monkeypatch.setattr(environment, "wait_passively", lambda: None)
    environment.import_and_run_main("command")
    output.flush()
    assert output.buffer.getvalue().strip() == printed


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_a_stage_keeps_the_memory_that_it_frees():
    """Blocks of 16 MiB are taken again without page faults."""
    code = (
        "import resource, pipeline, numpy as np\n"
        "count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "np.ones(1 << 24, np.uint8), np.ones(1 << 24, np.uint8)\n"
        "before = count()\n"
        "np.ones(1 << 24, np.uint8), np.ones(1 << 24, np.uint8)\n"
        "print(count() - before)"
    )
    assert int(run_python("-c", code).stdout) < 100
