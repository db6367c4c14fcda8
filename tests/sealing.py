"""Saved traces that a test edits, with checksums that are right for what it made of them."""

import shutil
from collections.abc import Callable
from pathlib import Path

from distcheck.recordings.traces import seal


def rewrite_about(folder: Path, change: Callable[[str], str]) -> None:
    """Changes the about.json of a case's traces, and the checksum with it."""
    about, indexes = seal.read_about(folder)
    seal.write_about(folder, change(about.decode()).encode(), indexes)


def seal_again(folder: Path) -> None:
    """Gives whatever is there now the checksums that it would have been saved with."""
    runs = sorted(folder.glob("run-*"))
    indexes = [seal.digest((run / "index.bin").read_bytes()) for run in runs]
    seal.write_about(folder, (folder / "about.json").read_bytes(), indexes)


def keep_digests(folder: Path) -> None:
    """Makes of a case's traces what `record --digests` would have kept."""
    shutil.rmtree(folder / "run-2", ignore_errors=True)
    for file in folder.glob("run-1/*.safetensors"):
        file.unlink()
    about = (folder / "about.json").read_text()
    assert about.count('"tensors":true}') == 1
    (folder / "about.json").write_text(about.replace('"tensors":true}', '"tensors":false}'))
    seal_again(folder)
