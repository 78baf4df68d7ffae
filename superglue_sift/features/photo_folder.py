"""List the photographs of a folder, and find their masks. No file is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Collection, Iterator, List, Optional, Tuple

from superglue_sift.errors import RequestError
from superglue_sift.files import FileName

# A file of a folder counts as a photograph if it has one of these extensions, and lies outside of
# folders that the system, a network drive or an archive program keeps for itself. Names that begin
# with a dot are hidden.
EXTENSIONS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm",
    ".gif", ".jp2", ".avif", ".heic", ".heif",
)  # fmt: skip
SYSTEM_FOLDERS = {
    "@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin", "__macosx",
    "lost+found", "network trash folder", "system volume information", "temporary items",
}  # fmt: skip


def is_photo(name: str) -> bool:
    """Return whether a path names a photograph.

    Args:
        name: the path below the folder of the photographs, with forward slashes.
    """
    *folders, file = name.split("/")
    return file.lower().endswith(EXTENSIONS) and not any(map(_is_hidden, [*folders, file]))


def _is_hidden(name: str) -> bool:
    """Return whether a name begins with a dot, or is one of `SYSTEM_FOLDERS`."""
    is_dotted = name.startswith(".") and name not in (".", "..")
    return is_dotted or name.lower() in SYSTEM_FOLDERS


def walk_folders(
    folder: FileName, ignored: Collection[FileName] = ()
) -> Iterator[Tuple[Path, List[str]]]:
    """Yield each visible folder at or below `folder`, with its sorted file names.

    Links to folders are followed. No folder is entered twice, or if it lies above `folder`.

    Args:
        folder: the folder.
        ignored: folders below it that are not entered.
    """
    # A link to a folder above this one would lead into this one again.
    entered = set(map(str, Path(folder).resolve().parents))
    entered.update({os.path.realpath(path) for path in ignored} - {os.path.realpath(folder)})
    for path, subfolders, files in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(path)
        # `os.walk` enters the folders that are left in its list.
        if real_path in entered:
            subfolders[:] = []
            continue
        entered.add(real_path)
        subfolders[:] = sorted(name for name in subfolders if not _is_hidden(name))
        yield Path(path), sorted(files)


def list_photos(folder: FileName, ignored: Collection[FileName] = ()) -> List[Path]:
    """List the photographs at or below `folder` by `is_photo` and `walk_folders`, sorted.

    Links without a target are listed, since reading them reports the error. Pipes and devices are
    left out.

    Args:
        folder: the folder.
        ignored: folders below it that are not entered, such as those of masks and results.

    Raises:
        RequestError: If the folder is missing.
    """
    if not os.path.isdir(folder):
        raise RequestError(f"{folder}: no such folder; give the folder that holds the images")
    paths = (path / name for path, names in walk_folders(folder, ignored) for name in names)
    photos = (path for path in paths if is_photo(path.name))
    return sorted(path for path in photos if path.is_file() or not path.exists())


def find_mask(masks: FileName, name: FileName) -> Optional[Path]:
    """Find the mask of a photograph.

    The mask of `name` is `name.png` in the folder `masks`, as in COLMAP, or the same with `.png` in
    place of the extension.

    Args:
        masks: the folder of the masks.
        name: path of the photograph below its folder.

    Returns:
        The path of the mask, or None if there is none.
    """
    colmap_path = Path(masks) / f"{name}.png"
    candidates = (colmap_path, (Path(masks) / name).with_suffix(".png"))
    return next(filter(Path.is_file, candidates), None)


def check_masks(masks: FileName, root: FileName) -> None:
    """Check that each image in the folder of masks is the mask of a photograph.

    A mask with a wrong name would be ignored, and its photograph used whole.

    Args:
        masks: the folder of the masks.
        root: the folder of the photographs.

    Raises:
        RequestError: If a mask is of no photograph, or if there are no masks.
    """
    is_empty = True
    for folder, mask_names in walk_folders(masks):
        photo_folder = Path(root) / folder.relative_to(masks)
        photos = os.listdir(photo_folder) if photo_folder.is_dir() else []
        # The names that `find_mask` looks for
        expected_names = {f"{name}.png" for name in photos}
        expected_names.update(str(Path(name).with_suffix(".png")) for name in photos)
        for name in filter(is_photo, mask_names):
            is_empty = False
            if name not in expected_names:
                raise RequestError(f"{folder / name}: is the mask of no photograph in {root}")
    if is_empty:
        raise RequestError(f"{masks}: holds no mask; that of NAME.jpg is NAME.jpg.png")
