"""Base class of all commands: help with grouped options, and errors with suggestions."""

import re
import shlex
import shutil
from collections.abc import Sequence
from typing import Any

import click

from distcheck.errors import most_similar_name
from distcheck.plan.settings import CALLED, JUDGED, RANKS, SETTINGS
from distcheck.worlds.launchers import is_rank_0_elsewhere

# Parameters by the heading of their group in `--help`, in addition to those of `plan/settings.py`;
# a short list of options has a single group.
_GROUPS: dict[str, tuple[str, ...]] = {
    JUDGED: (
        "orders", "vary", "from_step", "reference", "no_reference", "weights", "mesh",
        "resumed_from", "accept", "strict", "modules", "ops", "config", "shard", "last_failed",
        "failed_first",
    ),
    CALLED: (),
    RANKS: (
        "nproc", "on_cpu", "keep_going", "download", "budget", "max_cases", "epochs", "rate",
        "guard", "every", "warn", "audit", "watch", "on",
    ),
    "Several machines, without a launcher": (
        "nnodes", "machine", "master_addr", "master_port", "init_method",
    ),
    "Output": (
        "json_file", "junit_file", "html_file", "sarif_file", "gitlab_file", "github", "save",
        "digests", "log_every", "overlay", "verbose", "quiet",
    ),
}  # fmt: skip
_FEW = 12


class Command(click.Command):
    """Command whose help lists options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups with headings, and all defaults in the same format."""
        records: dict[str, tuple[str, str]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                records[param.name or ""] = (
                    record[0],
                    re.sub(r"\s+\[default", " [default", record[1]),
                )
        help_option = self.get_help_option(ctx)
        asks = "" if help_option is None else help_option.name
        if len(records) <= _FEW:
            with formatter.section("Options"):
                formatter.write_dl(list(records.values()))
            return
        for heading, names in _GROUPS.items():
            of_it = [(name, one) for name, one in SETTINGS.items() if one.heading == heading]
            settings = [word for name, one in of_it for word in (name, one.parameter)]
            last = [asks] if heading == [*_GROUPS][-1] else []
            rows = [records.pop(n) for n in (*settings, *names, *last) if n in records]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if records:
            with formatter.section("Other options"):
                formatter.write_dl(list(records.values()))

    def _check_for_missing_dashes(self, ctx: click.Context, given: Sequence[str]) -> None:
        """Raise UsageError for a missing `--`, if the command of a job seems to begin before it."""
        takes = [p for p in self.get_params(ctx) if isinstance(p, click.Argument) and p.nargs == -1]
        program = next((word for word in given if not word.startswith("-")), "")
        if "--" in given or not takes or shutil.which(program) is None:
            return
        words = shlex.join(given[given.index(program) :])
        raise click.UsageError(f"put -- before the command: {ctx.command_path} -- {words}", ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does. If there is an extra word, the error names the option that
        takes it.
        """
        given = list(args)  # click removes words from it
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            self._check_for_missing_dashes(ctx, given)
            if error.possibilities:
                raise
            said = error.format_message().rstrip(".")
            raise click.UsageError(f"{said}; {ctx.command_path} --help lists them", ctx) from None
        except click.UsageError as error:
            if type(error) is click.UsageError:
                self._explain(ctx, given)
            if type(error) in (click.UsageError, click.MissingParameter):
                usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)]).strip()
                said = error.format_message().rstrip(".")
                raise click.UsageError(f"{said}; write {usage}", ctx) from None
            raise

    def _explain(self, ctx: click.Context, given: list[str]) -> None:
        """Raise a clearer error for words that belong to no option."""
        try:
            _, extra, _ = self.make_parser(ctx).parse_args(list(given))
        except click.UsageError:
            return
        options = {word for param in self.params for word in param.opts}
        spelled = {name: option for option, name in _TAKE_NAMES if option in options}
        word = next((word for word in extra if isinstance(word, str)), "")
        if not word or not spelled or any(isinstance(p, click.Argument) for p in self.params):
            return
        before = given[max(given.index(word) - 2, 0) : given.index(word)]
        repeated = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        if word.isdigit() and before[1:] and before[0] in repeated and before[1].isdigit():
            advice = f"repeat the option: {' '.join(before)} {before[0]} {word}"
        else:
            advice = "pass {} {}".format(*_option_for(word, spelled))
        raise click.UsageError(
            f"unexpected argument {word!r}; {ctx.command_path} takes only options; {advice}", ctx
        )


class OnceCommand(Command):
    """Command that starts no ranks. If a launcher started several processes, rank 0 runs the
    command, and the others return at once.
    """

    def invoke(self, ctx: click.Context) -> Any:
        return 0 if is_rank_0_elsewhere() else super().invoke(ctx)


_TAKE_NAMES = (
    ("--strategy", "strategy"),
    ("--workload", "workload"),
    ("-k", "pattern"),
    ("--backend", "backend"),
)


def _option_for(word: str, spelled: dict[str, str]) -> tuple[str, str]:
    """Return the option that takes an extra word, and the word that was intended. If nothing
    indicates another option, the word is the name or file of a strategy.
    """
    from distcheck import backends
    from distcheck.training import loading

    known: dict[str, Any] = {
        "strategy": loading.strategy_names(),
        "workload": loading.workload_names(),
        "backend": backends.backend_names(),
    }
    if "pattern" in spelled:
        return spelled["pattern"], word
    for name, option in spelled.items():
        if word in known[name]:
            return option, word
    for name, option in spelled.items():
        if found := most_similar_name(word, known[name]):
            return option, found
    name, option = next(iter(spelled.items()))
    return option, word if ":" in word or name != "strategy" else "NAME or FILE.py:OBJECT"
