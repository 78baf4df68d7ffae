"""Compare the keypoint stage with the bare work and with a plain pool.

Three ways over the same images, alternating, so that other load affects them equally:

- floor: one process per core, doing nothing but OpenCV's decode, warp and SIFT, from
  bytes and homographies already in memory, on the views as the stage distorts them;
- ours: the stage's own pool, from the manifest to the written shards;
- plain: the straightforward way: `multiprocessing.Pool.imap` (spawned) over the same images,
  read and extracted in the workers, OpenCV's threads at their default; the same shards.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np
import psutil

from benchmarks import timing
from pipeline.features.store import write_shard
from pipeline.files import file_sha256
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.keypoints import image
from pipeline.keypoints.image import gray_views
from pipeline.keypoints.pool import Pool
from pipeline.keypoints.shards import SHARD_IMAGES
from pipeline.views import homography, render
from superglue_sift import sift
from superglue_sift.images import BadImage, decode_gray

Job = Tuple[bytes, str]
OF_FLOOR, OF_PLAIN = 0.95, 1.5  # targets of the stage
_MINFLT, _UTIME, _STIME = 7, 11, 12  # fields of /proc/PID/stat, counted from the one after the name


class Spent(NamedTuple):
    """wall: seconds; cpu: processor seconds of all processes; faults: their page faults."""

    wall: float
    cpu: float
    faults: int


def keypoint_rows(
    images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int, rounds: int = 3
) -> List[Dict[str, Any]]:
    """A row for each way, from some interleaved rounds.

    Columns: `views_per_second` of the best round; `of_floor` and `of_plain`, how many times as fast as those, the
    median over the rounds with its interval; `cpu_of_plain`, the same by processor seconds; `cpu_ms` and
    `faults`, processor time and page faults a view (medians).

    Raises AssertionError when ours and plain do not give the same bytes.
    """
    jobs = list(_jobs(images, entries, settings))
    spent: Dict[str, List[Spent]] = {"floor": [], "ours": [], "plain": []}
    digests = set()

    def whole(run: Callable[..., Tuple[Spent, str]]) -> Spent:
        taken, digest = run(images, entries, settings, workers)
        digests.add(digest)
        return taken

    ways: Dict[str, Callable[[], Spent]] = {
        "floor": lambda: _floor(jobs, settings, workers),
        "ours": lambda: whole(_ours),
        "plain": lambda: whole(_plain),
    }
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(list(ways)):
            spent[name].append(ways[name]())
    assert len(digests) == 1, "ours and the plain pool differ"
    views = len(entries) * settings.views_per_image
    what = f"keypoints {{}}, {settings.width}x{settings.height}"
    return [{"what": what.format(name), **_columns(name, spent, views)} for name in ways]


def _jobs(images: ImageSet, entries: Sequence[Entry], settings: Any) -> Iterator[Job]:
    """Input of the floor, without bad images, which cost the other ways next to nothing."""
    view_size = (settings.width, settings.height)
    for entry in entries:
        try:
            data = images.read(entry)
            height, width = decode_gray(data, entry.name).shape
        except BadImage:
            continue
        if homography.fits((width, height), view_size):
            yield data, entry.name


def _columns(name: str, spent: Dict[str, List[Spent]], views: int) -> Dict[str, Any]:
    own = spent[name]
    columns: Dict[str, Any] = {"views_per_second": round(views / min(each.wall for each in own), 2)}
    for key, other, field in (("of_floor", "floor", 0), ("of_plain", "plain", 0), ("cpu_of_plain", "plain", 1)):
        ratio = timing.speed_up([each[field] for each in spent[other]], [each[field] for each in own])
        columns.update(
            {key: round(ratio.value, 3), f"{key}_low": round(ratio.low, 3), f"{key}_high": round(ratio.high, 3)}
        )
    columns["cpu_ms"] = round(1000 * statistics.median(each.cpu for each in own) / views, 1)
    columns["faults"] = round(statistics.median(each.faults for each in own) / views)
    return columns


class _Meter:
    """Measures what this process and its children spend from now on; call `read` before a child ends."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> Spent:
        ticks, faults = 0, 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                text = Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:  # it has ended
                continue
            fields = text.rpartition(")")[2].split()
            faults += int(fields[_MINFLT])
            ticks += int(fields[_UTIME]) + int(fields[_STIME])
        return Spent(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), faults)

    def read(self) -> Spent:
        now = self._now()
        return Spent(*(after - before for after, before in zip(now, self._before)))


def _floor(jobs: Sequence[Job], settings: Any, workers: int) -> Spent:
    """The bare work, by started processes with bytes and views in memory."""
    context = multiprocessing.get_context("spawn")
    barrier, ends = context.Barrier(workers + 1), context.SimpleQueue()
    # distributed by size, so that the floor does not wait for one process
    shares = [list(jobs[rank::workers]) for rank in range(workers)]
    processes = [context.Process(target=_bare, args=(share, settings, barrier, ends)) for share in shares]
    for process in processes:
        process.start()
    barrier.wait()
    meter = _Meter()
    for _ in processes:
        ends.get()
    taken = meter.read()
    barrier.wait()
    for process in processes:
        process.join()
    return taken


def _bare(jobs: Sequence[Job], settings: Any, barrier: Any, ends: Any) -> None:
    cv2.setNumThreads(1)
    prepared = [_prepared(*job, settings) for job in jobs]
    detector = sift.detector(sift.with_spare(settings.max_keypoints))
    for _, _, views in prepared[:1]:
        detector.detectAndCompute(views[0], None)
    barrier.wait()
    for data, homographies, views in prepared:
        gray = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
        for H, view in zip(homographies, views):
            cv2.warpPerspective(gray, H, view.shape[::-1], flags=cv2.INTER_LINEAR)
            detector.detectAndCompute(view, None)
    ends.put(None)
    barrier.wait()  # its usage is read while it lives


def _prepared(data: bytes, name: str, settings: Any) -> Tuple[bytes, List[np.ndarray], List[np.ndarray]]:
    """The homographies and the views of an image, as `gray_views` makes them."""
    gray = decode_gray(data, name)
    size, view_size = (gray.shape[1], gray.shape[0]), (settings.width, settings.height)
    homographies, views = [], []
    for index in range(settings.views_per_image):
        rng = homography.generator(image.SEED, name, index)
        if index == 0:
            H = homography.mild_view(rng, size, view_size)
            views.append(render.render(gray, H, view_size))
        else:
            H = homography.sample_view(rng, size, view_size, settings.views.homography)
            views.append(render.distort(render.render(gray, H, view_size), rng, settings.views.photometric))
        homographies.append(H)
    return data, homographies, views


def _ours(images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int) -> Tuple[Spent, str]:
    with Pool(images, settings, workers) as pool:
        list(pool.map(entries[: 2 * workers]))  # processes started, as in a run of hours
        meter = _Meter()
        return _written(pool.map(entries), meter, SHARD_IMAGES)


def stage_seconds(images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int) -> float:
    """Seconds of the stage's own pool for these images, after its processes have started."""
    return _ours(images, entries, settings, workers)[0].wall


def _plain(images: ImageSet, entries: Sequence[Entry], settings: Any, workers: int) -> Tuple[Spent, str]:
    extract = functools.partial(_plain_views, images.without_entries(), settings)
    # spawn: a fork would inherit the one thread of this process where ours ran with one worker
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        list(pool.imap(extract, entries[: 2 * workers]))
        meter = _Meter()
        return _written(pool.imap(extract, entries), meter, SHARD_IMAGES)


def _plain_views(images: ImageSet, settings: Any, entry: Entry) -> Any:
    try:
        return gray_views(decode_gray(images.read(entry), entry.name), entry.name, settings)
    except BadImage as bad:
        return bad


def _written(results: Any, meter: _Meter, shard_images: int) -> Tuple[Spent, str]:
    """Write the results as shards; (what it took by the meter, digest of the files)."""
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
        taken = meter.read()
        return taken, " ".join(file_sha256(path) for path in paths)
