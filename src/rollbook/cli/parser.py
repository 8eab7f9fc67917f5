"""The commands of `rollbook`, their arguments, exit status and shell completion.

Invariant: a command's module is loaded when the command runs, never to print help. An error of a book or a file is one
line on standard error and status 2, never a traceback. Completion scripts list what the parser defines and run without
starting Python.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from rollbook.core import __version__
from rollbook.core.errors import explain_missing
from rollbook.core.terminal import COLOR_MODES, OK, UNREADABLE, print_json, printable, set_color_mode, wrapped

BOOK = "a book: its folder or postgresql://..."
RUN = "a book, the folder of a run, or saved rollouts of this or another tool"
_TOKENIZER = "folder of a tokenizer, for books without one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Command line without the program name; by default `sys.argv[1:]`.

    Returns:
        The exit status: 0 for success, 1 for findings, 2 for an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     main(["ls", folder])
    no runs or books here
    0
    """
    arguments = _join_negative_values(sys.argv[1:] if arguments is None else list(arguments))
    if not arguments:
        build_parser().print_help()
        return OK
    options = build_parser().parse_args(arguments)
    set_color_mode(options.color)
    module, _, name = options.run.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _print_error(options, f"warning: {message}")
            status: int = getattr(importlib.import_module(f"rollbook.cli.{module}"), name)(options)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; without this, Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        return 128 + int(number)
    except (ValueError, OSError, KeyError, ImportError, OverflowError, sqlite3.Error) as error:
        if isinstance(error, ModuleNotFoundError):
            error = explain_missing("this command", error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            text = f"{os.fsdecode(error.filename)}: {error.strerror[0].lower()}{error.strerror[1:]}"
        else:
            text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        _print_error(options, text)
        return UNREADABLE
    return status


def _redact_arguments(text: str, arguments: Iterable[Any]) -> str:
    """Remove passwords of addresses in the arguments from an error message."""
    from pathlib import Path

    from rollbook.core.addresses import redacted

    for argument in arguments:
        for address in argument if isinstance(argument, list) else [argument]:
            if isinstance(address, str) and address:
                for spelling in (address, str(Path(address))):
                    text = text.replace(spelling, redacted(spelling))
    return text


def _print_error(options: argparse.Namespace, text: str) -> None:
    """Print one line on standard error, wrapped on a terminal."""
    command, text = options.command, _redact_arguments(text, vars(options).values())
    text = f"rollbook {command}: {_escape_lines(text.removeprefix(f'{command}: '))}"
    if sys.stderr.isatty():
        limit = max(40, shutil.get_terminal_size().columns)
        text = "\n".join(wrapped(line, 2, limit=limit) for line in text.split("\n"))
    print(text, file=sys.stderr)


def _join_negative_values(arguments: list[str]) -> list[str]:
    """Turn `--sort -reward` into `--sort=-reward`: argparse takes a value with a minus for an option."""
    joined: list[str] = []
    for argument in arguments:
        if (
            joined
            and joined[-1] in ("--sort", "--tokens")
            and argument.startswith("-")
            and not argument.startswith("--")
        ):
            joined[-1] = f"{joined[-1]}={argument}"
        else:
            joined.append(argument)
    return joined


def _escape_lines(text: str) -> str:
    return "\n  ".join(printable(line) for line in text.splitlines())


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the closest name for an unknown command or option."""

    def error(self, message: str) -> NoReturn:
        quoted = message.split("'")
        if message.startswith("argument COMMAND: invalid choice") and len(quoted) > 1:
            import difflib

            suggestions = difflib.get_close_matches(quoted[1], COMMANDS, 1)
            message = f"unknown command {quoted[1]!r}{f'; did you mean {suggestions[0]!r}?' if suggestions else '.'}"
            message += f" Commands: {', '.join(COMMANDS)}"
        elif message.startswith("unrecognized arguments: -"):
            import difflib

            option = message.split(": ", 1)[1].split()[0].split("=")[0]
            options = [name for action in self._actions for name in action.option_strings]
            suggestions = difflib.get_close_matches(option, options, 1)
            message += f"; did you mean {suggestions[0]}?" if suggestions else ""
        super().error(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, rest = super().parse_known_args(args, namespace)
        if hasattr(options, "changes"):
            # argparse collects only the overrides before the first option.
            options.changes += [word for word in rest if "=" in word and not word.startswith("-")]
            rest = [word for word in rest if word not in options.changes]
        if rest and self.prog != "rollbook" and any(word.startswith("--") for word in rest):
            self.error(f"unrecognized arguments: {' '.join(word for word in rest if word.startswith('-'))}")
        return options, rest


def _int_between(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a parser for integers from `low` to `high` (by default the largest integer a ledger can store)."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            span = f">= {low}" if number < low and high == 2**63 - 1 else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer {span}")
        return number

    return parse


def _seconds(text: str) -> float:
    """Parse a duration from 0.1 s to a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds from 0.1 to 86400")
    return seconds


COMMANDS: dict[str, str] = {
    "train": "Train a model with reinforcement learning or on reference answers; without CONFIG, run a demo.",
    "rollout": "Generate rollouts for a trainer on another machine or process, which uses the same book.",
    "eval": "Evaluate a model on the held-out prompts of a configuration, or of a run and its last checkpoint.",
    "replay": "Recompute a step of a run from its book and checkpoints, and compare; exit status 1 if it differs.",
    "ls": "List the contents of a run or book, or the runs in a folder.",
    "show": "Show a run, a step, a group or a trajectory with colored tokens.",
    "view": "Open the web viewer on a run.",
    "top": "Live dashboard of a book: rates, queue depth, staleness, drops.",
    "doctor": "Check a run for common RL failure modes; exit status 1: findings of severity medium or high.",
    "diff": "Compare two step ranges, two runs or two trajectories: distributions, phrases, solved prompts.",
    "sql": "Run a SQL query over training, evaluations, metrics, events, queue, leases ...",
    "history": "Show the history of a record.",
    "export": "Export records to a file or folder, or as an HTML page.",
    "import": "Import records from a file or folder into a book; create the book if needed.",
    "check": "Check the integrity of a book; exit status 0: ok, 1: problems, 2: unreadable.",
    "compact": "Remove unused data of a book and merge small segments.",
    "completion": "Print a shell completion script.",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog="rollbook",
        description="Train with RL, inspect runs, check them for failure modes, and move records in and out.",
        epilog="PATH is the folder of a book or postgresql://user@host/database; commands that only read also take "
        "rollouts saved by another tool. `rollbook COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"rollbook {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: str, *, path: str | None = BOOK) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=COMMANDS[name], description=COMMANDS[name])
        if path is not None:
            subparser.add_argument("path", metavar="PATH", help=path)
        subparser.add_argument("--json", action="store_true", help="print JSON")
        subparser.add_argument(
            "--color", choices=COLOR_MODES, default="auto", help="when to use colors (auto: on a terminal)"
        )
        subparser.set_defaults(run=run)
        return subparser

    train = command("train", "train:train", path=None)
    train.add_argument("config", metavar="CONFIG", nargs="?", help="YAML or TOML file, or name of a recipe (letters)")
    train.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. steps=50 optimizer.lr=1e-5")
    train.add_argument("--out", metavar="FOLDER", help="folder of the run (default: runs/NAME)")
    train.add_argument("--seed", metavar="N", type=_int_between(0), help="random seed")
    train.add_argument("--steps", metavar="N", type=_int_between(0), help="total number of steps")
    train.add_argument(
        "--ranks", metavar="N", type=_int_between(1), help="processes on this machine; see `distributed`"
    )
    train.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="",
        help="train on a Ray cluster: at ADDRESS, or `local` for a new one on this machine; see `rollout`",
    )
    train.add_argument("--overwrite", action="store_true", help="start over if the folder has a run")
    train.add_argument("--show-config", action="store_true", help="print the full configuration and exit")
    train.add_argument("--recipes", action="store_true", help="list the built-in recipes")

    rollout = command("rollout", "train:rollout", path=None)
    rollout.add_argument("--book", metavar="URL", required=True, help="the trainer's book")
    rollout.add_argument("--engine", metavar="KIND", help="transformers, vllm, or the URL of a vLLM server")
    rollout.add_argument("--prompts", metavar="PATH", help="this machine's copy of the prompts")
    rollout.add_argument("--name", help="name of the worker (default: host and process)")
    rollout.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # process with which the worker ends
    rollout.add_argument("--trust", action="store_true", help="run the code that the trainer's config names")
    rollout.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. device=cuda:1")

    evaluate = command("eval", "train:evaluate", path=None)
    evaluate.add_argument("config", metavar="CONFIG", help="YAML or TOML file, name of a recipe, or folder of a run")
    evaluate.add_argument(
        "changes", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. evaluation.k=8 evaluation.greedy=true"
    )
    evaluate.add_argument("--model", metavar="PATH", help="folder or hub name of the weights to evaluate")
    evaluate.add_argument("--trust", action="store_true", help="run the code that the run's config names")

    replay = command("replay", "train:replay", path="folder of a run")
    replay.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. algorithm.estimator=rloo")
    replay.add_argument("--step", metavar="N", type=_int_between(1), required=True, help="step to recompute")
    replay.add_argument("--trust", action="store_true", help="run the code that the run's config names")

    ls = command("ls", "query:ls", path="a run, a book, a folder of runs, or saved rollouts")
    ls.add_argument("--where", metavar="FILTER", help='list matching samples, e.g. "reward < 0.2 and truncated"')
    ls.add_argument("--sort", metavar="COLUMNS", help="list samples in this order, e.g. -reward,length")
    ls.add_argument("--limit", metavar="N", type=_int_between(1), help="number of samples to list (default: 50)")

    show = command("show", "show:show", path=RUN)
    show.add_argument("id", metavar="ID", nargs="?", help="a uid or its prefix (42/1089/6), or a group (42/1089)")
    show.add_argument("--step", metavar="N", type=_int_between(0), help="show a step: its groups and their rewards")
    show.add_argument("--lens", "-l", metavar="NAME", help="color tokens by entropy, logprob, kl, ... or off")
    show.add_argument("--raw", action="store_true", help="print all tokens as one text")
    show.add_argument("--tokens", metavar="A:B", help="list these tokens, one per line, with their values")
    show.add_argument("--tokenizer", metavar="PATH", help=_TOKENIZER)

    view = command("view", "show:view", path=RUN)
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    view.add_argument("--port", type=_int_between(0, 65535), default=None, help="port (default: 8420, or a free one)")
    view.add_argument("--socket", metavar="PATH", help="listen on a Unix socket instead")
    view.add_argument(
        "--token", help="access token (default: random); set ROLLBOOK_TOKEN instead to hide it from other users"
    )
    view.add_argument("--open", action="store_true", help="open a browser")
    view.add_argument("--tokenizer", metavar="PATH", help=_TOKENIZER)
    view.add_argument("--trusted-host", metavar="HOST", action="append", default=[], help="also accept this host name")
    view.add_argument("--annotate", action="store_true", help="save stars and notes next to the data")
    view.add_argument(
        "--unsafe-allow-unauthenticated", action="store_true", help="serve without a token to anyone who can connect"
    )

    top = command("top", "top:top", path="a book or the folder of a run: any address that rollbook.open takes")
    top.add_argument(
        "--interval", metavar="SECONDS", type=_seconds, default=2.0, help="seconds between updates (default: 2)"
    )
    top.add_argument(
        "--window", metavar="SECONDS", type=_seconds, default=10.0, help="average rates over this time (default: 10)"
    )
    top.add_argument("--once", action="store_true", help="print once and exit, as if the output is not a terminal")

    doctor = command("doctor", "show:doctor", path=None)
    doctor.add_argument("path", metavar="PATH", nargs="?", help=RUN)
    doctor.add_argument("--steps", metavar="A-B", help="check only these steps")
    doctor.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="change a threshold")
    doctor.add_argument("--verbose", action="store_true", help="also list passed checks")
    doctor.add_argument("--thresholds", action="store_true", help="print every threshold and its meaning")
    doctor.add_argument("--evaluation", action="store_true", help="check evaluation records instead of training ones")
    doctor.add_argument(
        "--fail-on",
        choices=("low", "medium", "high", "never"),
        default="medium",
        help="lowest severity for exit status 1 (default: medium)",
    )

    diff = command("diff", "diff:diff", path=RUN)
    diff.add_argument("other", metavar="OTHER", nargs="?", help="another run (default: compare --a and --b of one run)")
    diff.add_argument("--a", metavar="STEPS", help="steps of A: 7 or 3-9 (default: the first quarter)")
    diff.add_argument("--b", metavar="STEPS", help="steps of B (default: the last quarter)")
    diff.add_argument(
        "--texts",
        metavar="N",
        type=_int_between(0),
        default=400,
        help="responses per side for phrase counts (default: 400)",
    )
    diff.add_argument("--solved", type=float, help="minimum reward of a solved sample")
    diff.add_argument(
        "--limit", metavar="N", type=_int_between(0), default=15, help="phrases and prompts to list (default: 15)"
    )
    diff.add_argument("--words", metavar="ID", nargs=2, help="compare two trajectories word by word")

    sql = command("sql", "query:sql")
    sql.add_argument("query", metavar="QUERY", help='e.g. "select train_step, avg(reward) from training group by 1"')
    sql.add_argument("--seconds", type=float, default=60.0, help="time limit (default: 60)")
    sql.add_argument("--memory", default="1GB", help="memory limit (default: 1GB)")

    history = command("history", "query:history")
    history.add_argument("uid", metavar="UID", help="id of the record, or a unique prefix of it")

    export = command("export", "book:export", path="a book; for HTML also saved rollouts")
    export.add_argument(
        "out", metavar="OUT", help="output; the suffix gives the format: .parquet, .jsonl, .frames, .trxp, .hf, .html"
    )
    export.add_argument("--format", help="format, if the name of OUT does not give it")
    export.add_argument("--evaluation", action="store_true", help="export evaluation records instead of training ones")
    export.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    page = export.add_argument_group("HTML page")
    page.add_argument("--id", metavar="ID", action="append", default=[], help="a trajectory or a group; repeatable")
    page.add_argument("--where", metavar="FILTER", help="samples that match a filter")
    page.add_argument("--redact", metavar="REGEX", action="append", default=[], help="black out matches; repeatable")
    page.add_argument("--no-images", action="store_true", help="leave images out")
    page.add_argument("--max-mb", type=float, help="maximum file size; larger exports fail")
    page.add_argument("--title", help="title of the page")
    page.add_argument("--theme", choices=("auto", "light", "dark"), default="auto", help="colors of the page")
    page.add_argument("--tokenizer", metavar="PATH", help=_TOKENIZER)

    import_ = command("import", "book:import_")
    import_.add_argument("source", metavar="IN", help="Parquet, JSONL, HF dataset, frames, TRXP, Trinity's SQLite ...")
    import_.add_argument("--format", help="format, if it cannot be detected")
    import_.add_argument("--evaluation", action="store_true", help="import as evaluation records, never trained on")
    import_.add_argument("--skip", action="store_true", help="skip rows that cannot be read")
    import_.add_argument("--table", help="table of a Trinity database that has several")
    import_.add_argument("--tokenizer", metavar="PATH", help="for rollouts without token ids (verl, TRL, OpenRLHF)")

    check = command("check", "book:check")
    check.add_argument("--repair", action="store_true", help="repair the book; keep a copy of changed files")
    check.add_argument(
        "--offer", action="store_true", help="with --repair: make records without history available for training"
    )
    check.add_argument("--quick", action="store_true", help="skip reading all data")

    command("compact", "book:compact")

    completion = command("completion", "parser:completion", path=None)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


# --- completion -----------------------------------------------------------------------------------------------------


def completion(options: argparse.Namespace) -> int:
    """Print the completion script of a shell. `eval "$(rollbook completion bash)"` loads it."""
    commands = dict(_list_options(build_parser()))
    text = {"bash": _bash_script, "zsh": _zsh_script, "fish": _fish_script}[options.shell](commands)
    if options.json:
        print_json({"shell": options.shell, "script": text})
    else:
        print(text)
    return OK


def _list_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, tuple[str, tuple[str, ...]]]]]:
    """Yield each command with its options: their help, and their choices if they have any."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield (
                    name,
                    {
                        option: (argument.help or "", tuple(map(str, argument.choices or ())))
                        for argument in subparser._actions
                        for option in argument.option_strings or tuple(argument.choices or ())
                        if option.startswith("--") or not argument.option_strings
                    },
                )


_CommandOptions = dict[str, dict[str, tuple[str, tuple[str, ...]]]]


def _bash_script(commands: _CommandOptions) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(options)}" ;;' for name, options in commands.items())
    with_choices = {
        (option, choices)
        for options in commands.values()
        for option, (_, choices) in options.items()
        if choices and option.startswith("--")
    }
    values = "\n".join(
        f'        {option}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word")); return ;;'
        for option, choices in sorted(with_choices)
    )
    return f"""_rollbook() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$word"))
        return
    fi
    case "$before" in
{values}
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ "$word" == -* || "${{COMP_WORDS[1]}}" == completion ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
        compopt -o filenames 2>/dev/null
    fi
}}
complete -F _rollbook rollbook"""


def _zsh_script(commands: _CommandOptions) -> str:
    entries = "\n".join(f"        '{name}:{_strip_special(COMMANDS[name])}'" for name in commands)
    values = {
        name: " ".join(_zsh_value(option, text) for option, (text, _) in options.items())
        for name, options in commands.items()
    }
    cases = "\n".join(f"        {name}) _values -w 'option' {words} ;;" for name, words in values.items())
    return f"""#compdef rollbook
_rollbook() {{
    local -a commands
    commands=(
{entries}
    )
    if (( CURRENT == 2 )); then
        _describe 'command' commands
        return
    fi
    if [[ "$words[CURRENT]" != -* && "$words[2]" != completion ]]; then
        _files
        return
    fi
    case "$words[2]" in
{cases}
    esac
}}
compdef _rollbook rollbook"""


def _zsh_value(option: str, text: str) -> str:
    return f"'{option}[{_strip_special(text)}]'"


def _strip_special(text: str) -> str:
    """Replace the characters that are special in a description for zsh; fish, with fewer, takes the same text."""
    return text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", ",")


def _fish_script(commands: _CommandOptions) -> str:
    lines = ["complete -c rollbook -n __fish_use_subcommand -f"]
    lines += [
        f"complete -c rollbook -n __fish_use_subcommand -a {name} -d '{_strip_special(COMMANDS[name])}'"
        for name in commands
    ]
    for name, options in commands.items():
        for option, (text, choices) in options.items():
            seen = f"complete -c rollbook -n '__fish_seen_subcommand_from {name}'"
            if option.startswith("--"):
                words = f" -x -a '{' '.join(choices)}'" if choices else ""
                lines.append(f"{seen} -l {option.removeprefix('--')}{words} -d '{_strip_special(text)}'")
            else:
                lines.append(f"{seen} -f -a {option}")
    return "\n".join(lines)
