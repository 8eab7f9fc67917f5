"""Multi-turn episodes: the model talks to an environment, such as a tool, a game or a user.

Invariant: all runs of all prompts advance in lockstep, one turn of all of them per call of the engine; what is sampled
in a run depends on the seed, its id and the turn, and on nothing that happens in another run. What an environment says
is context and never trained on; an environment that fails ends its own run and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.metrics import StepMetrics, advise
from rollbook.core.sampling import Prompt, Sample, Sampling
from rollbook.rollout.engine import BaseEngine
from rollbook.rollout.episode import Episode, act_all
from rollbook.rollout.transformers import TransformersEngine

Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What an environment says: text, or where the prompt is a chat a message or several; a text is then a user's."""

Counted = Literal["sum", "last"]
OnCut = Literal["end", "respond"]
_EPISODE = ["on_realign", "on_fork", "parse", "template_options"]
"""Options of `Episode` that a configuration may set."""


@dataclass(frozen=True)
class Reply:
    """What an environment makes of a turn: what it says, what the turn was worth, and whether the episode is over.

    `observation` is what the model reads before its next turn; what no turn comes after (it is `done`, or was the last
    of `max_turns`) is kept in the record's `info["last_observation"]`. Without a `reward` the turn adds nothing.

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
            object.__setattr__(self, "reward", check_float("reward", self.reward, -1e30, 1e30, "a finite number"))
        object.__setattr__(self, "done", check_bool("done", self.done))
        if self.observation is None and not self.done:
            raise ValueError("observation: got None and done is False, expected something for the model to go on from")


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
    eid: EID
    episode: Episode | None = None
    environment: Environment | None = None
    error: str | None = None
    over: bool = False
    ended: bool = False
    """Whether the environment said that it is over."""
    out_of_turns: bool = False
    rewards: list[float] = field(default_factory=list)
    """What each turn was worth, where the environment said so."""
    rows: list[Experience] = field(default_factory=list)

    def fail(self, error: BaseException | str, where: str = "") -> None:
        """This run is over, and what it was worth is not known."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.error, self.over = f"{where}: {message}" if where else message, True
        if self.episode is not None and self.episode.finish_reason != "error":
            self.episode.append_sample(self._failure())

    def _failure(self) -> Sample:
        return Sample(
            prompt=self.prompt,
            eid=self.eid,
            prompt_ids=list(self.prompt.token_ids or ()),
            response_ids=[],
            logprobs=[],
            finish_reason="error",
            error=self.error,
        )

    def record(self, counted: Counted, group_size: int) -> None:
        """Make its records: one, or several where a template forked the conversation."""
        if self.episode is None:
            self.rows = [_failed(self._failure().replace(group_size=group_size).to_experience(), str(self.error))]
            return
        total = 0.0
        if counted == "last" and self.rewards:
            total = self.rewards[-1]
        rows = self.episode.experiences(total)
        if self.error is not None:
            rows = [_failed(row, self.error) for row in rows]
        elif self.ended:
            rows = [_ended(row) for row in rows]
        elif self.out_of_turns:
            rows = [_out_of_turns(row) for row in rows]
        self.rows = rows


def _failed(row: Experience, error: str) -> Experience:
    """The record of a failed episode: no reward, and nothing to train on."""
    mask = None if row.action_mask is None else torch.zeros_like(row.action_mask)
    return row.replace(reward=math.nan, action_mask=mask, info={**row.info, "reward_error": f"no reward: {error}"})


def _ended(row: Experience) -> Experience:
    """The record of an episode that the environment ended: a cut turn that it responded to does not truncate it."""
    if row.finish_reason != "length":
        return row
    info = {name: value for name, value in row.info.items() if name != "truncated"}
    return row.replace(finish_reason="stop", truncate_status=None, info=info)


def _out_of_turns(row: Experience) -> Experience:
    info = {**row.info, "truncated": "turns"}
    return row.replace(finish_reason="length", truncate_status="response_truncated", info=info)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """How episodes are played.

    - `factory`: makes the environment of an episode from its prompt, which has the id of the run (`prompt.eid`), for
      what is random in it.
    - `max_turns`: of the model. `context_limit`: tokens of a whole episode with its prompt; unless given, the model's
      positions. An episode that reaches either has the finish reason `length`, and `info["truncated"]` says which:
      `turns`, `context`, or `turn` where `max_tokens` cut one.
    - `on_cut`: what happens to a turn that a limit cut. `end`: the episode is over, and the environment does not see
      it; `respond`: it is a turn like others, as in a game whose moves have a fixed number of tokens: an episode that
      the environment then ends has the finish reason `stop`, and is not truncated.
    - `rewards`: the reward of an episode is the `sum` of what the environment gave its turns, or the `last` of it; 0
      if it gave none. With `sum`, `token_level_reward` has each turn's on its last token, where estimators over time
      (`ppo`, `gae`, `reinforce`, ...) take it; those that compare runs take the total.
    - `workers`: how many environments respond at the same time, in threads.
    - `episode`: options of `Episode` (`on_fork`, `on_realign`, `parse`, `template_options`).
    - `tokenizer`: renders turns; the engine's processor or tokenizer unless given.

    >>> EnvironmentConfig(factory=print, max_turns=3).on_cut
    'end'
    """

    factory: Callable[[Prompt], Environment]
    max_turns: int = 8
    context_limit: int | None = None
    on_cut: OnCut = "end"
    rewards: Counted = "sum"
    workers: int = 1
    episode: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if not callable(self.factory):
            kind = type(self.factory).__name__
            raise ValueError(f"environment: got {kind}, expected a function from a Prompt to an Environment")
        check_choice("rewards", self.rewards, get_args(Counted))
        check_choice("on_cut", self.on_cut, get_args(OnCut))
        check_int("max_turns", self.max_turns, 1)
        check_int("workers", self.workers, 1)
        for name in self.episode:
            if name not in _EPISODE:
                raise ValueError(f"episode: unknown option {name!r}{suggest(name, _EPISODE)}")
        if self.context_limit is not None:
            check_int("context_limit", self.context_limit, 1)

    def tokenizer_of(self, engine: BaseEngine) -> Any:
        """Return what renders turns: `tokenizer`, or the engine's processor or tokenizer."""
        tokenizers = (self.tokenizer, getattr(engine, "processor", None), getattr(engine, "tokenizer", None))
        tokenizer = next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)
        if tokenizer is None:
            raise ValueError("tokenizer: got None, and the engine has none, expected one to read turns with")
        return tokenizer


def play_episodes(
    engine: BaseEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    environment: EnvironmentConfig,
    *,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Play `sampling.n` episodes per prompt.

    Args:
        engine: What samples the model's turns.
        prompts: The prompts.
        sampling: Options of each turn.
        environment: The other side of each episode, and the limits.
        metrics: Collects timings and counts (`episode/turns`, ...).

    Returns:
        A record of kind `multi_turn` per run, or one per rendering where the conversation forked, in the order of
        prompts and runs, with `reward` and, unless `rewards` is `last`, `token_level_reward`. `info["segments"]` says
        which tokens are whose, and `metrics` counts turns and observed tokens. A run whose environment or engine
        failed has the finish reason `error`, the error in `info["error"]`, a reward of NaN and nothing to train on.

    >>> from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> from rollbook.rollout import ScriptedEngine
    >>> letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("_$0156789x?=")}, unk_token="_"))
    >>> letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="_", eos_token="$")
    >>> class Calculator:
    ...     def __init__(self, prompt):
    ...         self.right = prompt.reference
    ...     def begin(self):
    ...         return None
    ...     def respond(self, text):
    ...         if "x" in text:
    ...             first, second = text.split("x")
    ...             return Reply(f"={int(first) * int(second)}=")
    ...         return Reply(reward=float(text == self.right), done=True)
    >>> engine = ScriptedEngine(["7x8$", "60$", "56$"], tokenizer)  # one run asks the calculator, the other does not
    >>> prompts, environment = [Prompt(text="7x8?", reference="56")], EnvironmentConfig(factory=Calculator, max_turns=3)
    >>> records = play_episodes(engine, prompts, Sampling(n=2), environment)
    >>> records.values("reward"), [tokenizer.decode(row.tokens[row.prompt_length :]) for row in records]
    ([1.0, 0.0], ['7x8$=56=56$', '60$'])
    >>> records[0].action_mask.int().tolist()
    [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    """
    metrics = StepMetrics() if metrics is None else metrics
    with torch.no_grad():
        return _Play(engine, sampling, environment, metrics).run(prompts)


class _Play:
    """One call of `play_episodes`."""

    def __init__(
        self, engine: BaseEngine, sampling: Sampling, environment: EnvironmentConfig, metrics: StepMetrics
    ) -> None:
        if sampling.max_prompt_tokens is not None:
            raise ValueError("max_prompt_tokens: a turn's prompt is all that came before it; see context_limit")
        self.engine, self.sampling, self.environment, self.metrics = engine, sampling, environment, metrics
        self.tokenizer = environment.tokenizer_of(engine)
        self.context_limit = environment.context_limit
        if self.context_limit is None and isinstance(engine, TransformersEngine):
            self.context_limit = engine.runner.positions

    def run(self, prompts: Sequence[Prompt]) -> Experiences:
        environment = self.environment
        with self.metrics.time("rollout") as stage, ThreadPoolExecutor(environment.workers) as pool:
            # The engine's own ids: as many, and the same, as it would give samples of a single turn.
            requests = self.engine.requests(prompts, self.sampling)
            runs = [_Run(request.prompt.replace(eid=eid), eid) for request in requests for eid in request.eids]
            try:
                self._play(runs, pool.map if environment.workers > 1 else map)
            finally:
                for run in runs:
                    close = getattr(run.environment, "close", None)
                    if callable(close):
                        with suppress(Exception):  # the episode is over, and its replies count
                            close()
            for run in runs:
                run.record(environment.rewards, self.sampling.n)
            rows = [row for run in runs for row in run.rows]
            stage["tokens"] = int(sum(row.metrics.get("trained_tokens", 0) for row in rows))
        if runs and all(run.error is not None for run in runs):
            advise(f"episodes: all {len(runs)} failed; the first: {runs[0].error}")
        if runs:
            self.metrics.add(_episode_metrics(runs))
        return Experiences(rows)

    def _play(self, runs: Sequence[_Run], map_runs: Callable[..., Iterable[Any]]) -> None:
        options = {
            "sampling": Sampling.of(self.sampling, n=1),
            "group_size": self.sampling.n,
            "context_limit": self.context_limit,
            **self.environment.episode,
        }
        for run in runs:
            try:
                run.episode = Episode(self.engine, self.tokenizer, run.prompt, eid=run.eid, **options)
            except Exception as error:  # a prompt that cannot be rendered fails alone
                run.fail(error, "prompt")
        self._ask([run for run in runs if not run.over], self._begin, map_runs)
        live = [run for run in runs if not run.over]
        is_first = True
        while live:
            samples = act_all([run.episode for run in live if run.episode is not None])
            if is_first and all(sample.finish_reason == "length" for sample in samples):
                advise(
                    f"episodes: all {len(samples)} first turns were cut off at max_tokens={self.sampling.max_tokens}; "
                    "raise sampling.max_tokens"
                )
            is_first = False
            waiting = [run for run, sample in zip(live, samples, strict=True) if self._goes_on(run, sample)]
            self._ask(waiting, _respond, map_runs)
            live = [run for run in live if not run.over]

    def _begin(self, run: _Run) -> Reply | None:
        run.environment = self.environment.factory(run.prompt)
        observation = run.environment.begin()
        return None if observation is None else Reply(observation)

    def _goes_on(self, run: _Run, sample: Sample) -> bool:
        """Whether the environment responds to a turn."""
        if sample.failed:
            run.fail(sample.error or "", "turn")
        elif sample.unfinished:
            run.fail("the engine broke off", "turn")
        elif sample.finish_reason == "length" and (self.environment.on_cut == "end" or not sample.response_ids):
            run.over = True
        return not run.over

    def _ask(
        self, runs: Sequence[_Run], ask: Callable[[_Run], Reply | None], map_runs: Callable[..., Iterable[Any]]
    ) -> None:
        """Ask environments, several at a time, and tell the episodes one by one: tokenizers are shared."""

        def answer(run: _Run) -> Reply | Exception | None:
            try:
                return ask(run)
            except Exception as error:  # whatever it is, it fails this run alone
                return error

        with self.metrics.time("environment"):
            for run, reply in zip(runs, map_runs(answer, runs), strict=True):
                if isinstance(reply, Exception):
                    run.fail(reply, "environment")
                elif reply is not None:
                    try:
                        self._take(run, reply)
                    except Exception as error:  # an observation that cannot be rendered
                        run.fail(error, "environment")

    def _take(self, run: _Run, reply: Reply) -> None:
        """Continue an episode after a reply."""
        episode = run.episode
        if episode is None:
            return
        if reply.reward is not None:
            run.rewards.append(reply.reward)
            if self.environment.rewards == "sum":
                episode.score_turn(reply.reward)
        observation, run.over, run.ended = reply.observation, reply.done, reply.done
        if not reply.done and len(episode.turns) >= self.environment.max_turns:
            run.over = run.out_of_turns = True
        if observation is None:
            return
        if run.over:  # no turn comes after it
            episode.info["last_observation"] = observation
        else:
            message = {"role": "user", "content": observation}
            episode.observe(message if isinstance(observation, str) and episode.messages else observation)


def _respond(run: _Run) -> Reply:
    """Return the environment's reply to the last turn."""
    if run.episode is None or run.environment is None:
        raise ValueError("the episode has not begun")
    reply = run.environment.respond(run.episode.turns[-1].text or "")
    if not isinstance(reply, Reply):
        raise ValueError(f"respond: got {type(reply).__name__} back, expected a Reply")
    return reply


def _episode_metrics(runs: Sequence[_Run]) -> dict[str, float]:
    """How many turns episodes have, and how they end."""
    last_rows = [run.rows[-1] for run in runs]
    count = len(runs)
    return {
        "episode/turns": sum(len(run.episode.turns) for run in runs if run.episode is not None) / count,
        "episode/observed_tokens": sum(row.metrics.get("observed_tokens", 0) for row in last_rows) / count,
        "episode/out_of_turns": sum(run.out_of_turns for run in runs) / count,
        "episode/out_of_context": sum(row.info.get("truncated") == "context" for row in last_rows) / count,
        "episode/environment_errors": float(sum((run.error or "").startswith("environment") for run in runs)),
    }


__all__ = ["Environment", "EnvironmentConfig", "Observation", "Reply", "play_episodes"]
