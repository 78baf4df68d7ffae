"""One evaluation by homographies, from its source to its folder: what `pipeline.evaluate` runs once a variant."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from pipeline.errors import WorkError
from pipeline.evaluation import options, outputs, summary, webpage
from pipeline.evaluation.degraded import sweep
from pipeline.evaluation.difficulty import by_condition
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.intervals import differences
from pipeline.evaluation.pairs import Source
from pipeline.evaluation.run import Results, Settings, evaluate, figures_of
from pipeline.report import page, tables
from pipeline.runtime import distributed
from pipeline.schema import EvaluateParams
from superglue_sift.superglue import SuperGlue


@dataclass(frozen=True)
class Job:
    """One process's part. info: the description stored with the model."""

    args: argparse.Namespace
    context: distributed.Context
    model: SuperGlue
    info: dict
    device: str
    extras: options.Extras

    def settings(self, section: EvaluateParams) -> Settings:
        """What is asked, from params.yaml, the command line and what is installed."""
        return options.settings_of(self.args, section, self.extras)

    def run(self, source: Source, where: str, section: EvaluateParams, out: Path) -> Optional[page.Content]:
        """Evaluate a source; the first process of a group writes everything into `out` and returns the page's content.

        Raises WorkError when no image could be read.
        """
        args, model, device, settings = self.args, self.model, self.device, self.settings(section)
        results = evaluate(source, model, device, settings, self.context)
        if not results.places:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        robustness = by_condition(results.rows)
        if args.robustness and isinstance(source, HeldOutPairs):
            robustness += sweep(source, args.robustness, model, device, settings, self.context)
        if not self.context.is_main:
            return None
        described = options.protocol(args, section, settings, where, self.info)
        outputs.write_all(out, results, described, robustness)
        drawn = outputs.write_pictures(out / "pictures", source, model, device, results, settings)
        title = f"Evaluation: {where}"
        content = webpage.content(title, results, figures_of(results), robustness, drawn, described)
        content.notes.extend(self.extras.skipped)
        (out / "index.html").write_text(page.render(content), encoding="utf-8")
        show(args, where, results, content.figures)
        bad = f"; {len(results.bad)} unreadable images left out, see bad_images.csv" if results.bad else ""
        print("\n".join([*self.extras.skipped, "", f"written to {out}{bad}"]), flush=True)
        return content


def show(args: argparse.Namespace, where: str, results: Results, figures: summary.Figures) -> None:
    """Print the tables."""
    print(f"\n{where}, {len(results.places)} pairs\n")
    if args.pairs:
        print(tables.by_scene(summary.by_scene(results.rows, results.matchers), results.matchers) + "\n")
    print(tables.comparison(figures) + "\n")
    print(tables.differences(differences(results.rows)))
