"""Describe the architecture of a network and its inputs.

This module imports neither torch nor numpy, because `pipeline.params` reads the architecture before
the environment is prepared for them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

# Maximum of each number of a configuration, since a model file may come from anyone
MAX_NUMBER = 65536
DESCRIPTOR_KINDS = ("sift", "float")  # kinds of descriptors, see `batch.normalize_descriptors`


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Describe the architecture of a network. It is the section `train.model` of params.yaml.

    Raises:
        ValueError: For a value out of range.
    """

    dim: int = 128  # D, width of a state; the paper has 128 for SIFT, 256 for SuperPoint
    layers: int = 9  # pairs of one self- and one cross-attention layer
    heads: int = 4  # heads of each attention layer
    norm: Literal["layer", "batch"] = "layer"  # norm of hidden layers
    neighbours: bool = False  # also encode the nearest neighbor in the other image
    rotary: bool = False  # use relative positions in self-attention
    sinkhorn_iterations: int = 100  # the same number in training and in matching

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(field.default) is int and not (type(value) is int and 1 <= value <= MAX_NUMBER):
                raise ValueError(
                    f"{field.name} = {value!r}: must be a whole number from 1 to {MAX_NUMBER}"
                )
        # Rotary positions take the channels of a head in pairs.
        if self.dim % (self.heads * (1 + self.rotary)):
            raise ValueError(
                f"heads = {self.heads}: must divide dim ({self.dim}), with rotary into even parts"
            )


@dataclasses.dataclass(frozen=True)
class SuperGlueConfig(Architecture):
    """Describe a network: its architecture, and its inputs, which the keypoints decide.

    A model file contains it.

    Raises:
        ValueError: For a value out of range.
    """

    scale_angle: bool = True  # also encode SIFT's scale and angle
    extractor: str = "sift"  # name of the keypoint extractor (extractors.py)
    descriptor: str = "sift"  # kind of descriptor, "sift" or "float" (extractors.py)
    descriptor_dim: int = 128  # number of entries of a descriptor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours and not self.scale_angle:
            raise ValueError("neighbours needs scale_angle")
        if self.descriptor not in DESCRIPTOR_KINDS:
            raise ValueError(f"descriptor {self.descriptor!r}: must be of {DESCRIPTOR_KINDS}")

    def to_dict(self) -> dict:
        """Return plain values for JSON. `SuperGlueConfig(**values)` reads them back."""
        return dataclasses.asdict(self)
