#!/usr/bin/env bash
# Try the library with the lowest or the newest versions that pyproject.toml allows, installed from its wheel:
#   requirements/test-bounds.sh lowest     Python 3.9
#   requirements/test-bounds.sh newest     Python 3.13
# Runs requirements/try-wheel.sh in .venv-lowest or .venv-newest. PYTHON names the interpreter;
# UV_TORCH_BACKEND=cpu takes torch 2 without CUDA, a tenth of the download.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

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

requirements/try-wheel.sh "$venv/bin/python"
