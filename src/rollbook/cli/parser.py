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
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rollbook.core import __version__
from rollbook.core.errors import explain_missing
from rollbook.core.terminal import OK, UNREADABLE, WHEN, print_json, printable, use_colour, wrapped

BOOK = "a book: its folder, or postgresql://..."
RUN = "a book, a run folder, or rollouts that this or another tool saved"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 well, 1 something was found, 2 it could not be done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     main(["ls", folder])
    no runs or books here
    0
    """
    words = _joined(sys.argv[1:] if arguments is None else list(arguments))
    if not words:
        build().print_help()
        return OK
    options = build().parse_args(words)
    use_colour(options.color)
    module, _, name = options.run.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(options, f"warning: {message}")
            status: int = getattr(importlib.import_module(f"rollbook.cli.{module}"), name)(options)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has enough; Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, KeyError, ImportError, OverflowError, sqlite3.Error) as error:
        if isinstance(error, ModuleNotFoundError):
            error = explain_missing("this command", error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            text = f"{os.fsdecode(error.filename)}: {error.strerror[0].lower()}{error.strerror[1:]}"
        else:
            text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        _say(options, text)
        return UNREADABLE
    return status


def _without_secrets(text: str, arguments: Iterable[Any]) -> str:
    """An error's text, where arguments that are addresses are shown without their secrets."""
    from pathlib import Path

    from rollbook.core.addresses import redacted

    for argument in arguments:
        for address in argument if isinstance(argument, list) else [argument]:
            if isinstance(address, str) and address:
                for shown in (address, str(Path(address))):
                    text = text.replace(shown, redacted(shown))
    return text


def _say(options: argparse.Namespace, text: str) -> None:
    """Print one line on the standard error, broken at words where that is a terminal."""
    command, text = options.command, _without_secrets(text, vars(options).values())
    text = f"rollbook {command}: {_one_line(text.removeprefix(f'{command}: '))}"
    if sys.stderr.isatty():
        limit = max(40, shutil.get_terminal_size().columns)
        text = "\n".join(wrapped(line, 2, limit=limit) for line in text.split("\n"))
    print(text, file=sys.stderr)


def _joined(arguments: list[str]) -> list[str]:
    """`--sort -reward` as `--sort=-reward`: a value that begins with a minus would be taken for an option."""
    made: list[str] = []
    for each in arguments:
        if made and made[-1] in ("--sort", "--tokens") and each.startswith("-") and not each.startswith("--"):
            made[-1] = f"{made[-1]}={each}"
        else:
            made.append(each)
    return made


def _one_line(text: str) -> str:
    return "\n  ".join(printable(line) for line in text.splitlines())


class _Parser(argparse.ArgumentParser):
    """Says the nearest name of a command or an option that does not exist."""

    def error(self, message: str) -> Any:
        words = message.split("'")
        if message.startswith("argument COMMAND: invalid choice") and len(words) > 1:
            import difflib

            near = difflib.get_close_matches(words[1], COMMANDS, 1)
            message = f"{words[1]!r} is no command{f'; did you mean {near[0]!r}?' if near else '.'}"
            message += f" There are: {', '.join(COMMANDS)}"
        elif message.startswith("unrecognized arguments: -"):
            import difflib

            given = message.split(": ", 1)[1].split()[0].split("=")[0]
            known = [each for action in self._actions for each in action.option_strings]
            near = difflib.get_close_matches(given, known, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if hasattr(found, "changes"):
            # argparse takes those before an option alone.
            found.changes += [each for each in rest if "=" in each and not each.startswith("-")]
            rest = [each for each in rest if each not in found.changes]
        if rest and self.prog != "rollbook" and any(each.startswith("--") for each in rest):
            self.error(f"unrecognized arguments: {' '.join(each for each in rest if each.startswith('-'))}")
        return found, rest


def _whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """What makes a whole number of an option's text, from `least` to `most`: what a ledger can hold."""

    def made(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            span = f"from {least} on" if found < least and most == 2**63 - 1 else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number {span}")
        return found

    return made


COMMANDS: dict[str, str] = {
    "train": "Train a model by reinforcement, or from given answers; without CONFIG, a demonstration.",
    "eval": "Evaluate a model on the held-out prompts of a configuration, or of a run and its last checkpoint.",
    "replay": "Compute a step of a run again from its book and checkpoints, and compare; status 1: it differs.",
    "ls": "List what a run or a book holds, or the runs in a folder.",
    "show": "Show a run, a step, a group or one trajectory, its tokens coloured.",
    "view": "Open the web viewer on a run.",
    "doctor": "Say what is wrong with a run, and what to do; status 0: nothing, 1: something, 2: unreadable.",
    "diff": "Compare two spans of steps, or two runs: distributions, phrases, prompts solved and broken.",
    "sql": "Run a SQL query over training, evaluations, metrics, events, work, leases ...",
    "history": "Tell everything that happened to one record.",
    "export": "Write records to a file or folder, or as one HTML page.",
    "import": "Bring the records of a file or folder into a book, which is made if it is new.",
    "check": "Check everything a book promises; status 0: all is well, 1: not, 2: unreadable.",
    "compact": "Remove bytes that nobody needs, and merge small segments.",
    "completion": "Print the completion script of a shell.",
}


def build() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="rollbook",
        description="Train on experience, look at it, find what is wrong with it, and move records in and out.",
        epilog="A PATH is the folder of a book, postgresql://user@host/database for one on a server, or, to look at, "
        "rollouts that another tool saved. `rollbook COMMAND --help` says more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"rollbook {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: str, *, path: str | None = BOOK) -> Any:
        made = commands.add_parser(name, help=COMMANDS[name], description=COMMANDS[name])
        if path is not None:
            made.add_argument("path", metavar="PATH", help=path)
        made.add_argument("--json", action="store_true", help="print JSON")
        made.add_argument("--color", choices=WHEN, default="auto", help="colours: auto (on a terminal), always, never")
        made.set_defaults(run=run)
        return made

    made = command("train", "train:train", path=None)
    made.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML or TOML file, or a recipe's name (letters)")
    made.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="such as steps=50 or optimizer.lr=1e-5")
    made.add_argument("--out", metavar="FOLDER", help="the run's folder (runs/NAME)")
    made.add_argument("--seed", metavar="N", type=_whole(0), help="what every random choice is made from")
    made.add_argument("--steps", metavar="N", type=_whole(0), help="how many steps, all in all")
    made.add_argument("--overwrite", action="store_true", help="begin anew if the folder has a run")
    made.add_argument("--show-config", action="store_true", help="print the whole configuration, and train nothing")
    made.add_argument("--recipes", action="store_true", help="list the recipes that come with the package")

    made = command("eval", "train:evaluate", path=None)
    made.add_argument("config", metavar="CONFIG", help="a YAML or TOML file, a recipe's name, or a run's folder")
    made.add_argument(
        "changes", metavar="KEY=VALUE", nargs="*", help="such as evaluation.k=8 or evaluation.greedy=true"
    )
    made.add_argument(
        "--model", metavar="PATH", help="a folder or hub name of weights, in place of the configuration's"
    )
    made.add_argument("--trust", action="store_true", help="run the code that a run's config names")

    made = command("replay", "train:replay", path="a run's folder")
    made.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="another choice: algorithm.estimator=rloo, ...")
    made.add_argument("--step", metavar="N", type=_whole(1), required=True, help="the step to compute again")
    made.add_argument("--trust", action="store_true", help="run the code that the run's config names")

    made = command("ls", "query:ls", path="a run, a book, a folder of runs, or saved rollouts")
    made.add_argument("--where", metavar="FILTER", help='list samples: such as "reward < 0.2 and truncated"')
    made.add_argument("--sort", metavar="COLUMNS", help="list samples in this order: such as -reward,length")
    made.add_argument("--limit", metavar="N", type=_whole(1), help="list so many samples (50)")

    made = command("show", "show:show", path=RUN)
    made.add_argument("what", metavar="ID", nargs="?", help="a uid or its beginning (42/1089/6), a group (42/1089)")
    made.add_argument("--step", metavar="N", type=_whole(0), help="show a step: its groups and their rewards")
    made.add_argument("--lens", "-l", metavar="NAME", help="what colours the tokens: entropy, logprob, kl, ... or off")
    made.add_argument("--raw", action="store_true", help="all tokens as the trainer saw them, in one piece")
    made.add_argument("--tokens", metavar="A:B", help="these tokens only, one a line with every number")
    made.add_argument("--tokenizer", metavar="PATH", help="a tokenizer's folder, for books that keep none")

    made = command("view", "view:view", path=RUN)
    made.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    made.add_argument("--port", type=_whole(0, 65535), default=None, help="the port (8420, or a free one)")
    made.add_argument("--socket", metavar="PATH", help="listen on a Unix socket instead")
    made.add_argument(
        "--token", help="the secret of the address; a random one if not given (others cannot see it in ROLLBOOK_TOKEN)"
    )
    made.add_argument("--open", action="store_true", help="open a browser")
    made.add_argument("--tokenizer", metavar="PATH", help="a tokenizer's folder, for books that keep none")
    made.add_argument("--trusted-host", metavar="HOST", action="append", default=[], help="a further name to answer to")
    made.add_argument("--annotate", action="store_true", help="let pages write stars and notes into the book")
    made.add_argument(
        "--unsafe-allow-unauthenticated", action="store_true", help="ask nobody for the secret: anyone who can connect"
    )

    made = command("doctor", "view:doctor", path=RUN)
    made.add_argument("--steps", metavar="A-B", help="only these steps")
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="another threshold")
    made.add_argument("--verbose", action="store_true", help="say what is well, too")
    made.add_argument("--thresholds", action="store_true", help="print every threshold and what it means")
    made.add_argument("--evaluation", action="store_true", help="the records for evaluation, instead of the others")
    made.add_argument(
        "--fail-on",
        choices=("low", "medium", "high", "never"),
        default="medium",
        help="status 1 from this severity on (medium)",
    )

    made = command("diff", "diff:diff", path=RUN)
    made.add_argument("other", metavar="OTHER", nargs="?", help="another run; without it, --a and --b of one run")
    made.add_argument("--a", metavar="STEPS", help="steps of the first side: 7 or 3-9 (the first quarter)")
    made.add_argument("--b", metavar="STEPS", help="steps of the second side (the last quarter)")
    made.add_argument(
        "--texts", metavar="N", type=_whole(0), default=400, help="count phrases in so many responses a side (400)"
    )
    made.add_argument("--solved", type=float, help="the reward from which a sample counts as solved")
    made.add_argument("--limit", metavar="N", type=_whole(0), default=15, help="so many phrases and prompts (15)")
    made.add_argument("--words", metavar="ID", nargs=2, help="compare two trajectories word by word instead")

    made = command("sql", "query:sql")
    made.add_argument(
        "query", metavar="QUERY", help='such as "select train_step, avg(reward) from training group by 1"'
    )
    made.add_argument("--seconds", type=float, default=60.0, help="how long it may take (60)")
    made.add_argument("--memory", default="1GB", help="how much memory it may take (1GB)")

    made = command("history", "query:history")
    made.add_argument("uid", metavar="UID", help="the record's id, or its beginning if no other has it")

    made = command("export", "book:export", path="a book; for HTML also saved rollouts")
    made.add_argument(
        "out", metavar="OUT", help="its name says the format: .parquet, .jsonl, .frames, .trxp, .hf, .html"
    )
    made.add_argument("--format", help="the format, if the name does not say it")
    made.add_argument("--evaluation", action="store_true", help="the records for evaluation, instead of the others")
    made.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    page = made.add_argument_group("an HTML page")
    page.add_argument(
        "--id", metavar="ID", action="append", default=[], help="a trajectory or a group; may be repeated"
    )
    page.add_argument("--where", metavar="FILTER", help="the samples that meet a condition")
    page.add_argument("--redact", metavar="REGEX", action="append", default=[], help="black out what matches")
    page.add_argument("--no-images", action="store_true", help="leave pictures out")
    page.add_argument("--max-mb", type=float, help="refuse to write a larger file")
    page.add_argument("--title", help="the page's title")
    page.add_argument("--theme", choices=("auto", "light", "dark"), default="auto")
    page.add_argument("--tokenizer", metavar="PATH", help="a tokenizer's folder, for books that keep none")

    made = command("import", "book:import_")
    made.add_argument("source", metavar="IN", help="Parquet, JSONL, a HF dataset, frames, TRXP, Trinity's SQLite ...")
    made.add_argument("--format", help="the format, if it cannot be guessed")
    made.add_argument("--evaluation", action="store_true", help="for evaluation: kept beside, never trained on")
    made.add_argument("--skip", action="store_true", help="leave out rows that cannot be read")
    made.add_argument("--table", help="of a Trinity database that has several")
    made.add_argument("--tokenizer", metavar="PATH", help="for rollouts that are text alone (verl, TRL, OpenRLHF)")

    made = command("check", "book:check")
    made.add_argument("--repair", action="store_true", help="mend what can be mended; what is changed is kept aside")
    made.add_argument(
        "--offer", action="store_true", help="with --repair: offer records for training whose history was lost"
    )
    made.add_argument("--quick", action="store_true", help="do not look at every byte of the data")

    command("compact", "book:compact")

    made = command("completion", "parser:completion", path=None)
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def completion(options: argparse.Namespace) -> int:
    """Print the script of a shell; `eval "$(rollbook completion bash)"` loads it."""

    commands = dict(_commands(build()))
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](commands)
    if options.json:
        print_json({"shell": options.shell, "script": text})
    else:
        print(text)
    return OK


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, tuple[str, tuple[str, ...]]]]]:
    """Of each command its options: what each is for, and the words it takes, if they are fixed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, made in action.choices.items():
                yield (
                    name,
                    {
                        option: (each.help or "", tuple(map(str, each.choices or ())))
                        for each in made._actions
                        for option in each.option_strings or tuple(each.choices or ())
                        if option.startswith("--") or not each.option_strings
                    },
                )


_Commands = dict[str, dict[str, tuple[str, tuple[str, ...]]]]


def _bash(commands: _Commands) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(options)}" ;;' for name, options in commands.items())
    fixed = {
        (option, choices)
        for options in commands.values()
        for option, (_, choices) in options.items()
        if choices and option.startswith("--")
    }
    values = "\n".join(
        f'        {option}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word")); return ;;'
        for option, choices in sorted(fixed)
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


def _zsh(commands: _Commands) -> str:

    listed = "\n".join(f"        '{name}:{_quoted(COMMANDS[name])}'" for name in commands)
    cases = "\n".join(
        f"        {name}) _values -w 'option' {' '.join(_value(option, *told) for option, told in options.items())} ;;"
        for name, options in commands.items()
    )
    return f"""#compdef rollbook
_rollbook() {{
    local -a commands
    commands=(
{listed}
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


def _value(option: str, said: str, choices: tuple[str, ...]) -> str:
    return f"'{option}[{_quoted(said)}]'"


def _quoted(text: str) -> str:
    """Without the characters that mean something to zsh in a description."""
    return text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", ",")


def _fish(commands: _Commands) -> str:

    lines = ["complete -c rollbook -n __fish_use_subcommand -f"]
    lines += [
        f"complete -c rollbook -n __fish_use_subcommand -a {name} -d '{_quoted(COMMANDS[name])}'" for name in commands
    ]
    for name, options in commands.items():
        for option, (said, choices) in options.items():
            seen = f"complete -c rollbook -n '__fish_seen_subcommand_from {name}'"
            if option.startswith("--"):
                words = f" -x -a '{' '.join(choices)}'" if choices else ""
                lines.append(f"{seen} -l {option.removeprefix('--')}{words} -d '{_quoted(said)}'")
            else:
                lines.append(f"{seen} -f -a {option}")
    return "\n".join(lines)
