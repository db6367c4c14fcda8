"""Whose a file is: what another user of this machine has left must not choose what runs here.

A file counts as one's own if it belongs to this user, to root, or to the owner of the current
folder (a container mounts a checkout that belongs to a user outside of it).
"""

import os
import stat
from pathlib import Path


def is_ones_own(path: Path) -> bool:
    """Whether a file or folder, and where a link leads, belongs to one of those above."""
    try:
        return _owners(path) <= {os.geteuid(), 0, *_owners(Path.cwd())}
    except (OSError, ValueError):  # a name that no file can have
        return False


def _owners(path: Path) -> set[int]:
    return {path.lstat().st_uid, path.stat().st_uid}


def is_private_folder(path: Path) -> bool:
    """Whether a path is a folder (no link) of one's own that not every user may write to."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and is_ones_own(path) and not about.st_mode & stat.S_IWOTH
