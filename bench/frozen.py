"""What must not change while the code does: verdicts, failed checks, causes and JSON, as data.

    python bench/frozen.py run FOLDER [PART ...]     stop it and run it again: it goes on
    python bench/frozen.py compare FOLDER [PART ...] what differs from what is kept, or was not run
    python bench/frozen.py keep FOLDER               adds it to what is kept, in bench/frozen/
    python bench/frozen.py keep --anew FOLDER        replaces those rows in what is kept

PART is mutants, subtle, unusual, adapted, misuse, jobs, guard or documents; all of them by default.
`--part 1/2` takes every other program, so that two can run beside each other into one folder. A row
is a program; what a race or a deadline may change is kept as every row that was seen of it. Where
a row differs from those that are kept, either the change is a mistake, or its commit says why.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests, and for ranks

import distcheck
from bench import zoo
from distcheck.errors import DistcheckError
from distcheck.worlds.jobs import Descriptors, Reporter

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
Made = Iterator[tuple[str, Callable[[], Row]]]  # the name of a program, and what gives its row
KEPT = Path(__file__).parent / "frozen"
GUARDED = "bench.frozen:guarded"  # what a rank runs
BACKENDS = ("simulated", "gloo", "mpi")


def verified(**asked: Any) -> Row:
    """The row of a program that `verify` judges."""
    try:
        report = distcheck.verify(**asked)
    except DistcheckError as error:
        return {"refused": type(error).__name__}
    return {"exit": int(report.exit_code), "cases": dict(zoo.cases_of(report.cases))}


def mutants() -> Made:
    """Every mutant, with what shows it."""
    from tests.mutants import everything

    for mutant in everything():
        yield mutant.name, lambda asked=mutant.asked: verified(**asked)


def subtle() -> Made:
    """Every subtle mutant, in the default run at world 4."""
    return default_runs("mutant")


def unusual() -> Made:
    """Every right program of an unusual form, in the default run at world 4."""
    return default_runs("right")


def default_runs(kind: str) -> Made:
    """The programs of the zoo of one kind, several to a verification."""
    programs = [program for program in zoo.programs([]) if program["kind"] == kind]
    made: dict[str, Row] = {}

    def row(at: int) -> Row:
        name = programs[at]["name"]
        if name not in made:
            together = programs[at : at + zoo.TOGETHER]
            lines = zoo.run_together(together, zoo.DEFAULT_RUN)
            made.update({line["name"]: {"cases": line.get("cases", "refused")} for line in lines})
        return made[name]

    for at, program in enumerate(programs):
        yield program["name"], lambda at=at: row(at)


def adapted() -> Made:
    """Every form of code that adapters take; by names that are the same in every checkout."""
    from tests.adapted.test_adapted import GIVEN, HERE, SMALL

    for given in GIVEN:
        module, _, name = given.spec.partition(":")
        local = HERE / f"{module}.py"
        asked = {
            "strategy": f"{local}:{name}" if local.exists() else given.spec, "workload": SMALL,
            "dtype": "float32", "batch": 48, "world": given.world, "steps": given.steps,
            **given.options,
        }  # fmt: skip
        yield str(given).replace(f"{HERE}/", ""), lambda asked=asked: verified(**asked)


def misuse() -> Made:
    """Programs that misuse torch.distributed, and their right twins, over each backend."""
    from distcheck import backends
    from distcheck.worlds.pool import Pool
    from tests.wrong_programs import PROGRAMS
    from tests.wrong_programs.running import named

    def judged(pool: Pool, name: str, *, wrong: bool, backend: str) -> Row:
        found = named(pool, PROGRAMS[name], wrong=wrong, backend=backend)
        lines = len(PROGRAMS[name].named) - len(found.missing_lines(PROGRAMS[name]))
        return {"causes": found.causes, "lines": lines, "finished": found.finished}

    with closing(Pool()) as pool:
        pool.wait_ready()
        for backend in BACKENDS:
            if backends.missing(backend):
                continue
            for name, program in PROGRAMS.items():
                if not program.expected(backend):
                    continue
                for wrong in (True, False):
                    row = lambda name=name, wrong=wrong, backend=backend: judged(  # noqa: E731
                        pool, name, wrong=wrong, backend=backend
                    )
                    yield f"{name} {'wrong' if wrong else 'right'} {backend}", row


def jobs() -> Made:
    """The examples of whole jobs, right and with each planted bug."""
    from tests.job.planted import BUGS, FOLDER, SCRIPTS, plant

    def judged(script: Path) -> Row:
        return command("job", "--steps", "6", "--nproc", "2", "--", sys.executable, str(script))

    def planted(bug: Any) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            return judged(plant(bug, Path(folder)))

    for name in SCRIPTS:
        yield name, lambda name=name: judged(FOLDER / name)
    for bug in BUGS:
        yield f"{bug.script} {bug.name}", lambda bug=bug: planted(bug)


def guard() -> Made:
    """A right training under `distcheck.guard`, and each mistake in it, on three ranks."""
    from distcheck.worlds.pool import Pool
    from tests.job.test_guard import MISTAKES
    from tests.world.launching import run_to_end, start

    def judged(pool: Pool, number: int) -> Row:
        ranks = start(pool, GUARDED, 3, number=number)
        run_to_end(pool, ranks)
        return {"ranks": [msgspec.json.decode(result) for result in ranks.results]}

    with closing(Pool()) as pool:
        pool.wait_ready()
        for number, (mistake, *_) in enumerate(MISTAKES):
            yield mistake.__name__, lambda number=number: judged(pool, number)


def guarded(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """One rank of a training with a mistake under the guard."""
    from distcheck.job.guard import explaining
    from distcheck.job.guard.guarding import DivergenceError
    from distcheck.worlds.jobs import STORE
    from distcheck.worlds.rendezvous import join
    from tests.job.test_guard import MISTAKES, Job, another_buffer, train
    from tests.world.jobs import Asked

    asked = msgspec.msgpack.decode(payload, type=Asked)
    join(asked.rendezvous, fds.get(STORE, -1))
    reporter.progress(1, "training")
    mistake = MISTAKES[asked.about["number"]][0]
    job = Job(asked.rendezvous.rank, broadcasts=mistake is not another_buffer)
    row: Row = {}
    try:
        train(job, mistake, lambda j: distcheck.guard(j.optimizer, every=5, save=None))
    except DivergenceError as error:
        found = error.divergence
        row = {
            "kinds": sorted({one.kind for one in found.findings}), "step": found.step,
            "agreed": found.agreed_at, "causes": [one.cause for one in explaining.causes(found)],
        }  # fmt: skip
    return msgspec.json.encode(row)


VOLATILE = {"environment", "timings_s", "made", "seconds", "digest", "machine"}


def documents() -> Made:
    """The shape of the JSON that each command writes, and its verdicts."""
    words = {
        "mutants": "tests.mutants.", "python": sys.executable,
        "adapted": str(ROOT / "tests" / "adapted") + "/",
        "examples": str(ROOT / "examples" / "jobs"),
    }  # fmt: skip
    lines = tomllib.loads((KEPT / "commands.toml").read_text())
    for name, line in lines["alone"].items():
        yield name, lambda line=line: command(*line.format(**words).split(), shape=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, strategy in (
            ("pass", "allreduce"),
            ("fail", "tests.mutants.scale:missing_division"),
        ):
            asked = f"--strategy {strategy} --world 2 --workload mlp".split()
            run("record", name, *asked, folder=Path(folder))
            run("verify", *asked, "--json", f"{name}.json", folder=Path(folder))
        for name, line in lines["after"].items():
            yield name, lambda line=line: command(*line.split(), shape=True, folder=Path(folder))


def run(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A command of distcheck, in a folder, with this tree's tests at hand."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    store = {"DISTCHECK_HOME": str(folder / "kept"), "XDG_CACHE_HOME": str(folder / "kept")}
    return subprocess.run(
        [sys.executable, "-m", "distcheck", *words], cwd=folder, check=False, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": path, **store},
    )  # fmt: skip


def command(*words: str, shape: bool = False, folder: Path | None = None) -> Row:
    """The exit code of a command and what its JSON says; or the shape of all of that."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "written.json"
        own = list(words)
        if words[-1] != "--json":
            at = own.index("--") if "--" in own else len(own)
            own[at:at] = ["--json", str(file)]
        ran = run(*own, folder=folder or Path(scratch))
        text = file.read_text() if file.exists() else ran.stdout
    try:
        document = json.loads(text)
    except ValueError:
        return {"exit": ran.returncode, "document": "none"}
    listed = document.get("cases", ())
    found = listed if isinstance(listed, list) else ()  # a search says how many
    cases = [short(case) for case in found if "checks" in case]
    row: Row = {"exit": ran.returncode, "cases": cases}
    return {**row, "shape": shape_of(document)} if shape else row


def short(case: Row) -> Row:
    """What is kept of a case of a document."""
    return {
        "verdict": case["verdict"],
        "failed": [f"{c['check']} {c['layer']}" for c in case["checks"] if c["verdict"] == "fail"],
        "unknown": [
            f"{c['check']} {c['layer']}" for c in case["checks"] if c["verdict"] == "unknown"
        ],
        "causes": [found["cause"] for found in case.get("diagnosis", ())],
    }


def shape_of(value: Any) -> Any:
    """Keys as they are, values as the names of their types; of a list, all that its items have."""
    if isinstance(value, dict):
        return {k: "..." if k in VOLATILE else shape_of(v) for k, v in sorted(value.items())}
    if isinstance(value, list):
        shapes = [shape_of(item) for item in value]
        return [together(shapes)] if shapes else []
    return (
        "number" if isinstance(value, int | float) and value is not True else type(value).__name__
    )


def together(shapes: list[Any]) -> Any:
    """One shape of all: the keys that any has, or the kinds that there are."""
    if all(isinstance(shape, dict) for shape in shapes):
        keys = sorted({key for shape in shapes for key in shape})
        return {key: together([s[key] for s in shapes if key in s]) for key in keys}
    if all(isinstance(shape, list) for shape in shapes):
        items = [item for shape in shapes for item in shape]
        return [together(items)] if items else []
    return " or ".join(sorted({s if isinstance(s, str) else type(s).__name__ for s in shapes}))


PARTS = {
    "mutants": mutants, "subtle": subtle, "unusual": unusual, "adapted": adapted, "misuse": misuse,
    "jobs": jobs, "guard": guard, "documents": documents,
}  # fmt: skip


def rows_of(folder: Path, part: str) -> dict[str, list[Row]]:
    """Every row that a folder has of each program of a part."""
    rows: dict[str, list[Row]] = {}
    for file in sorted(folder.glob(f"{part}*.jsonl")):
        for line in file.read_text().splitlines():
            if line.endswith("}"):  # the last one may have been cut short
                row = json.loads(line)
                rows.setdefault(row.pop("name"), []).append(row)
    return rows


def run_parts(folder: Path, parts: list[str], share: str) -> None:
    """Adds a row for every program that has none in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    number, shares = (int(word) for word in share.split("/"))
    for part in parts:
        known = rows_of(folder, part)
        with (folder / f"{part}-{number}of{shares}.jsonl").open("a") as file:
            for place, (name, made) in enumerate(PARTS[part]()):
                if place % shares == number - 1 and name not in known:
                    row = made()
                    file.write(json.dumps({"name": name, **row}) + "\n")
                    file.flush()
                    print(f"{part} {name}: {json.dumps(row)[:200]}", flush=True)


def keep(folder: Path, *, anew: bool) -> None:
    """Adds the rows of a folder to those that are kept."""
    KEPT.mkdir(exist_ok=True)
    for part in PARTS:
        kept = rows_of(KEPT, part)
        for name, rows in rows_of(folder, part).items():
            seen = [] if anew else kept.get(name, [])
            kept[name] = seen + [row for row in rows if row not in seen]
        lines = [json.dumps({"name": n, **row}) for n in sorted(kept) for row in kept[n]]
        if lines:
            (KEPT / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def compare(folder: Path, parts: list[str]) -> int:
    """Prints every program whose row is none of those that are kept, or that has none; returns 1 if
    there is any.
    """
    differences = 0
    for part in parts:
        kept, now = rows_of(KEPT, part), rows_of(folder, part)
        for name in sorted(kept.keys() - now.keys()):
            differences += 1
            print(f"{part} {name}\n  was not run")
        for name, rows in now.items():
            if name not in kept or any(row not in kept[name] for row in rows):
                differences += 1
                before = json.dumps(kept[name][0]) if name in kept else "not kept"
                print(f"{part} {name}\n  was {before}\n  is  {json.dumps(rows[-1])}")
        print(f"{part}: {len(now)} of {len(kept)} programs")
    print(f"{differences} differ")
    return int(differences > 0)


def main() -> int:
    """Runs, compares or keeps."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("what", choices=("run", "compare", "keep"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--anew", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}"
        )
    if options.what == "compare":
        return compare(options.folder, options.parts or list(PARTS))
    if options.what == "keep":
        keep(options.folder, anew=options.anew)
    else:
        run_parts(options.folder, options.parts or list(PARTS), options.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
