#!/usr/bin/env bash
# Try the wheel that is installed for an interpreter, on Linux, macOS and Windows (Git's bash), as README shows it:
#   requirements/try-wheel.sh PYTHON     two photographs, a folder, COLMAP's database, the quick tests of the library
# The interpreter also needs what the tests use (requirements/test-bounds.sh). Without pycolmap the database is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# What is asked for is the installed command, also on Windows.
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
PATH="$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))'):$scripts:$PATH"

cd "$work"
mkdir photos
"$python" - <<'END'
import cv2, numpy, superglue_sift
from skimage import data

assert "site-packages" in superglue_sift.__file__, superglue_sift.__file__
photo = data.coffee()[:, :, ::-1]
H = numpy.array([[0.8, -0.15, 60], [0.12, 0.85, 10], [1e-4, 0, 1]])
cv2.imwrite("photos/a.png", photo)
cv2.imwrite("photos/b.png", cv2.warpPerspective(photo, H, (600, 400)))
cv2.imwrite("photos/c.jpg", data.rocket()[:, :, ::-1])
END

echo "== two photographs"
superglue-match photos/a.png photos/b.png --out matches.png --json matches.json
"$python" - <<'END'
import json, pathlib, numpy

H = numpy.array([[0.8, -0.15, 60], [0.12, 0.85, 10], [1e-4, 0, 1]])
result = json.loads(pathlib.Path("matches.json").read_text())
estimated = numpy.array(result["H_0to1"])
corners = numpy.array([[0, 0, 1], [599, 0, 1], [599, 399, 1], [0, 399, 1.0]]).T
moved, true = estimated @ corners, H @ corners
error = numpy.hypot(*(moved[:2] / moved[2] - true[:2] / true[2])).mean()
print(f"mean error of the corners {error:.2f} px")
assert error < 1
END
[ -s matches.png ]

echo "== a folder"
colmap=()
if "$python" -c 'import pycolmap' 2>/dev/null; then
    colmap=(--colmap database.db)
fi
superglue-match folder photos --out-dir results ${colmap[@]+"${colmap[@]}"}
[ -s results/pairs.csv ] && ! grep -F '\' results/pairs.csv
[ -s results/a_b_matches.npz ]
[ ${#colmap[@]} -eq 0 ] || [ -s database.db ]

# A copy of what the tests import besides the wheel: in the clone, Python would find the files of the clone before
# those of the wheel.
echo "== the quick tests of the library"
mkdir clone
cp -r "$root"/{tests,pipeline,benchmarks,examples,pretrained,presets,docs,pyproject.toml,README.md,dvc.yaml} clone/
cd clone
PYTHONPATH=. "$python" -m pytest -q -p no:cacheprovider -m "not slow" \
    tests/{network,features,geometry,apps,interop} tests/test_{matcher,match_result,drawing,files,onnx,torch_compat}.py
