"""What holds images: a folder, a zip, a list file, or a COCO annotation file; the images stay where they are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Sequence, Union

from pipeline.errors import RequestError
from pipeline.images import archive
from pipeline.images.manifest import Entry
from pipeline.images.sources import Tick, folder_entries, list_images
from superglue_sift.images import EXTENSIONS


@dataclass(frozen=True)
class Container:
    """path: the folder or zip that holds the bytes; names: of the images in it, sorted, relative to it."""

    path: Path
    kind: str  # folder or zip
    names: List[str]
    facts: Dict[str, Any] = field(default_factory=dict)  # for source.json, such as the SHA-256 of an archive

    def entries(self, names: Sequence[str], split: str, key: str, tick: Tick = iter) -> List[Entry]:
        """Manifest entries of some of its images; `key` names this container in source.json."""
        if self.kind == "folder":
            return folder_entries(self.path, names, split, key, tick)
        wanted = set(names)
        members = [each for each in archive.image_members(self.path) if each.filename in wanted]
        return archive.zip_entries(self.path, members, split, key)


def open_container(
    path: Union[str, Path], root: str = "", categories: Sequence[str] = (), min_side: int = 0
) -> Container:
    """Open a folder, a .zip, a .txt list of images or a .json in COCO's annotation format.

    Args:
        root: folder (or zip) the names in a list or annotation file count from; "": the file's own folder.
        categories: of the images in an annotation file take those that show any of these; none: all.
        min_side: of them take those whose smaller side has so many px.

    Raises RequestError when there is nothing there, nothing in it, or a name leads outside.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if not path.exists():
        raise RequestError(f"{path}: no such folder, zip, list or annotation file")
    if path.is_dir():
        container = _folder(path)
    elif kind == ".zip":
        container = zip_container(path)
    elif kind in (".txt", ".json"):
        names = _listed(path) if kind == ".txt" else _annotated(path, categories, min_side)
        container = _chosen(path, Path(root) if root else path.parent, names)
    else:
        raise RequestError(f"{path}: must be a folder, a .zip, a .txt list or a .json of COCO annotations")
    if not container.names:
        raise RequestError(f"{path}: holds no images ({', '.join(EXTENSIONS)}, nested folders included)")
    return container


def digest(*paths: str) -> str:
    """Digest of the names and sizes of the images in these folders or zips, and of lists' text, in 16 hex digits."""
    state = hashlib.sha256()
    for path in map(Path, filter(None, paths)):
        if path.is_file() and path.suffix.lower() == ".zip":
            rows = [[each.filename, each.file_size, each.CRC] for each in archive.image_members(path)]
            state.update(json.dumps(rows).encode())
        elif path.is_file():  # a list or an annotation file
            state.update(path.read_bytes())
        else:
            for file in list_images(path):
                size = file.stat().st_size if file.exists() else -1
                name = file.relative_to(path).as_posix()
                state.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
            state.update(b"\0")
    return state.hexdigest()[:16]


def _folder(path: Path) -> Container:
    return Container(path, "folder", [each.relative_to(path).as_posix() for each in list_images(path)])


def zip_container(path: Path, **facts: Any) -> Container:
    """All images of an archive, read in place."""
    return Container(path, "zip", [member.filename for member in archive.image_members(path)], facts)


def _chosen(path: Path, root: Path, names: List[str]) -> Container:
    """The container `root` with the names a file lists; a listed file that is missing is reported later."""
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise RequestError(f"{path}: '{name}' leads outside {root}; set fetch.root to a folder above both")
    if not root.exists():
        raise RequestError(f"{root}: no such folder; fetch.root must hold the images that {path} lists")
    whole = zip_container(root) if root.suffix.lower() == ".zip" else _folder(root)
    return Container(root, whole.kind, sorted(set(_located(names, whole, path))))


def _located(names: List[str], whole: Container, path: Path) -> List[str]:
    """Names as the container knows them: COCO's annotations name files without the folder they are in."""
    there = set(whole.names)
    by_file: Dict[str, List[str]] = {}
    for name in whole.names:
        by_file.setdefault(name.rpartition("/")[2], []).append(name)
    found = [name if name in there else next(iter(by_file.get(name, ())), name) for name in names]
    missing = [name for name in found if name not in there]
    if missing and (whole.kind == "zip" or len(missing) == len(found)):
        more = f" (and {len(missing) - 1} more)"
        raise RequestError(f"{path}: '{missing[0]}' is not in {whole.path}{more}; set fetch.root")
    return found


def _listed(path: Path) -> List[str]:
    """One relative path per line; empty lines and lines that begin with # do not count."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _annotated(path: Path, categories: Sequence[str], min_side: int) -> List[str]:
    """`file_name` of the images in a COCO annotation file that show one of the categories and are large enough."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in content["images"]}
        known = {each["name"]: each["id"] for each in content.get("categories", [])}
        seen = {(each["image_id"], each["category_id"]) for each in content.get("annotations", [])}
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{path}: is not a COCO annotation file (images, annotations, categories)") from None
    for name in categories:
        if name not in known:
            raise RequestError(f"fetch.categories: '{name}' is not in {path}; known are {', '.join(known)}")
    if categories:
        wanted = {known[name] for name in categories}
        showing = {image for image, category in seen if category in wanted}
        images = {key: image for key, image in images.items() if key in showing}
    chosen = [
        image["file_name"]
        for image in images.values()
        if min(image.get("width", min_side), image.get("height", min_side)) >= min_side
    ]
    if not chosen:
        raise RequestError(f"{path}: no image fits fetch.categories and fetch.min_side; ask for less")
    return chosen
