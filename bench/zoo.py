"""Runs the subtle mutants, and right programs of unusual forms, and counts what is seen.

    python bench/zoo.py run FOLDER      the default run at world 4 of each program
    python bench/zoo.py show FOLDER     the table, and every survivor with what would show it

What is interrupted goes on where it was. `--workload`, `--thorough`, `--steps` and `--dtype` choose
another run, `--witness` takes each mutant's own; `-k` chooses by class or name; `--part 1/2` every
other program, so that several can run beside each other into one folder. A program is one line of
FOLDER/PART.jsonl. "Seen" is a verdict other than pass.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.unusual

import distcheck
from distcheck.errors import DistcheckError
from distcheck.records import CaseReport

Line = dict[str, Any]
TOGETHER = 6  # programs per verification; what is interrupted is lost
DEFAULT_RUN: Line = {"world": 4, "deadline_s": 10.0, "explore_s": 0}
AT_WORLD_4 = ("default", "apart")  # the reaches that a run at world 4 of a small model can have
ORDER = {"fail": 0, "unknown": 1, "pass": 2}


def programs(wanted: list[str]) -> list[Line]:
    """Every program: its spec, name, class, and what is known of it."""
    from distcheck_mutants.subtle import everything

    from tests.unusual import everything as right

    found = [
        {
            "kind": "mutant", "name": m.name, "class": m.group, "spec": m.spec, "wrong": m.wrong,
            "needs": m.needs, "reach": m.reach, "asked": m.asked,
        }
        for m in everything()
    ]  # fmt: skip
    found += [
        {"kind": "right", "name": p.name, "class": p.group, "spec": p.spec, "asked": {}}
        for p in right()
    ]
    names = {id(line): f"{line['kind']}.{line['class']}.{line['name']}" for line in found}
    return [
        line
        for line in found
        if not wanted or any(fnmatchcase(names[id(line)], f"*{pattern}*") for pattern in wanted)
    ]


def cases_of(cases: Sequence[CaseReport]) -> Iterator[tuple[str, Line]]:
    """What bench/frozen.py keeps of each case."""
    for number, case in enumerate(cases):
        failed = [f"{r.check} {r.layer}" for r in case.checks if r.verdict == "fail"]
        unknown = [f"{r.check} {r.layer}" for r in case.checks if r.verdict == "unknown"]
        firsts = [r.first for r in case.checks if r.verdict == "fail" and r.first]
        ends = [f"{o.rank} {o.outcome}" for o in case.outcomes if o.outcome != "finished"]
        first = firsts[0] if firsts else None
        row: Line = {
            "verdict": case.verdict,
            "failed": failed,
            "unknown": unknown,
            "causes": [found.cause for found in case.diagnosis],
            "ends": ends,
            "first": [first.parameter, first.rank, first.step] if first else [],
        }
        yield (
            f"{number} {case.case.workload.rpartition(':')[2]}",
            {k: v for k, v in row.items() if v},
        )


def judge(program: Line, cases: list[CaseReport], seconds: float) -> Line:
    """One line: the worst verdict over all cases, what failed, and the causes that were named."""
    results = [(case, result) for case in cases for result in case.checks]
    failed = [(c.case.workload, r.check, r.layer) for c, r in results if r.verdict == "fail"]
    reasons = [f"{r.check} {r.layer}: {r.reason}" for _, r in results if r.verdict == "unknown"]
    causes = dict.fromkeys(found.cause for case in cases for found in case.diagnosis)
    return {
        **{key: value for key, value in program.items() if key != "asked"},
        "verdict": min((case.verdict for case in cases), key=lambda v: ORDER[v], default="error"),
        "cases": dict(cases_of(cases)),
        "failed": list(dict.fromkeys(failed)),
        "unknown": reasons[:3],
        "causes": list(causes),
        "seconds": round(seconds, 2),
    }


def run_together(found: list[Line], asked: Line) -> list[Line]:
    """Verifies several programs as one run, and one by one where that cannot be."""
    begun = time.perf_counter()
    try:
        report = distcheck.verify([program["spec"] for program in found], **asked)
    except DistcheckError as error:
        if len(found) > 1:
            return [line for program in found for line in run_together([program], asked)]
        about = {key: value for key, value in found[0].items() if key != "asked"}
        return [{**about, "verdict": "error", "failed": [], "causes": [], "detail": str(error)}]
    each = (time.perf_counter() - begun) / len(found)
    return [
        judge(program, [c for c in report.cases if c.case.strategy == program["spec"]], each)
        for program in found
    ]


def run(options: argparse.Namespace) -> None:
    """Adds a line to the file of this part for every program that has none in the folder."""
    options.folder.mkdir(parents=True, exist_ok=True)
    number, parts = (int(word) for word in options.part.split("/"))
    known = {(line["kind"], line["name"]) for line in read(options.folder)}
    found = [p for p in programs(options.k) if (p["kind"], p["name"]) not in known]
    if options.witness:
        found = [program for program in found if program["asked"]]
    found = found[number - 1 :: parts]
    asked: Line = {
        **DEFAULT_RUN, "world": options.world, "steps": options.steps,
        "workload": options.workload, "thorough": options.thorough, "dtype": options.dtype,
    }  # fmt: skip
    size = 1 if options.witness else options.together
    for at in range(0, len(found), size):
        chunk = found[at : at + size]
        own = {k: v for k, v in (chunk[0]["asked"] or {}).items() if k != "strategy"}
        lines = run_together(chunk, own if options.witness else asked)
        with (options.folder / f"{number}of{parts}.jsonl").open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            print(
                f"{line['verdict']:8} {line['class']}.{line['name']} {line['causes']}", flush=True
            )


def read(folder: Path) -> list[Line]:
    """The whole lines of every part."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]


def show(folder: Path) -> Iterator[str]:
    """The table, line by line."""
    lines = read(folder)
    mutants = [line for line in lines if line["kind"] == "mutant"]
    right = [line for line in lines if line["kind"] == "right"]
    yield f"{'class':12} {'mutants':>8} {'fail':>6} {'unknown':>8} {'survive':>8} {'reachable':>10}"
    for name in [*dict.fromkeys(line["class"] for line in mutants), "all"]:
        of = [line for line in mutants if name in (line["class"], "all")]
        count = Counter(line["verdict"] for line in of)
        near = [line for line in of if line["reach"] in AT_WORLD_4]
        seen = sum(line["verdict"] != "pass" for line in near)
        yield (
            f"{name:12} {len(of):8} {count['fail']:6} {count['unknown'] + count['error']:8} "
            f"{count['pass']:8} {f'{seen}/{len(near)}':>10}"
        )
    seconds = sum(line.get("seconds", 0) for line in lines)
    unnamed = [line for line in mutants if line["verdict"] == "fail" and not named(line)]
    yield f"\n{len(lines)} programs, {seconds:.0f} s; failed without a named cause: {len(unnamed)}"
    alarms = [line for line in right if line["verdict"] != "pass"]
    yield f"right but unusual: {len(right)} programs, {len(alarms)} that do not pass"
    for line in alarms:
        yield f"  {line['class']}.{line['name']}: {line['verdict']} {line['failed'][:4]} "
        yield f"    {line['causes']} {line.get('unknown') or line.get('detail', '')}"
    for reach in dict.fromkeys(line["reach"] for line in mutants):
        survivors = [m for m in mutants if m["reach"] == reach and m["verdict"] == "pass"]
        yield f"\nsurvivors, reach {reach}: {len(survivors)}"
        for line in survivors:
            yield f"  {line['class']}.{line['name']}: {line['wrong']} Needs {line['needs']}."


def named(line: Line) -> bool:
    """Whether a cause was named that is one."""
    return bool(set(line["causes"]) - {"unexplained"})


def main() -> None:
    """Runs, or shows what there is."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--witness", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--together", type=int, default=TOGETHER)
    options = parser.parse_args()
    if options.what == "run":
        run(options)
    print("\n".join(show(options.folder)))


if __name__ == "__main__":
    main()
