"""Lines of somebody's code that read process state, found in its syntax tree."""

from pathlib import Path

import pytest

from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.records import CallSite
from distcheck.verification.process_state import (
    process_state_lines,
    shown_state_lines,
    with_source_text,
)

SET, HASH, ADDRESS = "iterates over a set", "calls hash()", "reads a memory address"
MACHINE, ENVIRONMENT = "reads the node or local rank", "iterates over the environment"
CHANCE = "reads a clock, a process ID or random bytes"


def found(folder: Path, code: str) -> list[str]:
    file = folder / "sync.py"
    file.write_text(code)
    return [line.what for line in process_state_lines(file)]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("for x in {1, 2}: f(x)", SET),
        ("for x in set(names): f(x)", SET),
        ("for x in frozenset(names): f(x)", SET),
        ("[f(x) for x in {n for n in names}]", SET),
        ("wanted = set(names)\nfor x in wanted: f(x)", SET),
        ("wanted: set[str] = set()\nfor x in wanted: f(x)", SET),
        ("self.wanted = set(names)\nlist(self.wanted)", SET),
        ("a = set(x)\nb = a\ntuple(b)", SET),
        ("for x in set(a) | set(b): f(x)", SET),
        ("for x in set(a).union(b): f(x)", SET),
        ("dict.fromkeys(set(names))", SET),
        ("torch.cat(list(set(parts)))", SET),
        ("first = set(names).pop()", SET),
        ("f(*set(names))", SET),
        ("bucket = hash(name) % 2", HASH),
        ("sorted(names, key=hash)", HASH),
        ("sorted(ps, key=id)", ADDRESS),
        ("ps.sort(key=id)", ADDRESS),
        ("seen[id(p)] = p", ADDRESS),
        ("p.data_ptr() % 2", ADDRESS),
        ("rank = int(os.environ['LOCAL_RANK'])", MACHINE),
        ("size = os.getenv('LOCAL_WORLD_SIZE', 1)", MACHINE),
        ("rank = dist.get_node_local_rank()", MACHINE),
        ("for name in os.environ: f(name)", ENVIRONMENT),
        ("[n for n, _ in os.environ.items()]", ENVIRONMENT),
        ("','.join(os.environ)", ENVIRONMENT),
        ("seed = time.time()", CHANCE),
        ("seed = os.getpid()", CHANCE),
    ],
)
def test_a_line_that_reads_process_state_is_found(tmp_path: Path, code: str, what: str) -> None:
    assert found(tmp_path, f"import os, time\n{code}\n") == [what]


@pytest.mark.parametrize(
    "code",
    [
        "for x in sorted(set(names)): f(x)",
        "if name in set(names): f(name)",
        "len({1, 2}); min({1, 2})",
        "for x in [1, 2]: f(x)",
        "for x in dict.fromkeys(names): f(x)",
        "rank = int(os.environ['RANK'])",
        "stack.pop(); mapping.pop('x')",
        "ident = self.id(p)",
    ],
)
def test_a_line_that_does_not_is_not(tmp_path: Path, code: str) -> None:
    assert found(tmp_path, f"import os\n{code}\n") == []


def test_only_what_the_strategy_leads_to_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "sync.py"
    file.write_text(
        "import beside\n"
        "ORDER = list({'a', 'b'})\n"
        "def other(model):\n"
        "    return hash('x')\n"
        "def helper(model):\n"
        "    return id(model)\n"
        "def sync(model, step):\n"
        "    return helper(model), ORDER\n"
    )
    (tmp_path / "beside.py").write_text("def f(x):\n    return [y for y in set(x)]\n")
    assert [(line.file, line.line) for line in process_state_lines(file, 7)] == [
        ("sync.py", 2), ("sync.py", 6), ("beside.py", 2),
    ]  # fmt: skip
    assert [line.line for line in process_state_lines(file)] == [2, 4, 6, 2]


def test_lines_are_of_what_made_the_difference_and_few(tmp_path: Path) -> None:
    file = tmp_path / "sync.py"
    several = "".join(f"    f(hash({n}))\n" for n in range(6))
    file.write_text(f"def sync(model, step):\n    g(os.environ['LOCAL_RANK'])\n{several}")
    by = {
        factor: shown_state_lines(
            str(file), 1, BisectionResult(depends=True, factors=(factor,), worlds=8)
        )
        for factor in ("nodes", "interpreters", "environment")
    }
    assert by["nodes"] == (f"sync.py:2 {MACHINE}: g(os.environ['LOCAL_RANK'])",)
    assert by["interpreters"][0] == f"sync.py:3 {HASH}: f(hash(0))"
    assert by["interpreters"][4:] == ("and 2 more",)
    assert by["environment"] == ()
    chance = shown_state_lines(str(file), 1, BisectionResult(depends=False, worlds=1))
    assert len(chance) == 5, "hashes as well: of an object it is an address"


@pytest.mark.parametrize(
    "content",
    [b"def sync(:\n", b"\xff\xfe\x00", b"x = " + b"(" * 5000, b"f(hash(0))\n#" + b" " * (1 << 20)],
    ids=["syntax", "bytes", "deep", "long"],
)
def test_a_file_that_cannot_be_read_has_no_lines(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "sync.py"
    file.write_bytes(content)
    assert process_state_lines(file) == []
    assert process_state_lines(tmp_path / "none.py") == []


def test_what_a_file_says_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "sync.py"
    file.write_text(f"f(hash('\x1b[2J'), {'x' * 100!r})\n")
    (line,) = process_state_lines(file)
    assert "\x1b" not in str(line)
    assert r"\x1b[2J" in line.text
    assert len(line.text) == 80


def test_the_text_of_a_line_is_read_beside_the_strategy_alone(tmp_path: Path) -> None:
    """A rank says which file it is: any that the person can read."""
    own, beside, secret = (tmp_path / "code" / "s.py", tmp_path / "code" / "b.py", tmp_path / "key")
    own.parent.mkdir()
    own.write_text("import b\nown = 1\n")
    beside.write_text("import s\nbeside = 2\n")
    secret.write_text("first\nsecret\n")
    for file, code in (
        (own, "own = 1"), (beside, "beside = 2"), (secret, ""),
        (own.parent / ".." / "key", ""), (tmp_path / "none.py", ""),
    ):  # fmt: skip
        found = with_source_text(CallSite(file=str(file), line=2), str(own))
        assert found is not None
        assert (found.file, found.code) == (str(file), code)
    link = own.parent / "link.py"
    link.symlink_to(secret)
    found = with_source_text(CallSite(file=str(link), line=2), str(own))
    assert found is not None
    assert found.code == ""
