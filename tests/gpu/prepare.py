"""Makes the folder that a machine with a GPU, and without a network, needs beside a checkout.

    python tests/gpu/prepare.py [ARCHITECTURE]        build/gpu, 90 for an H100 or H200

It holds the one package that such machines lack (msgspec, for the Python there), and this machine's
NCCL with the code of one architecture left, compressed: so that ranks can share the GPU where torch
brings an NCCL before 2.30. Nothing of it is committed. `tests/gpu/on_a_gpu.py` uses what is there.
"""

import importlib.util
import lzma
import struct
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "gpu"
NCCL = "libnccl.so.2"
PYTHON = "3.12"
MOST_BYTES = 60 << 20  # of the 64 MiB that may go with a checkout, which has some itself

# A fat binary: magic, version, size of this header, bytes behind it; then entries. An entry: kind
# (1 is PTX, 2 machine code), version, size of its header, bytes behind it; at 28 its architecture.
_MAGIC = 0xBA55ED50
_HEADER, _ENTRY, _ARCHITECTURE_AT = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28
_MACHINE_CODE = 2


def thinned(library: bytes, architecture: int) -> tuple[bytes, int]:
    """The library with zeros in place of what other GPUs would run, and how many bytes are left of
    code for this one. No offset moves; the driver reads what fits its GPU alone.
    """
    data, kept, place = bytearray(library), 0, 0
    magic = struct.pack("<I", _MAGIC)
    while (place := data.find(magic, place)) >= 0:
        _, version, header, size = _HEADER.unpack_from(data, place)
        end = place + header + size
        if version != 1 or header != _HEADER.size or end > len(data):
            place += len(magic)  # four bytes that happen to be alike
            continue
        entry = place + header
        while entry < end:
            kind, _, own_header, size = _ENTRY.unpack_from(data, entry)
            if kind not in (1, _MACHINE_CODE):
                raise ValueError(f"a fat binary at {place} has an entry of unknown kind {kind}")
            (of,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE_AT)
            code = entry + own_header
            if kind == _MACHINE_CODE and of == architecture:
                kept += size
            else:
                data[code : code + size] = bytes(size)
            entry = code + size
        place = end
    return bytes(data), kept


def installed_nccl() -> Path | None:
    """The library that this Python's torch brings as a package, if there is one."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        if (file := Path(place, "nccl", "lib", NCCL)).exists():
            return file
    return None


def main(architecture: int) -> None:
    """Fills the folder, and says what is in it and how it is used."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    platforms = [word for n in (17, 28) for word in ("--platform", f"manylinux_2_{n}_x86_64")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
         "--python-version", PYTHON, "--implementation", "cp", *platforms,
         "--platform", "manylinux2014_x86_64", "-d", str(FOLDER), "msgspec"], check=True,
    )  # fmt: skip
    library = installed_nccl()
    if library is None:
        print("this Python's torch brings no NCCL: ranks will not share the GPU")
    else:
        thin, kept = thinned(library.read_bytes(), architecture)
        if not kept:
            sys.exit(f"{library} has no code for architecture {architecture}")
        (FOLDER / f"{NCCL}.xz").write_bytes(lzma.compress(thin, preset=6))
    total = 0
    for file in sorted(FOLDER.iterdir()):
        total += file.stat().st_size
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    if total > MOST_BYTES:
        sys.exit(f"{total / 2**20:.0f} MiB are too much to go with a checkout")
    print("take it along as build/gpu, and run there: OUT=... python3 tests/gpu/on_a_gpu.py")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
