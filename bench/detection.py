"""What distcheck catches, names and wrongly accuses: the sweep behind the figures.

    python bench/detection.py run FOLDER [PART ...]     stop it and run it again: it goes on
    python bench/detection.py show FOLDER               the table of what there is

PART is correct (false positives), mutants, limits (the smallest error caught) or times; all of them
by default. Every case is one line of FOLDER/PART.jsonl, every run's machine one of machine.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.correct

import distcheck
from distcheck.addons.selftest.command import installed_zoo
from distcheck.addons.selftest.records import (
    SelftestVerdict,
    format_checks,
    judge_correct,
    judge_mutant,
)
from distcheck.errors import DistcheckError
from distcheck.records import Report

PARTS = ("correct", "mutants", "limits", "times")
WORLDS = (2, 3, 4, 5, 8)
WORKLOADS = ("exact", "mlp", "cnn")
SEEDS = range(10)
BATCHES = (40, 37)  # by the seed's parity: shares that are equal at 2, 4, 5, 8, and never
TOGETHER = 8  # strategies per verification; what is interrupted is lost
PLANTED = str(Path(__file__).parent.resolve() / "planted.py")
FORMATTER = argparse.RawDescriptionHelpFormatter
MANTISSA = {"float32": 23, "float64": 52}
ROUNDS = 5
Line = dict[str, Any]


class Log:
    """Lines of one part, those of earlier runs included."""

    def __init__(self, folder: Path, part: str) -> None:
        self._file = folder / f"{part}.jsonl"
        self.lines = read(self._file)
        self.keys = {line["key"] for line in self.lines}

    def add(self, *lines: Line) -> None:
        """Appends lines; all of them or, where this is killed, the last one cut short."""
        with self._file.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self.lines += lines
        self.keys |= {line["key"] for line in lines}


def read(file: Path) -> list[Line]:
    """The whole lines of a file, which need not be there."""
    if not file.exists():
        return []
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # killed in the middle of a line
        file.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def strategies() -> list[str]:
    """Every correct strategy: the built-in ones, and the forms of tests/correct.py."""
    from tests.correct import FORMS

    return [*installed_zoo().strategies, *(f"tests.correct:{form}" for form in FORMS)]


def run_correct(log: Log) -> None:
    """Strategies x worlds x workloads, seed after seed; any failure is a defect of distcheck."""
    names = strategies()
    chunks = [names[at : at + TOGETHER] for at in range(0, len(names), TOGETHER)]
    for seed in SEEDS:
        for world in WORLDS:
            for chunk in chunks:
                key = f"seed {seed}, world {world}, {', '.join(chunk)}"
                if key not in log.keys:
                    log.add(*_verify_correct(key, chunk, world=world, seed=seed))
                    alarms = sum(line["verdict"] == "false positive" for line in log.lines)
                    say(f"{len(log.lines)} correct cases, {alarms} false positives: {key}")


def _verify_correct(key: str, chunk: list[str], *, world: int, seed: int) -> list[Line]:
    about = {"key": key, "world": world, "seed": seed}
    begun = time.perf_counter()
    try:
        report = distcheck.verify(
            chunk, world=world, workload=WORKLOADS, batch=BATCHES[seed % 2], seed=seed
        )
    except DistcheckError as error:
        return [{**about, "verdict": "unknown", "detail": str(error)}]
    each = (time.perf_counter() - begun) / len(report.cases)
    return [
        {**about, "seconds": round(each, 3), **msgspec.to_builtins(judge_correct(case))}
        for case in report.cases
    ]


def run_mutants(log: Log) -> None:
    """Every mutant of the zoo, as `distcheck selftest` runs it."""
    for planted in installed_zoo().mutants:
        if planted.name in log.keys:
            continue
        begun = time.perf_counter()
        try:
            report = distcheck.verify(**planted.asked)
            row = judge_mutant(planted, report, seconds=time.perf_counter() - begun)
        except DistcheckError as error:
            row = SelftestVerdict(
                kind="mutant", name=planted.name, file=planted.file, detail=str(error)
            )
        log.add({"key": planted.name, **msgspec.to_builtins(row)})
        say(f"{len(log.lines)} mutants: {planted.name} {row.verdict}, named {row.naming}")


def run_limits(log: Log) -> None:
    """Per workload and dtype, the smallest error of each kind that each layer catches."""
    for workload, dtype in (("mlp", "float32"), ("cnn", "float32"), ("mlp", "float64")):
        bits = MANTISSA[dtype]
        for name, variable, least, most in (
            ("scaled", "EXPONENT", 1, bits),  # 1 + 2**-(bits + 1) is 1
            ("flipped_on_all_ranks", "BIT", 0, bits - 1),
            ("flipped_on_one_rank", "BIT", 0, bits - 1),
        ):
            key = f"{name}, {workload}, {dtype}"
            if key not in log.keys:
                found = _limits(name, variable, workload, dtype, least, most)
                log.add({"key": key, "caught": found})
                say(f"{key}: {found}")


def _limits(
    name: str, variable: str, workload: str, dtype: str, least: int, most: int
) -> dict[str, int | None]:
    """By "check layer": the largest EXPONENT, the smallest BIT that fails it; None where none."""
    seen: dict[int, set[str]] = {}

    def failed(size: int) -> set[str]:
        if size not in seen:
            report = distcheck.verify(
                f"{PLANTED}:{name}", world=4, workload=workload, dtype=dtype, batch=64,
                steps=1, variables={variable: size},
            )  # fmt: skip
            seen[size] = failures(report)
        return seen[size]

    grows = variable == "BIT"
    largest = most if grows else least
    return {
        check: smallest_caught(lambda size, c=check: c in failed(size), least, most, grows=grows)
        for check in sorted(failed(largest))
    }


def failures(report: Report) -> set[str]:
    """The (check, layer) that failed, as words."""
    results = [result for case in report.cases for result in case.checks]
    return {format_checks([(r.check, r.layer)]) for r in results if r.verdict == "fail"}


def smallest_caught(
    caught: Callable[[int], bool], least: int, most: int, *, grows: bool
) -> int | None:
    """Bisects for the smallest error that is caught, between sizes that lead to ever larger errors
    (`grows`) or ever smaller ones.
    """
    sizes = range(least, most + 1) if grows else range(most, least - 1, -1)
    low, high = 0, len(sizes)  # all of sizes[high:] is caught, nothing of sizes[:low]
    while low < high:
        middle = (low + high) // 2
        if caught(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return sizes[high] if high < len(sizes) else None


def run_times(log: Log) -> None:
    """Seconds of whole commands: the default run, and the thorough one where there is one."""
    distcheck_command = [sys.executable, str(Path(sysconfig.get_path("scripts"), "distcheck"))]
    verify = [*distcheck_command, "verify", "--strategy", "allreduce", "--world", "4"]
    commands = {"default": verify, "selftest --quick": [*distcheck_command, "selftest", "--quick"]}
    said = subprocess.run([*distcheck_command, "verify", "--help"], capture_output=True, text=True)
    if "--thorough" in said.stdout:
        commands["thorough"] = [*verify, "--thorough"]
    for name, command in commands.items():
        for number in range(ROUNDS if name == "default" else 1):
            key = f"{name}, {number + 1}"
            if key in log.keys:
                continue
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                ran = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL)
            seconds = round(time.perf_counter() - begun, 3)
            log.add({"key": key, "command": name, "seconds": seconds, "code": ran.returncode})
            say(f"{key}: {seconds:.1f} s, exit code {ran.returncode}")


def machine() -> Line:
    """What the figures depend on."""
    report = distcheck.verify("allreduce", world=2, workload="exact")
    wanted = ("torch", "python", "cpu", "cores", "cpu_capability", "mkldnn", "distcheck")
    facts = {name: report.environment.get(name) for name in wanted}
    load = round(os.getloadavg()[0], 1)
    return {"key": time.strftime("%Y-%m-%d %H:%M:%S"), **facts, "load": load}


def show(folder: Path) -> Iterator[str]:
    """The table, line by line."""
    for line in read(folder / "machine.jsonl")[-1:]:
        yield "machine   " + ", ".join(f"{name} {value}" for name, value in line.items())
    mutants = read(folder / "mutants.jsonl")
    verdicts = Counter(line["verdict"] for line in mutants)
    naming = Counter(line["naming"] for line in mutants)
    yield (
        f"mutants   {len(mutants)} planted, {verdicts['caught']} caught, {verdicts['missed']} "
        f"missed, {verdicts['unknown']} unknown; named right {naming['right']}, wrong "
        f"{naming['wrong']}, unexplained {naming['unexplained']}"
    )
    correct = read(folder / "correct.jsonl")
    verdicts = Counter(line["verdict"] for line in correct)
    seeds = {line["seed"] for line in correct}
    worlds = sorted({line["world"] for line in correct})
    yield (
        f"correct   {len(correct)} cases (worlds {worlds}, {len(seeds)} seeds, "
        f"{len({line.get('file') for line in correct})} strategies): {verdicts['passed']} passed, "
        f"{verdicts['false positive']} false positives, {verdicts['unknown']} unknown"
    )
    for line in correct:
        if line["verdict"] != "passed":
            yield f"  {line['verdict']}: {line.get('name', line['key'])}: {line['detail']}"
            yield f"    {line.get('replay', '')}"
    for line in mutants:
        if line["verdict"] != "caught" or line["naming"] == "wrong" or not line["as_listed"]:
            failed = format_checks([tuple(pair) for pair in line["checks"]])
            yield f"  {line['name']}: {line['verdict']} by {failed}, named {line['naming']} "
            yield f"    {line['causes']}; {line['detail']}"
    for line in read(folder / "limits.jsonl"):
        sign = "2^-" if line["key"].startswith("scaled") else "bit "
        parts = (f"{check} {sign}{size}" for check, size in line["caught"].items())
        yield f"limits    {line['key']}: {'; '.join(parts)}"
    times = read(folder / "times.jsonl")
    for name in dict.fromkeys(line["command"] for line in times):
        seconds = [line["seconds"] for line in times if line["command"] == name]
        yield f"times     {name}: median {statistics.median(seconds):.1f} s of {len(seconds)}"


def say(text: str) -> None:
    """Progress, for whoever reads the log."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    """Runs parts, or shows what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=FORMATTER)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", default=[])
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    if asked.what == "run":
        asked.folder.mkdir(parents=True, exist_ok=True)
        Log(asked.folder, "machine").add(machine())
        runs = {"correct": run_correct, "mutants": run_mutants, "limits": run_limits,
                "times": run_times}  # fmt: skip
        for part in asked.parts or PARTS:
            runs[part](Log(asked.folder, part))
    print("\n".join(show(asked.folder)))


if __name__ == "__main__":
    main()
