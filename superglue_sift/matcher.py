"""Two images in, matches out: SIFT keypoints, SuperGlue, mutual matches.

    from superglue_sift import Matcher

    matcher = Matcher.load()                         # the weights that ship with the library; a GPU where there is one
    found = matcher.match("A.jpg", "B.jpg")
    found.points0, found.points1, found.scores        # (K, 2), (K, 2) pixels, (K,) probabilities

    found.show()                                      # a picture, in a notebook; .save("matches.png")
    found.homography().model, found.fundamental().inliers    # (3, 3) or None, (K,) bool

Features of an image that is matched several times are computed once: `a = matcher.extract("A.jpg")`, then
`matcher.match(a, "B.jpg")`, or `matcher.match_many("A.jpg", ["B.jpg", "C.jpg"])`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from superglue_sift import scenes
from superglue_sift.batch import Pair, from_pairs
from superglue_sift.descriptors import kind_of
from superglue_sift.errors import RequestError
from superglue_sift.extractors import DEFAULT, DENSE, Extractor
from superglue_sift.extractors import load as load_extractor
from superglue_sift.features import Features, Image, extract, gray_of
from superglue_sift.images import gray_of as decoded
from superglue_sift.images import read
from superglue_sift.match_result import MatchResult
from superglue_sift.network.inference import CUDAGraphModel, fuse_for_inference
from superglue_sift.network.packing import Assignments
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, mutual_matches
from superglue_sift.upright import FRAMES, UPRIGHT, orientation
from superglue_sift.weights import choose_device, load_model, shipped_weights

MAX_KEYPOINTS = 1024
RESIZE = 1024  # px, longer side
THRESHOLD = 0.2  # probability of a match, of a model that does not bring its own (SuperGlue, section 5)


def match_threshold(info: Mapping[str, Any]) -> float:
    """The probability above which matches of a model count: what its description states, else THRESHOLD.

    Raises RequestError for what is no probability.
    """
    value = info.get("match_threshold", THRESHOLD)
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
        raise RequestError(f"the model's match_threshold is {value!r}: must be between 0 and 1; name another model")
    return float(value)


class PairMatches(NamedTuple):
    """A matcher's answer for one pair. matches0: (M,) int64, index in image 1 or -1; scores0: (M,) float, 0 to 1."""

    matches0: np.ndarray
    scores0: np.ndarray

    def above(self, threshold: float) -> PairMatches:
        """The same without matches whose score is not above `threshold`."""
        keep = self.scores0 > threshold
        return PairMatches(np.where(keep, self.matches0, -1), np.where(keep, self.scores0, 0.0))


def match_pairs(model: Callable[..., Assignments], pairs: Sequence[Pair], device: str) -> List[PairMatches]:
    """The network's matches of these pairs, in one batch: every mutual one, whatever its score."""
    batch = from_pairs(pairs).to(device)
    with torch.no_grad():
        size = (batch.records0.shape[1], batch.records1.shape[1])
        found = mutual_matches(model(batch), size, threshold=0.0)
    rows = zip(pairs, found.matches0.cpu().numpy(), found.matching_scores0.cpu().numpy())
    return [PairMatches(m[: len(pair.records0)], s[: len(pair.records0)]) for pair, m, s in rows]


@dataclasses.dataclass(eq=False, repr=False)
class Matcher:
    """A trained network and how images are read for it. `Matcher.load` makes one, and tells what the settings mean.

    Equal input gives equal bytes on one device. Threads may share a matcher: they find features side by side and take
    turns at the network, which uses all cores by itself.

    model: on `device`, for inference, such as `fuse_for_inference` gives. extractor: what finds the keypoints of
    images, None where it may not be run.
    """

    model: SuperGlue
    device: str = "cpu"
    max_keypoints: int = 1024
    resize: int = 1024
    threshold: float = THRESHOLD
    extractor: Optional[Extractor] = DEFAULT
    refine: bool = True
    rules: Optional[scenes.Rules] = None  # of photographs of a place
    frame: str = UPRIGHT
    workers: int = dataclasses.field(default=1, init=False)
    _turn: Any = dataclasses.field(default_factory=threading.Lock, init=False)
    _network: Any = dataclasses.field(init=False)  # the model as it is called

    def __post_init__(self) -> None:
        self._network = self.model if self.device == "cpu" else CUDAGraphModel(self.model)

    @classmethod
    def load(
        cls,
        path: Union[str, Path, None] = None,
        device: str = "auto",
        *,
        max_keypoints: Optional[int] = None,
        resize: Optional[int] = None,
        threshold: Optional[float] = None,
        precision: str = "float32",
        extractor: Optional[str] = None,
        refine: bool = True,
        scene: bool = False,
        frame: str = UPRIGHT,
        **rules: Any,
    ) -> Matcher:
        """A matcher from a model file. Raises RequestError: no such file or device, or not a model of this project.

        Args:
            path: models/superglue.safetensors of a training, or any checkpoint; None: the weights that ship.
            device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1".
            max_keypoints: the strongest so many of each image; None: 1,024, of a scene 8,192.
            resize: SIFT runs on the image reduced to this longer side in pixels; 0: never. Keypoints are always in
                pixels of the image as given. None: 1,024, of a scene 1,600.
            threshold: least probability of a match; None: the model's own, else 0.2.
            precision: of the layers: float32, bfloat16 (faster on GPUs and on CPUs with AMX) or float16.
            extractor: of a model of other keypoints than SIFT's their `module:function`, which is code that a model
                file can name and must not run: without it such a model matches `Features` alone.
            refine: align matches by the pixels, to a fraction of one (`MatchResult.aligned1`), where they are at hand;
                not the thousands of a scene.
            scene: the images are photographs of one place, of which not every two show the same: a pair is accepted
                first, then filled with matches of all keypoints (see `scenes`).
            frame: pixels that coordinates count, of files: "upright", turned as their EXIF data say, like
                `cv2.imread` and browsers; or "stored", like COLMAP (see `upright`).
            rules: of `scenes.Rules` what differs from the model's own, such as `accept=15`.
        """
        if frame not in FRAMES:
            raise RequestError(f"frame {frame!r}: must be 'upright' or 'stored'")
        device = choose_device(device)
        model, info = load_model(Path(path) if path else shipped_weights(), device)
        if threshold is None:
            threshold = match_threshold(info)
        found = _extractor_of(model.config.extractor, extractor, scene)
        if rules and not scene:
            raise RequestError(f"{', '.join(rules)}: of scenes; say scene=True")
        most = max_keypoints or (scenes.MAX_KEYPOINTS if scene else MAX_KEYPOINTS)
        side = resize if resize is not None else (scenes.RESIZE if scene else RESIZE)
        own = dataclasses.replace(scenes.Rules.of_model(info), **rules) if scene else None
        refine = refine and not scene
        return cls(fuse_for_inference(model, precision), device, most, side, threshold, found, refine, own, frame)

    def extract(self, image: Image) -> Features:
        """Keypoints of an image, for `match`. Raises RequestError for one that cannot be read."""
        if not isinstance(image, (str, Path)):
            return self.extract_gray(gray_of(image))._replace(image=image)
        return self.extract_file(read(image), image)

    def extract_file(self, data: bytes, path: Union[str, Path]) -> Features:
        """`extract` of a file whose bytes were read before."""
        turned = orientation(data) if self.frame == UPRIGHT else 1
        return self.extract_gray(decoded(data, path, self.frame))._replace(image=path, turned=turned)

    def extract_gray(self, gray: np.ndarray) -> Features:
        """Keypoints of gray pixels (H, W) uint8. Raises RequestError where the model's extractor may not be run."""
        if self.extractor is None:
            name = self.model.config.extractor
            asking = f"extractor='{name}' (--extractor {name})"
            raise RequestError(f"the model matches keypoints of {name}, code that is run only when asked for: {asking}")
        return extract(gray, self.max_keypoints, self.resize, self.extractor)._replace(frame=self.frame)

    def extract_all(self, images: Sequence[Union[Image, Features]]) -> List[Features]:
        """`extract` of several images, two at a time; of what is extracted already nothing is done."""
        waiting = [image for image in images if not isinstance(image, Features)]
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(self.extract, waiting)
            return [image if isinstance(image, Features) else next(found) for image in images]

    def match(
        self, image0: Union[Image, Features], image1: Union[Image, Features], *, refine: Optional[bool] = None
    ) -> MatchResult:
        """Matches of two images, each a file, its pixels or what `extract` gave of it.

        An image without keypoints gives no match. Raises RequestError for one that cannot be read.
        refine: align them by the pixels of both images? None: as the matcher was loaded. Features without pixels
        (`Features.of`) stay as they are, and `aligned1` of the result is None.
        """
        return next(self.match_batch([(image0, image1)], refine=refine))

    def match_many(
        self,
        image: Union[Image, Features],
        others: Iterable[Union[Image, Features]],
        batch_size: int = 8,
        *,
        refine: Optional[bool] = None,
        accepted_only: bool = False,
    ) -> Iterator[MatchResult]:
        """`match` of one image with each of the others, in their order; features of `image` are computed once.

        accepted_only: of a scene, pairs that were not accepted are left out.
        """
        one = self.extract_all([image])[0]
        found = self.match_batch(((one, other) for other in others), batch_size, refine=refine)
        return (each for each in found if each.accepted or not accepted_only)

    def match_batch(
        self,
        pairs: Iterable[Tuple[Union[Image, Features], Union[Image, Features]]],
        batch_size: int = 8,
        *,
        refine: Optional[bool] = None,
    ) -> Iterator[MatchResult]:
        """`match` of each pair, in order; `pairs` are read and answered `batch_size` at a time.

        In a batch a GPU is faster; scores differ from those of single pairs by rounding, up to 1e-5.
        """
        waiting, aligned = iter(pairs), self.refine if refine is None else refine
        for group in iter(lambda: list(itertools.islice(waiting, batch_size)), []):
            sides = self.extract_all([side for pair in group for side in pair])
            together = list(zip(sides[::2], sides[1::2]))
            if self.workers == 1:
                yield from self._match(together, aligned)
                continue
            for found in self._each(lambda pair: self._match([pair], aligned), together):
                yield from found

    def align_batch(self, found: Iterable[Tuple[MatchResult, Features, Features]]) -> Iterator[MatchResult]:
        """`MatchResult.align` of each that is not aligned yet, with the features of its images, in order."""

        def align(one: Tuple[MatchResult, Features, Features]) -> MatchResult:
            return one[0] if one[0].deviations is not None else one[0].align(*one[1:], self.device)

        waiting = iter(found)
        for group in iter(lambda: list(itertools.islice(waiting, 2 * self.workers)), []):
            yield from self._each(align, group)

    def _each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        with ThreadPoolExecutor(self.workers) as pool:
            yield from pool.map(function, items)

    def side_by_side(self) -> None:
        """On a CPU, answer as many pairs of a batch at once as there are cores, each with one thread.

        A pair's steps are too short to share: the threads of several wait for each other, and compute while they wait.
        torch's number of threads is set for the whole process. On a GPU nothing changes.
        """
        if self.device == "cpu":
            torch.set_num_threads(1)
            self.workers = usable_cores()
            self._turn = threading.BoundedSemaphore(self.workers)

    def _match(self, sides: Sequence[Tuple[Features, Features]], aligned: bool) -> List[MatchResult]:
        for pair in sides:
            check_features(self.model.config, *pair)
        pairs = [Pair(a.records[self._seen(a)], b.records[self._seen(b)], a.size, b.size) for a, b in sides]
        likely = [self._likely(*pair) for pair in sides]
        asked = [pair for pair, shown in zip(pairs, likely) if shown]
        with self._turn:
            answers = iter(match_pairs(self._network, asked, self.device) if asked else [])
        found = [self._result(*pair, next(answers) if shown else None) for pair, shown in zip(sides, likely)]
        return [one.align(*pair, self.device) if aligned else one for one, pair in zip(found, sides)]

    def _seen(self, side: Features) -> Union[slice, np.ndarray]:
        """Which keypoints the network sees: all, of a scene the strongest."""
        if self.rules is None:
            return slice(None)
        return scenes.strongest(side.records, self.rules.network_keypoints)

    def _likely(self, side0: Features, side1: Features) -> bool:
        """Is the network asked? Of a scene only where the classical matcher finds something in common."""
        if self.rules is None or not self.rules.likely:
            return True
        few = [side.records[scenes.strongest(side.records, scenes.LIKELY_KEYPOINTS)] for side in (side0, side1)]
        one, other = (scenes.side_of(records, side.size, self.resize) for records, side in zip(few, (side0, side1)))
        return scenes.agreeing((one, other)) >= self.rules.likely

    def _result(self, side0: Features, side1: Features, answer: Optional[PairMatches]) -> MatchResult:
        """The matches of a pair; of one of a scene the network answered for the strongest keypoints alone, or not."""
        if answer is None:
            return MatchResult.of(side0, side1, np.empty((0, 2), np.int64), np.empty(0, np.float32))._replace(
                pair_score=0
            )
        if self.rules is None:
            return MatchResult.of(side0, side1, *answer.above(self.threshold))._replace(threshold=self.threshold)
        found = MatchResult.of(side0, side1, *answer.above(0.0))
        seen = [
            np.arange(len(side.records))[self._seen(side)][own] for side, own in zip((side0, side1), found.matches.T)
        ]
        both = [scenes.side_of(side.records, side.size, self.resize) for side in (side0, side1)]
        filled = scenes.filled(np.stack(seen, axis=1), found.scores, self.threshold, (both[0], both[1]), self.rules)
        matches, scores, score = filled
        return found._replace(matches=matches, scores=scores, pair_score=score)


def _extractor_of(of_model: str, asked: Optional[str], scene: bool) -> Optional[Extractor]:
    """What finds the keypoints of a model's extractor: SIFT, or code that was asked for by name; else None."""
    if asked not in (None, of_model):
        raise RequestError(f"extractor {asked}: the model matches keypoints of {of_model}")
    found = load_extractor(of_model) if asked or of_model == DEFAULT.name else None
    return DENSE if scene and found is DEFAULT else found


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_features(config: SuperGlueConfig, *sides: Features) -> None:
    """RequestError for keypoints of other descriptors than a network matches, or without scales that it looks at."""
    for side in sides:
        kind = kind_of(side.records.dtype)
        if kind != (config.descriptor, config.descriptor_dim):
            matched = f"{config.extractor}, {config.descriptor} of {config.descriptor_dim}"
            given = f"keypoints with {kind[0]} descriptors of {kind[1]} entries"
            raise RequestError(f"{given}: the model matches those of {matched}")
        if config.scale_angle and not side.records["scale"].all():
            raise RequestError("keypoints without scale and angle: the model was trained with both")
