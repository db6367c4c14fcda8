"""Creation of all private files and folders of distcheck.

A folder has the mode 0700, belongs to this user, is not a link, and is not writable for others. A
file has the mode 0600 and is renamed into place when it is complete, so that a full disk preserves
the old one, and links are never written through. Failures are OSErrors with a clear `strerror`.

Data sets are not private, as other users may read them, and neither is a report whose name the user
gave (`publish`): unless it is in the folder of a run, it has the mode of the user's umask.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FOLDER = ".distcheck"  # in the current folder, for runs and everything else that is stored
_MOST_LINKS = 40  # the limit of Linux
_ROOT = 0
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS = "it is a link, another user's, or a folder that other users can write"


def has_trusted_owner(path: Path, *, like: Path | None = None) -> bool:
    """Return True if a file or folder, and the target of a link, belongs to this user, to root, or
    to the owner of `like` (a container mounts a checkout of a user outside of it).
    """
    try:
        return _owners(path) <= {os.geteuid(), 0, *(_owners(like) if like else ())}
    except (OSError, ValueError):  # a name that no file can have
        return False


def _owners(path: Path) -> set[int]:
    return {path.lstat().st_uid, path.stat().st_uid}


def is_private_folder(path: Path, *, strictly: bool = False) -> bool:
    """Return True if a path is a folder (no link) that `has_trusted_owner` and that no other user
    can write to; with `strictly`, if it belongs to this user.
    """
    try:
        about = path.lstat()
    except OSError:
        return False
    is_own = about.st_uid == os.geteuid() if strictly else has_trusted_owner(path)
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(about.st_mode) and is_own and not about.st_mode & others


def folder(path: Path, *, is_new: bool = False, strictly: bool = False) -> Path:
    """Create a folder and its parents, or return an existing one that is private, as all from
    `.distcheck` on must be. Raises OSError for one that is not (`strictly` as for
    `is_private_folder`), for a link of another user in the path, and with `is_new` for any existing
    one.
    """
    link_target(str(path))
    if FOLDER in path.parent.parts:
        folder(path.parent, strictly=strictly)
    if not path.parent.exists():
        folder(path.parent)
    try:
        path.mkdir(0o700)
    except FileExistsError:  # also if another process has just created it
        if is_new or (not path.is_symlink() and not path.is_dir()):
            raise
        if _is_own_and_empty(path):
            path.chmod(0o700)
        if not is_private_folder(path, strictly=strictly):
            raise PermissionError(errno.EPERM, _NOT_OURS, str(path)) from None
    else:
        path.chmod(0o700)  # independent of the umask
    return path


def check_stays(path: Path) -> None:
    """Raise OSError if another user can replace a folder, because one of its parents is theirs, or
    is writable for others and has no sticky bit.
    """
    for around in path.resolve().parents:
        about = around.stat()
        is_own = _is_own_group(about.st_gid) and not _has_acl(around)
        others = stat.S_IWOTH if is_own else stat.S_IWOTH | stat.S_IWGRP
        is_open = bool(about.st_mode & others) and not about.st_mode & stat.S_ISVTX
        if is_open or about.st_uid not in (os.geteuid(), _ROOT):
            raise PermissionError(errno.EPERM, _NOT_OURS, str(around))


def _is_own_group(number: int) -> bool:
    """Return True if only this user and root are in a group: it is root's, or the private group of
    this user.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    ours = {user.pw_name, pwd.getpwuid(_ROOT).pw_name}
    others = {one.pw_name for one in pwd.getpwall() if one.pw_gid == number}
    return number in (_ROOT, user.pw_gid) and {*group.gr_mem, *others} <= ours


def _has_acl(path: Path) -> bool:
    """Return True if an access control list gives rights to more users: the mode of the group is
    then the most that these have.
    """
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:  # it has none, or its file system does not support any
        return False


def temporary_folder() -> Path | None:
    """Return the folder for temporary files, or None if none is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None


def unique(prefix: str) -> str:
    """Return a name that cannot be guessed."""
    return f"{prefix}{os.urandom(8).hex()}"


def _is_own_and_empty(path: Path) -> bool:
    is_own = path.lstat().st_uid == os.geteuid() and not path.is_symlink()
    return is_own and not any(path.iterdir())


def new_file(path: Path | str) -> IO[bytes]:
    """Open a new file; raises FileExistsError for an existing one."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
    )


def write(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it atomically."""
    with replaced_atomically(path) as draft, new_file(draft) as file:
        file.write(content if isinstance(content, bytes) else _encode(content))


@contextlib.contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield the name of a draft, which replaces `path` at the end of the block."""
    draft = path.with_name(unique(".part-"))
    try:
        yield draft
        draft.chmod(0o600)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _walked(path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield a descriptor of the last folder on a path, and the names below it, of which at most the
    first one exists. No name is resolved twice: another user may replace it in between. Raises
    OSError for a link of another user, which may lead to any file of this one.
    """
    folder, names, links = os.open("/", _ENTRY), list[str](), 0
    ahead = [*reversed(Path(path).absolute().parts[1:])]
    try:
        while ahead:
            part = ahead.pop()
            if names:
                names = names[:-1] if part == ".." else [*names, part]
                continue
            try:
                one = os.open(part, _ENTRY, dir_fd=folder)
            except FileNotFoundError:
                names = [part]
                continue
            try:
                about = os.fstat(one)
                if stat.S_ISLNK(about.st_mode):
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if about.st_uid not in (os.geteuid(), _ROOT):
                        raise PermissionError(
                            errno.EPERM, f"{part} is a link of another user", path
                        )
                    target = os.readlink("", dir_fd=one)
                    if _has_no_name(part, target, folder):
                        names = [part]
                    else:
                        ahead += reversed(Path(target).parts)  # opening "/" ignores `folder`
                elif stat.S_ISDIR(about.st_mode) and ahead:
                    one, folder = folder, one
                else:
                    names = [part]
            finally:
                os.close(one)
        yield folder, names
    finally:
        os.close(folder)


def _has_no_name(link: str, target: str, folder: int) -> bool:
    """Return True for a link of /proc to a file that its text does not lead to, such as a pipe."""
    if os.fstat(folder).st_dev != Path("/proc").stat().st_dev:
        return False
    try:
        there = os.stat(link, dir_fd=folder)
        return not os.path.samestat(there, os.stat(target, dir_fd=folder))
    except FileNotFoundError:
        return True


def link_target(path: str) -> Path:
    """Return the target of a path. Raises OSError for a link of another user in it."""
    with _walked(path) as (folder, names):
        return Path(os.readlink(f"/proc/self/fd/{folder}"), *names)


@contextlib.contextmanager
def held(path: str) -> Iterator[Path]:
    """Yield the target of a path, below a descriptor of its folder, so that replacing a folder on
    the path does not redirect later writes. Raises OSError as `link_target`, and if the folder does
    not exist.
    """
    with _walked(path) as (folder, names):
        if len(names) > 1:
            os.stat(names[0], dir_fd=folder, follow_symlinks=False)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        yield Path(f"/proc/self/fd/{folder}", *names)


def open_held(place: Path, flags: int) -> int:
    """Open a file that `held` yields, or a new one. Raises OSError if it has become a link, and for
    a pipe of another user, who may let it wait.
    """
    try:
        one = os.open(place, _ENTRY)
    except FileNotFoundError:
        return os.open(place, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        about = os.fstat(one)
        if stat.S_ISFIFO(about.st_mode) and about.st_uid not in (os.geteuid(), _ROOT):
            raise PermissionError(errno.EPERM, f"{place.name} is a pipe of another user")
        if not stat.S_ISLNK(about.st_mode):
            return os.open(f"/proc/self/fd/{one}", flags | os.O_CLOEXEC)
        if about.st_dev != Path("/proc").stat().st_dev:
            raise PermissionError(errno.EPERM, f"{place.name} is a link of another user")
        return os.open(place, flags | os.O_CLOEXEC)
    finally:
        os.close(one)


def publish(path: str, text: str) -> None:
    """Write a file that the user named, atomically; a pipe or a device directly. Raises OSError."""
    with held(path) as place:
        is_there = place.exists()
        draft = place.parent / unique(".part-")
        if not is_there or place.is_file():
            try:
                file = draft.open("xb")
            except OSError:
                pass  # the folder is not writable, but the file may be
            else:
                try:
                    with file:
                        file.write(_encode(text))
                        about = place.lstat() if is_there else None
                        # By descriptor: in another user's folder, the name may be a link by now.
                        if about is not None and about.st_uid == os.geteuid():
                            os.fchmod(file.fileno(), stat.S_IMODE(about.st_mode))
                        elif about is None and (place.parent / "cases").is_dir():  # of a run
                            os.fchmod(file.fileno(), 0o600)
                    draft.replace(place)
                except OSError as error:
                    if error.errno != errno.EBUSY:  # mounted as a single file
                        raise
                else:
                    return
                finally:
                    draft.unlink(missing_ok=True)
        with os.fdopen(open_held(place, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(_encode(text))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")
