"""From a configuration to what is asked, and what an answer is worth: prompts and rewards.

Invariant: prompts to evaluate with are none of those that are trained on, as far as the configuration says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollbook.core.metrics import advise
from rollbook.core.sampling import Prompt
from rollbook.models import Actor
from rollbook.models.loading import transformers_module
from rollbook.rewards.functions import MissingExtraError
from rollbook.rewards.recipes import as_reward
from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.parts import Data, Reward
from rollbook.train.config.schema import Config
from rollbook.train.config.secrets import expanded
from rollbook.train.data import Prompts
from rollbook.train.modelling import called, loading
from rollbook.train.naming import resolve


def prompts_of(config: Config) -> tuple[Prompts, Prompts | None]:
    """The prompts to train on, and those to evaluate with, if there are any."""
    given = config.data
    if given.function is not None:
        found = _shaped(_from_function("data", given.function, given.options, config), config, given.limit)
    elif given.path is not None:
        found = _shaped(_from_file(given.path, given, config), config, None)
    else:
        raise ConfigError("data", "got none, expected one of path, function")
    held: Prompts | None = None
    if given.held_out:
        found, held = found.split(given.held_out if given.held_out < 1 else int(given.held_out), seed=config.seed)
    if config.evaluation.data is not None or config.evaluation.split is not None:
        held = _shaped(_evaluation_file(config), config, None)
    elif config.evaluation.function is not None:
        asked = config.evaluation
        held = _shaped(_from_function("evaluation", str(asked.function), asked.options, config), config, None)
    if held is not None and config.evaluation.prompts is not None and len(held) > config.evaluation.prompts:
        held = held.split(config.evaluation.prompts, seed=config.seed)[1]
    both = 0 if held is None else held.shared(found)
    if held is not None and both:
        advise(f"evaluation: {both} of {len(held)} prompts are among those that are trained on")
    if not config.algorithm.needs_rollouts:
        found.require(*(("chosen", "rejected") if config.algorithm.pairs else ("response",)))
    if config.warmup.steps:
        found.require("response")
    return found, held


def check_readable(actor: Actor, prompts: Prompts) -> None:
    """Refuse prompts of text where nobody turns them into tokens: each of them would fail."""
    first = prompts.every()[0]
    holder = actor.processor if actor.processor is not None else actor.tokenizer
    if holder is None and first.token_ids is None:
        raise ConfigError("model.tokenizer", "got none, and the model has none of its own, expected one: data are text")
    templates = [getattr(one, "chat_template", None) for one in (actor.processor, actor.tokenizer)]
    if first.messages is not None and not any(templates):
        raise ConfigError("model.tokenizer", "got one without a chat template, expected one that has: data are chats")


def _from_function(section: str, target: str, options: Mapping[str, Any], config: Config) -> Prompts:
    given = config.data
    return Prompts(
        lambda: called(f"{section}.function", target, options, config.seed),
        seed=config.seed,
        shuffle=given.shuffle,
        name=target,
        columns=dict(given.columns) or None,
        keep=given.keep,
    )


def _from_file(path: str, given: Data, config: Config) -> Prompts:
    return Prompts.from_file(
        path,
        split=given.split,
        subset=given.subset,
        columns=dict(given.columns) or None,
        keep=given.keep,
        limit=given.limit,
        seed=config.seed,
        shuffle=given.shuffle,
    )


def _evaluation_file(config: Config) -> Prompts:
    """Prompts of a file or dataset of their own, or of another split of the data's."""
    asked, given = config.evaluation, config.data
    path = asked.data if asked.data is not None else given.path
    if path is None:
        raise ConfigError("evaluation.split", f"got {asked.split!r}, and neither evaluation.data nor data.path")
    # Another dataset has splits of its own; the limit is of the rows to train on.
    split = given.split if asked.split is None and path == given.path else asked.split
    subset = given.subset if path == given.path else None
    return _from_file(path, dataclasses.replace(given, path=path, split=split, subset=subset, limit=None), config)


def _shaped(prompts: Prompts, config: Config, limit: int | None) -> Prompts:
    """Plain texts as chats, and a system message before them, where that is asked for; the first `limit` rows."""
    given = config.data
    if not given.chat and given.system is None and limit is None:
        return prompts
    made = [_chat(one, given).replace(eid=None) for one in prompts.every()[:limit]]
    return Prompts(made, seed=config.seed, shuffle=given.shuffle, name=prompts.name)


def _chat(prompt: Prompt, given: Data) -> Prompt:
    messages = prompt.messages
    if given.chat and prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    if messages is None:
        return prompt
    if given.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": given.system}, *messages]
    return prompt.replace(text=None, messages=messages)


def check_rewards(config: Config) -> None:
    """Build every reward but for models, so that what is wrong with one is known before anything is loaded."""
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, one in enumerate(rewards or ()):
            if one.model is None:
                _reward(f"{key}.{i}", one, None).close()


def reward_of(rewards: tuple[Reward, ...], actor: Actor | None = None, key: str = "rewards") -> Any:
    """One reward from all that are given; `None` if there are none. `actor`: the policy, beside which reward models lie
    and whose tokens they may read otherwise; `key`: where the configuration has them."""
    if not rewards:
        return None
    parts = [_reward(f"{key}.{i}", one, actor) for i, one in enumerate(rewards)]
    if len(parts) == 1 and rewards[0].weight == 1.0 and rewards[0].name is None:
        return parts[0]
    names = [one.name or f"{_called(one)}" for one in rewards]
    names = [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]
    return as_reward(dict(zip(names, parts, strict=True)), weights=[one.weight for one in rewards])


def _reward(key: str, one: Reward, actor: Actor | None) -> Any:
    kind = next(name for name in ("function", "recipe", "remote", "model") if getattr(one, name) is not None)
    source = expanded(getattr(one, kind), f"{key}.{kind}")
    options: dict[str, Any] = expanded(one.options, f"{key}.options")
    if kind == "model":
        with loading(f"{key}.model", source):
            source = _classifier(source, options, actor)
    elif kind == "remote":
        options |= {"replicas": True} if len(source) > 1 else {}
        source = source[0] if len(source) == 1 else list(source)
    elif kind == "function" and ":" in source and not source.rpartition(":")[0].endswith(".py"):
        source = resolve(source, name=f"{key}.function")
    try:
        return as_reward(source, **options)
    except (MissingExtraError, ValueError) as error:
        place = f"{key}.options" if str(error).startswith("reward: option") else f"{key}.{kind}"
        raise ConfigError(place, str(error).removeprefix("reward: ")) from error


def _classifier(name: str, options: dict[str, Any], actor: Actor | None) -> Any:
    """A sequence classifier; into its options go where it lies, and the tokenizer by which it reads what a policy of
    another one wrote."""
    transformers = transformers_module()
    options.setdefault("name", Path(name).name)
    if actor is not None:
        options.setdefault("device", actor.device)
        options.setdefault("policy_tokenizer", actor.tokenizer)
    known = options.get("tokenizer", name)
    if isinstance(known, str):
        try:
            options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(known, trust_remote_code=False)
        except (OSError, ValueError):
            if "tokenizer" in options:
                raise
            # It has none of its own, and is given the policy's tokens.
    return transformers.AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", trust_remote_code=False)


def _called(one: Reward) -> str:
    if one.remote is not None:
        return "remote"
    if one.recipe is not None:
        return "recipe"
    return Path(str(one.function or one.model).rpartition(":")[2]).stem
