"""Match two images: find SIFT keypoints, run SuperGlue, and keep mutual matches.

    from superglue_sift import Matcher

    matcher = Matcher.load()                         # the shipped weights; a GPU if there is one
    result = matcher.match("A.jpg", "B.jpg")
    result.points0, result.points1, result.scores     # (K, 2), (K, 2) pixels, (K,) probabilities

    result.show().save("matches.png")                 # a notebook shows the picture by itself
    result.fit_homography().model, result.fit_fundamental().inliers  # (3, 3) or None, (K,) bool

To match an image several times, compute its features once: `a = matcher.extract("A.jpg")`, then
`matcher.match(a, "B.jpg")`, or `matcher.match_many("A.jpg", ["B.jpg", "C.jpg"])`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Generator,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import cv2
import numpy as np
import torch

from superglue_sift import __version__, environment
from superglue_sift.errors import RequestError, check_range
from superglue_sift.features import nearest
from superglue_sift.features.extraction import Image, extract_features, load_mask, to_gray
from superglue_sift.features.extractors import SIFT, Extractor, load_extractor
from superglue_sift.features.features import Features
from superglue_sift.features.images import FRAMES, STORED, UPRIGHT, decode_photo, read_bytes
from superglue_sift.features.sift import estimate_sift_scale
from superglue_sift.files import FileName, compute_json_digest
from superglue_sift.geometry.verification import Factors
from superglue_sift.guided import add_guided_matches
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, match_pairs
from superglue_sift.network.weights import (
    THRESHOLD,
    choose_device,
    find_shipped_weights,
    fuse_for_inference,
    load_model,
    read_match_threshold,
)
from superglue_sift.scene import SIZES, SKIPPED, Rules, verify_pair, verify_ratio_matches
from superglue_sift.torch_compat import describe_missing_compiler

MAX_KEYPOINTS = 4096
NETWORK_KEYPOINTS = 1024
RESIZE = 1024  # Longer side in px to which images are reduced
# Attributes that decide the matches, beside the network. A pickle keeps them.
SETTINGS = (
    "max_keypoints", "network_keypoints", "resize", "threshold", "refine", "rules", "frame",
)  # fmt: skip
ImageOrFeatures = Union[Image, Features]  # What is matched
PRECISIONS = ("float32", "bfloat16", "float16")  # Number types of the layers


@dataclasses.dataclass(frozen=True, eq=False)
class Matcher:
    """A trained network with the settings of its input. Create it with `Matcher.load`.

    It is frozen. `dataclasses.replace(matcher, threshold=0.5)` makes a copy with other settings,
    which shares the network.

    Equal input gives equal bytes on one device. Threads may share a matcher: they extract features
    in parallel and take turns at the network, which uses all cores by itself. Processes must be
    spawned, not forked. A matcher is pickled as the name of its file and its settings.

    Attributes:
        model: the network for inference on `device`, as `fuse_for_inference` returns it.
        device: the torch device of the network.
        max_keypoints: maximum number of keypoints of an image.
        network_keypoints: maximum number of keypoints of an image that are selected for the network
            (`nearest.select_keypoints`). Time and memory grow with its square.
        resize: longer side in px to which images are reduced for SIFT. Images below
            768 px are enlarged to this size, at most twice. If 0, images keep their size. Features
            and results are in px of the file in any case.
        threshold: minimum probability of a match of the network.
        extractor: the extractor of keypoints. None if it may not be run.
        refine: whether to refine positions by the pixels, if there are any
            (`MatchResult.refined1`). None means True without `rules`, and False with them. The
            positions in a database are refined once, for all pairs (`tracks.refine_tracks`).
        rules: rules for images of one scene, of which not every two overlap. Each pair is first
            accepted or rejected, then matches of all keypoints are added (`scene`). If None,
            match any images.
        frame: the frame of coordinates. "upright" is rotated according to EXIF, as by `cv2.imread`
            and browsers. "stored" is not rotated, as in COLMAP (see `images`).
        info: the description in the model file. It is empty if the network is from no file.
        workers: number of pairs that are matched at a time (`use_one_core_per_pair`).

    Raises:
        RequestError: For a setting out of range.
    """

    model: SuperGlue = dataclasses.field(repr=False)
    device: str = "cpu"
    max_keypoints: int = MAX_KEYPOINTS
    network_keypoints: int = NETWORK_KEYPOINTS
    resize: int = RESIZE
    threshold: float = THRESHOLD
    extractor: Optional[Extractor] = dataclasses.field(default=SIFT, repr=False)
    refine: Optional[bool] = None
    rules: Optional[Rules] = None
    frame: str = UPRIGHT
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    workers: int = 1
    # These are arguments, so that `dataclasses.replace` passes them on to the copy.
    _turn: Any = dataclasses.field(default_factory=threading.Lock, repr=False)
    _process: int = dataclasses.field(default_factory=os.getpid, repr=False)
    # Load the same file again, to unpickle a matcher.
    _reload: Optional[Callable[[], Matcher]] = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_choice("frame", self.frame, FRAMES)
        check_range("max_keypoints", self.max_keypoints, 1)
        check_range("network_keypoints", self.network_keypoints, 1)
        check_range("resize", self.resize, 0)
        check_range("threshold", self.threshold, 0, 1)

    @classmethod
    def load(
        cls,
        path: Optional[FileName] = None,
        device: str = "auto",
        *,
        max_keypoints: Optional[int] = None,
        network_keypoints: Optional[int] = None,
        resize: Optional[int] = None,
        threshold: Optional[float] = None,
        precision: str = "float32",
        compile: bool = False,
        extractor: Optional[str] = None,
        refine: Optional[bool] = None,
        scene: bool = False,
        frame: str = UPRIGHT,
        accept: Optional[float] = None,
        min_matches: Optional[int] = None,
    ) -> Matcher:
        """Load a model file.

        Args:
            path: a trained model or any checkpoint. If None, take the shipped weights.
            device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1".
            max_keypoints: see the class. If None, it is 4,096, or 8,192 with `scene`.
            network_keypoints: see the class. If None, it is 1,024, or 512 with `scene`.
            resize: see the class. If None, it is 1,024, or 1,600 with `scene`.
            threshold: see the class. If None, it is the model's, or 0.2 if it has none.
            precision: float32, bfloat16 (for GPUs, and CPUs with AMX) or float16 in the layers.
            compile: whether to compile the layers by torch 2, once for each of a few sizes.
            extractor: `module:function` of a model that was not trained on SIFT, to let it run.
                Without it, such a model matches `Features` only.
            refine: see the class. If None, positions are refined without `scene` only.
            scene: whether the images show one scene.
            frame: "upright" or "stored", see the class.
            accept, min_matches: settings of `scene.Rules`, with `scene` only.

        Raises:
            RequestError: If the file cannot be loaded, or a setting is wrong.

        Example:
            >>> Matcher.load(device="cpu", max_keypoints=2048).max_keypoints
            2048
        """
        # Check the settings before the model is loaded.
        _check_choice("precision", precision, PRECISIONS)
        rules = _make_rules(scene, **_drop_none(accept=accept, min_matches=min_matches))
        chosen_device = choose_device(device)
        model, info = load_model(path or find_shipped_weights(), chosen_device)
        network = _prepare_network(model, precision, compile)
        # Sizes that are None are those of scenes, or the defaults of this class.
        sizes = _drop_none(
            max_keypoints=max_keypoints, network_keypoints=network_keypoints, resize=resize
        )
        file = str(Path(path).resolve()) if path else None
        return cls(
            network,
            chosen_device,
            **{**(SIZES if scene else {}), **sizes},
            threshold=read_match_threshold(info) if threshold is None else threshold,
            extractor=_choose_extractor(model.config.extractor, extractor),
            refine=refine,
            rules=rules,
            frame=frame,
            info=info,
            # Another machine, which may have no GPU, chooses its own device for "auto".
            _reload=functools.partial(
                cls.load, file, device, precision=precision, compile=compile, extractor=extractor
            ),
        )

    def __reduce__(self) -> Tuple[Any, ...]:
        """Pickle the name of the file and the settings. The file is loaded again."""
        if self._reload is None:
            raise TypeError("this Matcher has no file to be pickled by: create it by Matcher.load")
        settings = {name: getattr(self, name) for name in SETTINGS}
        return self._reload, (), settings

    def digest(self) -> str:
        """Return a digest (16 hexadecimal digits) of all that decides the matches of two images.

        It is of the version of the program, the weights with their precision, the extractor, and
        the settings. The device is not part of it, since it changes scores by rounding only.
        """
        weights = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            # numpy has no bfloat16, whose values float32 has as well.
            values = tensor.float().cpu().numpy().tobytes()
            weights.update(f"{name} {tensor.dtype}".encode() + values)
        extractor = self.extractor or SIFT
        return compute_json_digest(
            {
                "versions": (__version__, cv2.__version__),
                "model": repr(self.model.config),
                "weights": weights.hexdigest(),
                "extractor": (extractor.name, extractor.code, extractor.descriptor_dim),
                **{name: repr(getattr(self, name)) for name in SETTINGS if name != "refine"},
                "refine": self.refines,
            }
        )

    @property
    def refines(self) -> bool:
        """Return whether positions are refined by the pixels, if there are any."""
        return self.rules is None if self.refine is None else self.refine

    def _check_not_forked(self) -> None:
        """Raise RequestError in a forked process, where waiting for torch's threads never ends."""
        if self._process != os.getpid():
            fix = "multiprocessing.get_context('spawn') or torch.multiprocessing.spawn"
            raise RequestError(f"the Matcher was loaded before this process was forked: use {fix}")

    def extract(self, image: Image, mask: Optional[Union[FileName, np.ndarray]] = None) -> Features:
        """Extract keypoints of an image for `match`.

        Args:
            image: a file, an array (H, W) gray or (H, W, 3) BGR uint8, a PIL image or a tensor.
            mask: where it is black (0) or False, there is no keypoint. It is an array (H, W) like
                the image, or a file of the size of the image's file, as in COLMAP. Transparent
                pixels are left out in any case.

        Raises:
            RequestError: If the image or the mask cannot be read.

        Example:
            >>> from skimage import data
            >>> matcher = Matcher.load(device="cpu", max_keypoints=200)
            >>> features = matcher.extract(data.camera())
            >>> features.image_size, features.keypoints.shape
            ((512, 512), (200, 2))
        """
        if isinstance(image, (str, Path)):
            return self.extract_file(read_bytes(image), image, mask)
        # Pixels in memory are upright, so their masks need no rotation.
        gray, transparent = to_gray(image)
        loaded_mask = None if mask is None else load_mask(mask, gray.shape[1::-1], 1)
        return self._extract(gray, (transparent, loaded_mask), "an image")._replace(image=image)

    def extract_file(
        self, data: bytes, path: FileName, mask: Optional[Union[FileName, np.ndarray]] = None
    ) -> Features:
        """Extract keypoints from the bytes of a file, as `extract` does.

        Args:
            data: content of the file.
            path: the path of the file. Messages name it, and it becomes `Features.image`.
            mask: a mask as for `extract`.

        Raises:
            RequestError: If the image or the mask cannot be read.
        """
        photo = decode_photo(data, str(path), True, self.frame)
        turned = photo.turned if self.frame == UPRIGHT else 1
        size = photo.pixels.shape[1::-1]
        loaded_mask = None if mask is None else load_mask(mask, size, turned)
        features = self._extract(photo.pixels, (photo.mask, loaded_mask), str(path))
        return features._replace(image=path, turned=turned)

    def _extract(
        self, gray: np.ndarray, masks: Sequence[Optional[np.ndarray]], name: str
    ) -> Features:
        """Extract keypoints of gray pixels for `extract`.

        Args:
            gray: (H, W) uint8.
            masks: (H, W) uint8 or None each. No keypoint lies where one of them is 0.
            name: name of the image, for warnings.

        Raises:
            RequestError: If the model's extractor may not be run.
        """
        self._check_not_forked()
        if self.extractor is None:
            source = self.model.config.extractor
            reason = f"the model's keypoints come from {source}, code that runs only if allowed"
            raise RequestError(f"{reason}: extractor='{source}' (--extractor {source})")
        # A keypoint must lie inside every mask.
        used = [mask for mask in masks if mask is not None]
        features = extract_features(
            gray, self.max_keypoints, self.resize, self.extractor, used, name
        )
        return features._replace(frame=self.frame)

    def extract_all(self, images: Iterable[ImageOrFeatures]) -> List[Features]:
        """Extract features of several images, two at a time. Features are returned unchanged."""
        images = list(images)
        if all(isinstance(image, Features) for image in images):
            return images  # type: ignore[return-value]

        def features_of(image: ImageOrFeatures) -> Features:
            return image if isinstance(image, Features) else self.extract(image)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(features_of, images))

    def match(
        self, image0: ImageOrFeatures, image1: ImageOrFeatures, *, refine: Optional[bool] = None
    ) -> MatchResult:
        """Match two images. An image without keypoints has no matches.

        Args:
            image0, image1: both images, each a file, its pixels or its features from `extract`.
            refine: whether to refine positions by the pixels. If None, do what the matcher was
                loaded with, and leave the positions of features without pixels (`Features.of`) as
                they are.

        Raises:
            RequestError: If an image cannot be read, or if `refine` is True and features have no
                pixels.

        Example:
            >>> from skimage import data
            >>> photo = data.camera()
            >>> matcher = Matcher.load(device="cpu", max_keypoints=500)
            >>> result = matcher.match(photo, photo[:, 40:])  # without its left 40 columns
            >>> moves = result.points1 - result.points0
            >>> np.median(moves, axis=0).round().astype(int).tolist()
            [-40, 0]
        """
        features0, features1 = self.extract_all([image0, image1])
        (result,) = self._match_batch([(features0, features1)], refine)
        return result

    def match_many(
        self,
        image: ImageOrFeatures,
        others: Iterable[ImageOrFeatures],
        batch_size: int = 8,
        *,
        refine: Optional[bool] = None,
        accepted_only: bool = False,
    ) -> Iterator[MatchResult]:
        """Match one image, whose features are computed once, with each of the others in order.

        Args:
            image: the image that is part of each pair.
            others: the images to match it with.
            batch_size: how many pairs are read and matched at a time.
            refine: as for `match`.
            accepted_only: whether to leave out the pairs of a scene that were not accepted.

        Raises:
            RequestError: If an image cannot be read.
        """
        features = self.extract_all([image])[0]
        pairs = ((features, other) for other in others)
        results = self.match_batch(pairs, batch_size, refine=refine)
        return (result for result in results if result.accepted or not accepted_only)

    def match_batch(
        self,
        pairs: Iterable[Tuple[ImageOrFeatures, ImageOrFeatures]],
        batch_size: int = 8,
        *,
        refine: Optional[bool] = None,
    ) -> Generator[MatchResult, None, None]:
        """Match each pair, in order.

        Batches are faster on a GPU. Their scores differ from the scores of single pairs by
        rounding.

        Args:
            pairs: both images of each pair.
            batch_size: how many pairs are read and matched at a time.
            refine: as for `match`.

        Raises:
            RequestError: If an image cannot be read. Its batch is then not matched.
        """
        check_range("batch_size", batch_size, 1)
        for batch_images in split_batches(pairs, batch_size):
            features = self.extract_all(itertools.chain.from_iterable(batch_images))
            # The images of pair i are entries 2 i and 2 i + 1.
            batch = list(zip(features[::2], features[1::2]))
            if self.workers == 1:
                yield from self._match_batch(batch, refine)
            else:  # Side by side, each pair is a batch of its own
                yield from self._map_in_threads(
                    lambda pair: self._match_batch([pair], refine)[0], batch
                )

    def refine_batch(
        self, results: Iterable[Tuple[MatchResult, Features, Features]]
    ) -> Generator[MatchResult, None, None]:
        """Refine each result that is not refined yet, with the features of its images.

        The results keep their order.
        """

        def refine(item: Tuple[MatchResult, Features, Features]) -> MatchResult:
            result, features0, features1 = item
            if result.deviations is not None:
                return result
            return result.refine(features0, features1, self.device)

        for batch in split_batches(results, 2 * self.workers):
            yield from self._map_in_threads(refine, batch)

    def _map_in_threads(
        self, function: Callable[[Any], Any], items: Sequence[Any]
    ) -> Iterator[Any]:
        """Call `function` for each of `items` in `workers` threads; yield the results in order."""
        with ThreadPoolExecutor(self.workers) as pool:
            yield from pool.map(function, items)

    def use_one_core_per_pair(self) -> Matcher:
        """Return a matcher that matches one pair per core at a time on a CPU, each in one thread.

        The steps of a pair are too short to be shared by threads, which would mostly wait for each
        other. This sets torch's number of threads for the whole process.
        """
        if self.device != "cpu":
            return self
        torch.set_num_threads(1)
        cores = environment.count_usable_cores()
        return dataclasses.replace(self, workers=cores, _turn=threading.BoundedSemaphore(cores))

    def _match_batch(
        self, batch: Sequence[Tuple[Features, Features]], refine: Optional[bool]
    ) -> List[MatchResult]:
        """Match a batch of pairs. The network takes them all at once.

        Args:
            batch: features of both images of each pair.
            refine: as for `match`.
        """
        if refine and any(features.gray is None for pair in batch for features in pair):
            reason = "the features have no pixels, so positions cannot be refined"
            raise RequestError(f"refine=True: {reason}; leave it out, or match the images")
        results = []
        for pair, (matches, score) in zip(batch, self.match_features(batch)):
            result = MatchResult.of(*pair, matches)
            if self.rules is None:
                results.append(result.keep_above(self.threshold))
            else:
                results.append(dataclasses.replace(result, pair_score=score))
        # Move the matched positions to where the pixels of both images agree best.
        if self.refines if refine is None else refine:
            results = [result.refine(*pair, self.device) for result, pair in zip(results, batch)]
        return results

    def match_features(
        self, batch: Sequence[Tuple[Features, Features]]
    ) -> List[Tuple[Matches, Optional[float]]]:
        """Match the keypoints of pairs of images. All matches of this library come from here.

        Nearest neighbors select the keypoints of each pair that the network gets. The network
        matches these. Guided matching adds matches of other keypoints (`guided`). In a scene, the
        pair is verified in between (`scene.verify_pair`).

        Args:
            batch: features of both images of each pair. The network takes all pairs at once.

        Returns:
            For each pair, its matches and the probability that both images show one place. Without
            rules for a scene, these are all matches, whatever their scores, and the probability is
            None.

        Raises:
            RequestError: If the network cannot match these features (`check_features`).
        """
        self._check_not_forked()
        for pair in batch:
            check_features(self.model.config, *pair)
        if self.rules is not None:
            return self._match_scene(batch, self.rules)
        results: List[Tuple[Matches, Optional[float]]] = []
        for pair, (network_matches, mutual_matches, selected) in zip(
            batch, self.match_network(batch)
        ):
            keypoints = pair[0].keypoints, pair[1].keypoints
            factors = self.get_limit_factors(pair)
            matches = add_guided_matches(
                network_matches, mutual_matches, selected, keypoints, factors, self.threshold
            )
            results.append((matches, None))
        return results

    def get_limit_factors(self, pair: Tuple[Features, Features]) -> Factors:
        """Return px of each file per px of the image that SIFT saw."""
        scales = [estimate_sift_scale(features, self.resize) for features in pair]
        return 1 / scales[0], 1 / scales[1]

    def match_network(
        self, batch: Sequence[Tuple[Features, Features]]
    ) -> List[Tuple[Matches, Matches, Tuple[np.ndarray, np.ndarray]]]:
        """Match pairs by the network alone.

        Returns:
            For each pair:
            - all matches of the network, whatever their scores,
            - the mutual nearest neighbors of all keypoints,
            - the indices (m,) and (n,) of the selected keypoints.
        """
        # The network compares scales in pixels of the images that SIFT saw. In pixels of the files,
        # it would see a zoom that is not there.
        pairs = []
        for pair in batch:
            features0, features1 = (
                features._replace(sift_scale=estimate_sift_scale(features, self.resize))
                for features in pair
            )
            pairs.append((features0, features1))
        # Select the keypoints of each pair that have a likely partner.
        mutual_matches = [nearest.match_by_ratio(*pair, ratio=1.0) for pair in pairs]
        selected = [
            nearest.select_keypoints(features0, features1, self.network_keypoints, matches)
            for (features0, features1), matches in zip(pairs, mutual_matches)
        ]
        # Threads take turns, since the network uses all cores by itself.
        with self._turn:
            network_matches = match_pairs(self.model, pairs, self.device, selected)
        return list(zip(network_matches, mutual_matches, selected))

    def _match_scene(
        self, batch: Sequence[Tuple[Features, Features]], rules: Rules
    ) -> List[Tuple[Matches, Optional[float]]]:
        """Match pairs of a scene.

        The network runs where the ratio test finds something, and then each pair is verified.
        """
        factors = [self.get_limit_factors(pair) for pair in batch]
        first = [verify_ratio_matches(*item) for item in zip(batch, factors)]
        # Leave out pairs with too few ratio matches, and the keypoints of watermarks.
        unmarked = {
            number: (batch[number][0].select(index0), batch[number][1].select(index1))
            for number, (inliers, (index0, index1)) in enumerate(first)
            if inliers >= rules.min_matches
        }
        # Match and verify the other pairs. Those left out have no matches.
        results: List[Tuple[Matches, Optional[float]]]
        results = [(Matches.none(), SKIPPED)] * len(batch)
        matched = self.match_network(list(unmarked.values()))
        for (number, pair), (network_matches, mutual_matches, _) in zip(unmarked.items(), matched):
            matches, score = verify_pair(
                pair, network_matches, mutual_matches, factors[number], self.threshold, rules.accept
            )
            # Convert to indices of all keypoints.
            results[number] = matches.renumber(*first[number][1]).sort(), score
        return results


def split_batches(items: Iterable[Any], size: int) -> Iterator[List[Any]]:
    """Yield lists of `size` items, read as they are needed. The last list may have fewer."""
    iterator = iter(items)
    yield from iter(lambda: list(itertools.islice(iterator, size)), [])


def _drop_none(**settings: Any) -> Dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _make_rules(scene: bool, **settings: Any) -> Optional[Rules]:
    """Return the rules of a scene with these settings, or None without a scene.

    Raises:
        RequestError: If there are settings, but no scene.
    """
    if settings and not scene:
        raise RequestError(f"{', '.join(settings)}: only with scene=True")
    return Rules(**settings) if scene else None


def _prepare_network(model: SuperGlue, precision: str, compiled: bool) -> SuperGlue:
    """Return the network for inference in a precision, with its layers compiled if asked for.

    Raises:
        RequestError: If it shall be compiled, and there is no compiler.
    """
    network = fuse_for_inference(model, precision)
    if compiled:
        reason = describe_missing_compiler(network.dustbin.device.type)
        if reason:
            raise RequestError(f"compile: {reason}; install it, or leave out compile")
        network.compile_layers()
    return network


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise RequestError unless the setting `name` has one of the allowed values."""
    if value not in allowed:
        raise RequestError(f"{name} {value!r}: must be {' or '.join(map(repr, allowed))}")


def _choose_extractor(model_extractor: str, allowed: Optional[str]) -> Optional[Extractor]:
    """Return the extractor of a model, or None if it is code that may not be run.

    Args:
        model_extractor: name of the extractor whose keypoints the model matches.
        allowed: name of an extractor that the caller lets run.

    Raises:
        RequestError: If the caller allows another extractor than the model needs.
    """
    if allowed not in (None, model_extractor):
        raise RequestError(f"extractor {allowed}: the model matches keypoints of {model_extractor}")
    if model_extractor == SIFT.name:
        return SIFT
    return load_extractor(model_extractor) if allowed else None


def check_features(config: SuperGlueConfig, *pair: Features) -> None:
    """Check that the network can match the features of a pair.

    Args:
        config: configuration of the network.
        pair: features of both images.

    Raises:
        RequestError: If the network was trained on other descriptors, if it needs scales and a
            keypoint has none, or if the coordinates are of two frames.
    """
    # Upright and stored pixels are the same if no rotation was undone.
    frames = {
        features.frame for features in pair if features.turned != 1 or features.frame == STORED
    }
    if len(frames) > 1:
        raise RequestError(
            "features of stored and of upright pixels: use Matcher.load(frame='stored')"
        )
    for features in pair:
        kind, dim = "sift" if features.is_sift else "float", features.descriptors.shape[2]
        if (kind, dim) != (config.descriptor, config.descriptor_dim):
            trained = f"{config.extractor}, {config.descriptor} of {config.descriptor_dim}"
            reason = f"keypoints with {kind} descriptors of {dim} entries"
            raise RequestError(f"{reason}: the model matches those of {trained}")
        if config.scale_angle and not features.scales.all():
            raise RequestError("keypoints without scale and angle: the model was trained with both")
