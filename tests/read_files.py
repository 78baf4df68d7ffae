"""What a folder holds, to be compared with what it held before, or with another one."""


def read_files(folder):
    """Name below the folder -> bytes, of all files."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
