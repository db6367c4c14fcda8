"""Runs distcheck on released packages: what `manifest.toml` says of them, and what is right beside.

    python bench/released/run.py [NAME ...] [--targets FOLDER] [--json FILE] [--limit-s N]

A NAME is that of a finding or of a package's neighbors; none runs all. Each release is installed
once, without what it depends on, into a folder of its own under FOLDER (in the user's cache,
unless it is given), which is kept. A finding is judged together with its control,
before and after, by `distcheck verify` in a process with a limit of its own. Nothing that fails
ends the rest. The exit code is 0 if everything was as the manifest says.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TARGETS = Path.home() / ".cache" / "distcheck-released"  # where others do not write


@dataclass(kw_only=True)
class Ran:
    """What distcheck said of one object of a script, by worlds: `verdicts` and `causes` of its
    cases, the largest relative error, and the seconds of its process.
    """

    what: str
    package: str
    version: str
    role: str
    verdict: str = "not run"
    causes: list[str] = field(default_factory=list)
    error: float = 0.0
    seconds: float = 0.0
    expected: str = ""

    @property
    def as_expected(self) -> bool:
        """Whether it was what the manifest says: `pass`, `unknown`, or `fail` with a cause."""
        wanted, _, cause = self.expected.partition(":")
        return self.verdict == wanted and (not cause or cause in self.causes)


def installed(targets: Path, requirement: str) -> Path:
    """The folder of one release, which is made where it is not there. Raises CalledProcessError."""
    folder = targets / requirement.replace("==", "-")
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), requirement], check=True, capture_output=True)
        (folder / "complete").touch()
    return folder


def verified(
    paths: Sequence[Path], objects: Sequence[str], entry: dict[str, Any], limit_s: float
) -> tuple[dict[str, Any], str, float]:
    """The report of one run, what it wrote where there is none, and its seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = _command(objects, entry, report)
        path = os.pathsep.join([*map(str, paths), str(HERE)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        try:
            ended = subprocess.run(
                words, env=environment, cwd=folder, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return {}, f"over the limit of {limit_s:.0f} s", time.monotonic() - begun
        spent = time.monotonic() - begun
        if not report.exists():
            return {}, (ended.stderr.strip().splitlines() or ["no report"])[-1][:200], spent
        return json.loads(report.read_text()), "", spent


def _command(objects: Sequence[str], entry: dict[str, Any], report: Path) -> list[str]:
    """`distcheck verify` of all objects together, or `distcheck job` of one with its arguments."""
    distcheck = [sys.executable, "-m", "distcheck"]
    quiet = ["--quiet", "--json", str(report)]
    if entry["form"] == "job":
        script, _, arguments = objects[0].partition(":")
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", str(entry["worlds"][0])]
        started = [sys.executable, *ranks, str(HERE / script), *arguments.split()]
        return [*distcheck, "job", *quiet, *entry.get("options", []), "--", *started]
    words = [*distcheck, "verify", *quiet, "--as", entry["form"], *entry.get("options", [])]
    for name in objects:
        words += ["--strategy", str(HERE / name)]
    for world in entry["worlds"]:
        words += ["--world", str(world)]
    return words


def judged(ran: Ran, cases: Sequence[dict[str, Any]]) -> Ran:
    """The same with what the cases say: the worst verdict, and every cause once."""
    if not cases:
        return ran
    order = ("fail", "unknown", "pass")
    ran.verdict = min((case["verdict"] for case in cases), key=order.index)
    found = [one["cause"] for case in cases for one in case["diagnosis"]]
    ran.causes = list(dict.fromkeys(found))
    ran.error = max((_relative(check) for case in cases for check in case["checks"]), default=0.0)
    return ran


def _relative(check: dict[str, Any]) -> float:
    worst = check.get("worst")
    if check["verdict"] != "fail" or not worst:
        return 0.0
    try:
        return float(worst["error"]) / abs(float(worst["expected"]))
    except (ZeroDivisionError, TypeError, ValueError, KeyError):
        return 0.0


def run(entry: dict[str, Any], targets: Path, limit_s: float, needs: Sequence[str]) -> list[Ran]:
    """One finding or one package's neighbors, at each of its releases."""
    rows = []
    for when in ("before", "after"):
        if not (version := entry.get(when, "")):
            continue
        script, package = entry["script"], entry["package"]
        wanted = "pass" if when == "after" or "objects" in entry else f"fail:{entry['cause']}"
        roles = [("neighbor", name, "pass") for name in entry.get("objects", [])]
        roles += [("finding", entry["object"], wanted)] if "object" in entry else []
        roles += [("control", entry["control"], "pass")] if "control" in entry else []
        made = [
            Ran(what=name, package=package, version=version, role=role, expected=expected)
            for role, name, expected in roles
        ]
        try:
            every = [f"{package}=={version}", *needs, *entry.get("needs", [])]
            paths = [installed(targets, one) for one in every]
        except subprocess.CalledProcessError as error:
            print(f"  {package} {version}: pip failed: {error.stderr.decode()[-200:]}")
            rows += made
            continue
        for together in [[one] for one in made] if entry["form"] == "job" else [made]:
            names = [f"{script}:{one.what}" for one in together]
            report, said, seconds = verified(paths, names, entry, limit_s)
            if said:
                print(f"  {package} {version}: {said}")
            for one, name in zip(together, names, strict=True):
                cases = report.get("cases", [])
                if entry["form"] != "job":
                    cases = [case for case in cases if case["case"]["strategy"] == str(HERE / name)]
                one.seconds = seconds / len(together)
                rows.append(judged(one, cases))
    return rows


def chosen(manifest: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The entries to run, by name. Raises SystemExit for a name that is not there."""
    entries = [*manifest["finding"], *manifest["neighbors"]]
    known = {entry["name"] for entry in entries}
    if unknown := set(names) - known:
        raise SystemExit(
            f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    return (entry for entry in entries if not names or entry["name"] in names)


def main() -> int:
    """Runs, prints the table, and writes JSON."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("names", nargs="*")
    words.add_argument("--targets", type=Path, default=_TARGETS)
    words.add_argument("--json", type=Path)
    words.add_argument("--limit-s", type=float, default=600.0)
    asked = words.parse_args()
    manifest = tomllib.loads((HERE / "manifest.toml").read_text())
    begun, rows = time.monotonic(), list[Ran]()
    for entry in chosen(manifest, asked.names):
        print(entry["name"], flush=True)
        needs = manifest["needs"].get(entry["package"], [])
        for row in run(entry, asked.targets, asked.limit_s, needs):
            mark = " " if row.as_expected else "!"
            causes = f" ({', '.join(row.causes)}, {row.error:.2g})" if row.causes else ""
            print(
                f" {mark}{row.verdict:8}{row.role:10}{row.package} {row.version}  "
                f"{row.what}{causes}",
                flush=True,
            )
            rows.append(row)
    others = [row for row in rows if not row.as_expected]
    seconds = time.monotonic() - begun
    print(f"{len(rows)} judged in {seconds:.0f} s; {len(others)} otherwise than the manifest says")
    if asked.json:
        written = [{**asdict(row), "as_expected": row.as_expected} for row in rows]
        asked.json.write_text(json.dumps({"seconds": seconds, "rows": written}, indent=1) + "\n")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
