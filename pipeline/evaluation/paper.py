"""The protocol of the SuperGlue paper (section 5.1) and its variants, side by side: `evaluate --paper`.

Views of 640x480, for which most photographs of COCO must be magnified, and beside them 512x384, for which they need
not; 512 and 1,024 keypoints; every estimator that is installed.
"""

from __future__ import annotations

from typing import Dict, Optional

from pipeline.evaluation import options, outputs, summary
from pipeline.evaluation.job import Job
from pipeline.report import curves, overview, page, tables
from pipeline.schema import EvaluateParams

VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))  # width, height, keypoints


def run(job: Job, section: EvaluateParams) -> Optional[summary.Figures]:
    """Each variant in a folder of its own; one table, metrics.json, protocols.csv and page of all.

    Returns the figures of all variants, `<variant>.<matcher>.<figure>`, on the first process; None on the others.
    """
    contents: Dict[str, page.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = section.model_copy(update=asked)
        source, where = options.choose_source(job.args, variant, job.args.paper)
        name = f"{width}x{height}-{keypoints}"
        title = f"{where}, {width}x{height}, {keypoints} keypoints"
        content = job.run(source, title, variant, job.args.out / name)
        if content is not None:
            contents[name] = content
    return write(job, contents) if contents else None


def write(job: Job, contents: Dict[str, page.Content]) -> summary.Figures:
    """What stands above the folders of the variants. contents: the page of each."""
    out = job.args.out
    figures = {
        f"{name}.{figure}": value
        for name, content in contents.items()
        for figure, value in content.figures.items()
    }
    outputs.write_json(out / "metrics.json", figures)
    lines = [
        {"protocol": name, **line}
        for name, content in contents.items()
        for line in summary.by_matcher(content.figures)
    ]
    curves.write_csv(out / "protocols.csv", lines)
    title = "Evaluation: the paper's protocol and its variants"
    (out / "index.html").write_text(overview.render(title, contents), encoding="utf-8")
    print(f"\nAll variants side by side, {job.args.paper} pairs each\n")
    print(tables.side_by_side({name: content.figures for name, content in contents.items()}))
    print(f"\nwritten to {out}", flush=True)
    return figures
