"""Rendering the HTML report of VGG11 over 60 steps, over `import jinja2`, in fresh processes.

Rendering alone: what the process takes beyond its imports (jinja2 is imported by then), with the
template compiled anew. `distcheck report` as a whole: the interpreter, reading the JSON and
writing included, over `python -c "import jinja2"`.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from measure import compare, wall_s

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from distcheck.reports import html_report, json_report  # noqa: E402
from tests import documents  # noqa: E402

RENDER = """
import sys, time
from pathlib import Path
from distcheck.reports import html_report
from distcheck.reports.json_report import read_document
document = read_document(Path(sys.argv[1]))
begun = time.perf_counter()
html_report.render(document)
print(time.perf_counter() - begun)
"""
IMPORT = (
    "import time; begun = time.perf_counter(); import jinja2; print(time.perf_counter() - begun)"
)


def told_s(program: str, *words: str) -> float:
    """Seconds that a program says it took."""
    command = [sys.executable, "-c", program, *words]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    document = documents.document(documents.vgg11())
    sizes = [len(form.render(document).encode()) for form in (json_report, html_report)]
    print(f"VGG11, world 4, 60 steps: JSON {sizes[0]:,} bytes, HTML {sizes[1]:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        path.write_text(json_report.render(document))
        compare(
            "rendering / import jinja2",
            partial(told_s, RENDER, str(path)),
            partial(told_s, IMPORT),
            rounds=15,
            aim=3,
        )
        command = [sys.executable, "-m", "distcheck", "report", str(path)]
        compare(
            "distcheck report --html / python -c 'import jinja2'",
            partial(wall_s, [*command, "--html", str(Path(folder, "report.html"))]),
            partial(wall_s, [sys.executable, "-c", "import jinja2"]),
            rounds=15,
            aim=3,
        )
