"""The copy of a project that the reference runs in: nothing that it writes there is the job's.

It reaches as far as the checkout does, since scripts import from beside their folder. A link that
leads out of it is copied with what it leads to, or stays where that cannot be written to.
"""

import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcheck.recordings.jobs.reading import MANIFEST

MOST_BYTES = 1 << 30
MOST_FILES = 20_000
_LEFT_OUT = (".git", "__pycache__", ".distcheck", "node_modules", ".venv", "venv")


@dataclass(frozen=True)
class Copy:
    """Where a project is, and its copy; or `missing`, why there is none."""

    project: Path
    folder: Path
    missing: str = ""

    def of(self, path: Path) -> Path | None:
        """The place in the copy of a path into the project."""
        inside = path.is_absolute() and path.is_relative_to(self.project)
        return self.folder / path.relative_to(self.project) if inside else None

    def words(self, words: Sequence[str]) -> list[str]:
        """A command whose paths into the project lead into its copy."""
        places = [(word, self.of(Path(word))) for word in words]
        return [str(place) if place and place.exists() else word for word, place in places]


def copy_project(target: Path) -> Copy:
    """Copies the project that the command is started in: its checkout, or the folder alone where
    that is not one, or too large.
    """
    here, own = Path.cwd(), target.parent  # which may be within, where TMPDIR is
    checkout = next((one for one in (here, *here.parents) if (one / ".git").exists()), here)
    project = checkout if _size(checkout, own) is not None and checkout != Path.home() else here
    if _size(project, own) is None:
        missing = (
            f"the folder {here} holds more than {MOST_FILES:,} files or {MOST_BYTES >> 30} GiB, "
            "but the reference runs in a copy; start the job in a smaller folder"
        )
        return Copy(here, target, missing)
    try:
        shutil.copytree(project, target, symlinks=True, ignore=functools.partial(_ignored, own))
        _copy_what_links_lead_to(project, target)
    except (OSError, shutil.Error) as error:
        return Copy(
            here, target, f"the folder {project} cannot be copied for the reference: {error}"
        )
    return Copy(project, target)


def _size(project: Path, own: Path) -> int | None:
    """How many bytes a project has, with what its links lead to; None where they are too many."""
    size = 0
    for count, file in enumerate(_files(project, own)):
        size += file.stat().st_size if file.is_file() else 0
        if count > MOST_FILES or size > MOST_BYTES:
            return None
    return size


def _files(folder: Path, own: Path) -> Iterator[Path]:
    """The files of a folder and of those that its links lead to, each once: links may be a loop."""
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
    """Whether what a link leads to is outside of the project, and can be written to."""
    there = link.resolve()
    return there.exists() and not there.is_relative_to(project) and os.access(there, os.W_OK)


def _ignored(own: Path, folder: str, names: list[str]) -> set[str]:
    paths = {name: Path(folder, name) for name in names}
    return {name for name, path in paths.items() if _is_left_out(path, own) or path.is_socket()}


def _is_left_out(path: Path, own: Path) -> bool:
    """Whether it is left out of the copy, as recordings of distcheck are, which are large."""
    return path.name in _LEFT_OUT or path == own or (path / MANIFEST).exists()


def _copy_what_links_lead_to(project: Path, copy: Path) -> None:
    """Links of the copy lead into it, or to what cannot be written to. A folder outside is copied
    once, and what else leads to it leads to its copy.
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
                    shutil.copytree(there, link, symlinks=True)
                else:
                    shutil.copy2(there, link)


def _within_copies(there: Path, copies: Mapping[Path, Path]) -> Path | None:
    places = (c / there.relative_to(of) for of, c in copies.items() if there.is_relative_to(of))
    return next(places, None)
