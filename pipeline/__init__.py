"""Train SuperGlue on SIFT keypoints, and use it.

The network itself is the library `superglue_sift`, which knows nothing of this package. Modules
that can be run as `python -m pipeline.<name>` stand at the top. A stage is a folder, a section of
params.yaml and a stage of dvc.yaml:

    fetch/ keypoints/ train/ evaluate/ export    the five stages
    launch        starts a stage on all processes of this machine
    presets, doctor, report                      write params.yaml; check the machine; show results

What stages share:

    fetch.dataset      which photographs there are, and how they are read
    keypoints.views    random homographies without borders, rendering, photometric distortion
    keypoints.store    the keypoints of all views, which training maps into memory
    params        params.yaml: its keys, limits and messages
    distributed   the ranks of a training
    workers       work done ahead of time by threads and processes, and requests to stop
    provenance    code and versions, and the photographs that a model has seen
    tracking      the local log of a run; mlflow_store sends it to MLflow, served_model is the
                  registered model
    errors        errors that a person reads
"""

from __future__ import annotations

import superglue_sift  # noqa: F401 (prepares OpenCV before any module of the pipeline imports it)
