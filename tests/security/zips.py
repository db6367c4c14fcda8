"""Bundles as an attacker makes them: a sound one, and everything that can be wrong with it."""

import json
import stat
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

CODE = """
import pathlib
import torch.distributed as dist

pathlib.Path({marker!r}).touch()

def sync(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""
CASE: dict[str, Any] = {
    "id": "case-w2", "strategy": "/there/sync.py:sync", "world": 2, "workload": "mlp", "batch": 16,
    "steps": 1, "layers": ["bitwise", "rounding", "full batch float32"], "rerun": True,
}  # fmt: skip
MANIFEST: dict[str, Any] = {
    "schema": "distcheck.bundle/1", "distcheck": "0.1.0", "cases": ["case-w2"], "variables": {},
    "sources": [{
        "spec": "/there/sync.py:sync", "file": "sources/there/sync.py", "digest": "0", "runs": True,
    }],
}  # fmt: skip


def members(marker: Path, **manifest: Any) -> dict[str, bytes]:
    """The files of a bundle whose code touches `marker` when it is imported."""
    return {
        "bundle.json": json.dumps({**MANIFEST, **manifest}).encode(),
        "cases/case-w2.json": json.dumps(CASE).encode(),
        "sources/there/sync.py": CODE.format(marker=str(marker)).encode(),
    }


def write(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def bundle(path: Path, **manifest: Any) -> Path:
    return write(path, members(path.parent / "ran", **manifest))


def add(path: Path, name: str, data: bytes = b"", *, mode: int = 0, twice: bool = False) -> Path:
    """One more member, with a name or a mode that zipfile would not choose."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # duplicates
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        for _ in range(1 + twice):
            archive.writestr(member, data)
    return path


def link(path: Path) -> Path:
    return add(path, "sources/there/link.py", b"/etc/passwd", mode=stat.S_IFLNK | 0o777)


def with_nul(path: Path) -> Path:
    add(path, "sources/there/a.pyXevil")
    data = path.read_bytes().replace(b"a.pyXevil", b"a.py\0evil")
    path.write_bytes(data)
    return path


def encrypted(path: Path) -> Path:
    """Sets the bit that says so, in the lists of members and before each of them."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = data.find(signature)
        while at >= 0:
            (flags,) = struct.unpack_from("<H", data, at + offset)
            struct.pack_into("<H", data, at + offset, flags | 1)
            at = data.find(signature, at + 4)
    path.write_bytes(bytes(data))
    return path


def damaged(path: Path) -> Path:
    """Flips bits in the middle of a member that is stored as it is."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("traces/case-w2/run-1/data", bytes(5000))
    data = bytearray(path.read_bytes())
    at = data.find(bytes(1000))
    data[at + 100] ^= 0xFF
    path.write_bytes(bytes(data))
    return path


def cut(path: Path) -> Path:
    """Without the end of a member, with the list of members still there."""
    data = path.read_bytes()
    at = data.find(b"PK\3\4", 4)
    path.write_bytes(data[:at] + bytes(at) + data[2 * at :])
    return path


def bomb(path: Path, *, total_bytes: int = 6 << 30, member_bytes: int = 64 << 20) -> Path:
    """A small file that unpacks to gigabytes."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for n in range(total_bytes // member_bytes):
            archive.writestr(f"sources/there/{n}.py", bytes(member_bytes))
    return path


def many(path: Path, count: int = 20_000) -> Path:
    with zipfile.ZipFile(path, "a") as archive:
        for n in range(count):
            archive.writestr(f"sources/there/{n}.py", b"")
    return path


def overlapping(path: Path) -> Path:
    """Many members that are stored as they are, and share one piece of the file."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("traces/whole", bytes(100_000))
        (whole,) = (member for member in archive.infolist() if member.filename == "traces/whole")
        for n in range(500):
            member = zipfile.ZipInfo(f"traces/{n:05}")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(member, name, getattr(whole, name))
            archive.filelist.append(member)
            archive.NameToInfo[member.filename] = member
        archive._didModify = True  # type: ignore[attr-defined]
    return path
