"""SuperGlue as the package `transformers` has it, on made keypoints, for comparison: used where it is installed."""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch
from torch import nn

from pipeline.matching.superglue import SuperGlueConfig


class _Fixed(nn.Module):
    """In place of the detector: the same keypoints each time."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *_: object, **__: object) -> object:
        return self.answer


def matching_call(config: SuperGlueConfig, keypoints: int) -> Callable[[], object]:
    """Matches one pair of `keypoints` made keypoints each, with random weights of the same width, layers, heads and T.

    Raises ImportError where `transformers` (4.52 or later) cannot be imported.
    """
    try:
        from transformers import SuperGlueConfig as TheirConfig
        from transformers import SuperGlueForKeypointMatching, SuperPointConfig
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
        raise ImportError(str(error)) from error
    torch.manual_seed(0)
    theirs = TheirConfig(
        keypoint_detector_config=SuperPointConfig(descriptor_decoder_dim=config.dim),
        hidden_size=config.dim,
        gnn_layers_types=["self", "cross"] * config.layers,
        num_attention_heads=config.heads,
        sinkhorn_iterations=config.sinkhorn_iterations,
    )
    model = SuperGlueForKeypointMatching(theirs).eval()
    pixels = torch.rand(1, 2, 3, 64, 64)
    with torch.no_grad():
        answer = model.keypoint_detector(pixels[0])
    made = {
        "keypoints": torch.rand(2, keypoints, 2),
        "scores": torch.rand(2, keypoints),
        "descriptors": nn.functional.normalize(torch.randn(2, keypoints, config.dim), dim=-1),
        "mask": torch.ones(2, keypoints, dtype=torch.int32),
    }
    model.keypoint_detector = _Fixed(dataclasses.replace(answer, **made))

    def call() -> None:
        with torch.no_grad():
            model(pixels)

    return call
