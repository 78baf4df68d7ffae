"""How near the keypoint stage is to the bare work, and how far from a plain pool.

Three ways over the same images, in turns, so that a busy machine treats them alike:

- floor: one process per core, heap trimming off, doing nothing but OpenCV's decode, warp and SIFT, from
  bytes and homographies already in memory, on the views as the stage distorts them;
- ours: the stage's own pool, from the manifest to the written shards;
- plain: what one writes without knowing any of this: `multiprocessing.Pool.imap` (spawned) over the same images,
  read and extracted in the workers, OpenCV's threads and the allocator as they come; shards written alike.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import cv2
import numpy as np

from pipeline.extraction.image import image_views
from pipeline.extraction.pool import Pool
from pipeline.features import sift
from pipeline.features.store import sha256, write_shard
from pipeline.features.tuning import tune_process
from pipeline.images.decode import BadImage, decode_gray
from pipeline.images.manifest import Entry
from pipeline.images.sources import ImageSet
from pipeline.views import homography, photometric, render

Job = Tuple[bytes, str, Any]


def keypoint_rows(
    images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int, rounds: int = 3
) -> List[Dict[str, Any]]:
    """Best of some interleaved rounds: name, images per second, and the ratio to the floor.

    Raises AssertionError when ours and plain do not give the same bytes.
    """
    jobs = [(images.read(entry), entry.name, settings) for entry in entries]  # for the floor alone
    seconds: Dict[str, List[float]] = {"floor": [], "ours": [], "plain": []}
    digests = set()
    for _ in range(rounds):
        seconds["floor"].append(_floor(jobs, workers))
        for name, run in (("ours", _ours), ("plain", _plain)):
            taken, digest = run(images, entries, settings, workers)
            seconds[name].append(taken)
            digests.add(digest)
    assert len(digests) == 1, "ours and the plain pool differ"
    floor = min(seconds["floor"])
    return [
        {
            "what": f"keypoints {name}",
            "images_per_second": round(len(entries) / min(taken), 3),
            "views_per_second": round(len(entries) * settings.views / min(taken), 2),
            "of_floor": round(floor / min(taken), 4),
        }
        for name, taken in seconds.items()
    ]


def _floor(jobs: Sequence[Job], workers: int) -> float:
    """Seconds of the bare work: processes that are ready, bytes and views in their memory."""
    context = multiprocessing.get_context("spawn")
    barrier, ends = context.Barrier(workers + 1), context.SimpleQueue()
    # dealt by size: a floor that waits for one unlucky process would be no floor
    shares = [list(jobs[rank::workers]) for rank in range(workers)]
    processes = [context.Process(target=_bare, args=(share, barrier, ends)) for share in shares]
    for process in processes:
        process.start()
    barrier.wait()
    begun = time.perf_counter()
    for _ in processes:
        ends.get()
    taken = time.perf_counter() - begun
    for process in processes:
        process.join()
    return taken


def _bare(jobs: Sequence[Job], barrier: Any, ends: Any) -> None:
    tune_process()
    prepared = [_prepared(*job) for job in jobs]
    detector = sift.detector(sift.with_spare(jobs[0][2].max_keypoints))
    detector.detectAndCompute(prepared[0][2][0], None)
    barrier.wait()
    for data, homographies, views in prepared:
        gray = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
        for H, view in zip(homographies, views):
            cv2.warpPerspective(gray, H, view.shape[::-1], flags=cv2.INTER_LINEAR)
            detector.detectAndCompute(view, None)
    ends.put(None)


def _prepared(data: bytes, name: str, settings: Any) -> Tuple[bytes, List[np.ndarray], List[np.ndarray]]:
    """The homographies and the views of an image, as `image_views` makes them."""
    gray = decode_gray(data, name)
    size, view_size = (gray.shape[1], gray.shape[0]), (settings.width, settings.height)
    homographies, views = [], []
    for index in range(settings.views):
        rng = homography.generator(settings.seed, name, index)
        if index == 0:
            H = homography.mild_view(rng, size, view_size)
            views.append(render.render(gray, H, view_size))
        else:
            H = homography.sample_view(rng, size, view_size, settings.homography, settings.difficulty)
            views.append(photometric.distort(render.render(gray, H, view_size), rng, settings.photometric))
        homographies.append(H)
    return data, homographies, views


def _ours(images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int) -> Any:
    with Pool(images, settings, workers) as pool:
        list(pool.map(entries[: 2 * workers]))  # processes started, as in a run of hours
        begun = time.perf_counter()
        return _written(pool.map(entries), begun, settings.shard_images)


def _plain(images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int) -> Any:
    extract = functools.partial(_plain_views, images.without_entries(), settings)
    # spawn: a fork would inherit the tuning of this process where ours ran with one worker
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        list(pool.imap(extract, entries[: 2 * workers]))
        begun = time.perf_counter()
        return _written(pool.imap(extract, entries), begun, settings.shard_images)


def _plain_views(images: ImageSet, settings: Any, entry: Entry) -> Any:
    try:
        return image_views(images.read(entry), entry.name, settings)
    except BadImage as bad:
        return bad


def _written(results: Any, begun: float, shard_images: int) -> Tuple[float, str]:
    """Write the results as shards; (seconds since `begun`, digest of the files)."""
    with tempfile.TemporaryDirectory() as folder:
        waiting: List[Any] = []
        paths: List[Path] = []

        def flush() -> None:
            paths.append(Path(folder) / f"{len(paths)}")
            write_shard(paths[-1], waiting)
            waiting.clear()

        for result in results:
            if not isinstance(result, BadImage):
                waiting.append(result)
            if len(waiting) == shard_images:
                flush()
        flush()
        taken = time.perf_counter() - begun
        return taken, " ".join(sha256(path) for path in paths)
