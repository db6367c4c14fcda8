"""Makes docs/report.png: the page of the README's first failure, as a browser shows it.

    python docs/make_picture.py

It needs a chromium or chrome on PATH, and verifies the file that the README shows, for a minute.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WINDOW, SCALE = "1000,620", 1.5  # pixels of the page, and of the picture for each


def code_of(readme: str) -> str:
    """The README's my_sync.py, as it stands there."""
    blocks = re.findall(r"^```python\n(# my_sync\.py\n.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return str(blocks[0])


def command(browser: str, page: Path, picture: Path, profile: Path) -> list[str]:
    """What takes the picture of a page."""
    return [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={WINDOW}",
        f"--force-device-scale-factor={SCALE}", "--blink-settings=preferredColorScheme=1",
        f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip


def main() -> None:
    """Verifies, and takes the picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser is on PATH: one of {', '.join(BROWSERS)} is needed")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "my_sync.py").write_text(code_of((ROOT / "README.md").read_text()))
        words = ["verify", "--strategy", "my_sync.py:sync", "--world", "2", "--html", "fail.html"]
        ran = subprocess.run([sys.executable, "-m", "distcheck", *words], cwd=place)
        if ran.returncode != 1:
            sys.exit(f"distcheck {' '.join(words)} ended with {ran.returncode}, expected is 1")
        made = place / "report.png"
        subprocess.run(command(browser, place / "fail.html", made, place / "profile"), check=True)
        shutil.copyfile(made, PICTURE)


if __name__ == "__main__":
    main()
