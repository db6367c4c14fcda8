"""What the text of a strategy mentions, which nothing is imported to find out."""

from pathlib import Path

import pytest

from distcheck.plan.source_files import matches_in_sources, project_files_of
from distcheck.verification.run import _USES_COMPILER


@pytest.mark.parametrize(
    ("spec", "uses"),
    [
        ("ddp", True),
        ("fsdp", True),
        ("zero1", True),
        ("distcheck_strategies.ddp:DDP", True),
        ("allreduce", False),
        ("no.such.module:f", False),
        ("none.py:f", False),
        ("nul\0.py:f", False),
        ("", False),
    ],
)
def test_what_uses_the_compiler(spec: str, uses: bool) -> None:
    assert matches_in_sources(_USES_COMPILER, spec) == uses


def test_modules_beside_a_file_count(tmp_path: Path) -> None:
    (tmp_path / "sync.py").write_text("raise SystemExit('imported')\nfrom beside import wrap\n")
    (tmp_path / "beside.py").write_text("x = 1\n")
    spec = f"{tmp_path / 'sync.py'}:wrap"
    assert not matches_in_sources(_USES_COMPILER, spec)
    (tmp_path / "beside.py").write_text("from torch.nn.parallel import DistributedDataParallel\n")
    assert matches_in_sources(_USES_COMPILER, spec)


def written(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_imported_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each import of `sync.py` needs another rule; `other.py` is imported by none."""
    monkeypatch.chdir(tmp_path)
    written(
        tmp_path,
        {
            "src/pkg/__init__.py": "from . import setup",
            "src/pkg/setup.py": "",
            "src/pkg/up.py": "",
            "src/pkg/absolute.py": "",
            "src/pkg/other.py": "",
            "src/pkg/sub/__init__.py": "",
            "src/pkg/sub/sync.py": "from ..up import f\nimport pkg.absolute\nfrom lib import h\n"
            "import tools.deep\nimport importlib\nimport here\nimport json\n"
            "from stars import *\nimport linked\n"
            "load = importlib.import_module\nload(name='named')\nload('.inner', 'lazy')\n"
            "load('..outer', 'lazy.sub')\nload('with-dash')\npkgutil.resolve_name('by_name:f')\n",
            "src/lazy/outer.py": "",
            "src/with-dash.py": "",
            "src/by_name.py": "",
            "by_name.py": "",
            "src/stars/__init__.py": "__all__ = ['star']",
            "src/stars/star.py": "",
            "src/linked/__init__.py": "",
            "elsewhere/far.py": "",
            "src/lazy/inner.py": "",
            "src/lib/h.py": "",  # a namespace package
            "src/lib/other.py": "",
            "src/tools/__init__.py": "",
            "src/tools/any.py": "",
            "src/named.py": "",
            "here.py": "from lib_here import x",
            "json.py": "",  # Python's own is found before the current folder's
            "lib_here.py": "",
        },
    )
    (tmp_path / "src/linked/link").symlink_to(tmp_path / "elsewhere")
    found = project_files_of(Path("src/pkg/sub/sync.py"))
    assert next(iter(found)) == "pkg/sub/sync.py"
    assert set(found) == {
        "pkg/sub/sync.py", "pkg/sub/__init__.py", "pkg/__init__.py", "pkg/setup.py", "pkg/up.py",
        "pkg/absolute.py", "lib/h.py", "tools/__init__.py", "tools/any.py", "named.py", "./here.py",
        "./lib_here.py", "stars/__init__.py", "stars/star.py", "linked/__init__.py",
        "linked/link/far.py", "lazy/inner.py", "lazy/outer.py", "with-dash.py", "by_name.py",
        "./by_name.py",
    }  # fmt: skip
    assert all(file.path.read_bytes() == file.data for file in found.values())


def test_a_relative_import_that_leads_out_of_everything_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, {"a/sync.py": f"from {'.' * 40}x import y\n", "x.py": ""})
    assert [file.path for file in project_files_of(tmp_path / "a/sync.py").values()] == [
        tmp_path / "a/sync.py"
    ]


def test_equal_module_names_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one Python finds depends on the order in which files are loaded."""
    places = ("own", "here", "one", "two")
    written(tmp_path, {f"{place}/{file}": "import near\n" for place in places
                       for file in ("near.py", "main.py")})  # fmt: skip
    monkeypatch.chdir(tmp_path / "here")
    others = [tmp_path / place / "main.py" for place in ("one", "two")]
    found = project_files_of(tmp_path / "own/main.py", others)
    near = {file.path for file in found.values() if file.path.name == "near.py"}
    assert near == {tmp_path / place / "near.py" for place in places}
