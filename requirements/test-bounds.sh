#!/usr/bin/env bash
# Try the library with the lowest or the newest versions that pyproject.toml allows, installed from its wheel:
#   requirements/test-bounds.sh lowest     Python 3.9
#   requirements/test-bounds.sh newest     Python 3.13
# Runs requirements/try-wheel.sh in .venv-lowest or .venv-newest. Needs uv. PYTHON names the interpreter;
# UV_TORCH_BACKEND=cpu takes a tenth of the download.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    lowest) python=3.9 options=(--resolution lowest-direct) ;;
    newest) python=3.13 options=(--upgrade) ;;
    *) echo "error: which bound: lowest or newest" >&2 && exit 2 ;;
esac
venv=$PWD/.venv-$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

uv venv --clear --python "${PYTHON:-$python}" "$venv"
uv build --quiet --wheel --out-dir "$work"
uv pip compile --quiet --no-header --no-annotate --python "$venv" "${options[@]}" pyproject.toml -o "$work/bounds.txt"
cat "$work/bounds.txt"
uv pip install --quiet --python "$venv" -r "$work/bounds.txt" "$work"/*.whl \
    pytest hypothesis packaging psutil pydantic ruamel.yaml requests scikit-image pandas flask matplotlib jinja2 poselib onnx onnxscript

requirements/try-wheel.sh "$venv/bin/python"
