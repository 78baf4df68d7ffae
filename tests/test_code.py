"""Which code can change an output: what the digest sees, what it does not, and what it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import import_closure
import pytest

from pipeline.keypoints import shards
from pipeline.provenance import code
from pipeline.train import identity

pytestmark = pytest.mark.cu111

ROOT = Path(__file__).resolve().parents[1]
SOURCE = '''"""A module."""
import os

SHARE = 0.5  # of a half


class Mean:
    """Of numbers."""

    def of(self, numbers, name="x"):
        """Their mean."""
        if not numbers:
            raise ValueError(f"no numbers of {name}")
        assert len(numbers) < 99, "too many"
        print("taking the mean")
        return SHARE * sum(numbers) / len(numbers)
'''


@pytest.fixture
def digest_of(tmp_path: Path) -> Callable[[str], str]:
    """The digest of a module with this source."""

    def digest(source: str) -> str:
        (tmp_path / "pipeline").mkdir(exist_ok=True)
        (tmp_path / "pipeline" / "mean.py").write_text(source, encoding="utf-8")
        code._digest.cache_clear()
        return code.code_digest(["pipeline.mean"], root=tmp_path)

    return digest


@pytest.mark.parametrize(
    "old, new",
    [
        ("  # of a half", "  # of two halves"),
        ('"""A module."""', '"""A large module."""'),
        ('"""Of numbers."""', '"""Of numbers, in no order."""'),
        ('"""Their mean."""', ""),
        ("no numbers of {name}", "there are no numbers"),
        ("too many", "more than 98"),
        ('print("taking the mean")', 'print("done")'),
        ('        print("taking the mean")\n', ""),
        ("import os\n\n", "import os\n\n\n\n"),
        ('name="x"', "name='x'"),
        ("SHARE * sum(numbers) / len(numbers)", "(\n            SHARE * sum(numbers) / len(numbers)\n        )"),
    ],
)
def test_words_and_layout_do_not_count(digest_of, old, new):
    assert old in SOURCE
    assert digest_of(SOURCE.replace(old, new)) == digest_of(SOURCE)


@pytest.mark.parametrize(
    "old, new",
    [
        ("0.5", "0.25"),
        ("SHARE * sum(numbers)", "sum(numbers) * SHARE"),
        ('name="x"', 'name="y"'),
        ("raise ValueError", "raise KeyError"),
        ("len(numbers) < 99", "len(numbers) < 9"),
        ("sum(numbers) / len(numbers)", "sum(numbers) // len(numbers)"),
        ("import os", "import sys"),
    ],
)
def test_what_runs_counts(digest_of, old, new):
    assert old in SOURCE
    assert digest_of(SOURCE.replace(old, new)) != digest_of(SOURCE)


def test_the_digest_does_not_depend_on_the_version_of_python(digest_of):
    """Known values: every supported Python gives them (f-strings are other tokens from 3.12 on)."""
    assert digest_of(SOURCE) == "ba8f1d98889c695a"
    assert digest_of("def f(x):\n    return f'{x!r:>4} ' f'{x:{x}}', *x, {**x}\n") == "498a42518332d635"


def test_the_closure_follows_every_kind_of_import(tmp_path: Path) -> None:
    files = {
        "pipeline/__init__.py": "def __getattr__(name):\n    from pipeline.part import offered\n",
        "pipeline/stage.py": "import os, pipeline.direct\nfrom pipeline.part import inner as other\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipeline.never\n",
        "pipeline/direct.py": "def f():\n    if True:\n        from pipeline import lazy\n",
        "pipeline/lazy.py": "from superglue_sift.sift import extract\n",
        "pipeline/never.py": "",
        "pipeline/part/__init__.py": "from pipeline.part import sibling\n",
        "pipeline/part/sibling.py": "from pipeline.part.cousin import name\n",
        "pipeline/part/cousin.py": "from pipeline import stage\n",
        "pipeline/part/inner.py": "",
        "pipeline/part/offered.py": "",
        "superglue_sift/__init__.py": "",
        "superglue_sift/sift.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = code.closure(["pipeline.stage"], root=tmp_path)
    assert sorted(found.values()) == sorted(set(files) - {"pipeline/never.py", "pipeline/part/offered.py"})
    without = code.closure(["pipeline.stage"], ["pipeline.lazy", "pipeline.part"], root=tmp_path)
    assert sorted(without) == ["pipeline", "pipeline.direct", "pipeline.stage"]


def test_a_command_names_the_modules_it_runs() -> None:
    command = "python -m pipeline.launch pipeline.train --keypoints data/pipeline.keypoints"
    assert import_closure.modules_in(command) == ["pipeline.launch", "pipeline.train.__main__"]


def test_everything_left_out_by_name_is_there() -> None:
    for name in (*code.CHANGES_NO_OUTPUT, *identity.OUTSIDE, *shards.OUTSIDE):
        assert code.module_file(name), name


@pytest.mark.parametrize(
    "modules, outside, in_it, not_in_it",
    [
        (
            identity.CODE,
            identity.OUTSIDE,
            ["objective", "step", "order", "distributed"],
            ["progress", "tracking", "launch"],
        ),
        (shards.CODE, shards.OUTSIDE, ["sift", "render", "homography", "decode"], ["progress", "shards", "launch"]),
    ],
    ids=["training", "shards"],
)  # fmt: skip
def test_the_digest_covers_what_can_change_a_weight_or_a_record_alone(modules, outside, in_it, not_in_it):
    found = code.closure(modules, (*code.CHANGES_NO_OUTPUT, *outside))
    names = {name.rpartition(".")[2] for name in found}
    assert set(in_it) <= names and not set(not_in_it) & names


@pytest.mark.parametrize(
    "modules, outside, module",
    [(identity.CODE, identity.OUTSIDE, "objective"), (shards.CODE, shards.OUTSIDE, "render")],
    ids=["training", "shards"],
)
def test_a_comment_changes_neither_digest_and_a_constant_does(tmp_path, modules, outside, module):
    found = code.closure(modules)
    for path in found.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())

    def digest() -> str:
        code._digest.cache_clear()
        return code.code_digest(modules, outside, root=tmp_path)

    before = digest()
    assert before == code.code_digest(modules, outside)
    for path in found.values():
        (tmp_path / path).write_text(f"# a word\n{(tmp_path / path).read_text()}\n# another\n")
    assert digest() == before
    changed = next(path for path in found.values() if path.endswith(f"/{module}.py"))
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\nNEW = 1\n")
    assert digest() != before
