"""Code that a case from elsewhere names: which of it runs without a question, and whose it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distcheck.cli import root_command
from distcheck.errors import CannotRunError, UsageError
from distcheck.explore.found import KeptCases
from distcheck.plan import owners
from distcheck.plan.cases import plan_cases
from distcheck.plan.configuration import read_configuration
from distcheck.plan.request import Request
from distcheck.records import Adaptation, Case
from distcheck.store import trust
from distcheck.store.bundle import open_bundle
from distcheck.store.run_folder import Store
from tests.security import zips


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "checkout"
    (here / "package").mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "mine.py").write_text(
        "import os\nfrom os import system\nfrom package import near\nfrom far import off\n"
        "run = os.system\nclass Mine:\n    import os\n    def sync(self): ...\n"
        "def mean(model): ...\nmade = Mine()\nnear_by = near()\nround = round()\n"
        "from pathlib import Path, PosixPath\nHERE = Path(__file__)\nthing = object()\n"
        "class P(PosixPath): ...\nfrom functools import partial\npart = partial(os.system)\n"
        "from types import SimpleNamespace\nbox = SimpleNamespace(run=os.system)\n"
        "if box:\n    def guarded(model): ...\n"
    )
    (here / "package/__init__.py").write_text("from .inner import near\nfrom os import abort\n")
    (here / "package/inner.py").write_text("async def near(model): ...\n")
    return here


def of_another(monkeypatch: pytest.MonkeyPatch, *theirs: Path) -> None:
    """These files belong to another user."""
    real = owners._owners
    monkeypatch.setattr(
        owners, "_owners", lambda path: {4242} if path.absolute() in theirs else real(path)
    )


def asked(**changes: Any) -> int:
    case = Case(**{"id": "c", "strategy": "ddp", "world": 2, "workload": "mlp", **changes})
    return len(trust.unknown_code([case], {}))


@pytest.mark.parametrize(
    "spec", ["mine.py:mean", "mine.py:Mine.sync", "mine.py:made", "mine.py:near", "mine:mean",
             "package:near", "mine.py:near_by", "mine.py:guarded"],
)  # fmt: skip
def test_what_this_checkout_defines_is_known(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    assert asked(strategy=spec) == 0


@pytest.mark.parametrize(
    "spec",
    ["mine.py:os.system", "mine.py:system", "mine.py:run", "mine.py:off", "mine.py:nothing",
     "mine.py:HERE.write_text", "mine.py:HERE.unlink", "mine.py:HERE", "mine.py:P.write_text",
     "mine.py:part", "mine.py:box.run", "mine.py:Mine.os.system", "mine.py:thing", "mine.py:round",
     "mine.py:made.sync", "mine.py:Mine.__init__", "mine.py:__builtins__", "package:abort",
     "package:near.__globals__", "distcheck.worlds.messages:os.system",
     "distcheck.store.run_folder:shutil.rmtree",
     "distcheck.reports.files:write_text", "distcheck.workloads.mlp:torch.hub.load"],
)  # fmt: skip
@pytest.mark.parametrize("where", ["strategy", "workload", "backend", "value"])
def test_what_a_known_file_imports_is_asked_about(
    spec: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    if where == "value":
        assert asked(adaptation=Adaptation(arguments=(("x", f"@{spec}"),))) == 1
    else:
        assert asked(**{where: spec}) == 1


@pytest.mark.parametrize("spec", ["cnn:thing", "vgg11:os.system", "gloo:thing"])
def test_a_module_that_is_called_like_one_of_ours_is_asked_about(spec: str) -> None:
    """`cnn` is distcheck's, and `cnn:thing` is in a module of that name, wherever it is found."""
    where = "backend" if spec.startswith("gloo") else "workload"
    assert asked(**{where: spec}) == 1
    assert asked(**{where: spec.partition(":")[0]}) == 0


def test_a_case_that_names_a_function_of_the_system_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    case = {
        **zips.CASE, "strategy": "distcheck.worlds.messages:os.system",
        "adaptation": {"arguments": [["command", repr(f"touch {mark}")]]},
    }  # fmt: skip
    (tmp_path / "case.json").write_text(json.dumps(case))
    with pytest.raises(UsageError, match="runs code from outside this checkout"):
        root_command.main(["replay", str(tmp_path / "case.json")], standalone_mode=False)
    assert not mark.exists()


def test_files_of_another_user_are_asked_about(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(strategy="mine.py:mean") == 0
    of_another(monkeypatch, checkout / "mine.py")
    assert asked(strategy="mine.py:mean") == 1
    (tmp_path / ".git").mkdir()
    (tmp_path / "above.py").write_text("def f(model): ...")
    assert asked(strategy="../above.py:f") == 0
    of_another(monkeypatch, tmp_path / ".git")
    assert asked(strategy="../above.py:f") == 1


def test_a_configuration_of_another_user_is_not_read(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.distcheck]\nstrategies = ["ddp"]\n')
    assert read_configuration(None).strategies == ("ddp",)
    of_another(monkeypatch, file)
    assert read_configuration(None).strategies == ()


@pytest.mark.parametrize("kind", ["a link", "another user's", "everybody's"])
def test_a_kept_folder_that_others_control_is_not_used(
    kind: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkout / ".distcheck"
    if kind == "a link":
        (tmp_path / "theirs").mkdir()
        kept.symlink_to(tmp_path / "theirs")
    else:
        kept.mkdir()
        kept.chmod(0o777 if kind == "everybody's" else 0o755)
    if kind == "another user's":
        of_another(monkeypatch, kept, Path(".distcheck").absolute())
    case = kept / "runs" / "r" / "cases" / "c.json"
    case.parent.mkdir(parents=True)
    case.write_text(json.dumps({**zips.CASE, "id": "c"}))
    assert Store.by_default() is None
    assert not trust.is_own_run(str(case))
    with pytest.raises(CannotRunError, match=r"\.distcheck is a link, another user's, or"):
        open_bundle(zips.bundle(tmp_path / "b.zip"))


def test_a_kept_folder_of_ones_own_is_used(checkout: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (checkout / ".distcheck").mkdir()
    (checkout / ".distcheck/.gitignore").symlink_to(victim)
    store = Store.by_default()
    assert store is not None
    assert victim.read_text() == "precious", "a link is not followed"
    (store.folder / "cases").mkdir()
    (store.folder / "cases/c.json").write_text("{}")
    assert trust.is_own_run(str(store.folder / "cases/c.json"))


@pytest.mark.parametrize("name", ["runs", "bundles", "explore"])
def test_a_folder_within_that_is_a_link_is_not_used(
    name: str, checkout: Path, tmp_path: Path
) -> None:
    """As in a folder from elsewhere: old runs would be removed from wherever it leads."""
    home = tmp_path / "home"
    for number in range(15):
        (home / f"document-{number}").mkdir(parents=True)
    (checkout / ".distcheck").mkdir()
    (checkout / ".distcheck" / name).symlink_to(home)
    before = sorted(home.iterdir())
    refused = rf"\.distcheck/{name} is a link, another user's, or"
    if name == "runs":
        assert Store.by_default() is None
        with pytest.raises(CannotRunError, match=refused):
            Store.of_own(keep_everything=True)
    elif name == "bundles":
        with pytest.raises(CannotRunError, match=refused):
            open_bundle(zips.bundle(tmp_path / "b.zip"))
    else:
        kept = KeptCases("ddp")
        assert kept.keep(Case(id="c", strategy="ddp", world=2)) is None
        (home / kept.folder.name).mkdir()
        (home / kept.folder.name / "c.json").write_text(json.dumps(zips.CASE | {"strategy": "ddp"}))
        assert kept.read() == []
        shutil.rmtree(home / kept.folder.name)
    assert sorted(home.iterdir()) == before


def test_only_runs_are_removed_to_make_room(checkout: Path, tmp_path: Path) -> None:
    runs = checkout / ".distcheck/runs"
    (runs / "0 a folder of somebody's").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (runs / "0-0-0").symlink_to(tmp_path / "home")
    for number in range(1, 15):
        (runs / f"20260131-120000-{10**7 + number}").mkdir()
    assert Store.by_default() is not None
    left = sorted(path.name for path in runs.iterdir())
    assert left[:2] == ["0 a folder of somebody's", "0-0-0"]
    assert len(left) == 2 + 10
    assert (tmp_path / "home").is_dir()


def test_what_explore_keeps_overwrites_nothing_else(checkout: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    kept = KeptCases("ddp")
    kept.folder.mkdir(parents=True)
    case = Case(id="c", strategy="ddp", world=2)
    for place in (checkout / ".distcheck/.gitignore", kept.folder / "c.json"):
        place.symlink_to(victim)
    assert kept.keep(case) is not None
    assert victim.read_text() == "precious"
    assert json.loads((kept.folder / "c.json").read_text())["strategy"] == "ddp"


def test_a_kept_case_of_another_strategy_is_not_run(checkout: Path) -> None:
    kept = KeptCases("ddp")
    (case,) = [c for c in plan_cases(Request(strategies=("ddp",), worlds=(2,), workloads=("mlp",)))
               if c.dtype == "float32"]  # fmt: skip
    kept.keep(case)
    assert kept.read() == [case]
    (kept.folder / "d.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(case, id="d", strategy="os:system"))
    )
    assert kept.read() == [case]


@pytest.mark.parametrize(
    ("strategy", "pair", "is_asked"),
    [
        ("mine.py:mean", ("command", "'curl x | sh'"), True),
        ("mine.py:mean", ("commands", "[1, {'a': (b'x',)}]"), True),
        ("mine.py:mean", ("f", "f'{x}'"), True),
        ("mine.py:mean", ("average", "True"), False),
        ("mine.py:mean", ("sizes", "[1, -2.5, None]"), False),
        ("mine.py:mean", ("group", "@group"), False),
        ("ddp", ("command", "'curl x | sh'"), False),
    ],
)
@pytest.mark.parametrize("where", ["arguments", "variables"])
def test_a_text_for_a_function_of_this_checkout_is_asked_about(
    strategy: str, pair: tuple[str, str], is_asked: bool, where: str
) -> None:
    """`def run(command): os.system(command)` is in many a checkout, whatever it is there for."""
    case = Case(id="c", strategy=strategy, world=2, workload="mlp",
                adaptation=Adaptation(**{where: (pair,)}))  # fmt: skip
    given = {"doing": "replaying", "trusted": False}
    if is_asked:
        with pytest.raises(UsageError, match=f"{pair[0]}=.* for mine.py:mean; read it, then add"):
            trust.require_trust("x.zip", [case], **given)  # type: ignore[arg-type]
    else:
        trust.require_trust("x.zip", [case], **given)  # type: ignore[arg-type]
