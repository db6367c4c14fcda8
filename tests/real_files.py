"""Small CIFAR-10 and MNIST data sets in the real file formats, made from nothing."""

import gzip
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np

CIFAR_TRAIN, CIFAR_TEST, MNIST_TRAIN, MNIST_TEST = 1500, 100, 600, 100


def cifar10_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [n, 3072] and labels, test images and labels."""
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (CIFAR_TRAIN, 3072), dtype=np.uint8)
    test = rng.integers(0, 256, (CIFAR_TEST, 3072), dtype=np.uint8)
    return train, np.arange(CIFAR_TRAIN) % 10, test, np.arange(CIFAR_TEST) % 10


def write_cifar10(parent: Path) -> Path:
    """cifar-10-batches-py as its authors pack it: five pickled batches, a test batch, the names."""
    folder = parent / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    train, train_labels, test, test_labels = cifar10_arrays()
    parts = zip(np.split(train, 5), np.split(train_labels, 5), strict=True)
    batches = {f"data_batch_{number}": part for number, part in enumerate(parts, 1)}
    batches["test_batch"] = (test, test_labels)
    for name, (data, labels) in batches.items():
        content = {
            "batch_label": name, "labels": labels.tolist(), "data": data,
            "filenames": [f"{i}.png" for i in range(len(labels))],
        }  # fmt: skip
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = ["airplane", "automobile", "bird", "cat", "deer"]
    names += ["dog", "frog", "horse", "ship", "truck"]
    meta = {"num_cases_per_batch": 10000, "label_names": names, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return folder


def pack_cifar10(folder: Path, archive: Path) -> Path:
    """The folder as cifar-10-python.tar.gz."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def mnist_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [n, 28, 28] and labels, test images and labels."""
    rng = np.random.default_rng(1)
    train = rng.integers(0, 256, (MNIST_TRAIN, 28, 28), dtype=np.uint8)
    test = rng.integers(0, 256, (MNIST_TEST, 28, 28), dtype=np.uint8)
    train_labels = (np.arange(MNIST_TRAIN) % 10).astype(np.uint8)
    return train, train_labels, test, (np.arange(MNIST_TEST) % 10).astype(np.uint8)


def write_mnist(folder: Path, *, packed: bool) -> Path:
    """The four idx files, packed with gzip or not."""
    folder.mkdir(parents=True, exist_ok=True)
    train, train_labels, test, test_labels = mnist_arrays()
    for name, array in (
        ("train-images-idx3-ubyte", train),
        ("train-labels-idx1-ubyte", train_labels),
        ("t10k-images-idx3-ubyte", test),
        ("t10k-labels-idx1-ubyte", test_labels),
    ):
        magic = 0x0800 + array.ndim
        header = struct.pack(f">I{array.ndim}I", magic, *array.shape)
        content = header + array.tobytes()
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder
