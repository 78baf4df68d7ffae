#!/usr/bin/env bash
# Try the library with the lowest or the newest versions that pyproject.toml allows, installed from its wheel:
#   requirements/test-bounds.sh lowest     Python 3.9
#   requirements/test-bounds.sh newest     Python 3.13
# Runs the tests of the library and matches two photographs, in .venv-lowest or .venv-newest. PYTHON names the
# interpreter; UV_TORCH_BACKEND=cpu takes torch 2 without CUDA, a tenth of the download.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONWARNINGS=ignore:pkg_resources:UserWarning # torch 1.10, at every import

case ${1:-} in
    lowest) python=${PYTHON:-python3.9} options=(--resolution lowest-direct) ;;
    newest) python=${PYTHON:-python3.13} options=(--upgrade) ;;
    *) echo "error: which bound: lowest or newest" >&2 && exit 2 ;;
esac
command -v "$python" >/dev/null || { echo "error: no $python here; PYTHON names one" >&2 && exit 2; }
venv=$PWD/.venv-$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv --clear "$venv"
"$venv/bin/pip" install --quiet uv==0.13.9
uv() { "$venv/bin/uv" "$@" --python "$venv/bin/python"; }
"$venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work" .
uv pip compile --quiet --no-header --no-annotate "${options[@]}" pyproject.toml -o "$work/bounds.txt"
cat "$work/bounds.txt"
uv pip install --quiet -r "$work/bounds.txt" "$work"/*.whl
uv pip install --quiet -c "$work/bounds.txt" pytest hypothesis packaging psutil pydantic ruamel.yaml requests scikit-image

# `pytest` and not `python -m pytest`: the latter would find the clone's files before those of the wheel. Some tests
# also need `pipeline`, which is not in the wheel. What is left out builds the wheel, which the setuptools of an old
# Python cannot do by itself.
mkdir "$work/clone"
ln -s "$PWD/pipeline" "$work/clone/pipeline"
PYTHONPATH="$work/clone" "$venv/bin/pytest" -q -p no:cacheprovider -m "not slow" -k "not the_wheel_holds" \
    tests/library/test_{matching,sift,refine,neighbours,orientation,library}.py \
    tests/library/apps/test_{many,match}.py

cd "$work"
"$venv/bin/python" - <<'END'
import cv2, numpy, superglue_sift
from skimage import data

assert "site-packages" in superglue_sift.__file__, superglue_sift.__file__
photo = data.coffee()[:, :, ::-1]
H = numpy.array([[0.8, -0.15, 60], [0.12, 0.85, 10], [1e-4, 0, 1]])
cv2.imwrite("a.png", photo)
cv2.imwrite("b.png", cv2.warpPerspective(photo, H, (600, 400)))
END
"$venv/bin/superglue-match" a.png b.png --out matches.png --json matches.json
"$venv/bin/python" - <<'END'
import json, pathlib, numpy

H = numpy.array([[0.8, -0.15, 60], [0.12, 0.85, 10], [1e-4, 0, 1]])
found = json.loads(pathlib.Path("matches.json").read_text())
estimated = numpy.array(found["H_0to1"])
corners = numpy.array([[0, 0, 1], [599, 0, 1], [599, 399, 1], [0, 399, 1.0]]).T
moved, true = estimated @ corners, H @ corners
error = numpy.hypot(*(moved[:2] / moved[2] - true[:2] / true[2])).mean()
print(f"mean error of the corners {error:.2f} px")
assert error < 1
END
