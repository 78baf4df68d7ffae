"""One evaluation from its source to its folder, and the SuperGlue paper's: several of them side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from pipeline.errors import WorkError
from pipeline.evaluation import content, estimators, figures, poses, run
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.hpatches import HPatchesPairs
from pipeline.evaluation.matchers import OURS, Matchers, Network
from pipeline.evaluation.pairs import Source
from pipeline.evaluation.scoring import Row, Settings
from pipeline.files import file_sha256
from pipeline.report import files, page, tables
from pipeline.runtime import distributed
from pipeline.schema import EvaluateParams
from superglue_sift import drawing, extractors

# The paper's (section 5.1), 640x480, for which most photographs of COCO must be magnified, and beside it 512x384, for
# which they need not: width, height, keypoints.
VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))

Named = Tuple[Source, str]  # and where its pairs come from, as text


@dataclass(frozen=True)
class Evaluation:
    """What stays the same from source to source.

    skipped: a line for each thing that was asked for and is not here; training: folder of its curves, for the page.
    """

    matchers: Matchers
    settings: Settings
    context: distributed.Context
    skipped: Tuple[str, ...] = ()
    training: Optional[Path] = None

    def run(self, named: Named, out: Path) -> Optional[page.Content]:
        """Evaluate a source; the first process of a group writes everything into `out` and returns the content.

        Raises WorkError when no image could be read.
        """
        (source, where), settings, matchers = named, self.settings, self.matchers
        results = run.evaluate(source, matchers, settings, self.context)
        if not results.pairs:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        disturbed: List[figures.Line] = []
        if settings.robustness and isinstance(source, HeldOutPairs):
            disturbed = run.disturbed_lines(source, matchers, settings, self.context)
        unrelated: List[Row] = []
        if isinstance(source, HeldOutPairs):
            unrelated = run.unrelated_rows(source, matchers, settings, self.context)
        if not self.context.is_main:
            return None
        thresholds = {name: network.threshold for name, network in matchers.networks.items()}
        compared = figures.compare(results.pairs, thresholds)
        drawn = content.draw_pictures(source, matchers, results, settings)
        shown = [small for small, _ in drawn]
        compared.figures.update(figures.unrelated(unrelated))
        found = content.content(where, results, compared, disturbed, shown, self.describe(source, where))
        found.notes.extend(self.skipped)
        files.write(out, found, self.training)
        files.emptied(out / "pictures")
        for small, picture in drawn:
            drawing.write(out / "pictures" / f"{small.name}.png", picture)
        scenes = tables.by_scene(found.scenes) + "\n\n" if isinstance(source, HPatchesPairs) else ""
        print(f"\n{where}, {len(results.pairs)} pairs\n\n{scenes}{tables.comparison(found.figures)}\n")
        print(tables.differences(found.differences))
        print("\n".join(tables.unrelated(found.figures)))
        bad = f"; {len(results.bad)} unreadable images left out, see bad_images.csv" if results.bad else ""
        print("\n".join([*self.skipped, "", f"written to {out}{bad}"]), flush=True)
        return found

    def describe(self, source: Source, where: str) -> Dict[str, object]:
        """Everything a figure must be quoted with."""
        params, resize = self.settings.params, self.settings.resize
        judged = {
            "truth": f"mutual nearest reprojections under {params.correct_px} px, the larger of both directions",
            "robust": f"inliers within {params.ransac_px} px, {params.ransac_iterations} iterations",
            "estimators": {name: estimators.WORDS[name] for name in self.settings.estimators},
        }
        rendered = isinstance(source, HeldOutPairs)
        resized = f"shorter side {resize} px" if resize else "as they are"
        extractor = self.settings.extractor
        found_by = "SIFT" if extractor is extractors.DEFAULT else extractor.name
        models = {name: model_lines(network) for name, network in self.matchers.networks.items()}
        ours = models.pop(OURS)
        return {
            "pairs_from": where,
            "views": f"{params.width}x{params.height}" if rendered else resized,
            "keypoints": f"{found_by}, at most {params.max_keypoints} in each view",
            **(poses.RULES if isinstance(source, poses.PosePairs) else judged),
            "params": params.model_dump(),
            "model": ours,
            **({"models beside it": models} if models else {}),
        }


def model_lines(network: Network) -> Dict[str, object]:
    """What the protocol says of a network."""
    return {
        "file": network.file.name,
        "sha256": file_sha256(network.file),
        "network": network.info["model"],
        "step": network.info.get("step"),
        "threshold": network.threshold,
    }


def run_paper(
    work: Evaluation, source_of: Callable[[EvaluateParams], Named], out: Path
) -> Dict[str, page.Content]:
    """Each variant in a folder of its own; one table, metrics.json, protocols.csv and page of all.

    Returns the report of each on the first process, nothing on the others.
    """
    contents: Dict[str, page.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = work.settings.params.model_copy(update=asked)
        source, where = source_of(variant)
        title = f"{where}, {width}x{height}, {keypoints} keypoints"
        name = f"{width}x{height}-{keypoints}"
        part = replace(work, settings=replace(work.settings, params=variant))
        found = part.run((source, title), out / name)
        if found is not None:
            contents[name] = found
    if contents:
        write_paper(contents, out)
    return contents


def write_paper(contents: Mapping[str, page.Content], out: Path) -> None:
    """What stands above the folders of the variants. contents: the report of each; figures as
    `<variant>.<matcher>.<figure>`."""
    by_variant = {name: found.figures for name, found in contents.items()}
    flat = {f"{name}.{figure}": value for name, own in by_variant.items() for figure, value in own.items()}
    files.write_json(out / "metrics.json", flat)
    lines = [
        {"protocol": name, **line}
        for name, own in by_variant.items()
        for line in tables.lines_by_matcher(own)
    ]
    files.write_csv(out / "protocols.csv", lines)
    title = "Evaluation: the paper's protocol and its variants"
    (out / "index.html").write_text(page.render_overview(title, contents), encoding="utf-8")
    print("\nAll variants side by side\n")
    print(tables.side_by_side(by_variant))
    print(f"\nwritten to {out}", flush=True)
