"""SuperGlue of the package `transformers` with our weights, for comparison where it is installed.

The definitions agree for BatchNorm and an encoder of position and score alone. Theirs takes keypoints as fractions of
the image, and descriptors as wide as the network: it gets ours after the projection.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.descriptors import root_sift
from superglue_sift.network.orientation import choose_orientations
from superglue_sift.network.superglue import SuperGlue, geometry_of

SIDE, REACH = (64, 0.7)  # of the image in place of ours, in px; theirs divides distances to its middle by REACH * SIDE


class _Fixed(nn.Module):
    """Replaces the detector: the same keypoints each time."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *_: object, **__: object) -> object:
        return self.answer


def matching_call(model: SuperGlue, batch) -> Callable[[], Tuple[Tensor, Tensor]]:
    """A call that matches one pair as `model` (norm "batch", no scale_angle): matches (2, N) or -1, scores (2, N).

    Raises ImportError where `transformers` (4.52 or later) cannot be imported.
    """
    try:
        from transformers import SuperGlueConfig as TheirConfig
        from transformers import SuperGlueForKeypointMatching, SuperPointConfig
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
        raise ImportError(str(error)) from error
    config = model.config
    theirs = SuperGlueForKeypointMatching(
        TheirConfig(
            keypoint_detector_config=SuperPointConfig(descriptor_decoder_dim=config.dim),
            hidden_size=config.dim,
            gnn_layers_types=["self", "cross"] * config.layers,
            num_attention_heads=config.heads,
            sinkhorn_iterations=config.sinkhorn_iterations,
            matching_threshold=0.0,
        )
    ).eval()
    theirs.load_state_dict({**theirs.state_dict(), **_renamed(model)})
    pixels = torch.rand(1, 2, 3, SIDE, SIDE)
    with torch.no_grad():
        answer = theirs.keypoint_detector(pixels[0])
        theirs.keypoint_detector = _Fixed(dataclasses.replace(answer, **_inputs(model, batch)))

    def call() -> Tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = theirs(pixels)
        return found.matches[0], found.matching_scores[0]

    return call


def _inputs(model: SuperGlue, batch) -> Dict[str, Tensor]:
    """Outputs of the replaced detector, such that encoder and layers get the same numbers as ours."""
    batch = choose_orientations(batch)
    geometry = torch.cat([geometry_of(batch, side, False) for side in "01"])
    descriptors = torch.cat([root_sift(getattr(batch, "descriptors" + side)) for side in "01"])
    return {
        "keypoints": geometry[..., :2] * REACH + 0.5,
        "scores": geometry[..., 2],
        "descriptors": model.descriptor_projection(descriptors),
        "mask": torch.ones(geometry.shape[:2], dtype=torch.int32),
    }


def _renamed(model: SuperGlue) -> Dict[str, Tensor]:
    """Our weights under their names."""
    own = model.state_dict()
    names = {"final_projection.final_proj": "final_projection", "keypoint_encoder.encoder.4": "keypoint_encoder.12"}
    for i in range(4):
        names[f"keypoint_encoder.encoder.{i}.linear"] = f"keypoint_encoder.{3 * i}"
        names[f"keypoint_encoder.encoder.{i}.batch_norm"] = f"keypoint_encoder.{3 * i + 1}"
    found = {"bin_score": own["dustbin"]}
    for i in range(2 * model.config.layers):
        source, target = f"{('self', 'cross')[i % 2]}_attention.{i // 2}", f"gnn.layers.{i}"
        names[f"{target}.attention.output.dense"] = f"{source}.merge"
        parts = (("0.linear", "0"), ("0.batch_norm", "1"), ("1", "3"))
        names.update({f"{target}.mlp.{theirs}": f"{source}.mlp.{ours}" for theirs, ours in parts})
        for key in ("weight", "bias"):
            split = own[f"{source}.query_key_value.{key}"].chunk(3)
            for part, value in zip(("query", "key", "value"), split):
                found[f"{target}.attention.self.{part}.{key}"] = value
    for target, source in names.items():
        for key in ("weight", "bias", "running_mean", "running_var"):
            if f"{source}.{key}" in own:
                found[f"{target}.{key}"] = own[f"{source}.{key}"]
    return found
