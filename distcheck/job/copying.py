"""Copies the project, so that the reference run cannot modify the original.

The copy covers the whole checkout, because scripts import from neighboring folders. The target of a
link that leads out of the checkout is copied. If the target is not writable, or is a device, the
link is kept instead.
"""

import functools
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcheck import private
from distcheck.recordings.jobs.reading import MANIFEST

MOST_BYTES = 1 << 30
MOST_FILES = 20_000
_LEFT_OUT = (".git", "__pycache__", ".distcheck", "node_modules", ".venv", "venv")


@dataclass(frozen=True)
class ProjectCopy:
    """A project and its copy. If there is no copy, `missing` is the reason."""

    project: Path
    folder: Path
    missing: str = ""

    def of(self, path: Path) -> Path | None:
        """Return the path in the copy that corresponds to a path in the project."""
        inside = path.is_absolute() and path.is_relative_to(self.project)
        return self.folder / path.relative_to(self.project) if inside else None

    def words(self, words: Sequence[str]) -> list[str]:
        """Return a command in which paths into the project are replaced by paths into the copy."""
        places = [(word, self.of(Path(word))) for word in words]
        return [str(place) if place and place.exists() else word for word, place in places]


def copy_project(target: Path) -> ProjectCopy:
    """Copy the current checkout. Copy only the current folder if it is in no checkout, or the
    checkout is too large.
    """
    here, own = Path.cwd(), target.parent  # may be inside the project, depending on TMPDIR
    folders = (one for one in (here, *here.parents) if (one / ".git").exists())
    owned = (one for one in folders if private.has_trusted_owner(one / ".git", like=here))
    checkout = next(owned, here)
    project = checkout if _size(checkout, own) is not None and checkout != Path.home() else here
    if _size(project, own) is None:
        missing = (
            f"the folder {here} holds more than {MOST_FILES:,} files or {MOST_BYTES >> 30} GiB, "
            "but the reference runs in a copy; start the job in a smaller folder"
        )
        return ProjectCopy(here, target, missing)
    try:
        shutil.copytree(
            project, target, symlinks=True, ignore=functools.partial(_ignored_names, own)
        )
        _copy_what_links_lead_to(project, target)
    except (OSError, shutil.Error) as error:
        return ProjectCopy(
            here, target, f"the folder {project} cannot be copied for the reference: {error}"
        )
    return ProjectCopy(project, target)


def _size(project: Path, own: Path) -> int | None:
    """Return the size of a project in bytes, including targets of links; None if it is
    too large.
    """
    size = 0
    for count, file in enumerate(_files(project, own)):
        size += file.stat().st_size if file.is_file() else 0
        if count > MOST_FILES or size > MOST_BYTES:
            return None
    return size


def _files(folder: Path, own: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the targets of its links, without duplicates, even if
    links form a cycle.
    """
    ahead, seen = [folder], {folder}
    while ahead:
        for parent, folders, names in os.walk(top := ahead.pop()):
            folders[:] = [n for n in folders if not _is_left_out(Path(parent, n), own)]
            links = [Path(parent, n) for n in folders if Path(parent, n).is_symlink()]
            for there in (link.resolve() for link in links if _is_copied(link, top)):
                if there not in seen:
                    seen.add(there)
                    ahead.append(there)
            yield from (file for n in names if os.path.lexists(file := Path(parent, n)))


def _is_copied(link: Path, project: Path) -> bool:
    """Return True if a link's target is a file or folder outside the project, and writable."""
    there = link.resolve()
    is_outside = not there.is_relative_to(project)
    return is_outside and (there.is_file() or there.is_dir()) and os.access(there, os.W_OK)


def _ignored_names(own: Path, folder: str, names: list[str]) -> set[str]:
    left_out = {name for name in names if _is_left_out(Path(folder, name), own)}
    return left_out | _special_names(folder, names)


def _special_names(folder: str, names: list[str]) -> set[str]:
    """Return the names of sockets and devices: a copy of a device may have no end."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return {n for n, m in modes.items() if stat.S_ISSOCK(m) or stat.S_ISCHR(m) or stat.S_ISBLK(m)}


def _is_left_out(path: Path, own: Path) -> bool:
    """Return True for paths that are not copied, such as large recordings of distcheck."""
    return path.name in _LEFT_OUT or path == own or (path / MANIFEST).exists()


def _copy_what_links_lead_to(project: Path, copy: Path) -> None:
    """Make the links of the copy point into the copy, except those with a read-only target. A
    folder outside the project is copied once, and all links to it share that copy.
    """
    copies: dict[Path, Path] = {}
    for parent, folders, names in os.walk(copy):
        for name in (*folders, *names):
            link = Path(parent, name)
            if not link.is_symlink():
                continue
            original = project / link.relative_to(copy)
            there = original.resolve()
            if there.is_relative_to(project):
                if Path(os.readlink(link)).is_absolute():
                    link.unlink()
                    link.symlink_to(copy / there.relative_to(project))
            elif (known := _within_copies(there, copies)) is not None:
                link.unlink()
                link.symlink_to(known)
            elif _is_copied(original, project):
                link.unlink()
                if there.is_dir():
                    copies[there] = link
                    shutil.copytree(there, link, symlinks=True, ignore=_special_names)
                else:
                    shutil.copy2(there, link)


def _within_copies(there: Path, copies: Mapping[Path, Path]) -> Path | None:
    places = (c / there.relative_to(of) for of, c in copies.items() if there.is_relative_to(of))
    return next(places, None)
