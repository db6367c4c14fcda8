"""Writes docs/reference/ from the code: every command's help, every public name's docstring.

python docs/make_reference.py
"""

import ast
import copy
import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- made by docs/make_reference.py; edit the code instead -->\n\n"


def commands() -> str:
    """Every command: what it says under --help."""
    from distcheck.cli import root_command
    from distcheck.cli.commands import COMMANDS

    context = click.Context(root_command, info_name="distcheck", **root_command.context_settings)
    lines = [MADE, "# Commands\n\nEvery command, with the text of its `--help`.\n"]
    for name in COMMANDS:
        command = root_command.get_command(context, name)
        assert command is not None, name
        own = click.Context(command, parent=context, info_name=name, max_content_width=100)
        text = _with_anchors(name, command.get_help(own).rstrip())
        lines.append(f"\n## distcheck {name}\n\n<pre><code>{text}\n</code></pre>\n")
    return "".join(lines)


def _with_anchors(command: str, text: str) -> str:
    """A command's help as HTML, in which `verify--world` is where the option --world is."""
    usage, heading, options = re.split(r"^(?=\w.*:$)()", text, maxsplit=1, flags=re.MULTILINE)
    options = re.sub(
        r"^(  (?:-\w, )?)--([\w-]+)",
        lambda found: f'{found[1]}<a id="{command}--{found[2]}">--{found[2]}</a>',
        html.escape(options, quote=False),
        flags=re.MULTILINE,
    )
    return html.escape(usage, quote=False) + heading + options


def settings() -> str:
    """Every setting of a verification: its names, what it takes, and what it is by default."""
    from distcheck.plan.settings import DEFAULTS, SETTINGS

    lines = [
        MADE,
        "# Settings of a verification\n\n"
        "Each is an option of `distcheck verify`, a key of `[tool.distcheck]`, and a parameter of "
        "`distcheck.verify(...)`.\n\n"
        "| option | key | Python | a key takes | default | what it does |\n"
        "|---|---|---|---|---|---|\n",
    ]
    for name, one in SETTINGS.items():
        default = one.default or f"`{DEFAULTS[name]!r}`"
        anchor = one.option.strip("-")
        option = f'<a id="{anchor}"></a>[`{one.option}`](commands.md#verify--{anchor})'
        cells = (option, f"`{one.key}`", f"`{one.parameter}`", one.takes, default, one.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def python() -> str:
    """The public names of Python, by module."""
    import distcheck
    import distcheck.contract
    import distcheck.integrations
    import distcheck.testing

    lines = [MADE, "# Python\n\nThe public names of `distcheck` in Python, by module.\n"]
    lines += _section("distcheck", [(n, getattr(distcheck, n)) for n in distcheck.__all__])
    contract = distcheck.contract
    promises = [n for n in vars(contract) if _is_public(contract, n) and n not in distcheck.__all__]
    lines += _section("distcheck.contract", [(n, getattr(contract, n)) for n in promises])
    text = inspect.getdoc(distcheck.integrations)
    lines.append(f"\n## distcheck.integrations\n\n```text\n{text}\n```\n")
    testing = distcheck.testing
    lines += _section("distcheck.testing", [(n, getattr(testing, n)) for n in testing.__all__])
    return "".join(lines)


def _is_public(module: Any, name: str) -> bool:
    own = getattr(vars(module)[name], "__module__", None) == module.__name__
    return own and not name.startswith("_") and inspect.getdoc(vars(module)[name]) is not None


def _section(module: str, names: list[tuple[str, Any]]) -> Iterator[str]:
    yield f"\n## {module}\n"
    for name, thing in sorted(names):
        if not callable(thing):
            continue
        tree = ast.parse(inspect.getsource(thing)).body[0]
        if isinstance(tree, ast.FunctionDef):
            yield f"\n### {name}\n{_block(_signature(tree), ast.get_docstring(tree))}"
        elif isinstance(tree, ast.ClassDef):
            yield f"\n### {name}\n{_block(_fields(tree), ast.get_docstring(tree))}"
            for method in tree.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield _block(_signature(method, tree.name), ast.get_docstring(method))


def _block(code: str, text: str | None) -> str:
    return f"\n```text\n{code}\n```\n\n```text\n{text or ''}\n```\n"


def _signature(function: ast.FunctionDef, owner: str = "") -> str:
    """As it is written, whatever the version of Python that reads it."""
    one = copy.copy(function.args)
    if owner:
        one.args = one.args[1:]  # self
    is_property = any(ast.unparse(d).endswith("property") for d in function.decorator_list)
    name = f"{owner}.{function.name}" if owner else function.name
    returns = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    return f"{name}{returns}" if is_property else f"{name}({ast.unparse(one)}){returns}"


def _fields(tree: ast.ClassDef) -> str:
    fields = [ast.unparse(node) for node in tree.body if isinstance(node, ast.AnnAssign)]
    return "\n".join([f"class {tree.name}:", *(f"    {field}" for field in fields or ["..."])])


PAGES = {"commands.md": commands, "settings.md": settings, "python.md": python}


def main() -> None:
    """Writes all pages, to another folder where one is given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make())


if __name__ == "__main__":
    main()
