"""The set of wrong programs and their right twins: what is named, and who is accused.

    python bench/errors.py [--gloo | --mpi] [NAME ...]

Prints for each class how many programs got the right class (the cause that is expected), how many
had every line named that is expected, and how many right twins were accused; in simulated worlds,
and with --gloo or --mpi in worlds of processes, with the seconds until a program was named.
"""

import statistics
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.wrong_programs

from distcheck.worlds.pool import Pool
from tests.wrong_programs import PROGRAMS, Program
from tests.wrong_programs.running import Named, named


def judge(pool: Pool, program: Program, backend: str) -> tuple[Named, Named]:
    """What is named of a program and of its right twin; what is wrong with that is printed."""
    expected = program.expected(backend)
    found = named(pool, program, wrong=True, backend=backend)
    if found.cause != expected:
        print(f"  {program.name}: {found.cause or 'nothing'}, not {expected}: {found.said[:600]}")
    elif lines := found.missing_lines(program):
        print(f"  {program.name}: does not name {', '.join(lines)}: {found.said[:600]}")
    twin = named(pool, program, wrong=False, backend=backend)
    if twin.causes or not twin.finished:
        print(f"  the right twin of {program.name} is accused: {twin.said[:600]}")
    return found, twin


def main(backend: str, programs: list[Program]) -> None:
    """Runs the programs of one backend, and prints the table."""
    rows: dict[str, list[tuple[Program, Named, Named]]] = defaultdict(list)
    with closing(Pool()) as pool:
        pool.wait_ready()
        for program in programs:
            rows[program.kind].append((program, *judge(pool, program, backend)))
    print(f"{backend}:")
    everything = [row for own in rows.values() for row in own]
    for kind, own in [*rows.items(), ("all", everything)]:
        expected = [p.expected(backend) for p, _, _ in own]
        right = sum(f.cause == e for (_, f, _), e in zip(own, expected, strict=True))
        lines = sum(f.cause != "" and not f.missing_lines(p) for p, f, _ in own)
        accused = sum(bool(twin.causes) or not twin.finished for _, _, twin in own)
        seconds = [found.seconds for _, found, _ in own if found.cause]
        spent = (
            f"; named after {statistics.median(seconds):.2f} s (at most {max(seconds):.2f})"
            if seconds
            else ""
        )
        print(
            f"{kind}: {len(own)} wrong programs; class right {right}, lines right {lines}; "
            f"{accused} of {len(own)} right twins accused{spent}"
        )


if __name__ == "__main__":
    words = sys.argv[1:]
    asked = next((backend for backend in ("gloo", "mpi") if f"--{backend}" in words), "simulated")
    names = [word for word in words if not word.startswith("--")]
    chosen = [PROGRAMS[name] for name in names] or list(PROGRAMS.values())
    main(asked, [program for program in chosen if program.expected(asked)])
