"""File data sets: found where people have them, read as torchvision reads them, or refused."""

import gzip
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch

from distcheck.errors import CannotRunError
from distcheck.workloads.datasets import ArrayDescription, cifar10, files, mnist
from distcheck.workloads.datasets.arrays import ArraySamples
from distcheck.workloads.datasets.files import prepare, unpack
from tests import real_files

needs_torchvision = pytest.mark.usefixtures("torchvision_loads")


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cifar-10-batches-py in it."""
    parent = tmp_path_factory.mktemp("cifar")
    real_files.write_cifar10(parent)
    return parent


@needs_torchvision
@pytest.mark.parametrize("form", ["parent", "inner", "archive", "folder with archive"])
def test_cifar10_is_found_in_every_form(cifar: Path, tmp_path: Path, fd: int, form: str) -> None:
    inner = cifar / "cifar-10-batches-py"
    where = {"parent": cifar, "inner": inner}.get(form)
    if where is None:
        archive = real_files.pack_cifar10(inner, tmp_path / "cifar-10-python.tar.gz")
        where = archive if form == "archive" else tmp_path
    description = prepare("cifar10", str(where), download=False, fd=fd)
    about = msgspec.msgpack.decode(description, type=ArrayDescription)
    assert (about.train_size, about.test_size) == (1500, 100)
    samples = ArraySamples(fd, description)
    assert (samples.shape, samples.classes) == ((3, 32, 32), 10)
    train, labels, test, _ = real_files.cifar10_arrays()
    ids = torch.tensor([0, 299, 300, 1499])  # across the borders of batches
    images, found = samples.read(ids, train=True, dtype=torch.float32)
    assert found.tolist() == labels[ids].tolist()
    pixels = torch.from_numpy(train)[ids].view(-1, 3, 32, 32) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (about.mean, about.std))
    assert torch.equal(images, (pixels - mean) / std)
    images, _ = samples.read(torch.tensor([7]), train=False, dtype=torch.float64)
    assert images.dtype == torch.float64
    restored = (images[0] * std + mean) * 255
    assert torch.allclose(restored, torch.from_numpy(test[7]).view(3, 32, 32).double(), atol=1e-3)


@needs_torchvision
def test_files_that_are_not_the_published_ones_are_remarked_on(cifar: Path, fd: int) -> None:
    description = prepare("cifar10", str(cifar), download=False, fd=fd)
    note = msgspec.msgpack.decode(description, type=ArrayDescription).note
    assert "not the published CIFAR-10" in note


@needs_torchvision
@pytest.mark.parametrize("inner", ["MNIST/raw", "raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_found_in_every_form(tmp_path: Path, fd: int, inner: str, packed: bool) -> None:
    real_files.write_mnist(tmp_path / "x" / inner, packed=packed)
    description = prepare("mnist", str(tmp_path / "x"), download=False, fd=fd)
    samples = ArraySamples(fd, description)
    assert samples.shape == (1, 28, 28)
    train, labels, _, _ = real_files.mnist_arrays()
    images, found = samples.read(torch.tensor([5, 599]), train=True, dtype=torch.float32)
    assert found.tolist() == labels[[5, 599]].tolist()
    expected = (torch.from_numpy(train[[5, 599]]).unsqueeze(1) / 255 - 0.1307) / 0.3081
    assert torch.allclose(images, expected)
    assert samples.size(train=False) == 100


@needs_torchvision
def test_what_was_tried_is_said(tmp_path: Path, fd: int) -> None:
    with pytest.raises(CannotRunError) as caught:
        prepare("cifar10", str(tmp_path), download=False, fd=fd)
    message = str(caught.value)
    for tried in ("cifar-10-batches-py", "cifar-10-python.tar.gz", str(tmp_path)):
        assert tried in message
    assert "--download" in message
    assert "\n" not in message


@needs_torchvision
@pytest.mark.parametrize("damage", ["cut", "missing", "not an archive"])
def test_damaged_files_are_refused(cifar: Path, tmp_path: Path, fd: int, damage: str) -> None:
    where = tmp_path / "copy"
    shutil.copytree(cifar, where)
    batch = where / "cifar-10-batches-py" / "data_batch_3"
    if damage == "cut":
        batch.write_bytes(batch.read_bytes()[:1000])
    elif damage == "missing":
        batch.unlink()
    else:
        where = tmp_path / "cifar-10-python.tar.gz"
        where.write_bytes(b"<html>404</html>")
    with pytest.raises(CannotRunError, match=r"damaged|incomplete") as caught:
        prepare("cifar10", str(where), download=False, fd=fd)
    assert "\n" not in str(caught.value)


class _Runs:
    """What a pickle makes of itself: a call, of the reader's choosing no more than of ours."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@needs_torchvision
def test_a_batch_that_holds_code_does_not_run_it(cifar: Path, tmp_path: Path, fd: int) -> None:
    """A case or a configuration from elsewhere names the folder; a batch is a pickle."""
    where = tmp_path / "copy"
    shutil.copytree(cifar, where)
    content = {"data": _Runs(tmp_path / "ran"), "labels": []}
    batch = where / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(pickle.dumps(content))
    with pytest.raises(CannotRunError, match="it names ") as caught:
        prepare("cifar10", str(where), download=False, fd=fd)
    assert "a batch of CIFAR-10 holds arrays, numbers and texts" in str(caught.value)
    assert not (tmp_path / "ran").exists()


class _Calls:
    """A call in a pickle, and perhaps the state of what it makes."""

    def __init__(self, *made: object) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return self.made


_PIXELS = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
_MULTIARRAY = np.zeros(1).__reduce__()[0]
_ALL_ROOM = (_MULTIARRAY, (np.ndarray, (10_000_000, 3072), b"B"))
# A dtype with an object in it that does not say so; its array makes an object of any address.
_ADDRESS = _Calls(
    np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
)
_FROM_BUFFER = _PIXELS.__reduce_ex__(5)[0]


def _written(parent: Path, batch: bytes) -> Path:
    folder = parent / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(batch)
    return parent


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_of_every_protocol_is_read(
    tmp_path: Path, protocol: int, order: Literal["C", "F"]
) -> None:
    data = np.array(_PIXELS, order=order)
    batch = pickle.dumps({"data": data, "labels": [0, 9]}, protocol=protocol)
    found = cifar10.files.read(_written(tmp_path, batch), train=False)
    assert found.images.tolist() == _PIXELS.reshape(2, 3, 32, 32).tolist()
    assert found.labels.tolist() == [0, 9]


def test_a_batch_as_python_2_wrote_it_is_read(tmp_path: Path) -> None:
    minus_one = b"J\xff\xff\xff\xff"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN" + 2 * minus_one + b"K\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x02M\x00\x0ct"
        + dtype + b"\x89T" + struct.pack("<I", _PIXELS.size) + _PIXELS.tobytes() + b"tb"
    )  # fmt: skip
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x00K\x09eu."
    found = cifar10.files.read(_written(tmp_path, batch), train=True)
    assert found.images[8:].tolist() == _PIXELS.reshape(2, 3, 32, 32).tolist()
    assert found.labels.tolist() == [0, 9] * 5


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "content",
    [
        {"data": _PIXELS, "labels": _Calls(_FROM_BUFFER, (bytes(8), _ADDRESS, (1,), "C"))},
        {"data": _Calls(_FROM_BUFFER, (bytes(3072), _ADDRESS, (1, 3072), "C")), "labels": [1]},
        {"data": _Calls(*_ALL_ROOM), "labels": [1]},
        {"data": _Calls(*_ALL_ROOM, (1, (9, 3072), np.dtype("u1"), False, b"1")), "labels": [1]},
        {
            "data": _Calls(_FROM_BUFFER, (bytes(3073), np.dtype("u1"), (1, 3072), "C")),
            "labels": [1],
        },
        {"data": _PIXELS[:0], "labels": []},
        {"data": _PIXELS[:, :-3], "labels": [1, 2]},
        {"data": _PIXELS.astype(np.int8), "labels": [1, 2]},
        {"data": _PIXELS.astype(np.uint16), "labels": [1, 2]},
        {"data": [1, 2], "labels": [1, 2]},
        {"data": _PIXELS, "labels": [1, True]},
        {"data": _PIXELS, "labels": [1, 10]},
        {"data": _PIXELS, "labels": [1, -1]},
        {"data": _PIXELS, "labels": (1, 2)},
        {"data": _PIXELS, "labels": np.array([1, 2])},
    ],
)
def test_what_no_batch_contains_is_refused(
    content: dict[str, object], protocol: int, tmp_path: Path
) -> None:
    """The first ended the process, at an address that the file determines."""
    where = _written(tmp_path, pickle.dumps(content, protocol=protocol))
    with pytest.raises(pickle.UnpicklingError, match="CIFAR-10"):
        cifar10.files.read(where, train=True)


@pytest.mark.parametrize(
    "batch",
    [
        b"\x80\x02Nr\xff\xff\xff\x07.",  # memo: 1 GiB for the place of one object
        b"N" * (1 << 17) + b"N.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b".",
    ],
    ids=["memo", "steps", "bytes"],
)
def test_a_small_batch_takes_little_memory(batch: bytes, tmp_path: Path) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError), match=r"more steps|but only 1 remain"):
        cifar10.files.read(_written(tmp_path, batch), train=True)


@needs_torchvision
def test_a_batch_that_is_a_pipe_is_damaged(cifar: Path, tmp_path: Path, fd: int) -> None:
    """It has no end, and nobody may ever write into it."""
    shutil.copytree(cifar / "cifar-10-batches-py", tmp_path / "data")
    batch = tmp_path / "data/data_batch_2"
    batch.unlink()
    os.mkfifo(batch)
    with pytest.raises(CannotRunError, match=r"damaged|incomplete"):
        prepare("cifar10", str(tmp_path / "data"), download=False, fd=fd)


@needs_torchvision
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_what_unpacks_to_too_much_is_refused(
    cifar: Path, tmp_path: Path, fd: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, mnist):
        monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    where = tmp_path / "cifar-10-python.tar.gz"
    if name == "cifar10":
        real_files.pack_cifar10(cifar / "cifar-10-batches-py", where)
    else:
        where = real_files.write_mnist(tmp_path / "packed", packed=True)
    with pytest.raises(CannotRunError, match="unpacks to more than 0 MiB"):
        prepare(name, str(where), download=False, fd=fd)


@needs_torchvision
def test_a_failed_download(tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(CannotRunError, match="could not be downloaded") as caught:
        prepare("cifar10", str(tmp_path / "data"), download=True, fd=fd)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "data").iterdir())


@needs_torchvision
def test_folder(cifar: Path, tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server on loopback, checksum and all."""
    import hashlib
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    from torchvision.datasets import CIFAR10

    served = tmp_path / "served"
    served.mkdir()
    archive = real_files.pack_cifar10(cifar / "cifar-10-batches-py", served / CIFAR10.filename)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    for listed in ("train_list", "test_list"):
        names = [name for name, _ in getattr(CIFAR10, listed)]
        sums = [
            [n, hashlib.md5((cifar / CIFAR10.base_folder / n).read_bytes()).hexdigest()]
            for n in names
        ]
        monkeypatch.setattr(CIFAR10, listed, sums)
    meta = cifar / CIFAR10.base_folder / "batches.meta"
    digest = hashlib.md5(meta.read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": digest})
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}"
        monkeypatch.setattr(CIFAR10, "url", url)
        description = prepare("cifar10", str(tmp_path / "data"), download=True, fd=fd)
        server.shutdown()
    assert msgspec.msgpack.decode(description, type=ArrayDescription).train_size == 1500
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["cifar-10-batches-py"]


def test_without_torchvision(tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(CannotRunError, match=r"pip install 'distcheck\[data\]'"):
        prepare("cifar10", str(tmp_path), download=False, fd=fd)


def test_unpacking_needs_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons before 3.11.4 have none."""
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(CannotRunError, match=r"unpack it, and pass its folder with --data-dir"):
        unpack(tmp_path / "data.tar.gz", tmp_path)


@pytest.mark.parametrize("kind", ["one", "many"])
def test_the_headers_of_an_archive_are_bounded(kind: str, tmp_path: Path) -> None:
    """tarfile reads a header whole, and each header before a member in another call."""
    archive = tmp_path / "cifar-10-python.tar.gz"
    size, count = (1 << 27, 1) if kind == "one" else (0, 5000)
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, size
    with gzip.open(archive, "wb", compresslevel=1) as file:
        for _ in range(count):
            file.write(header.tobuf() + bytes(size))
    tracemalloc.start()
    with pytest.raises(tarfile.ReadError, match="a header has more than 64 KiB"):
        unpack(archive, tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
