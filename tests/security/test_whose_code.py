"""Code that a case from elsewhere names: which of it runs without a question, and whose it is."""

import hashlib
import importlib.util
import io
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from distcheck import private
from distcheck.cli import root_command
from distcheck.errors import CannotRunError, UsageError
from distcheck.plan import provenance
from distcheck.plan.cases import plan_cases
from distcheck.plan.configuration import read_configuration
from distcheck.plan.provenance import provenance_of
from distcheck.plan.settings import Request
from distcheck.records import Adaptation, Case, CaseReport
from distcheck.store import trust
from distcheck.store.bundle import make_bundle, open_bundle
from distcheck.store.run_folder import RunStore, read_provenance
from distcheck.training import loading, sources_only
from distcheck.training.building import load_initial
from tests.optional import needs
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


def commit(root: Path) -> None:
    """Makes a git repository of a folder and commits everything in it."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)


def of_another(monkeypatch: pytest.MonkeyPatch, *theirs: Path) -> None:
    """These files belong to another user."""
    real = private._owners
    monkeypatch.setattr(
        private, "_owners", lambda path: {4242} if path.absolute() in theirs else real(path)
    )


def asked(**changes: Any) -> int:
    case = Case(**{"id": "c", "strategy": "ddp", "world": 2, "workload": "mlp", **changes})
    return len(trust.untrusted_code([case], {}, made={"c": provenance_of(case, {})}))


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
def test_imports_are_asked_about(spec: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UsageError, match="runs untrusted code"):
        root_command.main(["replay", str(tmp_path / "case.json")], standalone_mode=False)
    assert not mark.exists()


def test_foreign_files(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(strategy="mine.py:mean") == 0
    of_another(monkeypatch, checkout / "mine.py")
    assert asked(strategy="mine.py:mean") == 1
    (tmp_path / "above.py").write_text("def f(model): ...")
    commit(tmp_path)
    assert asked(strategy="../above.py:f") == 0
    of_another(monkeypatch, tmp_path / ".git")
    assert asked(strategy="../above.py:f") == 1


@pytest.mark.parametrize("is_git", [False, True])
def test_the_folder_of_another_user(
    is_git: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is asked about, by name; its configuration is used, as in a container."""
    (checkout / "pyproject.toml").write_text('[tool.distcheck]\nstrategies = ["ddp"]\n')
    if is_git:
        commit(checkout)
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    made = {"c": provenance_of(case, {})}
    assert trust.untrusted_code([case], {}, made=made) == []
    theirs = [path for path in checkout.rglob("*") if path.parent.name != ".git"]
    of_another(monkeypatch, checkout, *theirs)
    (code,) = trust.untrusted_code([case], {}, made=made)
    assert "it belongs to another user" in str(code)
    assert read_configuration(None).strategies == ("ddp",)


def test_a_foreign_config(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert RunStore.default_or_none() is None
    with pytest.raises(
        CannotRunError, match=r"\.distcheck cannot be written: it is a link, another user's, or"
    ):
        open_bundle(zips.bundle(tmp_path / "b.zip"))


def test_a_kept_folder_of_ones_own_is_used(checkout: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (checkout / ".distcheck").mkdir()
    (checkout / ".distcheck/.gitignore").symlink_to(victim)
    store = RunStore.default_or_none()
    assert store is not None
    assert victim.read_text() == "precious", "a link is not followed"
    (store.folder / "cases").mkdir()
    (store.folder / "cases/c.json").write_text("{}")


def _kept_cases() -> Any:
    from distcheck.addons.explore.failure_database import FailureDatabase

    return FailureDatabase("ddp")


@pytest.mark.parametrize(
    "name", ["runs", "bundles", pytest.param("explore", marks=needs("explore"))]
)
def test_an_inner_folder_link_is_not_used(name: str, checkout: Path, tmp_path: Path) -> None:
    """As in a folder from elsewhere: old runs would be removed from wherever it leads."""
    home = tmp_path / "home"
    for number in range(15):
        (home / f"document-{number}").mkdir(parents=True)
    (checkout / ".distcheck").mkdir()
    (checkout / ".distcheck" / name).symlink_to(home)
    before = sorted(home.iterdir())
    refused = rf"\.distcheck/{name} cannot be written: it is a link, another user's, or"
    if name == "runs":
        assert RunStore.default_or_none() is None
        with pytest.raises(CannotRunError, match=refused):
            RunStore.of_own(keep_everything=True)
    elif name == "bundles":
        with pytest.raises(CannotRunError, match=refused):
            open_bundle(zips.bundle(tmp_path / "b.zip"))
    else:
        kept = _kept_cases()
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
    assert RunStore.default_or_none() is not None
    left = sorted(path.name for path in runs.iterdir())
    assert left[:2] == ["0 a folder of somebody's", "0-0-0"]
    assert len(left) == 2 + 10
    assert (tmp_path / "home").is_dir()


@needs("explore")
def test_what_explore_keeps_overwrites_nothing_else(checkout: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    kept = _kept_cases()
    kept.folder.mkdir(parents=True)
    case = Case(id="c", strategy="ddp", world=2)
    for place in (checkout / ".distcheck/.gitignore", kept.folder / "c.json"):
        place.symlink_to(victim)
    assert kept.keep(case) is not None
    assert victim.read_text() == "precious"
    assert json.loads((kept.folder / "c.json").read_text())["strategy"] == "ddp"


@needs("explore")
def test_a_kept_case_of_another_strategy_is_not_run(checkout: Path) -> None:
    kept = _kept_cases()
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
        ("distcheck_strategies.run/../mine.py:mean", ("command", "'curl x | sh'"), True),
    ],
)
@pytest.mark.parametrize("where", ["arguments", "variables"])
def test_a_text_for_a_function_of_this_checkout_is_asked_about(
    strategy: str, pair: tuple[str, str], is_asked: bool, where: str
) -> None:
    """`def run(command): os.system(command)` is in many a checkout, whatever it is there for."""
    case = Case(id="c", strategy=strategy, world=2, workload="mlp",
                adaptation=Adaptation(**{where: (pair,)}))  # fmt: skip
    made = {"c": provenance_of(case, {})}
    Path("gift").mkdir()
    Path("distcheck_strategies.run").mkdir()
    if is_asked:
        with pytest.raises(
            UsageError, match=rf"{pair[0]}=.* for \S*mine.py:mean; review it, then pass"
        ):
            trust.require_trust("gift", [case], made, doing="replaying", trusted=False)
    else:
        trust.require_trust("gift", [case], made, doing="replaying", trusted=False)


@pytest.mark.parametrize("changed", ["nothing", "the case", "a digest", "the user"])
def test_only_own_runs_rerun(changed: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.distcheck` may come with a folder: that a case lies there says nothing."""
    text = ("args", f"'touch {checkout}/mark'")
    case = Case(id="c", strategy="subprocess:call", world=2, workload="mlp",
                adaptation=Adaptation(arguments=(text,)))  # fmt: skip
    made = provenance_of(case, {})
    kept = RunStore.of_own(keep_everything=False)
    kept.write_case(case, made)
    recorded = read_provenance(kept.case_file(case))
    assert recorded is not None
    if changed == "the case":
        case = msgspec.structs.replace(case, adaptation=Adaptation(arguments=(("args", "'ls'"),)))
    if changed == "a digest":
        digests = {**recorded.digests, "strategy": "0" * 32}
        recorded = msgspec.structs.replace(recorded, digests=digests)
    if changed == "the user":
        monkeypatch.setenv("DISTCHECK_SECRET", "of the home folder of another user")
    given = str(kept.folder)
    if changed == "nothing":
        trust.require_trust(given, [case], {"c": recorded}, doing="replaying", trusted=False)
    else:
        with pytest.raises(UsageError, match=r"untrusted code: .*subprocess:call.*args="):
            trust.require_trust(given, [case], {"c": recorded}, doing="replaying", trusted=False)


SYNC = "import beside\ndef sync(model): ...\n"


@pytest.fixture
def tracked(checkout: Path) -> Path:
    """A file that git tracks, with a module next to it that it imports."""
    (checkout / "sync.py").write_text(SYNC)
    (checkout / "beside.py").write_text("x = 1\n")
    commit(checkout)
    return checkout / "sync.py"


def test_a_tracked_and_unmodified_file_is_trusted(tracked: Path) -> None:
    assert asked(strategy="sync.py:sync") == 0
    assert asked(strategy=f"{tracked}:sync") == 0


@pytest.mark.parametrize("change", ["modified", "untracked", "shadowed", "compiled", "skipped"])
def test_in_a_repository_no_other_file_is_trusted(tracked: Path, change: str) -> None:
    beside = tracked.with_name("beside.py")
    if change in ("modified", "skipped"):
        beside.write_text("x = 2\n")
    if change == "skipped":  # git itself would call it unmodified
        words = ["git", "update-index", "--assume-unchanged", "beside.py"]
        subprocess.run(words, check=True)
    if change == "untracked":
        subprocess.run(["git", "rm", "-q", "--cached", "beside.py"], check=True)
    if change == "shadowed":
        beside.with_suffix("").mkdir()
        (beside.with_suffix("") / "__init__.py").write_text("x = 3\n")
    if change == "compiled":
        beside.with_name("beside.so").write_bytes(b"\x7fELF")
    assert asked(strategy="sync.py:sync") == 1


def test_nothing_in_the_folder_that_was_given_is_trusted(tracked: Path, checkout: Path) -> None:
    """Not even what git tracks there: a colleague's folder is not one's own by being added."""
    gift = checkout / "colleague"
    (gift / "cases").mkdir(parents=True)
    (gift / "sync.py").write_text("def sync(model): ...\n")
    commit(checkout)
    case = Case(id="c", strategy="colleague/sync.py:sync", world=2, workload="mlp")
    (gift / "cases/c.json").write_bytes(msgspec.json.encode(case))
    assert trust.untrusted_code([case]) == []
    assert len(trust.untrusted_code([case], given="colleague")) == 1
    assert len(trust.untrusted_code([case], given="../checkout/colleague/")) == 1
    (gift / "link").symlink_to(gift)
    assert len(trust.untrusted_code([case], given="colleague/link")) == 1
    own = msgspec.structs.replace(case, strategy="sync.py:sync")
    assert trust.untrusted_code([own], given="colleague") == []
    shutil.rmtree(checkout / ".git")
    given = "colleague/cases/c.json"
    for one, asked in ((case, 1), (own, 0)):
        made = {"c": provenance_of(one, {})}
        assert len(trust.untrusted_code([one], given=given, made=made)) == asked


def test_without_git_the_folder_of_a_case_file_is_not_trusted(checkout: Path) -> None:
    """Case and code were downloaded together."""
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    Path("c.json").write_bytes(msgspec.json.encode(case))
    assert len(trust.untrusted_code([case], given="c.json")) == 1
    commit(checkout)
    assert trust.untrusted_code([case], given="c.json") == []


def test_without_git_changed_code_is_asked_about_again(checkout: Path) -> None:
    (checkout / "run").mkdir()
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    made = {"c": provenance_of(case, {})}
    assert trust.untrusted_code([case], given="run", made=made) == []
    with open("mine.py", "a") as file:
        file.write("x = 1\n")
    (code,) = trust.untrusted_code([case], given="run", made=made)
    assert str(code).endswith("; changed since it was recorded)")
    commit(checkout)
    assert trust.untrusted_code([case], given="run", made=made) == [], "git vouches for it"


@pytest.mark.parametrize("changed", ["sub/elsewhere.py", "__init__.py", "up.py"])
def test_changed_code_ends_the_trust(changed: str, checkout: Path, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    (package / "sub").mkdir(parents=True)
    for name in ("__init__.py", "sub/__init__.py", "up.py"):
        (package / name).write_text("f = 1\n")
    elsewhere = package / "sub/elsewhere.py"
    elsewhere.write_text("from ..up import f\ndef sync(model): ...\n")
    case = Case(id="c", strategy=f"{elsewhere}:sync", world=2, workload="mlp",
                adaptation=Adaptation(arguments=(("x", f"@{elsewhere}:sync"),)))  # fmt: skip
    unsealed = provenance_of(case, {})
    store = RunStore.default_or_none()
    assert store is not None
    store.write_case(case, unsealed)
    recorded = read_provenance(store.case_file(case))
    assert recorded is not None
    given, made = str(store.folder), {"c": recorded}
    assert trust.untrusted_code([case], given=given, made=made) == []
    assert len(trust.untrusted_code([case], given=given)) == 2, "no digest was recorded"
    assert len(trust.untrusted_code([case], given=given, made={"c": unsealed})) == 2
    (package / changed).write_text(f"{(package / changed).read_text()}print()\n")
    code, _ = trust.untrusted_code([case], given=given, made=made)
    assert "changed since it was recorded" in str(code)


@pytest.mark.parametrize("file", ["/dev/zero", "../slot-000.safetensors", "a link", "a FIFO"])
def test_a_case_starts_from_files_of_its_run(file: str, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "slot-000.safetensors").touch()
    (checkout / "gift").mkdir()
    inside = checkout / "gift/slot-000.safetensors"
    if file == "a link":
        inside.symlink_to("/dev/zero")
    if file == "a FIFO":
        os.mkfifo(inside)
    case = Case(id="c", strategy="ddp", world=2, workload="mlp",
                initial=file if "/" in file else str(inside))  # fmt: skip
    if file == "a FIFO":  # which is in the run, and is not opened
        trust.require_trust("gift", [case], {}, doing="replaying", trusted=True)
        with pytest.raises(UsageError, match="is not a regular file"):
            load_initial(torch.nn.Linear(1, 1), case.initial)
    else:
        with pytest.raises(UsageError, match="is not a file of its run"):
            trust.require_trust("gift", [case], {}, doing="replaying", trusted=True)


def test_the_read_source_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled copy that says of itself that it need not be checked."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for name, text in (("main_of_gift", "import next_of_gift"), ("next_of_gift", "")):
        source = tmp_path / f"{name}.py"
        source.write_text("raise SystemExit('compiled')")
        py_compile.compile(str(source), invalidation_mode=unchecked)
        source.write_text(f"{text}\ndef sync(model): ...\n")
        assert Path(importlib.util.cache_from_source(str(source))).exists()
    try:
        _, _, module = loading._resolve("strategy", f"{tmp_path}/main_of_gift.py:sync", {})
        assert module.next_of_gift.sync
    finally:
        for name in ("main_of_gift", "next_of_gift"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()


@pytest.mark.parametrize(
    "change", ["nothing", "the file", "a link", "a module next to it", "a new module"]
)
def test_what_runs_is_what_was_asked_about(
    change: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question stands for as long as the person takes, and the folder may be another user's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    main, beside = tmp_path / "main_of_question.py", tmp_path / "next_of_question.py"
    main.write_text("import colorsys, next_of_question\ndef sync(model): ...\n")
    sys.modules.pop("colorsys", None)
    beside.write_text("")
    case = Case(id="c", strategy=f"{main}:sync", world=2, workload="mlp")
    (tmp_path / "evil.py").write_text("raise SystemExit('evil')")

    def answers(*_: object, **__: object) -> bool:
        if change in ("the file", "a module next to it"):
            {"the file": main}.get(change, beside).write_text("raise SystemExit('evil')")
        if change == "a link":
            main.unlink()
            main.symlink_to("evil.py")
        if change == "a new module":
            (tmp_path / "colorsys.py").write_text("raise SystemExit('evil')")
        return True

    monkeypatch.setattr("click.confirm", answers)
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    trust.require_trust("gift", [case], {}, doing="replaying", trusted=False)
    try:
        if change == "nothing":
            assert loading._resolve("strategy", case.strategy, {})[2].sync
        else:
            with pytest.raises(UsageError, match=r"since it was checked|files that were checked"):
                loading._resolve("strategy", case.strategy, {})
    finally:
        for name in ("main_of_question", "next_of_question", "colorsys"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()


def test_trusted_code_imports_nothing_from_what_was_handed_over(
    tracked: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be called like a package that the code can do without. What the code imports by
    its name is asked about; a name that is computed is not known before.
    """
    monkeypatch.setattr(sys, "path", [str(checkout), *sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    tracked.write_text(
        "import importlib\nname = 'apax'\ntry:\n    amp = importlib.import_module(name + '.amp')\n"
        "except ImportError:\n    amp = None\n" + SYNC
    )
    commit(checkout)
    (checkout / "apax").mkdir()
    (checkout / "apax/amp.py").write_text("raise SystemExit('evil')")
    case = Case(id="c", strategy="sync.py:sync", world=2, workload="mlp")
    trust.require_trust("apax", [case], {}, doing="replaying", trusted=False)
    try:
        assert loading._resolve("strategy", case.strategy, {})[2].amp is None
    finally:
        for name in ("sync", "beside", "apax", "apax.amp"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()


@pytest.mark.parametrize("inner", ["", "/sub"])
def test_an_archive_of_what_was_handed_over_is_not_imported_from(
    inner: str, tracked: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No digest covers the modules of a zip file, which Python imports like those of a folder."""
    monkeypatch.setattr(sys, "path", [str(checkout), *sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    (checkout / "gift").mkdir()
    with zipfile.ZipFile(checkout / "gift/lib.zip", "w") as archive:
        archive.writestr(f"{inner[1:]}/apax.py".lstrip("/"), "raise SystemExit('evil')")
    tracked.write_text(
        f"import importlib, sys\nsys.path.insert(0, '{checkout}/gift/lib.zip{inner}')\n"
        "import json\nname = 'ap'\n"
        "apax = importlib.import_module(name + 'ax')\n" + SYNC
    )
    commit(checkout)
    case = Case(id="c", strategy="sync.py:sync", world=2, workload="mlp")
    trust.require_trust("gift", [case], {}, doing="replaying", trusted=False)
    try:
        with pytest.raises(UsageError, match=r"lib.zip\S*/apax is not among the files"):
            loading._resolve("strategy", case.strategy, {})
    finally:
        for name in ("sync", "beside", "apax"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()


def test_trusted_code_runs(tracked: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked about a tracked file; one that takes its place afterwards does not run."""
    monkeypatch.setattr(sys, "path", [str(checkout), *sys.path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    (checkout / "gift").mkdir()
    case = Case(id="c", strategy="sync.py:sync", world=2, workload="mlp")
    trust.require_trust("gift", [case], {}, doing="replaying", trusted=False)
    tracked.write_text("raise SystemExit('evil')")
    try:
        with pytest.raises(UsageError, match=r"sync.py has changed since it was checked"):
            loading._resolve("strategy", case.strategy, {})
    finally:
        for name in ("sync", "beside"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()


def test_digests_of_a_large_checkout_fit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable may have 128 KiB; files that foreign code cannot reach are left out first."""
    monkeypatch.setenv(sources_only._VARIABLE, "{}")
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(5000)]
    many = {str(checkout / f"m{number}.py"): digest for number, digest in enumerate(digests)}
    gift = str(checkout / "gift/sync.py")
    sources_only.require_sources({**many, gift: digests[0]}, around=(str(checkout / "gift"),))
    assert len(os.environ[sources_only._VARIABLE]) < 128 << 10
    assert sources_only._asked()["agreed"] == {gift: digests[0]}
    with pytest.raises(UsageError, match=r"so many files \(5,000\) .*; review them, then pass"):
        sources_only.require_sources(many, around=(str(checkout),))
    few = dict([*many.items()][:1000])
    sources_only.require_sources(few, around=())
    assert len(os.environ[sources_only._VARIABLE]) < 128 << 10
    assert sources_only._asked()["agreed"] == few


def test_a_text_for_an_object_of_this_checkout_is_asked_about_for_every_strategy() -> None:
    """A class of the checkout may be filled with it, whichever strategy is judged."""
    said = Adaptation(variables=(("dist", "@mine.py:Mine"),), arguments=(("command", "'ls'"),))
    case = Case(id="c", strategy="ddp", world=2, workload="mlp", adaptation=said)
    assert trust.text_arguments_of([case]) == ["command='ls' for ddp"]
    assert trust.text_arguments_of([msgspec.structs.replace(case, adaptation=Adaptation())]) == []


@pytest.mark.parametrize("name", ["xxhash", "distcheck_strategies", "distcheck_mutants"])
def test_a_module_next_to_a_file_takes_no_place_of_an_installed_one(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a file comes first in a rank's path; what a rank imports itself is there."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or importlib.import_module(name))
    monkeypatch.delitem(sys.modules, name)
    (checkout / f"{name}.py").write_text("raise SystemExit('evil')")
    loading._import_own.cache_clear()
    (checkout / "plain.py").write_text("")
    loading._import_file(checkout / "plain.py", {})
    assert not sys.modules[name].__file__.startswith(str(checkout))  # type: ignore[union-attr]
    sys.modules.pop("plain", None)


@pytest.mark.parametrize("name", ["distcheck_strategies", "distcheck_mutants"])
def test_a_package_of_the_current_folder_is_not_ours_for_its_name(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With distcheck on the path and not installed, Python finds that of the current folder."""
    (checkout / name).mkdir()
    evil = checkout / name / "evil.py"
    evil.write_text("def sync(model): ...\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)  # it is not installed
    assert provenance.source_file_of_module(f"{name}.evil") == evil
    case = Case(id="c", strategy=f"{name}.evil:sync", world=2, workload="mlp")
    assert len(trust.untrusted_code([case])) == 1


@pytest.mark.parametrize(
    ("new", "strategy", "workload"),
    [
        ("two/apax.py", "one/sync.py:sync", "two/work.py:work"),
        ("one/apax.py", "one/sync.py:sync", "two/work.py:work"),
        ("two/top.py", "top:sync", "two/work.py:work"),
        ("one/base.py", "one/sync.py:sync", "base:work"),
    ],
)
def test_what_a_case_names_is_looked_for_in_all_of_its_folders(
    new: str, strategy: str, workload: str, tracked: Path, checkout: Path
) -> None:
    """The folder of each file that is named comes before the current folder, for all of them."""
    optional = "try:\n    import apax\nexcept ImportError:\n    pass\n"
    for name in ("one/sync.py", "two/work.py", "top.py", "base.py"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text(f"{optional}def sync(model): ...\nclass work: ...\n")
    commit(checkout)
    case = Case(id="c", strategy=strategy, world=2, workload=workload)
    assert trust.untrusted_code([case]) == []
    (checkout / new).write_text("")
    assert trust.untrusted_code([case])


def test_a_folder_that_is_called_site_packages_is_no_library(checkout: Path) -> None:
    place = checkout / "gift/site-packages"
    place.mkdir(parents=True)
    (place / "s.py").write_text("import helper_of_gift\ndef sync(model): ...\n")
    (place / "helper_of_gift.py").write_text("")
    case = Case(id="c", strategy=f"{place}/s.py:sync", world=2, workload="mlp")
    (code,) = trust.untrusted_code([case], given="gift")
    assert {Path(file).name for file in code.files} == {"s.py", "helper_of_gift.py"}


def test_what_stands_next_to_a_run_was_handed_over_with_it(checkout: Path) -> None:
    (checkout / "gift/run/cases").mkdir(parents=True)
    (checkout / "gift/code.py").write_text("def sync(model): ...\n")
    case = Case(id="c", strategy="gift/code.py:sync", world=2, workload="mlp")
    made = {"c": provenance_of(case, {})}  # which its author can write as well
    for given in ("gift/run", "gift/run/cases/c.json"):
        assert len(trust.untrusted_code([case], given=given, made=made)) == 1


def test_a_shared_folder_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared/in_a_shared_folder.py").write_text("import colorsys\n")
    (tmp_path / "shared/colorsys.py").write_text("raise SystemExit('of another user')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("colorsys", None)
    place = f"{tmp_path}/shared/in_a_shared_folder.py:colorsys"
    assert loading._resolve("strategy", place, {})[2].colorsys.rgb_to_hsv


@pytest.mark.parametrize("kind", ["a link", "outside", "someone's secret"])
def test_a_bundle_packs_code_of_the_checkout(kind: str, checkout: Path, tmp_path: Path) -> None:
    target = {"a link": checkout / "link.py", "outside": tmp_path / "secret.py",
              "someone's secret": checkout / "settings.py"}[kind]  # fmt: skip
    (tmp_path / "secret.py").write_text("TOKEN = 'precious'")
    (checkout / "settings.py").write_text("TOKEN = 'precious'")
    if kind == "a link":
        target.symlink_to("settings.py")
    case = Case(id="c", strategy=f"{target}:TOKEN", world=2, workload="mlp")
    recorded = provenance_of(case, {}) if kind != "someone's secret" else None
    gift = RunStore.at(checkout / "gift")
    gift.write_case(case, recorded)
    with pytest.raises(UsageError, match="is not packed: it is a link, outside this checkout, or"):
        make_bundle(gift.folder, tmp_path / "b.zip", traces=False)
    if kind == "someone's secret":  # who knows its digest knows the file
        gift.write_case(case, provenance_of(case, {}))
        assert make_bundle(gift.folder, tmp_path / "b.zip", traces=False)[0].sources


def test_another_users_draft_does_not_become_the_bundle(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder such as /tmp; the name was that of the bundle with a suffix."""
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    gift = RunStore.at(checkout / "run")
    gift.write_case(case, provenance_of(case, {}))
    real, planted = private.unique, tmp_path / ".b.zip.draft"
    planted.write_text("theirs")
    names: list[str] = []
    monkeypatch.setattr(private, "unique", lambda prefix: names.append(real(prefix)) or names[-1])
    make_bundle(gift.folder, tmp_path / "b.zip", traces=False)
    assert zipfile.is_zipfile(tmp_path / "b.zip")
    assert planted.read_text() == "theirs"
    assert any(name.startswith(".part-") for name in names)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def asks(case: Case, given: Path, monkeypatch: pytest.MonkeyPatch, **made: Any) -> str:
    """What is shown of a case before the question, which is answered with no."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(UsageError) as caught:
        trust.require_trust(str(given), [case], made, doing="replaying", trusted=False)
    return f"{screen.getvalue()}\n{caught.value}"


HIDES = 'API_TOKEN="$(touch pwned)" python train.py'


@pytest.mark.parametrize("kind", ["a command", "a text"])
def test_a_question_hides_nothing_that_runs(
    kind: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value with the name of a secret may be a command as well."""
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    if kind == "a command":
        case = msgspec.structs.replace(case, job=("--", "bash", "-c", HIDES))
    else:
        given = Adaptation(arguments=(("command", repr(HIDES)),))
        case = msgspec.structs.replace(case, adaptation=given)
    assert "$(touch pwned)" in asks(case, checkout / "run", monkeypatch)
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    said = asks(case, checkout / "run", monkeypatch)
    assert "pwned" not in said, "nobody is asked, and a log may be public"
    assert "(the case file has it without masks and cuts); review it, then pass --trust" in said


def test_a_command_that_is_too_long_to_read_is_not_asked_about(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--", "bash", "-c", " " * 20_000 + "touch pwned" + " " * 20_000)
    case = Case(id="c", strategy="job", world=2, workload="job", job=words)
    said = asks(case, checkout / "run", monkeypatch)
    assert "Run it?" not in said
    assert "pass --trust" in said


def test_the_secrets_of_an_own_command_stay_masked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ("--", "python", "train.py", "--token=hunter2-of-mine")
    case = Case(id="job", strategy="train.py", world=2, workload="job", job=job)
    store = RunStore.at(checkout / "run")
    store.write_case(case, provenance.Provenance(environment={}))
    made = read_provenance(store.case_file(case))
    said = asks(case, checkout / "run", monkeypatch, job=made)
    assert "Run it?" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "changed", ["nothing", "the report", "the seal", "the code", "torch", "the run"]
)
def test_what_a_restart_takes_up_is_ones_own(changed: str, checkout: Path) -> None:
    """A folder that came with a checkout may hold the verdicts of a run that is still to come."""
    case = Case(id="c", strategy="mine.py:mean", world=2, workload="mlp")
    made = provenance_of(case, {})
    report = CaseReport(
        case=case, strategy_file="mine.py", verdict="pass", outcomes=(), checks=(), diagnosis=(),
        replay="", notes=(),
    )  # fmt: skip
    store = RunStore(checkout / "run", keep_everything=True, run="run-7")
    store.write_finished(report, made)
    (file,) = (checkout / "run/finished").iterdir()
    kept = json.loads(file.read_text())
    if changed == "the report":
        kept["report"]["notes"] = ["forged"]
    elif changed == "the seal":
        kept["seal"] = ""
    file.write_text(json.dumps(kept, separators=(",", ":")))
    if changed == "the code":
        (checkout / "mine.py").write_text("def mean(model): ...\n")
        made = provenance_of(case, {})
    if changed == "torch":
        made = provenance_of(case, {"torch": "3.0"})
    again = RunStore(
        checkout / "run", keep_everything=True, run="run-8" if changed == "the run" else "run-7"
    )
    found = again.finished([case], {"c": made})
    assert found == ({"c": report} if changed == "nothing" else {})
