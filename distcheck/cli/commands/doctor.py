"""`distcheck doctor`: reports packages, the machine, and the backends that can run here."""

import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import click

from distcheck import backends
from distcheck.cli.group import OnceCommand
from distcheck.cli.options import json_option
from distcheck.contract import BackendAllReduce, BackendReduce, DDPBuckets
from distcheck.errors import DistcheckError, ExitCode
from distcheck.machine.resources import available_bytes
from distcheck.reports.files import check_writable, write_answer
from distcheck.training import loading
from distcheck.training.jobs import EXAMINE, CalibrationResult
from distcheck.verification import preparation
from distcheck.workloads.datasets import dataset_names
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool

_WORLDS = (2, 3, 4)
_TESTED_TORCH = ((2, 11), (2, 15))
_PACKAGES = ("torch", "torchvision", "numpy", "msgspec", "safetensors", "xxhash", "rich", "click",
             "psutil", "pytest", "pytest-xdist", "hypothesis")  # fmt: skip


@click.command("doctor", cls=OnceCommand)
@json_option("examination")
def command(json_file: str | None) -> int:
    """Print versions, machine, calibration and available backends, for example for a bug report."""
    check_writable(json_file)
    pool = Pool()
    found: dict[str, str] = {}
    try:
        for name, text in _findings(pool):
            found[name] = text if name not in found else f"{found[name]}; {text}"
            if json_file is None:
                click.echo(f"{name:<25}{text}")
    finally:
        pool.close()
    write_answer(json_file, "distcheck.doctor/1", **found)
    return int(ExitCode.CANNOT_RUN if "cannot run" in found else ExitCode.PASS)


def _findings(pool: Pool) -> Iterator[tuple[str, str]]:
    try:
        yield from _examine(pool)
    except DistcheckError as error:
        yield "cannot run", str(error)


def _examine(pool: Pool) -> Iterator[tuple[str, str]]:
    yield "packages", ", ".join(_packages())
    free = shutil.disk_usage(".").free
    yield "memory", f"{available_bytes() / 2**30:.1f} GiB available"
    yield "disk", f"{free / 2**30:.1f} GiB free here"
    pool.wait_ready()
    found = run_job(pool, EXAMINE, b"")
    about = found["environment"]
    for name in ("distcheck", "torch", "python", "platform", "cpu", "cores", "threads",
                 "cpu_capability", "mkldnn", "deterministic_algorithms"):  # fmt: skip
        yield name.replace("_", " "), str(about[name])
    yield from _torch_remark(about["torch"])
    yield "built into torch", ", ".join(found["backends"]) or "no backend"
    if found["nccl"]:
        yield "NCCL", found["nccl"]
    for name in backends.backend_names():
        why = backends.missing(name)
        yield f"backend {name}", f"cannot run here: {why}" if why else "can run here"
    yield "devices", found["devices"]
    yield "torchvision", found["torchvision"]
    yield from _calibrations(pool)
    yield "strategies", ", ".join(sorted(loading.strategy_names()))
    yield "workloads", ", ".join(sorted(loading.workload_names()))
    loads = found["torchvision"].startswith("loads")
    files = "" if loads else "; only the data set synthetic can run here"
    yield "data", ", ".join(dataset_names()) + files


def _packages() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _torch_remark(torch_version: str) -> Iterator[tuple[str, str]]:
    parts = torch_version.split(".")
    release = (int(parts[0]), int(parts[1]))
    if not _TESTED_TORCH[0] <= release <= _TESTED_TORCH[1]:
        low, high = (".".join(map(str, r)) for r in _TESTED_TORCH)
        yield (
            "remark",
            f"torch {torch_version} is not supported; distcheck is tested with {low} to {high}",
        )


def _calibrations(pool: Pool) -> Iterator[tuple[str, str]]:
    for world in _WORLDS:
        try:
            calibration: CalibrationResult = preparation.calibrate(
                pool,
                backend="gloo",
                world=world,
                orders=(BackendAllReduce(), BackendReduce(), DDPBuckets()),
                dtypes=("float32", "float64"),
                deadline_s=30.0,
            )
        except DistcheckError as error:
            yield f"gloo, world {world}", f"cannot run: {error}"
            continue
        for order, failure in calibration.failures:
            name = type(order).__struct_config__.tag
            text = (
                (f"{name}: bit-identical to the prediction")
                if not failure
                else f"{name}: {failure}"
            )
            yield f"gloo world {world}", text
