"""Functions that a configuration names, as `module:function` or `file.py:function`, and which of them are trusted.

Invariant: a file runs once in a process, however often it is named. Errors inside a user's module are raised unchanged.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.core.checks import suggest
from rollbook.core.vocabulary import load_module_file
from rollbook.train.config.schema import Config, RewardSection


def resolve(target: str, *, name: str = "function", folder: str | Path | None = None) -> Any:
    """Import what `module:name` or `file.py:name` names.

    Args:
        target: The name. After the colon it may be dotted: `module:Class.method`.
        name: Name of the option in errors.
        folder: Folder that the path of a file is relative to; `None`: the current one.

    Returns:
        The function, class or other object of that name.

    Raises:
        ValueError: There is no such module, file or attribute.

    >>> resolve("math:gcd")(12, 18)
    6
    >>> resolve("math:gdc")
    Traceback (most recent call last):
        ...
    ValueError: function: got 'math:gdc', but math has no 'gdc'; did you mean 'gcd'?
    >>> resolve("maths:gcd", name="data.function")
    Traceback (most recent call last):
        ...
    ValueError: data.function: got 'maths:gcd', but there is no module 'maths'
    """
    where, _, inner = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if not where or not inner or not all(part.isidentifier() for part in inner.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected 'module:function' or 'path/to/file.py:function'")
    target_object: Any
    if where.endswith(".py"):
        target_object = _file(target, name, Path(folder or ".") / where)
    else:
        target_object = _module(target, name, where, Path(folder or "."))
    for part in inner.split("."):
        if not hasattr(target_object, part):
            names = (
                {attribute: None for attribute in vars(target_object) if not attribute.startswith("_")}
                if hasattr(target_object, "__dict__")
                else {}
            )
            guess = suggest(part, names).partition("?")
            hint = guess[0] + guess[1] if guess[1] else ""
            raise ValueError(f"{name}: got {target!r}, but {where} has no {part!r}{hint}")
        target_object = getattr(target_object, part)
    return target_object


def _module(target: str, name: str, path: str, folder: Path) -> ModuleType:
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{name}: got {target!r}, expected a module's dotted name or a .py file before the colon")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(f"{missing}."):
            raise  # the module exists, but one of its imports does not
        # Unlike a script, a command does not find modules in the current folder.
        file = Path(*path.split(".")).with_suffix(".py")
        here = f"; the file is there: {file}:{target.rpartition(':')[2]}" if (folder / file).is_file() else ""
        raise ValueError(f"{name}: got {target!r}, but there is no module {missing!r}{here}") from None


def _file(target: str, name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{name}: got {target!r}, but there is no file {path.resolve()}")
    return load_module_file(path)


_RECIPES = "rollbook.train.recipes."
_PLAIN_ENGINE_ARGS = frozenset(
    (
        *("block_size", "cpu_offload_gb", "data_parallel_size", "disable_log_stats", "dtype"),
        *("enable_chunked_prefill", "enable_lora", "enable_prefix_caching", "enable_sleep_mode"),
        *("enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "logprobs_mode"),
        *("max_logprobs", "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens"),
        *("max_num_seqs", "pipeline_parallel_size", "seed", "swap_space", "tensor_parallel_size"),
    )
)
"""Fields of `vllm.AsyncEngineArgs` that load neither code nor another model."""


def check_trusted(folder: Path, config: Config, *, remote: bool = False, trusted: Collection[str] = ()) -> None:
    """Reject a configuration that names code outside Rollbook.

    Args:
        folder: The run's folder, for the message.
        config: The configuration in that folder.
        remote: Whether servers that sample or score count, too.
        trusted: Paths of keys that the user has set, whose values are trusted.

    Raises:
        ValueError: The configuration names such code. The message lists every key and its value.
    """
    values = {path: value for path, value in find_foreign_code(config, remote=remote).items() if path not in trusted}
    if values:
        listed = "".join(f"\n{path}: {value}" for path, value in values.items())
        raise ValueError(
            f"{folder}: its configuration names code or servers that are not part of Rollbook:{listed}\n"
            "Continuing would run some of it. If you trust all of it, pass --trust (in Python: trust=True)"
        )


def find_foreign_code(config: Config, *, remote: bool = False) -> dict[str, str]:
    """Find the functions, files, programs and servers outside Rollbook that a configuration names.

    Args:
        config: The configuration.
        remote: Whether servers that sample or score count, too.

    Returns:
        Values by the path of their key.

    >>> find_foreign_code(Config(model={"builder": "os:system"}, rewards=["exact_match", "mine.py:score"]))
    {'model.builder': 'os:system', 'rewards.1.function': 'mine.py:score'}
    >>> find_foreign_code(Config(engine={"kind": "vllm", "options": {"engine_args": {"model": "x/y", "seed": 1}}}))
    {'engine.options.engine_args.model': 'x/y'}
    """
    functions = {
        "model.builder": config.model.builder,
        "teacher.builder": config.teacher.builder,
        "data.function": config.data.function,
        "evaluation.function": config.evaluation.function,
        "environment.function": config.environment.function,
    }
    values = {path: target for path, target in functions.items() if target is not None and not is_builtin(target)}
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, reward in enumerate(rewards):
            values |= {f"{key}.{i}.{name}": value for name, value in _foreign_reward_code(reward, remote)}
    values |= {f"tracking.trackers.{i}": tracker for i, tracker in enumerate(config.tracking.trackers)}
    if "/" in (config.model.attention or ""):
        values["model.attention"] = str(config.model.attention)  # a kernel of the hub
    for section in ("model", "critic", "teacher"):
        values |= _model_code(f"{section}.config", getattr(config, section).config or {})
    if config.engine.kind == "vllm":
        values |= _foreign_engine_args(config.engine.options.get("engine_args"))
    if remote and config.engine.url is not None:
        values["engine.url"] = ", ".join(config.engine.url)
    for path, address in (("book", config.book), ("replay.expert", config.replay.expert)):
        if address is not None and "://" in address:
            # libpq sends the password in the environment, if there is one, to the server of this address.
            values[path] = address
    return values


def _model_code(path: str, config: Mapping[Any, Any], inside: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the keys of a model's configuration by which transformers loads code: kernels of the hub, and classes."""
    for name, value in config.items():
        is_kernel = "implementation" in str(name) and "/" in str(value)
        is_code = inside or is_kernel or name in ("auto_map", "trust_remote_code")
        if isinstance(value, (Mapping, list, tuple)):
            yield from _model_code(
                f"{path}.{name}", value if isinstance(value, Mapping) else dict(enumerate(value)), is_code
            )
        elif is_code:
            yield f"{path}.{name}", str(value)


def _foreign_engine_args(engine_args: Any) -> dict[str, str]:
    """Return the arguments of vLLM that may load code or another model: all but numbers and names known to be safe."""
    path = "engine.options.engine_args"
    if not isinstance(engine_args, Mapping):
        return {path: str(engine_args)} if engine_args else {}  # a list of pairs would do
    return {
        f"{path}.{name}": str(value)
        for name, value in engine_args.items()
        if name not in _PLAIN_ENGINE_ARGS or not isinstance(value, (bool, int, float, str, type(None)))
    }


def _foreign_reward_code(reward: RewardSection, remote: bool) -> Iterator[tuple[str, str]]:
    if reward.function is not None and not is_builtin(reward.function):
        yield "function", reward.function
    for label, lines in (reward.recipe or {}).items():
        if "code_match" in str(lines):
            yield f"recipe.{label}", "code_match"
    for name in ("functions", "models"):
        option = reward.options.get(name, {})
        parts = option.items() if isinstance(option, Mapping) else enumerate(option if isinstance(option, list) else ())
        for part, value in parts:
            if not (isinstance(value, str) and is_builtin(value)):
                yield f"options.{name}.{part}", str(value)
    if remote and reward.remote is not None:
        yield "remote", ", ".join(reward.remote)


def is_builtin(target: str) -> bool:
    """Return whether a name is that of a built-in reward or of a function of a recipe.

    Other names in Rollbook's modules do not count: the modules import others (`rollbook.cli.parser:os.system`), and
    some functions run files. `code_match` does not count either: it runs the programs in responses.

    Args:
        target: `module:function`, or the name of a built-in reward.

    >>> names = ("rollbook.train.recipes.letters:reward", "exact_match", "rollbook.core:sys.exit")
    >>> [is_builtin(name) for name in names]
    [True, True, False]
    """
    from rollbook.rewards.recipes import BUILTIN_REWARDS

    module, _, name = target.rpartition(":")
    if module.startswith(_RECIPES) and module.removeprefix(_RECIPES).isidentifier():
        try:
            return name in importlib.import_module(module).__all__
        except ImportError:
            return False
    ready = name in BUILTIN_REWARDS and name != "code_match"
    return ready and (not module or module in ("rollbook.rewards", BUILTIN_REWARDS[name].__module__))
