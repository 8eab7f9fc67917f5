"""`EpisodeMaker`: experience of several turns, in which the model talks to an environment: a tool, a game, a user.

Invariant: all runs of all prompts advance in lock step, a turn of all of them in one call of the engine; what is
sampled in a run depends on the seed, its id and the turn, and on nothing that happens in another. What an environment
says is context and never trained; an environment that breaks costs its own run and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from rollbook.algorithms.registry import choice, near, number, switch, whole_number
from rollbook.experience import Experience
from rollbook.experience_maker import MakerConfig, NaiveExperienceMaker
from rollbook.experiences import Experiences
from rollbook.making import estimating
from rollbook.making.recording import finished
from rollbook.making.whole import Whole
from rollbook.progress import Stages, advise
from rollbook.rewards.choose import as_reward
from rollbook.rewards.types import RewardInput, Scores
from rollbook.rollout.engine import Engine
from rollbook.rollout.episode import Episode, act_all
from rollbook.rollout.local import TransformersEngine
from rollbook.rollout.types import Prompt, Sample, Sampling

Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What an environment says: text, or where the prompt is a chat a message or several; a text is then a user's."""

Counted = Literal["sum", "last"]
OnCut = Literal["end", "respond"]
_EPISODE = ("on_realign", "on_fork", "parse", "template_options")
"""What `Episode` can be told that the maker does not know better."""
_ENDLESS = 1 << 30


@dataclass(frozen=True)
class Reply:
    """What an environment makes of a turn: what it says, what the turn was worth, and whether the episode is over.

    `observation` is what the model reads before its next turn; when it is `done` there is none to come, and what is
    said then is kept in the record's `info["last_observation"]`. A `reward` of `None` is none: the turn adds nothing.

    >>> Reply("= 42")
    Reply(observation='= 42', reward=None, done=False)
    >>> Reply(reward=1.0)
    Traceback (most recent call last):
        ...
    ValueError: observation: got None and done is False, expected something for the model to go on from
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", number("reward", self.reward))
        object.__setattr__(self, "done", switch("done", self.done))
        if self.observation is None and not self.done:
            raise ValueError(
                "observation: got None and done is False, expected something for the model to go on from"
            )


class Environment(Protocol):
    """One episode's other side. It is made for one run of one prompt, and forgotten after it.

    If it has a method `close`, that is called when its episode is over, however it ended.
    """

    def begin(self) -> Observation | None:
        """What the model reads after the prompt and before its first turn, if anything."""
        ...

    def respond(self, text: str) -> Reply:
        """What comes of a turn: `text` is what the model wrote, without the token that ends it."""
        ...


@dataclass
class _Run:
    """One episode under way."""

    prompt: Prompt
    """With the id of this run."""
    task: int
    """The prompt's place in the call."""
    episode: Episode | None = None
    environment: Environment | None = None
    error: str | None = None
    over: bool = False
    out_of_turns: bool = False
    rewards: list[float] = field(default_factory=list)
    """What each turn was worth, where the environment said so."""
    rows: list[Experience] = field(default_factory=list)

    def fail(self, error: BaseException | str, where: str = "") -> None:
        """This run is over, and what it was worth is not known."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.error, self.over = f"{where}: {said}" if where else said, True
        if self.episode is not None and self.episode.finish_reason != "error":
            self.episode.append_sample(self._failure())

    def _failure(self) -> Sample:
        return Sample(
            prompt=self.prompt,
            eid=self._eid,
            prompt_ids=list(self.prompt.token_ids or ()),
            response_ids=[],
            logprobs=[],
            finish_reason="error",
            error=self.error,
        )

    @property
    def _eid(self) -> Any:
        return self.prompt.eid

    def record(self, counted: Counted, group_size: int) -> None:
        """Make its records: one, or several where a template forked the conversation."""
        if self.episode is None:
            self.rows = [self._failure().replace(group_size=group_size).to_experience().replace(reward=math.nan)]
            return
        total = 0.0
        if counted == "last" and self.rewards:
            total = self.rewards[-1]
        made = self.episode.experiences(total)
        if self.error is not None:
            made = [one.replace(reward=math.nan, action_mask=torch.zeros_like(one.action_mask)) for one in made]
        elif self.out_of_turns:
            made = [_out_of_turns(one) for one in made]
        self.rows = made


def _out_of_turns(row: Experience) -> Experience:
    info = {**row.info, "truncated": "turns"}
    return row.replace(finish_reason="length", truncate_status="response_truncated", info=info)


class EpisodeMaker(NaiveExperienceMaker):
    """Makes experience of several turns; ids, rewards, advantages, metrics and records as `NaiveExperienceMaker`'s.

    - `actor`: a `rollbook.models.Actor`, or an engine. `environment`: makes the other side of an episode from its
      prompt, which has the id of the run (`prompt.eid`), for what is random in it.
    - `tokenizer`: the actor's own unless given; of a vision-language model its processor.
    - `max_turns`: of the model. `context_limit`: tokens of a whole episode, prompt and all; unless given, the model's
      positions. An episode that comes to either end has the reason `length`, and `info["truncated"]` says which:
      `turns`, `context`, or `turn` where `max_tokens` cut one.
    - `on_cut`: what becomes of a turn that a limit cut. `end`: the episode is over, and the environment does not see
      it; `respond`: it is a turn like others, as in a game whose moves have a fixed number of tokens.
    - `rewards`: an episode is worth the `sum` of what the environment gave its turns, or the `last` of it; 0 if it
      gave nothing. With `sum`, `token_level_reward` of the record has each turn's on its last token; estimators are
      given the total. `reward`: what else to add: whatever `rollbook.rewards.as_reward` takes, asked of the finished
      records. Both parts are in the record's `metrics`, as `environment` and `source`.
    - `workers`: so many environments respond at the same time, in threads, where they wait for something.
    - `episode`: options of `Episode` (`on_fork`, `on_realign`, `parse`, `template_options`).
    - `config`, `critic`, `initial_model`, `teacher`, `kl_controller`, `engine`: see `NaiveExperienceMaker`. An overlong
      buffer counts what was sampled in all turns, up to `max_turns` times `max_tokens`.

    An error of an environment, or of the engine, is that run's: its record has the reason `error`, what happened in
    `info["error"]`, no reward (NaN) and nothing to train on.

    >>> from rollbook.rollout import ScriptedEngine
    >>> from tests.tiny import bytes_
    >>> class Echo:
    ...     def begin(self):
    ...         return None
    ...     def respond(self, text):
    ...         return Reply(f"[{text}]") if text != "bye" else Reply(reward=1.0, done=True)
    >>> engine = ScriptedEngine({"hi": ["hello", "hello"], "hi[hello]": ["bye", "well"]}, bytes_())
    """

    def __init__(
        self,
        actor: Any,
        environment: Callable[[Prompt], Environment],
        *,
        config: MakerConfig | None = None,
        tokenizer: Any = None,
        engine: Engine | None = None,
        critic: Any = None,
        initial_model: Any = None,
        teacher: Any = None,
        kl_controller: Any = None,
        reward: Any = None,
        rewards: Counted = "sum",
        max_turns: int = 8,
        context_limit: int | None = None,
        on_cut: OnCut = "end",
        workers: int = 1,
        episode: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(environment):
            got = type(environment).__name__
            raise ValueError(f"environment: got {got}, expected a function from a Prompt to an Environment")
        self.environment = environment
        self.rewards: Counted = choice("rewards", rewards, get_args(Counted))
        self.on_cut: OnCut = choice("on_cut", on_cut, get_args(OnCut))
        self.max_turns = whole_number("max_turns", max_turns, 1)
        self.workers = whole_number("workers", workers, 1)
        self.episode = dict(episode or {})
        for name in self.episode:
            if name not in _EPISODE:
                raise ValueError(f"episode: option {name!r} is not known{near(name, _EPISODE)}")
        if context_limit is not None:
            whole_number("context_limit", context_limit, 1)
        source = None if reward is None else as_reward(reward)
        super().__init__(
            actor,
            critic,
            None,
            initial_model,
            tokenizer,
            _ENDLESS if context_limit is None else context_limit,
            kl_controller,
            reward_fn=source,
            config=config if config is not None else MakerConfig(),
            engine=engine,
            teacher=teacher,
        )
        if self.engine is None:
            raise ValueError(f"actor: got {type(actor).__name__}, expected one with an engine, or an engine beside it")
        if tokenizer is None:
            known = (getattr(self.engine, name, None) for name in ("processor", "tokenizer"))
            self.tokenizer = next((one for one in known if one is not None), None)
        if self.tokenizer is None:
            raise ValueError("tokenizer: got None, and the engine has none, expected one to read turns with")
        if context_limit is None and isinstance(self.engine, TransformersEngine):
            context_limit = self.engine.runner.positions
        self.context_limit = context_limit
