"""Each thing that an attacker could use is done in one place, which knows the rules. A new entry
point that does it by itself fails here: it calls the function that is named, or says in the table
why it need not.
"""

import ast
from collections.abc import Callable

import pytest

from tests.optional import left_of
from tests.sources import calls


def runs_code(called: str, call: ast.Call) -> bool:
    """What makes code of data: from a file, a pickle, or a name that is not written there."""
    last = called.rpartition(".")[2]
    if last in ("exec_module", "run_path", "run_module", "AutoExecutor", "exec", "eval"):
        return bool(call.args)  # model.eval() has none
    if called.startswith(("pickle.load", "marshal.load", "torch.load", "shelve.")):
        return True
    if last.endswith("Unpickler"):
        return True
    return last == "import_module" and not is_own_name(call.args[0])


def is_own_name(name: ast.expr) -> bool:
    """Whether a module's name is written in the call, or its package is."""
    if isinstance(name, ast.JoinedStr):
        first = name.values[0]
        if isinstance(first, ast.FormattedValue):
            return ast.unparse(first.value) == "__name__"
        return isinstance(first, ast.Constant) and str(first.value).startswith("distcheck.")
    return isinstance(name, ast.Constant)


def makes_folders(called: str, call: ast.Call) -> bool:
    """A new folder, or a temporary one."""
    last = called.rpartition(".")[2]
    return last in ("mkdir", "makedirs", "mkdtemp", "TemporaryDirectory")


def writes_files(called: str, call: ast.Call) -> bool:
    """A file that is opened to be written."""
    last = called.rpartition(".")[2]
    if last in ("write_bytes", "touch", "mkstemp", "NamedTemporaryFile", "copyfile", "fdopen"):
        return True
    if last in ("open", "write_text"):
        words = [a.value for a in call.args if isinstance(a, ast.Constant)]
        words += [k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)]
        modes = [w for w in words if isinstance(w, str) and {*w} <= {*"rwxabt+"}]
        return (
            "O_CREAT" in ast.unparse(call)
            or any({*mode} & {*"wxa+"} for mode in modes)
            or ("." in called and last == "write_text")
        )
    return last == "save_file" and ast.unparse(call.args[1]) != "draft"


def prints(called: str, call: ast.Call) -> bool:
    """A text on the terminal, past `say` and past a console."""
    return called in ("click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write")


def makes_json(called: str, call: ast.Call) -> bool:
    """JSON for people, which is indented."""
    return called.endswith("json.format")


Reasons = dict[str, str]
# What is done, in which calls, and the files in which it may be done without more, and why.
RULES: dict[str, tuple[Callable[[str, ast.Call], bool], Reasons]] = {
    "code is run; the command asks store/trust.require_trust first": (runs_code, {
        "training/loading.py": "loads what a case names, after the question",
        "training/scripts.py": "the same, of a script without its training",
        "training/adapters/free_names.py": "modules of a list of distcheck's own",
        "testing/front.py": "modules that the person's own tests have imported",
        "testing/reused_rank.py": "tests of the person's own, from its parent",
        "addons/engines/on_slurm.py": "results of its own jobs, in a folder of its own",
        "machine/compat.py": "calls that this process itself has recorded",
        "integrations.py": "a framework of which the person's own code passes an object",
        "workloads/datasets/cifar10.py": "an unpickler that knows numbers, texts and arrays alone",
        **dict.fromkeys((
            "__init__.py", "cli/__init__.py", "judge/checks/__init__.py",
            "plan/source_files.py", "judge/oracles/design.py",
            "addons/selftest/command.py",
            "workloads/datasets/files.py", "worlds/local/child.py", "worlds/local/helper.py",
            "worlds/local/late_compiler.py", "addons/simulated/host.py",
            "addons/simulated/search.py",
        ), "modules of distcheck and of torch, by names that are written in distcheck"),
    }),
    "a folder is made; private.folder does it": (makes_folders, {
        "private.py": "here",
        "cli/commands/skill.py": "a folder that the person named, for other programs",
        **dict.fromkeys(("workloads/datasets/files.py", "workloads/datasets/mnist.py"),
                        "data sets, which other users may read"),
    }),
    "a file is written; private.write does it, or publish, drafted, new_file": (writes_files, {
        "private.py": "here",
        "workloads/datasets/mnist.py": "a data set, which other users may read",
        "reports/files.py": "appends to GitHub's summary, and tries a file before anything runs",
        "store/bundle.py": "a file without a name, which gets the one that the person gave",
        "job/in_use.py": "a lock, which must be held before the file has its name",
        "job/inside/install.py": "a counter that is written in place",
        "job/hook/sitecustomize.py": "distcheck could not be imported, and that is noted",
        "worlds/linux.py": "the name of a thread",
        "worlds/pinning.py": "lines that code reads, of several processes, one after the other",
        **dict.fromkeys(("cli/streams.py", "job/running.py", "worlds/local/child.py",
                         "testing/fixtures.py"), "descriptors that are open already"),
    }),
    "a text is printed; errors/shown_text.print_displayable masks it": (prints, {
        "errors/shown_text.py": "here",
        "reports/files.py": "a report or annotations, which are masked already",
        "store/trust.py": "lines that were made fit to be shown",
        "testing/waiting.py": "lines of the person's own tests",
        "worlds/jobs.py": "one sentence of distcheck",
        **dict.fromkeys((
            "cli/__init__.py", "cli/commands/explain.py", "cli/commands/verify.py",
            "cli/commands/list.py", "cli/commands/doctor.py", "cli/commands/skill.py",
            "cli/forecast.py", "cli/show_and_keep.py", "cli/training_run.py",
            "cli/commands/report.py", "addons/explore/command.py", "addons/selftest/command.py",
        ), "distcheck's own words and numbers"),
    }),
    "a document is written; reports/json_report.render masks it": (makes_json, {
        "reports/json_report.py": "here",
        "store/run_folder.py": "a case, which must run again as it is, in a private file",
        "store/bundle.py": "masked there, member by member",
    }),
    "a file that the person named is written; reports/files.write_text masks it": (
        lambda called, _: called.endswith("private.publish"), {"reports/files.py": "here"},
    ),
    "what a process computed is read; worlds/jobs.Job.decode makes it unknown": (
        lambda called, _: called == "msgspec.msgpack.decode", {
            "worlds/jobs.py": "here",
            "verification/preparation.py": "what describes distcheck's own data",
            "verification/own_code.py": "what another machine asks for",
            "recordings/traces/header.py": "lines of a trace, of which what is damaged is left out",
            "workloads/datasets/arrays.py": "what describes distcheck's own data",
            "worlds/call_log.py": "a log, of which what is damaged is left out",
            "addons/simulated/host.py": "what the front asks for",
            "cli/training_run.py": "figures of a training, which judges nothing",
            "addons/backend_probe/command.py": "numbers of distcheck's own ranks",
            "testing/reused_rank.py": "what the person's own tests ask for",
            "testing/waiting.py": "what ranks of the person's own tests report",
            "job/guard/guarding.py": "what the ranks of the person's own job gather",
            "addons/explore/running.py": "a report that this process has written",
        },
    ),
    "ranks meet at a port, which every user can reach; worlds/rendezvous.py has a file": (
        lambda called, _: called.rpartition(".")[2] in ("TCPStore", "init_process_group"), {
            "worlds/rendezvous.py": "at a port if ranks are of several processes",
            "addons/simulated/__init__.py": "in the memory of one process",
            "worlds/remote/bootstrap.py": "a word through the launcher's store, which is there",
            "job/inside/ending.py": "the same, of the person's own job",
        },
    ),
    "processes connect; worlds/remote/protocol.Connection signs every message": (
        lambda called, call: called.endswith("create_connection")
        or (called.endswith(".accept") and not call.args), {
            "worlds/remote/bootstrap.py": "the handshake, and then such a connection",
            "worlds/remote/handshake.py": "its other end",
            "addons/mpi/started.py": "a socket in a folder that only this user can enter",
            "addons/engines/on_ray.py": "sends nothing: is a cluster there?",
        },
    ),
    "the user's secret is used; worlds/remote/secret.RunSecret restricts it to one run": (
        lambda called, _: called.rpartition(".")[2] == "shared_secret"
        or called.startswith("hmac."), {
            "worlds/remote/secret.py": "here",
            "plan/provenance.py": "seals, which prove that a file is this user's",
            "worlds/remote/coordinator.py": "makes such a secret",
            "worlds/remote/agent.py": "the same, and the name of a socket",
            "job/machines.py": "the same",
        },
    ),
    "a host is looked up; worlds/remote/bootstrap.address_of rejects what is no address": (
        lambda called, _: called.rpartition(".")[2] in ("getaddrinfo", "gethostbyname"),
        {"worlds/remote/bootstrap.py": "here"},
    ),
    "a text is cut before it is masked, and part of a secret stays": (
        lambda called, call: called.rpartition(".")[2] in ("masked", "without_secrets")
        and any(isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Slice)
                for one in call.args), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_nothing_goes_around_the_one_function(rule: str) -> None:
    is_done, reasons = RULES[rule]
    found = {file for file, called, call in calls() if is_done(called, call)}
    assert sorted(found - {*reasons}) == [], rule
    assert sorted(left_of(reasons) - found) == [], "it is not done there any more"


@pytest.mark.parametrize(
    "line",
    ["exec(text)", "spec.loader.exec_module(module)", "runpy.run_path(path)", "torch.load(file)",
     "pickle.loads(data)", "importlib.import_module(name)", "import_module(f'{place}.x')",
     "_Unpickler(file)", "submitit.AutoExecutor(folder)", "place.mkdir(parents=True)",
     "tempfile.mkdtemp()", "place.write_text(text)", "open(place, 'w')", "place.open('xb')",
     "os.open(place, os.O_CREAT)", "save_file(held, place)", "shutil.copyfile(a, b)",
     "print(text)", "click.echo(text)", "msgspec.json.format(data)", "private.publish(a, b)",
     "msgspec.msgpack.decode(answer, type=Facts)", "dist.TCPStore(host, port)",
     "socket.create_connection(place)", "server.accept()", "secret.shared_secret()",
     "hmac.new(key, text)", "socket.getaddrinfo(host, 1)", "masked(text[:100])"],
)  # fmt: skip
def test_what_would_go_around_it_is_found(line: str) -> None:
    """Each line fails one of the rules in a file that it does not list."""
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert any(is_done(ast.unparse(call.func), call) for is_done, _ in RULES.values())


def test_every_screen_masks_its_texts() -> None:
    """A module that prints on a console makes the texts fit to be shown, or has only its own."""
    prints = {file for file, called, _ in calls() if called.endswith("console.print")}
    masks = {file for file, called, _ in calls() if called == "displayable"}
    own = {
        "addons/backend_probe/command.py": "two lines of its own",
        "reports/brief.py": "texts of a report that terminal.py has masked",
        "reports/wrapping.py": "lines of its callers",
    }
    assert prints - masks == left_of(own)
