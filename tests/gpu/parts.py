"""What a run on a GPU consists of: commands, their limits, and how their figures are read."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
DISTCHECK = [sys.executable, "-m", "distcheck"]
STRATEGIES = ("allreduce", "ddp", "gather_scatter")
# Without the composite model and float64, where time is short.
FEWER = ("--workload", "exact", "--workload", "cnn", "--dtype", "float32")
TO_SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
NO_GPU = re.compile(
    r"no NVIDIA (GPU|driver)|needs an? (NVIDIA )?GPU(, but|;) this machine has none"
)
SHARDS = 4

# One of each family of tests/mutants but for those whose code sends GPU tensors over gloo (servers,
# pipelines, tokens), is a loss or metric (exchanging), or shows only in separate interpreters
# (process). A rehearsal has the first 2.
MUTANTS = (
    "scale.missing_division", "missing_sync.no_sync", "accepted.rounded_and_never_divided",
    "accumulation.DividesByTheStepsTwice", "cells.fills_absent_gradients_with_zeros",
    "tensors.NoSumInBackward", "divided.NormalizesOverItsOwnClasses",
    "factors.unscales_what_was_never_scaled", "failures.dies_after_the_last_collective",
    "feeding.GeneratorOfEachRanksOwn", "groups.DividesByOneDimension", "late.SendsBeforeItFills",
    "layout.puts_back_in_storage_order", "left_out.ConvertedAfterWrapping",
    "more_cells.RestsAtRateZero", "named.one_of_two_gives", "order.adds_in_rank_order",
    "rings.list_of_one_tensor", "sharded.OwnersDoNotDivide", "stale.UsesTheLastStep",
    "state.BuildsItsOwnModel", "token_counts.means_over_tokens_count_alike",
    "updates.EpsilonOfEveryRank", "workloads.MeanOverWhatCounts",
    "absent.skips_what_is_absent", "buffers.adds_up_counts", "counts.only_64_tensors",
    "depth.children_only", "groups.FirstGroupOnly", "kinds.layers_by_type",
    "precision.embeddings_in_bfloat16", "races.divides_before_it_waits", "ranks.last_ranks_chunk",
    "schedules.CompensatesTheRate", "sizes.chunks_of_a_million", "state.eval_mode_is_left_on",
    "steps.stops_at_step_3", "training.flattened_as_it_lies", "twins.buffer_by_shape",
    "worlds.ranks_count_alike",
)  # fmt: skip

# Of streams.py.
WRONG_STREAMS = ("divides_before_it_waits", "a_stream_that_nobody_waits_for")
RIGHT_STREAMS = ("divides_after_it_has_waited", "a_stream_that_waits_and_is_waited_for")
# Of a_usual_job.py.
USUAL = ("float16", "bfloat16", "fsdp")

# Edits of a_job.py, each with the cause that must be named.
BUGS = {
    "missing-sync": ("model(inputs)", "model.module(inputs)"),
    "double-division": ("loss.backward()", "(loss / world).backward()"),
}

ABOUT = """
import ctypes, json, os, platform, sys
from pathlib import Path
import torch
from distcheck.machine import devices
there = torch.cuda.is_available()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "gpu": torch.cuda.get_device_name() if there else "none", "gpus": torch.cuda.device_count(),
    "NCCL loaded": ".".join(map(str, devices.nccl_version())),
    "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version())) if there else "",
    "cudnn": torch.backends.cudnn.version(), "cores": len(os.sched_getaffinity(0)),
    "distcheck sees": devices.gpu_count(), "files": [str(f) for f in Path("/dev").glob("nvidia*")],
    "driver": devices._driver_version(),
}))
if "cuda" in sys.argv and not there:
    sys.exit("torch finds no NVIDIA GPU")
"""

Read = Callable[[Path, str], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A command. `code` is the exit code that is expected (None: any); `files` are written where it
    starts.
    """

    name: str
    words: list[str]
    limit_s: float
    read: Read
    code: int | None = 0
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    newer_nccl: bool = (
        False  # ranks share a GPU over NCCL, so the library that was brought goes first
    )


@dataclass(frozen=True)
class Place:
    """Where it runs: on which device, with small work or all of it, with which files."""

    device: str
    small: bool
    site: str
    root: str
    nccl: str = ""
    sharing: dict[str, str] = field(default_factory=dict)  # with which ranks share a GPU over NCCL

    def environment(self, part: Part) -> dict[str, str]:
        """What a part's command has in its environment beside this program's own."""
        path = filter(None, [self.site, self.root, os.environ.get("PYTHONPATH")])
        given = {
            "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN",
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **part.environment,
        }  # fmt: skip
        if part.newer_nccl:
            given |= self.sharing
            given |= {"LD_PRELOAD": self.nccl} if self.nccl else {}
        return given

    def over(self, backend: str) -> str:
        """The backend; on the CPU gloo stands in for NCCL."""
        return backend if self.device == "cuda" else "gloo"


# -- figures


def read_report(folder: Path, text: str) -> dict[str, Any]:
    """Of a report of `verify` or `job`: the verdict of each check, and its largest error over its
    bound; 0 where all bits are equal.
    """
    file = folder / "r.json"
    if not file.exists():
        return {}
    document = json.loads(file.read_text())
    cases, most = {}, 0.0
    for case in document["cases"]:
        checks = {}
        for check in case["checks"]:
            worst, said = check.get("worst"), check["verdict"]
            if worst and worst["bound"]:
                share = worst["error"] / worst["bound"]
                said += f", {worst['error']:.3g} of {worst['bound']:.3g}"
                most = max(most, share) if check["verdict"] == "pass" else most
            checks[f"{check['check']} {check['layer']}"] = (
                f"{said} {check.get('reason', '')}".strip()
            )
        cases[case["case"]["id"]] = {
            "verdict": case["verdict"], "checks": checks, "notes": case["notes"],
            "causes": [found["cause"] for found in case["diagnosis"]],
            "timings_s": case["timings_s"],
        }  # fmt: skip
    passed = sum(case["verdict"] == "pass" for case in cases.values())
    return {
        "verdict": document["verdict"], "passed": f"{passed} of {len(cases)}",
        "causes": " ".join({c: "" for case in cases.values() for c in case["causes"]}),
        "most of a bound": round(most, 3), "cases": cases, "left out": document.get("left_out"),
    }  # fmt: skip


def read_selftest(folder: Path, text: str) -> dict[str, Any]:
    """Of mutants: how many were caught and named, and every one that is not as it should be."""
    file = folder / "r.json"
    if not file.exists():
        return {}
    document = json.loads(file.read_text())
    counts = {n: document["counts"][n] for n in ("planted", "caught", "named_right", "named_wrong")}
    odd = {
        f"{row['file']}.{row['name']}": f"{row['verdict']}, named {row['naming']}: {row['detail']}"
        for row in document["rows"]
        if row["verdict"] != "caught" or row["naming"] == "wrong"
    }
    return {**counts, "odd": odd}


def read_probe(folder: Path, text: str) -> dict[str, Any]:
    """Of a probe: how many cells there are of each verdict, and those that are not right."""
    file = folder / "r.json"
    if not file.exists():
        return {}
    (found,) = json.loads(file.read_text())["backends"]
    counts: dict[str, Any] = Counter(cell["verdict"] for cell in found["cells"])
    odd = [cell for cell in found["cells"] if cell["verdict"] != "right"]
    return {**counts, "missing": found["missing"], "odd": odd}


def read_tests(folder: Path, text: str) -> dict[str, Any]:
    """Of pytest: counts, and what failed or was skipped."""
    file = folder / "junit.xml"
    if not file.exists():
        return {}
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "details": {}}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        kind, said = "passed", None
        for name in ("failure", "error", "skipped"):
            if (said := case.find(name)) is not None:
                kind = "skipped" if name == "skipped" else "failed"
                break
        found[kind] += 1
        if said is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            found["details"][name] = f"{kind}: {said.get('message', '')[:400]}"
    return found


def read_printed(folder: Path, text: str) -> dict[str, Any]:
    """Of a program that prints JSON."""
    begin = text.find("{")
    document: dict[str, Any] = json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else {}
    return document


def read_lines(folder: Path, text: str) -> dict[str, Any]:
    """Of a program that prints sentences."""
    lines = [
        line for line in text.splitlines() if line and not line.startswith(("*", "Setting OMP"))
    ]
    return {"lines": lines[-30:]}


def read_seconds(steps: int) -> Read:
    """Of `bench/peers/bare_training.py`."""

    def read(folder: Path, text: str) -> dict[str, Any]:
        last = text.split()[-1:]
        return {"s a step": round(float(last[0]) / steps, 5)} if last else {}

    return read


# -- parts


def verify(
    name: str, place: Place, backend: str, strategy: str, *words: str, limit_s: float, **about: Any
) -> Part:
    """A part that verifies a strategy over a backend."""
    if place.small and "vgg11" not in words:
        words = (*words[: 2 * ("--world" in words)], "--workload", "mlp:small", "--steps", "2")
    options = ["--backend", place.over(backend), "--device", place.device, "--json", "r.json"]
    command = [*DISTCHECK, "verify", "--strategy", strategy, *words, *options]
    return Part(name, command, limit_s, read_report, newer_nccl=backend == "nccl", **about)


def strategies(place: Place, backend: str, world: int, *words: str) -> list[Part]:
    """A part for each strategy in a world; of one rank the verdict is unknown."""
    ranks, code = f"{backend}, {world} rank{'s' * (world > 1)}", 0 if world > 1 else 5
    words = ("--world", str(world), *words)
    return [
        verify(f"{ranks}, {name}", place, backend, name, *words, limit_s=100, code=code)
        for name in STRATEGIES
    ]


def torchrun(ranks: int, port: int, *words: str) -> list[str]:
    """Ranks on this machine, with a port of their own: other parts run beside them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
    return [*launcher, "--master-port", str(port), "--nproc-per-node", str(ranks), *words]


def job(place: Place, backend: str, number: int, *, limit_s: float) -> Part:
    """A part that judges a whole job: right (0), or with a bug."""
    text, bug = (HERE / "a_job.py").read_text(), ["right", *BUGS][number]
    if number:
        find, put = BUGS[bug]
        assert text.count(find) == 1, (bug, find)
        text = text.replace(find, put)
    over_nccl = backend == "nccl"
    ranks = torchrun(
        2, 29510 + 10 * over_nccl + number, "a_job.py", place.over(backend), place.device
    )
    command = [*DISTCHECK, "job", "--steps", "4", "--json", "r.json", "--", *ranks]
    return Part(
        f"job over {backend}, {bug}", command, limit_s, read_report, code=1 if number else 0,
        files={"a_job.py": text}, environment=TO_SHARE if over_nccl else {}, newer_nccl=over_nccl,
    )  # fmt: skip


def usual_job(place: Place, number: int) -> Part:
    """A part that judges a job as it usually is on GPUs, in one of its precisions."""
    how = USUAL[number]
    ranks = torchrun(2, 29540 + number, "a_usual_job.py", place.over("nccl"), place.device, how)
    command = [*DISTCHECK, "job", "--steps", "4", "--json", "r.json", "--", *ranks]
    return Part(
        f"usual job, {how}", command, 150, read_report, environment=TO_SHARE, newer_nccl=True,
        files={"a_usual_job.py": (HERE / "a_usual_job.py").read_text()},
    )  # fmt: skip


def streams(place: Place) -> list[Part]:
    """A part for each sync of streams.py, over NCCL."""
    files = {"streams.py": (HERE / "streams.py").read_text()}
    words = ("--world", "2", "--workload", "cnn", "--dtype", "float32")
    return [
        verify(
            f"streams, {name}",
            place,
            "nccl",
            f"streams.py:{name}",
            *words,
            limit_s=90,
            code=int(name in WRONG_STREAMS),
            files=files,
        )
        for name in (*WRONG_STREAMS, *RIGHT_STREAMS)
    ]


def sharing(place: Place) -> Part:
    """The part that finds the settings for those that come after it."""

    def read(folder: Path, text: str) -> dict[str, Any]:
        found = read_printed(folder, text)
        place.sharing.update(found["works with"] or {})
        return found

    words = [sys.executable, "{ROOT}/tests/gpu/share.py", place.over("nccl"), place.device]
    return Part("sharing over nccl", words, 110, read, newer_nccl=True)


def mutants(place: Place, shard: int) -> Part:
    """A part that plants some of the mutants."""
    chosen = MUTANTS[:2] if place.small else MUTANTS
    words = [word for name in chosen[shard::SHARDS] for word in ("-k", name)]
    command = [*DISTCHECK, "selftest", "--device", place.device, "--json", "r.json", *words]
    return Part(f"mutants, {shard + 1} of {SHARDS}", command, 220, read_selftest)


def probe(place: Place, backend: str) -> Part:
    """A part that probes some operations of a backend."""
    command = [*DISTCHECK, "backends", "--backend", place.over(backend), "--device", place.device]
    command += ["--world", "2", "--json", "r.json"]
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
        command += ["--op", name]
    command += ["--dtype", "float32"] if place.small else []
    over_nccl = backend == "nccl"
    return Part(f"probe of {backend}", command, 90, read_probe, code=None, newer_nccl=over_nccl)


def program(name: str, words: list[str], read: Read, *, limit_s: float) -> Part:
    """A part that is a program of the checkout."""
    return Part(name, [sys.executable, *words], limit_s, read)


def tests() -> Part:
    """The tests that need a GPU; what strategies come to is in parts of its own."""
    words = ["-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", "{ROOT}"]
    words += [
        "-c",
        "{ROOT}/pyproject.toml",
        "--junitxml",
        "junit.xml",
        "-k",
        "not test_strategies and not on_a_gpu",
    ]
    words += ["{ROOT}/tests/world/test_cuda.py", "{ROOT}/tests/gpu"]
    return program("tests", ["-m", "pytest", *words], read_tests, limit_s=150)


def in_tf32(place: Place) -> Part:
    """A right strategy with TensorFloat-32: which bounds does it break?"""
    words = ("tf32.py:allreduce", "--world", "2", "--workload", "cnn", "--dtype", "float32")
    files = {"tf32.py": (HERE / "tf32.py").read_text()}
    return verify("TF32", place, "gloo", *words, limit_s=90, code=None, files=files)


def figures(place: Place) -> list[Part]:
    """The parts whose seconds count."""
    device = place.device
    count, few, more, rounds = (1, 1, 2, 1) if place.small else (20, 2, 6, 9)
    bare = ["{ROOT}/bench/peers/bare_training.py", str(count), device]
    world = torchrun(4, 29530, *bare)[1:]
    words = ["allreduce", "--workload", "vgg11", "--dtype", "float32"]
    words += ["--batch", "8"] if place.small else []
    guard = ["{ROOT}/bench/guard.py", str(rounds), device]
    return [
        program("VGG11, bare, 1 process", bare, read_seconds(count), limit_s=60),
        program("VGG11, bare, 4 ranks over gloo", world, read_seconds(count), limit_s=60),
        *(
            verify(f"VGG11, {n} steps", place, "gloo", *words, "--steps", str(n), limit_s=90)
            for n in (few, more)
        ),
        program("guard", guard, read_lines, limit_s=60),
    ]


def phases(place: Place) -> list[tuple[list[Part], int]]:
    """The parts in the order in which they run, and how many of each list run beside others."""
    bits = ["{ROOT}/tests/gpu/bits.py", place.device, "8" if place.small else "256"]
    first = [
        Part(
            "about", [sys.executable, "-c", ABOUT, place.device], 60, read_printed, newer_nccl=True
        ),
        Part("doctor", [*DISTCHECK, "doctor"], 60, read_lines, newer_nccl=True),
    ]
    over_nccl = [
        *strategies(place, "nccl", 2), job(place, "nccl", 0, limit_s=90),
        *strategies(place, "nccl", 4, *FEWER), job(place, "nccl", 1, limit_s=90),
        *strategies(place, "nccl", 1, *FEWER), job(place, "nccl", 2, limit_s=90),
        *(usual_job(place, number) for number in range(len(USUAL))),
        *(streams(place) if place.device == "cuda" else ()), probe(place, "nccl"),
    ]  # fmt: skip
    over_gloo = [
        *strategies(place, "gloo", 4),
        *(mutants(place, shard) for shard in range(2 if place.small else SHARDS)),
        *(job(place, "gloo", number, limit_s=100) for number in range(1 + len(BUGS))),
        in_tf32(place), tests(), program("bits", bits, read_printed, limit_s=90),
        probe(place, "gloo"),
    ]  # fmt: skip
    beside = 1 if place.small else 8
    return [
        (first, 2), ([sharing(place)], 1), (figures(place), 1), (over_nccl, min(4, beside)),
        (over_gloo, beside),
    ]  # fmt: skip


def derived(results: dict[str, tuple[float, dict[str, Any]]]) -> dict[str, float]:
    """What follows from several parts; `results` has each part's seconds and figures."""
    found: dict[str, float] = {}
    timed = sorted(
        (int(match[1]), seconds)
        for name, (seconds, _) in results.items()
        if (match := re.fullmatch(r"VGG11, (\d+) steps", name))
    )
    bare = results.get("VGG11, bare, 4 ranks over gloo", (0.0, {}))[1].get("s a step")
    if len(timed) == 2:
        (few, one), (more, other) = timed
        found["VGG11 under verify, s a further step"] = round((other - one) / (more - few), 4)
        if bare:
            found["over a bare step of 4 ranks"] = round((other - one) / (more - few) / bare, 2)
    return found
