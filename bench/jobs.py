"""`distcheck job` over the plain job of the same steps, and what it catches in the examples.

python bench/jobs.py                  right scripts at worlds 2, 3, 4, planted bugs, ratios
python bench/jobs.py --worlds 2 --seeds 1 --without-bugs

Prints right scripts passed / tried, bugs caught and named / planted, and for each script two
ratios: the whole command, and the same without a reference, over the job itself, which is ended
after as many steps. A seed is planted into a script as the seed of its model.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "jobs"
STEPS = 6
# Ends a script after as many optimizer steps as distcheck records, so that both do the same work.
PLAIN = f"""
import os, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
made = 0
def count(*_):
    global made
    made += 1
    if made == {STEPS}:
        torch.distributed.barrier()
        os._exit(0)
register_optimizer_step_post_hook(count)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def judge(script: Path, world: int, *options: str) -> tuple[dict[str, Any], float]:
    """The case of the report, and the seconds that the command took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [sys.executable, "-m", "distcheck", "job", "--steps", str(STEPS), *options]
        words += ["--json", str(file), "--nproc", str(world), "--", sys.executable, str(script)]
        begun = time.perf_counter()
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        spent_s = time.perf_counter() - begun
        if not file.exists():
            return {"verdict": "none", "diagnosis": [], "said": ran.stderr[-500:]}, spent_s
        return json.loads(file.read_text())["cases"][0], spent_s


def plain_s(script: Path, world: int) -> float:
    """The seconds that the job itself takes for as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Path(folder) / "plain.py"
        runner.write_text(PLAIN)
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        begun = time.perf_counter()
        subprocess.run([*words, str(runner), str(script)], capture_output=True, check=True)
        return time.perf_counter() - begun


def seeded(script: Path, seed: int, folder: Path) -> Path:
    """The script with another seed for its model."""
    text = script.read_text()
    changed = re.sub(r"(manual_seed|set_seed)\((\d+)\)", rf"\1({seed} + \2)", text, count=1)
    copy = folder / script.name
    copy.write_text(changed)
    return copy


def right_scripts(scripts: list[Path], worlds: list[int], seeds: int) -> None:
    """Right scripts passed over tried."""
    passed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            for world in worlds:
                for seed in range(seeds):
                    case, _ = judge(seeded(script, seed, Path(folder)), world)
                    tried += 1
                    passed += case["verdict"] == "pass"
                    if case["verdict"] != "pass":
                        print(f"  {script.name}, world {world}, seed {seed}: {case['verdict']}")
    print(f"right scripts passed: {passed} / {tried}")


def planted_bugs() -> None:
    """Bugs caught, and those whose cause was named, over planted."""
    bugs = tomllib.loads((EXAMPLES / "planted.toml").read_text())["bug"]
    caught = named = 0
    with tempfile.TemporaryDirectory() as folder:
        for bug in bugs:
            wrong = Path(folder) / bug["script"]
            wrong.write_text(
                (EXAMPLES / bug["script"]).read_text().replace(bug["find"], bug["put"])
            )
            case, _ = judge(wrong, 2)
            causes = [found["cause"] for found in case["diagnosis"]]
            caught += case["verdict"] == "fail"
            named += bug["cause"] in causes
            if bug["cause"] not in causes:
                print(f"  {bug['name']}: {case['verdict']}, {causes}")
    print(f"planted bugs caught: {caught} / {len(bugs)}, named: {named} / {len(bugs)}")


def ratios(scripts: list[Path]) -> None:
    """The command, and its recording alone, over the job."""
    for script in scripts:
        job = plain_s(script, 2)
        _, whole = judge(script, 2)
        _, recording = judge(script, 2, "--no-reference")
        print(f"{script.name}: whole command {whole / job:.1f}x, without reference "
              f"{recording / job:.1f}x of {job:.1f} s")  # fmt: skip


def main() -> None:
    """Parses the options and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--scripts", nargs="*", default=[])
    parser.add_argument("--without-bugs", action="store_true")
    parser.add_argument("--without-ratios", action="store_true")
    asked = parser.parse_args()
    scripts = [EXAMPLES / name for name in asked.scripts] or sorted(EXAMPLES.glob("*.py"))
    if asked.seeds and asked.worlds:
        right_scripts(scripts, asked.worlds, asked.seeds)
    if not asked.without_bugs:
        planted_bugs()
    if not asked.without_ratios:
        ratios(scripts)


if __name__ == "__main__":
    main()
