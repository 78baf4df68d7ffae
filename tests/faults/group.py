"""Trainings that are killed, in processes that start clean: a kill costs a second.

A server, which has imported the stages and computed nothing, forks them (`forkserver`): libraries
that have started threads, as torch and OpenCV do in a process of tests, cannot be forked.
A group is started as by torchrun (RANK, WORLD_SIZE, a gloo group over loopback). `until_done`
starts it again whenever a process died, as the launcher does.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time

from faults import inject
from pipeline import errors, tracking
from pipeline.distributed import find_free_port
from pipeline.train import __main__ as train
from superglue_sift.network.weights import load_model_file

HANG_SECONDS = 180  # of a start; one takes two
STAGES = ("fetch", "keypoints", "train", "evaluate")
clean = multiprocessing.get_context("forkserver")
clean.set_forkserver_preload([f"pipeline.{stage}.__main__" for stage in STAGES])


def begin(main, arguments, log, folder, **environment):
    """Start a process that becomes a command: `main(arguments)` in `folder`, printing into `log`.

    main: a function of a module. Returns the process when it is about to call it.
    """
    about_to, ready = clean.Pipe(False)
    values = {**os.environ, **environment}
    process = clean.Process(target=_become, args=(main, arguments, log, folder, values, ready))
    process.start()
    ready.close()
    about_to.recv()
    return process


def _become(main, arguments, log, folder, environment, ready):
    os.setsid()  # as torchrun's ranks have it
    with open(log, "a") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.update(environment)
    inject.install()
    tracking.open_run = lambda *_, **__: tracking.Run()  # MLflow has tests of its own
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of a command that has not begun
    ready.send(True)
    sys.exit(errors.run(main, list(arguments)))


def start(ranks, main, arguments, log, folder=".", **environment):
    """Start the ranks of a group; their processes."""
    if ranks > 1:
        environment = {"WORLD_SIZE": str(ranks), **rendezvous(), **environment}
    return [
        begin(main, arguments, log, folder, RANK=str(i), LOCAL_RANK=str(i), **environment)
        for i in range(ranks)
    ]


def rendezvous():
    """Where the ranks of a group meet: a free port of this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "SG_TIMEOUT": "60"}


def wait(processes):
    """Wait for all; their exit codes (negative: the signal). AssertionError if one hangs."""
    deadline = time.monotonic() + HANG_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in codes
    return codes


def until_done(folder, arguments, ranks, fault="", **environment):
    """Start a group until the training is done; the digest of its weights, and the exit codes of
    each start. AssertionError if it hangs or does not get done.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = {"SG_FAULT": fault, "SG_FAULT_ONCE": str(folder), **environment}
    whole = [*arguments, "--out", f"{folder}/checkpoints", "--reports", f"{folder}/reports"]
    codes = []
    while not codes or any(codes[-1]):
        codes.append(wait(start(ranks, train.main, whole, folder / "log", **faults)))
        assert len(codes) < 12, (folder / "log").read_text()
    return digest(folder / "checkpoints"), codes


def digest(checkpoints):
    """SHA-256 over all tensors of the newest checkpoint and of the best model."""
    newest = max(checkpoints.glob("*/step-*.safetensors"), key=lambda path: path.name)
    sha256 = hashlib.sha256()
    for file in (newest, checkpoints / "best.safetensors"):
        for name, tensor in sorted(load_model_file(file)[0].items()):
            sha256.update(name.encode() + tensor.numpy().tobytes())
    return sha256.hexdigest()
