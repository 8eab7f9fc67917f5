"""`completion`: scripts that let a shell complete commands, options and paths.

Invariant: a script names what the parser names, and nothing is run to complete: it works without starting Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rollbook.core.terminal import OK, print_json


def completion(options: argparse.Namespace) -> int:
    """Print the script of a shell; `eval "$(rollbook completion bash)"` loads it."""
    from rollbook.cli.parser import build

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
    from rollbook.cli.parser import COMMANDS

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
    from rollbook.cli.parser import COMMANDS

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
