#!/usr/bin/env bash
# In an image built by build-in-chroot.sh: start training in a workspace, send SIGTERM to the container's first process
# as `docker stop` does, look for the checkpoint, and let the next run go on from it.
#   docker/stop-and-go.sh cu111|modern WORKSPACE
set -euo pipefail
cd "$(dirname "$0")/.."
stack=$1
place=$(realpath "$2")
log=$(mktemp)
STEPS=${STEPS:-2000}

fail() {
    tail -n 30 "$log"
    echo "error: $*" >&2
    exit 1
}

rm -rf "$place/checkpoints" "$place/reports/train"
# Enough steps that the stop falls into the middle, and no checkpoint by itself before it.
sed -i -E "/^train:/,/^[a-z]+:$/ { s/^( +steps:) [0-9]+/\1 $STEPS/; s/^( +(save|val)_every:) [0-9]+/\1 100000/ }" \
    "$place/params.yaml"
docker/build-in-chroot.sh "$stack" run "$place" repro >"$log" 2>&1 &
runner=$!
for _ in $(seq 600); do
    grep -q '"train/loss"' "$place/reports/train/log.jsonl" 2>/dev/null && break
    kill -0 "$runner" 2>/dev/null || fail "the run ended before training began"
    sleep 0.5
done

# chroot isolation shares our process ids, and this workspace's lock names its entrypoint.
entry=$(sed -E 's/.*"pid": ([0-9]+).*/\1/' "$place/.dvc/tmp/workspace.lock")
before=$(date +%s)
kill -TERM "$entry"
code=0
wait "$runner" || code=$?
echo "stopped in $(($(date +%s) - before)) s with exit code $code"
[ "$code" = 143 ] || fail "exit code $code, not 143"
ls "$place"/checkpoints/step-*.safetensors >/dev/null 2>&1 || fail "no checkpoint"
step=$(ls "$place"/checkpoints | sed -nE 's/^step-0*([0-9]+)\.safetensors$/\1/p' | sort -n | tail -n 1)
echo "the checkpoint is of step $step"
[ "$step" -gt 0 ] && [ "$step" -lt "$STEPS" ] || fail "step $step is not in the middle"

docker/build-in-chroot.sh "$stack" run "$place" repro >"$log" 2>&1 &
runner=$!
for _ in $(seq 600); do
    grep -q "resuming at step" "$log" && break
    kill -0 "$runner" 2>/dev/null || break
    sleep 0.5
done
grep "resuming at step" "$log" || fail "the next run did not say that it goes on"
entry=$(sed -E 's/.*"pid": ([0-9]+).*/\1/' "$place/.dvc/tmp/workspace.lock")
[ -z "$entry" ] || kill -TERM "$entry" 2>/dev/null || true
wait "$runner" || true
rm -f "$log"
