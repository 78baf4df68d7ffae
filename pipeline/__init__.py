"""Train SuperGlue on SIFT keypoints, and use it.

The network itself is in the library `superglue_sift`, which imports nothing of this package. Each
of these modules is a command, `python -m pipeline.<name>`:

    fetch/ keypoints/ train/ evaluate/ export    the five stages of dvc.yaml
    launch             starts a stage on all processes of this machine
    presets            writes params.yaml
    doctor             checks the machine
    report             shows the last evaluation, or compares experiments
    tracking           shows MLflow's pages, or sends what a server has missed

Stages share these modules:

    fetch.dataset      lists the photographs, and reads them
    keypoints.views    renders views by random homographies without borders, and distorts them
    keypoints.store    has the keypoints of all views, which training maps into memory
    params             checks params.yaml
    distributed        connects the ranks of a training
    workers            computes results ahead of time, and defers signals
    provenance         says which code, versions and photographs a result comes from
    tracking           sends the run of a training to MLflow
    served_model       is the model as MLflow serves it
    errors             has the errors that a user reads
"""

from __future__ import annotations

# `superglue_sift` prepares OpenCV before any module of the pipeline imports it.
from superglue_sift.environment import keep_freed_memory

keep_freed_memory()
