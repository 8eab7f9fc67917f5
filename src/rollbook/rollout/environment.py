"""Multi-turn rollouts: environments, the loop that plays episodes with them, and `Episode`, one conversation.

- `Environment`, `Reply`, `EnvironmentConfig`: the types that users implement or create.
- `play_episodes`: plays the episodes of many prompts; each call of the engine samples one turn of all episodes.
- `Episode`, `act_all`: one conversation with tools or an environment, turn by turn, with branches.
- `Recorder`: creates the records of an episode.

Invariant: the samples of a run depend on the seed, the id of the run and the turn, not on other runs. Observations are
context and are never trained on. Each sampled token is trained in exactly one record. An environment that fails ends
only its own run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, get_args

import torch

from rollbook.batch.media import BY_TOKEN
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.media import encode_for_record
from rollbook.core.metrics import StepMetrics, warn_user
from rollbook.core.sampling import FinishReason, LogprobsKind, Prompt, Sample, Sampling, as_media, token_ids
from rollbook.core.vocabulary import Tokenizer
from rollbook.rollout.chat import Drifts
from rollbook.rollout.engine import BaseEngine, Cancel, Engine, PromptLike, SamplingOption, random_batch_id
from rollbook.rollout.transformers import TransformersEngine
from rollbook.rollout.tree import (
    Branch,
    DriftPolicy,
    NextTokens,
    Parse,
    PendingObservation,
    Span,
    Tree,
    Turn,
    TurnRequest,
    check_single,
    collect_drifts,
    extract_images,
    full_conversation,
    make_renderer,
    place_media,
    recorded_branches,
    sampled_text,
)

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "Observation",
    "Reply",
    "act_all",
    "join_media",
    "play_episodes",
]

Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Input for the model: text or, if the prompt is a chat, messages. Text in a chat becomes a user message."""

RewardMode = Literal["sum", "last"]
OnTruncation = Literal["end", "respond"]

_EPISODE_OPTIONS = ["on_realign", "on_fork", "parse", "template_options"]
"""Options of `Episode` that `EnvironmentConfig.episode` may have."""


@dataclass(frozen=True)
class Reply:
    """Reply of an environment to a turn.

    Args:
        observation: Input of the model before its next turn. If there is no next turn, it is recorded in
            `info["last_observation"]`.
        reward: Reward of the turn, if any.
        done: Whether the episode is over.

    Raises:
        ValueError: The reward is not finite, or the episode continues without an observation.

    >>> Reply("= 42")
    Reply(observation='= 42', reward=None, done=False)
    >>> Reply(reward=1.0)
    Traceback (most recent call last):
        ...
    ValueError: observation: missing, and done is False
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", check_float("reward", self.reward, -1e30, 1e30, "a finite number"))
        object.__setattr__(self, "done", check_bool("done", self.done))
        if self.observation is None and not self.done:
            raise ValueError("observation: missing, and done is False")


class Environment(Protocol):
    """The environment of one episode. Each run of each prompt has its own.

    An optional method `close` is called when the episode is over, also after an error.

    >>> class Guess:
    ...     def __init__(self, prompt):
    ...         self.secret = prompt.reference
    ...     def begin(self):
    ...         return "Guess a number."
    ...     def respond(self, text):
    ...         return Reply(reward=1.0, done=True) if text == self.secret else Reply("Wrong, try again.")
    >>> environment: Environment = Guess(Prompt(text="", reference="7"))
    >>> environment.respond("7")
    Reply(observation=None, reward=1.0, done=True)
    """

    def begin(self) -> Observation | None:
        """Return the observation between the prompt and the first turn, or `None`."""
        ...

    def respond(self, text: str) -> Reply:
        """Reply to a turn.

        Args:
            text: Text of the turn, without the end token.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Settings of multi-turn rollouts.

    An episode that reaches a limit has finish reason `length`, and `info["truncated"]` names the limit: `turns`,
    `context`, or `turn` if a turn reached `max_tokens`.

    Args:
        factory: Creates the environment of an episode from its prompt. `prompt.eid` is the id of the run, which can
            serve as a random seed.
        max_turns: Largest number of turns of the model.
        context_limit: Largest number of tokens of an episode, including the prompt. `None`: the model's positions.
        on_truncation: What happens after a truncated turn. `end`: the episode is over, and the environment does not
            see the turn. `respond`: the environment replies as usual, as in a game whose moves have a fixed number of
            tokens. An episode that the environment then ends has finish reason `stop`.
        rewards: Whether the reward of an episode is the `sum` of the rewards of its turns, or the `last` one; 0 if
            there are none. With `sum`, `token_level_reward` has the reward of each turn on its last token, for
            temporal estimators (`ppo`, `gae`, `reinforce`, ...).
        workers: Number of environments that respond concurrently, in threads.
        episode: Options of `Episode`: `on_fork`, `on_realign`, `parse`, `template_options`.
        tokenizer: Renders turns. `None`: the engine's processor or tokenizer.

    Raises:
        ValueError: An option is invalid.

    >>> EnvironmentConfig(factory=print, max_turns=3).on_truncation
    'end'
    """

    factory: Callable[[Prompt], Environment]
    max_turns: int = 8
    context_limit: int | None = None
    on_truncation: OnTruncation = "end"
    rewards: RewardMode = "sum"
    workers: int = 1
    episode: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not callable(self.factory):
            kind = type(self.factory).__name__
            raise ValueError(f"environment: got {kind}, expected a function from a Prompt to an Environment")
        check_choice("rewards", self.rewards, get_args(RewardMode))
        check_choice("on_truncation", self.on_truncation, get_args(OnTruncation))
        check_int("max_turns", self.max_turns, 1)
        check_int("workers", self.workers, 1)
        for name in self.episode:
            if name not in _EPISODE_OPTIONS:
                raise ValueError(f"episode: unknown option {name!r}{suggest(name, _EPISODE_OPTIONS)}")
        if self.context_limit is not None:
            check_int("context_limit", self.context_limit, 1)

    def get_tokenizer(self, engine: Engine) -> Any:
        """Return the tokenizer that renders turns: `tokenizer`, or the engine's processor or tokenizer.

        Args:
            engine: The engine.

        Returns:
            The tokenizer.

        Raises:
            ValueError: All of them are missing.
        """
        tokenizers = (self.tokenizer, getattr(engine, "processor", None), getattr(engine, "tokenizer", None))
        tokenizer = next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)
        if tokenizer is None:
            raise ValueError("tokenizer: missing, and the engine has none")
        return tokenizer


def play_episodes(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    environment: EnvironmentConfig,
    *,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Play `sampling.n` episodes per prompt.

    Args:
        engine: Samples the turns of the model.
        prompts: The prompts.
        sampling: Sampling options of each turn.
        environment: The environment, and the limits.
        metrics: Collects timings and counts (`episode/turns`, ...).

    Returns:
        One `multi_turn` record per run, or several if the conversation forked, in the order of prompts and runs, with
        `reward` and, unless `rewards` is `last`, `token_level_reward`. `info["segments"]` has the origin of the tokens,
        and `metrics` counts turns and observed tokens. A run whose environment or engine failed has finish reason
        `error`, the error in `info["error"]`, a reward of NaN and nothing to train on.

    Raises:
        ValueError: `sampling.max_prompt_tokens` is set, or there is no tokenizer.

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
    >>> engine = ScriptedEngine(["7x8$", "60$", "56$"], tokenizer)  # one run uses the calculator
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
        self, engine: Engine, sampling: Sampling, environment: EnvironmentConfig, metrics: StepMetrics
    ) -> None:
        if sampling.max_prompt_tokens is not None:
            raise ValueError("max_prompt_tokens: not supported for episodes; use context_limit")
        self.engine, self.sampling, self.environment, self.metrics = engine, sampling, environment, metrics
        self.tokenizer = environment.get_tokenizer(engine)
        self.context_limit = environment.context_limit
        if self.context_limit is None and isinstance(engine, TransformersEngine):
            self.context_limit = engine.runner.max_positions

    def run(self, prompts: Sequence[Prompt]) -> Experiences:
        environment = self.environment
        with self.metrics.time("rollout") as stage, ThreadPoolExecutor(environment.workers) as pool:
            # The runs have the same ids as single-turn samples.
            requests = BaseEngine.requests(prompts, self.sampling)
            runs = [_Run(request.prompt.replace(eid=eid), eid) for request in requests for eid in request.eids]
            try:
                self._play(runs, pool.map if environment.workers > 1 else map)
            finally:
                for run in runs:
                    close = getattr(run.environment, "close", None)
                    if callable(close):
                        with suppress(Exception):  # the episode is over already
                            close()
            for run in runs:
                run.record(environment.rewards, self.sampling.n)
            rows = [row for run in runs for row in run.rows]
            stage["tokens"] = int(sum(row.metrics.get("trained_tokens", 0) for row in rows))
        if runs and all(run.error is not None for run in runs):
            warn_user(f"episodes: all {len(runs)} failed; the first: {runs[0].error}")
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
        self._call_environments([run for run in runs if not run.over], self._begin, map_runs)
        live = [run for run in runs if not run.over]
        is_first = True
        while live:
            samples = act_all([run.episode for run in live if run.episode is not None])
            if is_first and all(sample.finish_reason == "length" for sample in samples):
                warn_user(
                    f"episodes: all {len(samples)} first turns were truncated at "
                    f"max_tokens={self.sampling.max_tokens}; raise sampling.max_tokens"
                )
            is_first = False
            waiting = [run for run, sample in zip(live, samples, strict=True) if self._awaits_reply(run, sample)]
            self._call_environments(waiting, _respond, map_runs)
            live = [run for run in live if not run.over]

    def _begin(self, run: _Run) -> Reply | None:
        run.environment = self.environment.factory(run.prompt)
        observation = run.environment.begin()
        return None if observation is None else Reply(observation)

    def _awaits_reply(self, run: _Run, sample: Sample) -> bool:
        """Return whether the environment replies to a turn; otherwise, end the run."""
        if sample.failed:
            run.fail(sample.error or "", "turn")
        elif sample.unfinished:
            run.fail("the engine aborted the turn", "turn")
        elif sample.finish_reason == "length" and (self.environment.on_truncation == "end" or not sample.response_ids):
            run.over = True
        return not run.over

    def _call_environments(
        self, runs: Sequence[_Run], call: Callable[[_Run], Reply | None], map_runs: Callable[..., Iterable[Any]]
    ) -> None:
        """Call environments concurrently, and apply their replies one by one, since episodes share the tokenizer."""

        def call_safely(run: _Run) -> Reply | Exception | None:
            try:
                return call(run)
            except Exception as error:  # fails this run alone
                return error

        with self.metrics.time("environment"):
            for run, reply in zip(runs, map_runs(call_safely, runs), strict=True):
                if isinstance(reply, Exception):
                    run.fail(reply, "environment")
                elif reply is not None:
                    try:
                        self._apply_reply(run, reply)
                    except Exception as error:  # an observation that cannot be rendered
                        run.fail(error, "environment")

    def _apply_reply(self, run: _Run, reply: Reply) -> None:
        """Record the reward of a reply, and append its observation or end the run."""
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
        if run.over:  # there is no next turn
            episode.info["last_observation"] = observation
        else:
            message = {"role": "user", "content": observation}
            episode.observe(message if isinstance(observation, str) and episode.messages else observation)


def _respond(run: _Run) -> Reply:
    """Return the environment's reply to the last turn."""
    if run.episode is None or run.environment is None:
        raise ValueError("the episode has not started")
    reply = run.environment.respond(run.episode.turns[-1].text or "")
    if not isinstance(reply, Reply):
        raise ValueError(f"respond: got {type(reply).__name__}, expected a Reply")
    return reply


def _episode_metrics(runs: Sequence[_Run]) -> dict[str, float]:
    """Return the means of turns and observed tokens, and how episodes ended."""
    last_rows = [run.rows[-1] for run in runs]
    count = len(runs)
    return {
        "episode/turns": sum(len(run.episode.turns) for run in runs if run.episode is not None) / count,
        "episode/observed_tokens": sum(row.metrics.get("observed_tokens", 0) for row in last_rows) / count,
        "episode/out_of_turns": sum(run.out_of_turns for run in runs) / count,
        "episode/out_of_context": sum(row.info.get("truncated") == "context" for row in last_rows) / count,
        "episode/environment_errors": float(sum((run.error or "").startswith("environment") for run in runs)),
    }


@dataclass
class _Run:
    """One episode that is being played."""

    prompt: Prompt
    eid: EID
    episode: Episode | None = None
    environment: Environment | None = None
    error: str | None = None
    over: bool = False
    ended: bool = False
    """Whether the environment ended it."""
    out_of_turns: bool = False
    rewards: list[float] = field(default_factory=list)
    """Rewards of the turns that have one."""
    rows: list[Experience] = field(default_factory=list)

    def fail(self, error: BaseException | str, stage: str) -> None:
        """End the run with an error in a stage: `prompt`, `turn` or `environment`."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.error, self.over = f"{stage}: {message}", True
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

    def record(self, reward_mode: RewardMode, group_size: int) -> None:
        """Create the records of the run: one, or several if the conversation forked."""
        if self.episode is None:
            self.rows = [
                _failed_record(self._failure().replace(group_size=group_size).to_experience(), str(self.error))
            ]
            return
        # With `sum`, the episode adds the rewards of its turns itself.
        reward = self.rewards[-1] if reward_mode == "last" and self.rewards else 0.0
        for row in self.episode.experiences(reward):
            if self.error is not None:
                row = _failed_record(row, self.error)
            elif self.ended and row.finish_reason == "length":
                # The environment replied to a truncated turn, so the episode is not truncated.
                info = {name: value for name, value in row.info.items() if name != "truncated"}
                row = row.replace(finish_reason="stop", truncate_status=None, info=info)
            elif self.out_of_turns:
                info = {**row.info, "truncated": "turns"}
                row = row.replace(finish_reason="length", truncate_status="response_truncated", info=info)
            self.rows.append(row)


def _failed_record(row: Experience, error: str) -> Experience:
    """Return the record of a failed episode: no reward, and nothing to train on."""
    mask = None if row.action_mask is None else torch.zeros_like(row.action_mask)
    return row.replace(reward=math.nan, action_mask=mask, info={**row.info, "reward_error": f"no reward: {error}"})


POLICIES = ("keep", "fork")


class Episode:
    """One branch of a multi-turn conversation of a model with tools or an environment.

    An episode is not thread-safe, but its branches can act concurrently in one event loop.

    Args:
        engine: Samples the turns. Without one, turns are appended by `append_turn` or `append_sample`.
        tokenizer: Tokenizer or processor of the engine's model, which renders messages. Not needed for token ids.
        prompt: The input before the first turn: messages, text, token ids or a `Prompt`.
        messages: Chat messages, instead of `prompt`.
        eid: Id of the run.
        tools: Tools offered to the model.
        sampling: Sampling options of every turn; `act` takes changes. With a `seed`, each turn and branch has its own
            random stream.
        context_limit: Largest number of tokens of a branch, including the prompt. Turns are truncated to fit; when
            nothing is left, `act` returns a sample without tokens and finish reason `length`.
        group_size: Number of runs of the task; `Episode.group` creates all of them.
        on_realign: What happens if rendering the conversation again gives other tokens for the same text (see
            `rollbook.rollout.chat.Outcome`). `keep` continues from the sampled tokens. `fork` starts a branch whose
            prompt is the new rendering; the sampled tokens are trained in the old branch.
        on_fork: What happens if rendering gives another text: `keep` or `fork`.
        parse: Converts the text of a turn to the assistant's message (for example, with `tool_calls`), or to `None`.
            By default, the message is that of the server (`Sample.message`), or has the text as its content.
        template_options: Options of the chat template, such as `enable_thinking`.
        media: Processed images of the prompt, for the record, if the engine does not return them.

    Raises:
        ValueError: The prompt cannot be rendered, or an option is invalid.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine([[7, 8, 2], [9, 2]])
    >>> episode = Episode(engine, prompt=[1, 5, 6], eid=EID(batch=0, task=3, suffix="a"))
    >>> episode.act().response_ids, episode.observe_tokens([4, 4]), episode.act().response_ids
    ([7, 8, 2], None, [9, 2])
    >>> (record,) = episode.experiences(reward=1.0)
    >>> record
    Experience(0/3/0/0/a, multi_turn, 3+7 tokens, reward=1.0)
    >>> record.tokens.tolist(), record.action_mask.int().tolist(), record.logprobs.tolist()
    ([1, 5, 6, 7, 8, 2, 4, 4, 9, 2], [1, 1, 1, 0, 0, 1, 1], [-1.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0])
    """

    def __init__(
        self,
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        prompt: PromptLike | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        eid: EID | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        context_limit: int | None = None,
        group_size: int | None = None,
        on_realign: DriftPolicy = "keep",
        on_fork: DriftPolicy = "keep",
        parse: Parse | None = None,
        template_options: Mapping[str, Any] | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> None:
        if (prompt is None) == (messages is None):
            raise ValueError("prompt: got both or neither of prompt and messages, expected one of them")
        if isinstance(messages, (str, bytes)):
            raise ValueError(f"messages: got {type(messages).__name__}, expected a list of messages; text is a prompt")
        task = Prompt.of(messages if prompt is None else prompt)
        if tools is not None:
            task = task.replace(tools=tools)
        check_choice("on_realign", on_realign, POLICIES)
        check_choice("on_fork", on_fork, POLICIES)
        self.engine = engine
        self._tree = Tree(
            renderer=make_renderer(tokenizer, task, template_options),
            prompt=task,
            eid=_with_batch(eid if eid is not None else task.eid),
            sampling=check_single(Sampling.of(sampling)),
            context_limit=None if context_limit is None else check_int("context_limit", context_limit, 1),
            group_size=None if group_size is None else check_int("group_size", group_size, 1),
            policies={"realigned": on_realign, "forked": on_fork},
            parse=parse,
        )
        self._branch = Branch(number=0)
        self._tree.branches.append(self._branch)
        self._next_cache: tuple[tuple[int, int, int], NextTokens] | None = None
        if task.token_ids is not None:
            self.observe_tokens(task.token_ids, images=task.images, media=media)
        else:
            self.observe(task.messages if task.text is None else task.text, images=task.images, media=media)  # type: ignore[arg-type]

    @classmethod
    def group(cls, n: int, *arguments: Any, eid: EID | None = None, **options: Any) -> list[Self]:
        """Create the runs of one task, each with its own id.

        Args:
            n: Number of runs.
            arguments: Positional arguments of `Episode`.
            eid: Id of the first run.
            options: Keyword arguments of `Episode`.

        >>> [episode.eid.rid for episode in Episode.group(2, prompt=[1], eid=EID(batch=0, task=4))]
        ['0/4/0', '0/4/1']
        """
        check_int("n", n, 1)
        prompt = arguments[2] if len(arguments) > 2 else options.get("prompt")
        first = _with_batch(eid if eid is not None else prompt.eid if isinstance(prompt, Prompt) else None)
        ids = [first, *(first.replace(run=first.run + k, suffix=os.urandom(8).hex()) for k in range(1, n))]
        return [cls(*arguments, **{"group_size": n, **options}, eid=run_eid) for run_eid in ids]

    def _with_branch(self, branch: Branch) -> Self:
        """Return an episode that refers to another branch."""
        sibling = type(self).__new__(type(self))
        sibling.engine, sibling._tree, sibling._branch, sibling._next_cache = self.engine, self._tree, branch, None
        return sibling

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def eid(self) -> EID:
        """Id of this branch's record: that of the run, with the number of the branch as its step."""
        return self._tree.record_eid(self._branch)

    @property
    def number(self) -> int:
        """Number of the branch. It changes when the conversation continues in a fork."""
        return self._branch.number

    @property
    def branches(self) -> list[Self]:
        """All branches that can be continued, including this one."""
        alive = [branch for branch in self._tree.branches if branch.continued_as is None]
        return [self if branch is self._branch else self._with_branch(branch) for branch in alive]

    @property
    def tokens(self) -> list[int]:
        """All tokens: the prompt of the next turn."""
        return list(self._next()[0])

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation; empty unless the prompt is a chat."""
        return full_conversation(self._branch) if self._tree.chat else []

    @property
    def turns(self) -> list[Turn]:
        """Turns of the model, including those before a fork."""
        return list(self._branch.turns)

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the last turn; `length` if the context is full, `error` if the turn failed."""
        if self._branch.failed is not None:
            return "error"
        if self._branch.full:
            return "length"
        return self._branch.turns[-1].finish_reason if self._branch.turns else None

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens until the context limit; `None` without a limit."""
        limit = self._tree.context_limit
        return None if limit is None else max(limit - len(self.tokens), 0)

    @property
    def drift(self) -> Drifts:
        """Differences between the sampled tokens and a new rendering, in all branches; see `Drifts.counts`."""
        return collect_drifts(turn for branch in self._tree.branches for turn in branch.turns)

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Errors, each with `turn` and `error`. The turn may have succeeded later."""
        return [dict(error) for error in self._branch.errors]

    @property
    def reward(self) -> float | None:
        """Reward of this branch, if it was set; `experiences` takes one for all branches."""
        return self._branch.reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self._branch.reward = None if reward is None else _check_reward(reward)

    @property
    def info(self) -> dict[str, Any]:
        """Data for the `info` of the record, to be written to. A new branch has a copy."""
        return self._branch.info

    def sampled_text(self) -> str | None:
        """Return the text of all turns, without observations; `None` without a tokenizer."""
        return sampled_text(self._branch.turns)

    def score_turn(self, reward: float, turn: int = -1) -> None:
        """Set the reward of a turn, which is put on the turn's last token in the record that trains it.

        Args:
            reward: The reward; replaces an earlier one.
            turn: Index of the turn; the last by default.

        Raises:
            ValueError: There is no such turn, or it is unfinished.
        """
        turns = self._branch.turns
        if not -len(turns) <= turn < len(turns):
            raise ValueError(f"turn: got {turn}, expected an index of the {len(turns)} turns")
        if turns[turn] is self._branch.open:
            raise ValueError(f"turn: got {turn}, which is unfinished")
        self._tree.turn_rewards[turns[turn].key] = _check_reward(reward)

    # --- turns of the model -----------------------------------------------------------------------------------------

    def act(self, *, cancel: Cancel | None = None, pause_after: int | None = None, **options: SamplingOption) -> Sample:
        """Sample the next turn and append it.

        A turn that was paused or canceled (`abort`) is continued, if nothing was observed since. A failed turn is
        recorded in `errors` and can be repeated.

        Args:
            cancel: Stops the call from another thread.
            pause_after: Limit on the tokens of this call.
            options: Changes of the sampling options.

        Returns:
            The sample. If it failed, it has an `error`.

        Raises:
            ValueError: There is no engine, or nothing was observed since the last turn.
        """
        return act_all([self], cancel=cancel, pause_after=pause_after, **options)[0]

    async def aact(
        self, *, cancel: Cancel | None = None, pause_after: int | None = None, **options: SamplingOption
    ) -> Sample:
        """Sample the next turn in an event loop, and append it.

        Args:
            cancel: See `act`.
            pause_after: See `act`.
            options: See `act`.

        Returns:
            The sample. If it failed, it has an `error`.

        Raises:
            ValueError: There is no engine, nothing was observed since the last turn, or the branch was changed during
                the call.
        """
        engine, request = _engine(self), self._tree.request_turn(self._branch, self._next(), options)
        if isinstance(request, Sample):
            return request
        samples = await engine.agenerate([request.prompt], [request.sampling], cancel=cancel, pause_after=pause_after)
        return self._append_sampled(request, samples[0])

    def append_turn(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        *,
        versions: Sequence[int] | int | None = None,
        finish_reason: FinishReason = "stop",
        message: Mapping[str, Any] | None = None,
        logprobs_kind: LogprobsKind = "processed",
    ) -> None:
        """Append a turn that was sampled elsewhere, after `tokens`.

        Args:
            ids: [R] Token ids.
            logprobs: [R] Log-probs.
            versions: [R] Versions of the policy, or one for all tokens.
            finish_reason: Finish reason of the turn.
            message: The assistant's message, if it is not the text.
            logprobs_kind: Kind of the log-probs.

        >>> episode = Episode(prompt=[1, 2])
        >>> episode.append_turn([3, 4], [-0.5, -0.25], versions=7)
        >>> episode.experiences()[0].policy_versions.tolist()
        [7, 7]
        """
        sampled = token_ids("ids", list(ids))
        sample = Sample(
            prompt=self._tree.prompt,
            eid=self.eid,
            prompt_ids=[],
            response_ids=sampled,
            logprobs=None if logprobs is None else [float(logprob) for logprob in logprobs],
            logprobs_kind=logprobs_kind,
            versions=[versions] * len(sampled) if isinstance(versions, int) else versions,
            finish_reason=finish_reason,
            message=message,
        )
        self.append_sample(sample)

    def append_sample(self, sample: Sample) -> None:
        """Append a turn that an engine returned.

        Args:
            sample: The sample. Its `prompt_ids`, if any, are what the model was given. If they differ from `tokens`
                only after the last turn, the observations are taken from them. If they differ before, the turn begins a
                new branch with them as its prompt: turns are recorded only after tokens that the model was given.
        """
        self._branch = self._tree.append(self._branch, sample)

    def _next(self) -> NextTokens:
        """Return `Tree.next` of the branch, cached until the branch changes."""
        if self._next_cache is None or self._next_cache[0] != self._branch.state:
            self._next_cache = self._branch.state, self._tree.next(self._branch)
        return self._next_cache[1]

    def _append_sampled(self, request: TurnRequest, sample: Sample) -> Sample:
        if request.state != self._branch.state:
            raise ValueError("act: the branch was changed during the call")
        self._branch = self._tree.append(self._branch, sample, request.next)
        return sample

    # --- observations -----------------------------------------------------------------------------------------------

    def observe(
        self,
        observation: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str,
        *,
        images: Sequence[Any] = (),
        media: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an observation, rendered together with those before it since the last turn.

        Args:
            observation: Messages if the prompt is a chat, else text.
            images: Images for the next turn, if they are not within the messages.
            media: Processed images, for the record.

        Raises:
            ValueError: The observation has the wrong type or cannot be rendered; the episode is unchanged.
        """
        renderer, branch = self._tree.renderer, self._branch
        pictures = list(as_media("images", images))
        if renderer is not None and renderer.chat:
            messages = [observation] if isinstance(observation, Mapping) else observation
            if isinstance(messages, str) or not all(
                isinstance(message, Mapping) and "role" in message for message in messages
            ):
                raise ValueError(f"observation: got {observation!r}, expected messages with a role")
            if any(pending.ids is not None for pending in branch.pending):
                raise ValueError("observation: got a message after token ids, expected a turn or more ids")
            remaining = iter(pictures)
            observations = [extract_images(message, remaining) for message in messages]
            left_over = tuple(remaining)  # the text of the messages has their placeholders
            if left_over and observations:
                observations[-1] = replace(observations[-1], images=(*observations[-1].images, *left_over))
        elif not isinstance(observation, str):
            raise ValueError(f"observation: got {type(observation).__name__}, expected text: the prompt is not a chat")
        elif renderer is None:
            raise ValueError("observation: got text, expected token ids (observe_tokens): the episode has no tokenizer")
        elif branch.unchecked or any(pending.ids is not None for pending in branch.pending):
            ids = tuple(renderer.encode_after("", observation, pictures))
            observations = [PendingObservation(ids=ids, images=tuple(pictures))]
        else:
            role = "observation" if branch.turns else "prompt"
            observations = [PendingObservation(message={"role": role, "content": observation}, images=tuple(pictures))]
        self._observe(observations, media)

    def observe_tokens(
        self,
        ids: Sequence[int],
        *,
        message: Mapping[str, Any] | None = None,
        images: Sequence[Any] = (),
        media: Mapping[str, Any] | None = None,
    ) -> None:
        """Append token ids unchanged, without a template.

        Args:
            ids: Token ids, including the placeholders of images.
            message: The same as a message. Without it, the conversation is no longer compared with its rendering.
            images: Images for the next turn.
            media: Processed images, for the record. Entries per token (`mm_token_type_ids`) have one for each id.
        """
        plain_message = None if message is None else dict(message)
        observation = PendingObservation(
            ids=token_ids("ids", list(ids)), message=plain_message, images=as_media("images", images)
        )
        self._observe([observation], media)

    def _observe(self, observations: list[PendingObservation], media: Mapping[str, Any] | None) -> None:
        branch = self._branch
        placed = place_media(media, branch, observations) if media else None
        images = [image for observation in observations for image in observation.images]
        branch.pending += observations
        branch.images += images
        try:
            self._next()  # raises if it cannot be rendered
        except Exception:
            del branch.pending[len(branch.pending) - len(observations) :]
            del branch.images[len(branch.images) - len(images) :]
            raise
        if placed:
            branch.media.append(placed)

    # --- branches and records ---------------------------------------------------------------------------------------

    def branch(self) -> Self:
        """Create a branch: an episode with the same history, continued independently.

        >>> from rollbook.rollout import ScriptedEngine
        >>> episode = Episode(ScriptedEngine([[5], [6], [7]]), prompt=[1], eid=EID(batch=0, task=0))
        >>> _ = episode.act(), episode.observe_tokens([2])
        >>> other = episode.branch()
        >>> _ = episode.act(), other.act()
        >>> [(row.tokens.tolist(), row.action_mask.tolist()) for row in episode.experiences()]
        [([1, 5, 2, 6], [True, False, True]), ([1, 5, 2, 7], [False, False, True])]
        """
        branch = self._branch.copy(len(self._tree.branches))
        self._tree.branches.append(branch)
        return self._with_branch(branch)

    def experiences(self, reward: float | Callable[[Episode], float | None] | None = None) -> list[Experience]:
        """Create the records of all branches: one for each branch that no other continues.

        A sampled token that several branches share is trained in the first of them (by number), where the mask is True;
        in the others it is context, with its log-prob.

        Args:
            reward: Reward of every branch that has none of its own, or a function of the branch. The rewards of turns
                are added to it; if there are any, `token_level_reward` has them on the last tokens of the turns, and
                this reward on the last trained token. A fork and its origin are one trajectory with one reward.

        Returns:
            Records of one run. `eid.step` is the number of the branch, `parent` the record that it branched off.
        """
        tree, prompt = self._tree, self._tree.prompt

        def outcome(branch: Branch) -> float | None:
            if branch.reward is not None or reward is None:
                return branch.reward
            score = reward(self._with_branch(branch)) if callable(reward) else reward
            return None if score is None else _check_reward(score)

        fields = {"reference": prompt.reference, "label": prompt.label}
        recorder = Recorder(
            tree=tree, info={**prompt.info, **{name: value for name, value in fields.items() if value is not None}}
        )
        return recorder.records(outcome)

    def to_dict(self) -> dict[str, Any]:
        """Return all branches as plain values, to be continued later, possibly with a newer policy.

        Images, media, `info` and references are returned as they were given.

        >>> episode = Episode(prompt=[1, 2], eid=EID(batch=0, task=0, suffix="a"))
        >>> episode.append_turn([3])
        >>> Episode.from_dict(episode.to_dict()).tokens
        [1, 2, 3]
        """
        return {**self._tree.to_dict(), "branch": self._branch.number}

    @classmethod
    def from_dict(
        cls,
        plain: Mapping[str, Any],
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        parse: Parse | None = None,
    ) -> Self:
        """Restore an episode from `to_dict`.

        Args:
            plain: Result of `to_dict`.
            engine: Samples the turns.
            tokenizer: Must have the same chat template as before.
            parse: See `Episode`.

        Raises:
            ValueError: The format or the chat template differs.
        """
        episode = cls.__new__(cls)
        episode.engine, episode._next_cache = engine, None
        episode._tree = Tree.from_dict(plain, tokenizer, parse)
        episode._branch = episode._tree.branches[plain["branch"]]
        return episode


def act_all(
    episodes: Sequence[Episode],
    *,
    cancel: Cancel | None = None,
    pause_after: int | None = None,
    **options: SamplingOption,
) -> list[Sample]:
    """Sample the next turn of several episodes or branches in one call of their engine.

    Args:
        episodes: Episodes that share one engine.
        cancel: Stops the call from another thread.
        pause_after: Limit on the tokens of this call; unfinished turns continue with the next one.
        options: Changes of the sampling options.

    Returns:
        One sample per episode.

    Raises:
        ValueError: The episodes have no engine, or different ones, or one of them has nothing to respond to.

    >>> from rollbook.rollout import ScriptedEngine
    >>> episodes = Episode.group(2, ScriptedEngine([[5], [6, 7]]), prompt=[1])
    >>> [sample.response_ids for sample in act_all(episodes)]
    [[5], [6, 7]]
    """
    requests = [
        (episode, episode._tree.request_turn(episode._branch, episode._next(), options))
        for episode in episodes
        if _engine(episode)
    ]
    if any(episode.engine is not episodes[0].engine for episode in episodes):
        raise ValueError("episodes: got several engines, expected one")
    # If the context of an episode is full, there is a sample instead of a request.
    waiting = [request for _, request in requests if isinstance(request, TurnRequest)]
    samples: Iterator[Sample] = iter(())
    if waiting:
        prompts, samplings = [request.prompt for request in waiting], [request.sampling for request in waiting]
        engine = _engine(episodes[0])
        # Not every engine has these options.
        controls = {"cancel": cancel, "pause_after": pause_after}
        controls = {name: control for name, control in controls.items() if control is not None}
        samples = iter(engine.generate(prompts, samplings, **controls))
    return [
        request if isinstance(request, Sample) else episode._append_sampled(request, next(samples))
        for episode, request in requests
    ]


def _engine(episode: Episode) -> Any:
    if episode.engine is None:
        raise ValueError("engine: missing; turns that were sampled elsewhere are appended with append_turn")
    return episode.engine


def _with_batch(eid: EID | None) -> EID:
    """Return an id with a batch and a task: without them every record would be its own run."""
    base = eid if eid is not None else EID()
    return base if base.batch != "" or base.task != "" else base.replace(batch=random_batch_id(), task=0)


def _check_reward(reward: float) -> float:
    """Check a reward. NaN, a missing reward, is allowed."""
    return float(reward) if reward != reward else check_float("reward", reward)


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Creates the records of the branches of an episode."""

    tree: Tree
    info: Mapping[str, Any]
    """The `info` that all records share."""

    def records(self, outcome: Callable[[Branch], float | None]) -> list[Experience]:
        """Create a record for each branch that is not part of another. A shared token is trained in the first one.

        Args:
            outcome: Returns the reward of a branch, without the rewards of its turns.
        """
        branches = recorded_branches(self.tree.branches)
        trained: set[int] = set()
        records = []
        for branch in branches:
            trained_here = {span.number for span in branch.spans if span.kind == "model"} - trained
            trained |= trained_here
            end = branch
            while end.continued_as is not None:
                end = self.tree.branches[end.continued_as]
            records.append(self._record(branch, end, trained_here, outcome(end), self._parent(branch, branches)))
        return records

    def _parent(self, branch: Branch, branches: Sequence[Branch]) -> str | None:
        """Return the id of the record that this branch continues."""
        if branch.parent is None:
            return None
        origin = self.tree.branches[branch.parent]
        path = origin.numbers
        candidates = [origin, *branches] if any(other is origin for other in branches) else branches
        for candidate in candidates:
            if candidate.numbers[: len(path)] == path:
                return None if candidate is branch else self.tree.record_eid(candidate).uid
        return None

    def _record(
        self, branch: Branch, end: Branch, trained_here: set[int], outcome: float | None, parent: str | None
    ) -> Experience:
        spans = list(branch.spans)
        info: dict[str, Any] = {**self.info, **branch.info}
        if branch.pending and branch.continued_as is None:
            limit = self.tree.context_limit
            try:
                tail = tuple(self.tree.tail(branch, not spans))  # a prompt includes the start of the assistant's turn
            except ValueError as error:
                tail, info["not_rendered"] = (), str(error)
            if spans and limit is not None and len(branch.ids) + len(tail) > limit:
                info["left_out_tokens"] = len(tail)  # beyond the limit, and no turn follows
            else:
                spans.append(Span(number=-1, kind="observation" if spans else "prompt", ids=tail))
        prompt = len(spans[0].ids) if spans else 0
        response = spans[1:]
        mask = [span.number in trained_here for span in response for _ in span.ids]
        turns = branch.own_turns
        reason = branch.turns[-1].finish_reason if branch.turns else None
        if branch.continued_as is None:
            reason = "error" if branch.failed is not None else "length" if branch.full else reason
        segments = self._segments(spans, branch.turns, trained_here)
        info |= {"segments": segments, "drift": [turn.drift.to_dict() for turn in turns if turn.drift is not None]}
        info["branch"] = branch.number
        if reason == "length":
            info["truncated"] = "context" if branch.full else "turn"
        if branch.errors:
            info["errors"] = [dict(error) for error in branch.errors]
        if branch.failed is not None and branch.continued_as is None:
            info["error"] = branch.failed
        if "images" not in info and (images := encode_for_record(branch.images)):
            info["images"] = images
        reward, by_token = self._rewards(branch, end, response, mask, outcome)
        renderer, tools = self.tree.renderer, self.tree.prompt.tools
        return Experience(
            eid=self.tree.record_eid(branch),
            tokens=[token for span in spans for token in span.ids],
            prompt_length=prompt,
            action_mask=mask,
            logprobs=_per_token(response, "logprobs"),
            policy_versions=_per_token(response, "versions"),
            routed_experts=_experts(response),
            reward=reward,
            token_level_reward=by_token,
            finish_reason=reason,
            truncate_status="response_truncated" if reason == "length" else None,
            prompt_text=None if renderer is None or not spans else renderer.decode(spans[0].ids),
            response_text=sampled_text(turns),
            messages=[dict(message) for message in full_conversation(branch)] if self.tree.chat else None,
            tools=None if tools is None else [dict(tool) for tool in tools],
            multi_modal_inputs=branch.engine_media if branch.engine_media is not None else join_media(branch.media),
            sampling=_sampling(turns),
            parent=parent,
            group_size=self.tree.group_size,
            info=info,
            metrics=_metrics(branch, spans, turns, sum(mask)),
            experience_type="multi_turn",
        )

    def _segments(self, spans: Sequence[Span], turns: Sequence[Turn], trained_here: set[int]) -> list[dict[str, Any]]:
        """Describe the tokens in order: the kind of each `tokens[start:stop]`."""
        numbers = {span.number for span in spans}
        common = _sampling([turn for turn in turns if turn.key in numbers]) or {}
        turn_index = {piece.number: i for i, turn in enumerate(turns) for piece in turn.pieces}
        segments: list[dict[str, Any]] = []
        stop = 0
        for span in spans:
            start, stop = stop, stop + len(span.ids)
            segment: dict[str, Any] = {"kind": span.kind, "start": start, "stop": stop}
            if span.number in turn_index:
                turn = turns[turn_index[span.number]]
                segment |= {"turn": turn_index[span.number], "trained": span.number in trained_here}
                segment["finish_reason"] = turn.finish_reason if span.number == turn.key else "abort"
                differing = {name: option for name, option in turn.sampling.items() if common.get(name) != option}
                optional: dict[str, Any] = {
                    "sampling": differing or None,
                    "stop_reason": turn.stop_reason,
                    "reward": self.tree.turn_rewards.get(span.number),
                }
                segment |= {name: entry for name, entry in optional.items() if entry is not None}
            if stop > start or span.kind == "model":
                segments.append(segment)
        return segments

    def _rewards(
        self, branch: Branch, end: Branch, response: Sequence[Span], mask: Sequence[bool], outcome: float | None
    ) -> tuple[float | None, list[float] | None]:
        """Return the reward of the episode, and the rewards per token.

        The reward of a turn is on its last token, if that is trained. The outcome, and the rewards of turns after a
        fork, are on the last trained token.
        """
        scores = {
            turn.key: self.tree.turn_rewards[turn.key] for turn in end.turns if turn.key in self.tree.turn_rewards
        }
        if not scores:
            return outcome, None
        total = sum(scores.values()) + (0.0 if outcome is None else outcome)
        own_keys = {turn.key for turn in branch.turns}
        actions = [i for i, trains in enumerate(mask) if trains]
        by_token = [0.0] * len(mask)
        if actions:
            after_fork = sum(score for key, score in scores.items() if key not in own_keys)
            by_token[actions[-1]] += after_fork + (0.0 if outcome is None else outcome)
            stop = 0
            for span in response:
                stop += len(span.ids)
                trains = mask[stop - 1] if span.ids else False
                if span.number in scores and (trains or not span.ids):
                    # A turn without tokens has its reward on the token before it.
                    by_token[max((i for i in actions if i < stop), default=actions[0])] += scores[span.number]
        return total, by_token


def join_media(media: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Join the tensors of several observations by key, in order.

    Args:
        media: Media of each observation, as returned by `place_media`.

    Returns:
        Tensors concatenated along their first axis. Tensors per token [1, n], which start at the first token, are
        summed. They are left out if an observation has none; the model then derives them. `None` without media.

    >>> import torch
    >>> first = {"pixel_values": torch.zeros(2, 3), "mm_token_type_ids": torch.tensor([[0, 1]])}
    >>> second = {"pixel_values": torch.ones(1, 3), "mm_token_type_ids": torch.tensor([[0, 0, 0, 1]])}
    >>> joined = join_media([first, second])
    >>> joined["pixel_values"].shape, joined["mm_token_type_ids"]
    (torch.Size([3, 3]), tensor([[0, 1, 0, 1]]))
    """
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for observation in media for key in observation):
        tensors = [observation[key] for observation in media if key in observation]
        if key not in BY_TOKEN:
            joined[key] = torch.cat(tensors)
        elif len(tensors) == len(media):
            entries = tensors[0].new_zeros((1, max(tensor.shape[1] for tensor in tensors)))
            for tensor in tensors:
                entries[:, : tensor.shape[1]] += tensor.to(entries)
            joined[key] = entries
    return joined or None


def _per_token(response: Sequence[Span], name: Literal["logprobs", "versions"]) -> list[Any] | None:
    """Return the log-probs or versions [R]. An observed token has log-prob 0 and the version of the last sampled token,
    so that the oldest and newest versions of a record are those of sampled tokens."""
    if any(getattr(span, name) is None for span in response if span.kind == "model"):
        return None
    values: list[Any] = []
    for span in response:
        span_values = getattr(span, name)
        if span.kind != "model":
            span_values = [0.0 if name == "logprobs" else values[-1] if values else 0] * len(span.ids)
        values += span_values
    return values


def _experts(response: Sequence[Span]) -> Any:
    """Return the selected experts [R, layers, k], -1 for tokens without any."""
    with_experts = [span for span in response if span.experts is not None and len(span.ids)]
    if not with_experts:
        return None
    tensors = {span.number: torch.as_tensor(span.experts) for span in with_experts}
    first = tensors[with_experts[0].number]
    dtype = torch.int16 if first.dtype == torch.uint8 else first.dtype
    return torch.cat(
        [
            tensors[span.number].to(dtype)
            if span.number in tensors
            else torch.full((len(span.ids), *first.shape[1:]), -1, dtype=dtype)
            for span in response
        ]
    )


def _sampling(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """Return the options of the first turn. Differing options and seeds of other turns are in their segments."""
    if not turns:
        return None
    first = turns[0]
    options = {name: value for name, value in first.sampling.items() if name != "seed"}
    has_logprobs = all(piece.logprobs is not None for turn in turns for piece in turn.pieces)
    options["logprobs"] = first.logprobs_kind if has_logprobs else None
    return options if first.run_id is None else {**options, "run": first.run_id}


def _metrics(branch: Branch, spans: Sequence[Span], turns: Sequence[Turn], trained: int) -> dict[str, float]:
    """Count turns, tokens, tool calls and errors. Only `trained_tokens` are disjoint between records."""
    counts = {kind: sum(len(span.ids) for span in spans[1:] if span.kind == kind) for kind in ("model", "observation")}
    calls = [turn.message.get("tool_calls") or () for turn in turns if turn.message is not None]
    metrics: dict[str, float] = {
        "turns": len(turns),
        "sampled_tokens": counts["model"],
        "trained_tokens": trained,
        "observed_tokens": counts["observation"],
        "tool_calls": sum(len(turn_calls) for turn_calls in calls),
        "tool_messages": sum(message.get("role") == "tool" for message in full_conversation(branch)),
        "errors": len(branch.errors),
    }
    return metrics | {f"drift/{name}": count for name, count in collect_drifts(turns).counts.items()}
