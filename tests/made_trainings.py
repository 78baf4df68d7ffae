"""Small trainings on synthetic views, and networks whose every layer does something."""

import json
import os
import signal
from pathlib import Path

from made_params import make_tree
from made_views import make_stores

from pipeline import tracking
from pipeline.params import RunParams
from pipeline.train import __main__ as train
from pipeline.train import log
from pipeline.train import train as story
from superglue_sift.files import write_atomically
from superglue_sift.network.weights import load_model_file

SMALL = {
    "batch": 4,
    "steps": 6,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "max_keypoints": 32,
    "warmup_steps": 2,
    "val_pairs": 4,
    "val_every": 3,
    "save_every": 2,
    "log_every": 2,
    "decay_start": 3,
}


def make_request_function(folder, make_params):
    """`request(out, **keys)`: arguments of pipeline.train on views in `folder`, with these keys of
    the sections `train` and `run`.
    """
    keypoints = make_stores(folder / "keypoints")

    def make(out, **keys):
        keys = {**SMALL, **keys}
        keys["warmup_steps"] = min(keys["warmup_steps"], keys["steps"])
        run = {name: keys.pop(name) for name in set(keys) & set(RunParams.model_fields)}
        values = make_params("train", **keys).model_dump()
        file = folder / f"{out}.yaml"
        file.write_text(json.dumps(make_tree({"train": values, "run": run})))  # JSON is YAML
        words = ["--keypoints", keypoints, "--out", folder / out]
        words += ["--reports", folder / f"{out}-reports", "--params", file]
        return [*map(str, words)]

    return make


def leave_records_out(patch):
    """No MLflow and no picture of the curves, which have tests of their own: each takes longer than
    a small training.
    """
    patch.setattr(tracking, "open_run", lambda *_, **__: tracking.Run())
    patch.setattr(log, "draw_curves", lambda path, *_: write_atomically(path, ""))


def find_training(out):
    """The folder of the only training in `out`."""
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


def find_newest_checkpoint(out):
    """The newest checkpoint of all trainings in `out`."""
    return max(out.rglob("step-*.safetensors"), key=lambda path: path.name)


def read_weights(path):
    """The tensors of a model file."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_model_file(path)[0].items()}


def call_before_step(monkeypatch, function):
    """Call `function(step)` before each step of a training, which needs its learning rate then."""
    inner = story.compute_learning_rate

    def compute(train, run, step, *arguments):
        function(step)
        return inner(train, run, step, *arguments)

    monkeypatch.setattr(story, "compute_learning_rate", compute)


def stop_after(monkeypatch, step):
    """Send SIGTERM to this process during the step that ends with this number."""

    def stop(begun):
        if begun == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    call_before_step(monkeypatch, stop)


def interrupt(arguments, monkeypatch, step=4):
    """A training stopped at `step`; what its newest checkpoint holds."""
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        assert train.main(arguments) == 143
    return read_weights(find_newest_checkpoint(Path(arguments[arguments.index("--out") + 1])))
