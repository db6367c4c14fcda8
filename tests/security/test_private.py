"""Files and folders of distcheck's own: who can read and write them, and which of them are used."""

import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from distcheck import private
from distcheck.errors import CannotRunError
from distcheck.errors.defects import save_traceback
from distcheck.records import Case
from distcheck.records.decoding import read_bounded
from distcheck.reports.files import check_writable, write_text
from distcheck.store.run_folder import RunStore
from tests.optional import needs

ANOTHER = 4242


def _start_on_slurm() -> None:
    from distcheck.addons.engines import on_slurm
    from distcheck.addons.engines.running import MatrixTask

    on_slurm.start("local", [MatrixTask(1, "part", ("--world", "2"), 2, 0)])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0o002)
    yield tmp_path
    os.umask(umask)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_and_files_are_ones_own(here: Path) -> None:
    file = private.folder(here / "a" / "b") / "file"
    private.write(file, "text\n")
    assert [mode_of(path) for path in (here / "a", here / "a/b", file)] == [0o700, 0o700, 0o600]
    private.write(file, b"other")
    assert file.read_bytes() == b"other"
    assert os.listdir(here / "a/b") == ["file"]


def test_a_run_is_ones_own(here: Path) -> None:
    store = RunStore.default_or_none()
    assert store is not None
    store.write_case(Case(id="c", strategy="ddp", world=2))
    store.write_report("{}")
    for path in (here / ".distcheck").rglob("*"):
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
    assert mode_of(here / ".distcheck") == 0o700


def test_an_earlier_clock_reuses_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    stores = [RunStore.default_or_none() for _ in range(3)]
    folders = [store.folder for store in stores if store is not None]
    assert len({*folders}) == 3
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("kind", ["a link", "another user's", "the group's", "everybody's"])
@pytest.mark.parametrize(
    "use", ["runs", "a traceback", pytest.param("pickles", marks=needs("engines"))]
)
def test_a_folder_that_others_can_write_is_not_used(
    kind: str, use: str, here: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place = here / ".distcheck"
    there = tmp_path_factory.mktemp("theirs")
    (there / "planted").touch()
    if kind == "a link":
        place.symlink_to(there)
    else:
        place.mkdir()
        (place / "planted").touch()
        place.chmod({"the group's": 0o770, "everybody's": 0o757}.get(kind, 0o755))
    if kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(place, ANOTHER, ANOTHER)
    if use == "runs":
        assert RunStore.default_or_none() is None
    elif use == "a traceback":
        saved = save_traceback("boom")
        assert saved
        assert not Path(saved).resolve().is_relative_to(here)
        assert not Path(saved).resolve().is_relative_to(there)
    else:
        with pytest.raises(CannotRunError, match="another user's, or a folder that other users"):
            _start_on_slurm()
    assert os.listdir(place) == ["planted"]


@needs("engines")
def test_pickles_are_in_a_folder_of_this_user_even_where_the_current_one_is_not(here: Path) -> None:
    """In a container, the current folder may belong to another user, who is not trusted."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    for path in (here, here / ".distcheck", here / ".distcheck/slurm"):
        path.mkdir(exist_ok=True)
        os.chown(path, ANOTHER, ANOTHER)
        path.chmod(0o755)
    assert not private.is_private_folder(here / ".distcheck")
    assert RunStore.default_or_none() is None
    for path in (here / ".distcheck", here / ".distcheck/slurm"):
        os.chown(path, os.geteuid(), os.getegid())
    with pytest.raises(CannotRunError, match="exchanges pickles"):
        _start_on_slurm()


@pytest.mark.parametrize(
    ("members", "primary", "acl", "is_safe"),
    [
        ([], [], False, True), (["me"], [], False, True), (["me", "other"], [], False, False),
        ([], ["other"], False, False), ([], [], True, False),
    ],
)  # fmt: skip
def test_a_private_group_has_no_other_members(
    members: list[str], primary: list[str], acl: bool, is_safe: bool, here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its name does not prove that: another user could replace a folder in which pickles are."""
    user = SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=ANOTHER)
    others = [SimpleNamespace(pw_name=name, pw_gid=ANOTHER) for name in primary]
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)
    monkeypatch.setattr("pwd.getpwall", lambda: [user, *others])
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name="me", gr_mem=members))
    assert private._is_own_group(ANOTHER) is (is_safe or acl)
    monkeypatch.setattr(private, "_has_acl", lambda _: acl)
    monkeypatch.setattr(private, "_is_own_group", lambda _, own=private._is_own_group: own(ANOTHER))
    (here / "shared").mkdir()
    (here / "shared").chmod(0o770)
    if is_safe:
        private.check_stays(here / "shared/jobs")
    else:
        with pytest.raises(PermissionError):
            private.check_stays(here / "shared/jobs")


def test_an_empty_folder_that_the_umask_left_open_is_closed(here: Path) -> None:
    (here / "run").mkdir(0o775)
    private.folder(here / "run")
    assert mode_of(here / "run") == 0o700


def test_a_folder_that_is_to_be_new_is_new(here: Path) -> None:
    private.folder(here / "one", is_new=True)
    with pytest.raises(FileExistsError):
        private.folder(here / "one", is_new=True)
    (here / "file").touch()
    with pytest.raises(FileExistsError):
        private.folder(here / "file")


def test_a_link_is_replaced_and_not_followed(here: Path) -> None:
    (here / "victim").write_text("precious")
    (here / "link").symlink_to("victim")
    private.write(here / "link", "ours")
    assert (here / "victim").read_text() == "precious"
    assert not (here / "link").is_symlink()


def test_a_full_disk_leaves_the_old_report() -> None:
    """As a quota does: a file cannot grow beyond a few kilobytes."""
    program = """
import resource, signal, sys
from distcheck.errors import CannotRunError
from distcheck.reports.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_text("report.html", "x" * 100_000, option="--html")
except CannotRunError as error:
    print(error)
"""
    Path("report.html").write_text("the old one")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "--html report.html cannot be written: File too large" in ran.stdout
    assert Path("report.html").read_text() == "the old one"
    assert os.listdir() == ["report.html"]


def test_a_report_that_the_person_named_has_their_mode(here: Path) -> None:
    write_text("new.json", "{}")
    assert mode_of(here / "new.json") == 0o664
    (here / "new.json").chmod(0o640)
    (here / "latest.json").symlink_to("new.json")
    write_text("latest.json", "[]")
    assert (mode_of(here / "new.json"), Path("new.json").read_text()) == (0o640, "[]")
    assert (here / "latest.json").is_symlink()


def test_a_page_of_a_run_is_as_private_as_the_run(here: Path) -> None:
    run = private.folder(here / "run" / "cases").parent
    write_text(str(run / "report.html"), "<html>", option="--html")
    assert mode_of(run / "report.html") == 0o600


@pytest.mark.parametrize("path", ["link.json", "folder/r.json", "own.json"])
def test_a_foreign_link_is_refused(path: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine").mkdir()
    (here / "mine/r.json").write_text("precious")
    (here / "link.json").symlink_to("mine/r.json")
    (here / "folder").symlink_to("mine")
    (here / "own.json").symlink_to("link.json")
    write_text(path, "{}")
    assert (here / "mine/r.json").read_text() == "{}"
    (here / "mine/r.json").write_text("precious")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)  # and the links are root's no more
    monkeypatch.setattr(private, "_ROOT", 4343)
    for write in (lambda: write_text(path, "{}"), lambda: check_writable(path)):
        with pytest.raises(CannotRunError, match="is a link of another user"):
            write()
    assert (here / "mine/r.json").read_text() == "precious"


def test_a_report_goes_into_a_pipe(here: Path) -> None:
    os.mkfifo("pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append(Path("pipe").read_text()))
    reader.start()
    write_text("pipe", "{}")
    reader.join()
    assert found == ["{}"]


def of_another(path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, ANOTHER, ANOTHER)
    return path


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_of_another_user_is_neither_written_nor_waited_for(name: str, here: Path) -> None:
    os.mkfifo("pipe", 0o666)
    (here / "link").symlink_to("pipe")
    of_another(here / "pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    for write in (write_text, lambda path, _: check_writable(path)):
        with pytest.raises(CannotRunError, match="is a pipe of another user"):
            write(name, "{}")
    writer = os.open("pipe", os.O_WRONLY)  # and never writes
    assert read_bounded(Path(name)) == b""
    os.close(writer)
    os.close(reader)


def test_a_report_in_place_of_another_users_file_has_this_users_mode(here: Path) -> None:
    (here / "r.json").touch()
    (here / "r.json").chmod(0o666)
    of_another(here / "r.json")
    write_text("r.json", "{}")
    assert (mode_of(here / "r.json"), (here / "r.json").stat().st_uid) == (0o664, os.geteuid())


def test_the_mode_of_a_report_is_given_to_no_other_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the folder replaces the draft by a link while it is written."""
    (here / "victim").touch(0o600)
    (here / "r.json").touch(0o644)
    (here / "r.json").chmod(0o666)

    def replaced(text: str) -> bytes:
        (draft,) = here.glob(".part-*")
        draft.unlink()
        draft.symlink_to("victim")
        return text.encode()

    monkeypatch.setattr(private, "_encode", replaced)
    write_text("r.json", "{}")
    assert mode_of(here / "victim") == 0o600


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("does", ["publish", "check"])
def test_a_place_that_becomes_a_link_meanwhile_is_not_written_through(
    what: str, does: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder replaces what is in it by a link, after the path has been resolved."""
    if what == "file":  # written directly, as in a folder in which this user makes no files
        monkeypatch.setattr(private, "unique", lambda _: "x" * 300)
    (here / "mine").mkdir()
    (here / "mine/r.json").write_text("precious")
    (here / "sub").mkdir()
    path = here / "sub/r.json"
    path.write_text("{}")
    swapped = of_another(path if what == "file" else here / "sub")
    real, done = Path.exists, []

    def exists(place: Path) -> bool:
        found = real(place)
        if place.name == "r.json" and not done:
            done.append(swapped.rename(here / "old"))
            swapped.symlink_to(here / "mine" / ("r.json" if what == "file" else ""))
            os.chown(swapped, ANOTHER, ANOTHER, follow_symlinks=False)
        return found

    monkeypatch.setattr(Path, "exists", exists)
    with contextlib.suppress(CannotRunError):
        write_text(str(path), "new") if does == "publish" else check_writable(str(path))
    assert done
    assert (here / "mine/r.json").read_text() == "precious"
