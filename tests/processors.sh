#!/usr/bin/env bash
# The numeric tests with the kernels of other processors: each line limits the instructions or the code paths that
# one library may use, so that its sums round as they would there. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=(tests/network tests/golden/test_golden.py tests/geometry/test_two_view.py tests/test_match_result.py
    tests/test_torch_compat.py tests/train/test_loss.py tests/train/test_optimizer.py)
failed=()

# try NAME VARIABLE=VALUE...
try() {
    printf '\n=== %s (%s)\n' "$1" "${*:2}"
    env "${@:2}" "${PYTHON:-.venv/bin/python}" -m pytest -q -m "not slow" -p no:cacheprovider "${tests[@]}" \
        "${arguments[@]}" || failed+=("$1")
}

arguments=("$@")
try "torch without vector units" ATEN_CPU_CAPABILITY=default
try "torch with AVX2" ATEN_CPU_CAPABILITY=avx2
try "MKL with SSE 4.2" MKL_ENABLE_INSTRUCTIONS=SSE4_2
try "MKL with AVX2" MKL_ENABLE_INSTRUCTIONS=AVX2
try "MKL with the code for every processor" MKL_CBWR=COMPATIBLE
try "oneDNN with SSE 4.1" ONEDNN_MAX_CPU_ISA=SSE41
try "oneDNN with AVX2" ONEDNN_MAX_CPU_ISA=AVX2
try "OpenBLAS for Haswell" OPENBLAS_CORETYPE=Haswell
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nerror: tests failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
