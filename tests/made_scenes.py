"""Small inputs for the tests of evaluation: an untrained model, sequences with exact homographies,
image sets.
"""

import json

import cv2
import numpy as np
import torch

from pipeline.fetch import dataset
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import save_model_file

IDENTITY = np.eye(3)
SHIFT = np.array([[1.0, 0, 12], [0, 1, -8], [0, 0, 1]])
MILD = np.array([[0.92, -0.16, 40], [0.14, 0.9, -12], [1e-4, -5e-5, 1]])
TURN = np.array([[0.92, -0.26, 70], [0.26, 0.92, -40], [1e-4, -5e-5, 1]])


def map_to_photograph(H, size):
    """(2, height, width): x and y, in the photograph, of each pixel of a view."""
    x, y = np.meshgrid(*map(np.arange, size))
    places = transform(np.stack([x, y], -1).reshape(-1, 2).astype(float), np.linalg.inv(H))
    return places.T.reshape(2, *size[::-1])


def write_model(path, about=None, **changes):
    """An untrained network: the softmax nearest-neighbor matcher it starts as.

    about: more of its description; changes: of its configuration.
    """
    torch.manual_seed(0)
    config = SuperGlueConfig(**{"layers": 1, "sinkhorn_iterations": 10, **changes})
    info = {
        "model": config.to_dict(),
        "step": 7,
        "data": "abc",
        "code": "def",
        "training": "0123abcd",
    }
    save_model_file(path, SuperGlue(config).state_dict(), {**info, **(about or {})})
    return path


def write_sequence(folder, image, homographies):
    """A sequence in HPatches layout: image 1 and its warps, with their homographies."""
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / "1.png"), image)
    for number, H in homographies.items():
        warped = cv2.warpPerspective(image, H, image.shape[::-1], borderMode=cv2.BORDER_REFLECT)
        cv2.imwrite(str(folder / f"{number}.png"), warped)
        np.savetxt(folder / f"H_1_{number}", H)
    return folder


def write_image_set(folder, images, split, broken=()):
    """What `fetch` leaves, for these images in one split; names in `broken` hold no image."""
    originals = folder / "originals"
    originals.mkdir(parents=True)
    for name, image in images.items():
        cv2.imwrite(str(originals / name), image)
    for name in broken:
        (originals / name).write_bytes(b"not an image")
    names = [*images, *broken]
    entries = [dataset.read_file_entry(originals, name, split, "folder") for name in names]
    dataset.write_manifest(folder / "manifest.csv", entries)
    content = {"source": "folder", "containers": {"folder": {"path": "originals"}}}
    (folder / "source.json").write_text(json.dumps(content))
    return folder


CAMERA = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def format_pair(name0, name1, K0=CAMERA, pose=None):
    """A line of a list of pairs with known cameras, as the authors of SuperGlue write it."""
    pose = np.eye(4) if pose is None else pose
    values = [*np.ravel(K0), *np.ravel(CAMERA), *np.ravel(pose)]
    return f"{name0} {name1} 0 0 " + " ".join(repr(float(value)) for value in values)
