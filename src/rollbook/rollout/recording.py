"""From an episode's branches to records, ready for batches and estimators.

Invariant: the log-probs, versions and mask of a record are made from the same spans as its tokens, so that they cannot
come apart; and of all records of an episode, exactly one trains a sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollbook.core.images import recorded
from rollbook.rollout.branches import Branch, Span, Turn, drifts, messages_of, rows, sampled_text
from rollbook.rollout.tree import Tree

if TYPE_CHECKING:
    from rollbook.core.experience import Experience


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Makes the records of an episode's branches: what all of them have in common."""

    tree: Tree
    info: Mapping[str, Any]
    """What every record's `info` begins with."""

    def records(self, outcome: Callable[[Branch], float | None]) -> list[Experience]:
        """One record for each branch that is not a part of another; each sampled token is trained in the first."""
        found = rows(self.tree.branches)
        trained: set[int] = set()
        made = []
        for branch in found:
            own = {span.number for span in branch.spans if span.kind == "model"} - trained
            trained |= own
            end = branch
            while end.continued_as is not None:
                end = self.tree.branches[end.continued_as]
            made.append(self._record(branch, end, own, outcome(end), self._parent(branch, found)))
        return made

    def _parent(self, branch: Branch, found: Sequence[Branch]) -> str | None:
        """The record that has what this branch went on from: of the branch it left, or of one that goes on from it."""
        if branch.parent is None:
            return None
        origin = self.tree.branches[branch.parent]
        path = origin.numbers
        candidates = [origin, *found] if any(one is origin for one in found) else found
        for one in candidates:
            if one.numbers[: len(path)] == path:
                return None if one is branch else self.tree.id_of(one).uid
        return None

    def _record(
        self, branch: Branch, end: Branch, own: set[int], outcome: float | None, parent: str | None
    ) -> Experience:
        from rollbook.core.experience import Experience

        spans = list(branch.spans)
        info: dict[str, Any] = {**self.info, **branch.info}
        if branch.pending and branch.continued_as is None:
            limit = self.tree.context_limit
            try:
                tail = tuple(self.tree.tail(branch, not spans))  # a prompt is as an engine would be given it
            except ValueError as error:
                tail, info["not_rendered"] = (), str(error)  # a fork would have been rendered as a whole
            if spans and limit is not None and len(branch.ids) + len(tail) > limit:
                info["left_out_tokens"] = len(tail)  # no turn came after them; nothing is learned from them
            else:
                spans.append(Span(number=-1, kind="observation" if spans else "prompt", ids=tail))
        prompt = len(spans[0].ids) if spans else 0
        response = spans[1:]
        mask = [span.number in own for span in response for _ in span.ids]
        turns = branch.own_turns
        reason = branch.turns[-1].finish_reason if branch.turns else None
        if branch.continued_as is None:
            reason = "error" if branch.failed is not None else "length" if branch.full else reason
        segments = self._segments(spans, branch.turns, own)
        info |= {"segments": segments, "drift": [one.drift.to_dict() for one in turns if one.drift is not None]}
        info["branch"] = branch.number
        if reason == "length":
            info["truncated"] = "context" if branch.full else "turn"
        if branch.errors:
            info["errors"] = [dict(error) for error in branch.errors]
        if branch.failed is not None and branch.continued_as is None:
            info["error"] = branch.failed
        if "images" not in info and (images := recorded(branch.images)):
            info["images"] = images
        reward, by_token = self._rewards(branch, end, response, mask, outcome)
        renderer, tools = self.tree.renderer, self.tree.prompt.tools
        return Experience(
            eid=self.tree.id_of(branch),
            tokens=[one for span in spans for one in span.ids],
            prompt_length=prompt,
            action_mask=mask,
            logprobs=_filled(response, "logprobs"),
            policy_versions=_filled(response, "versions"),
            routed_experts=_experts(response),
            reward=reward,
            token_level_reward=by_token,
            finish_reason=reason,
            truncate_status="response_truncated" if reason == "length" else None,
            prompt_text=None if renderer is None or not spans else renderer.decode(spans[0].ids),
            response_text=sampled_text(turns),
            messages=[dict(one) for one in messages_of(branch)] if self.tree.chat else None,
            tools=None if tools is None else [dict(tool) for tool in tools],
            multi_modal_inputs=branch.engine_media if branch.engine_media is not None else joined_media(branch.media),
            sampling=_sampling(turns),
            parent=parent,
            group_size=self.tree.group_size,
            info=info,
            metrics=_metrics(branch, spans, turns, sum(mask)),
            experience_type="multi_turn",
        )

    def _segments(self, spans: Sequence[Span], turns: Sequence[Turn], own: set[int]) -> list[dict[str, Any]]:
        """What the tokens are, from the first to the last: `tokens[start:stop]` of each kind."""
        numbers = {span.number for span in spans}
        common = _sampling([turn for turn in turns if turn.key in numbers]) or {}
        place = {piece.number: i for i, turn in enumerate(turns) for piece in turn.pieces}
        found: list[dict[str, Any]] = []
        at = 0
        for span in spans:
            start, at = at, at + len(span.ids)
            made: dict[str, Any] = {"kind": span.kind, "start": start, "stop": at}
            if span.number in place:
                turn = turns[place[span.number]]
                made |= {"turn": place[span.number], "trained": span.number in own}
                made["finish_reason"] = turn.finish_reason if span.number == turn.key else "abort"
                others = {name: value for name, value in turn.sampling.items() if common.get(name) != value}
                more: dict[str, Any] = {"sampling": others or None, "stop_reason": turn.stop_reason}
                more["reward"] = self.tree.turn_rewards.get(span.number)
                made |= {name: value for name, value in more.items() if value is not None}
            if at > start or span.kind == "model":
                found.append(made)
        return found

    def _rewards(
        self, branch: Branch, end: Branch, response: Sequence[Span], mask: Sequence[bool], outcome: float | None
    ) -> tuple[float | None, list[float] | None]:
        """The whole episode's reward, and by token: a turn's on its last token, where that is trained; what comes
        later, other branches' turns and the outcome, on the last token that is."""
        scores = {
            turn.key: self.tree.turn_rewards[turn.key] for turn in end.turns if turn.key in self.tree.turn_rewards
        }
        if not scores:
            return outcome, None
        total = sum(scores.values()) + (0.0 if outcome is None else outcome)
        here = {turn.key for turn in branch.turns}
        actions = [i for i, trains in enumerate(mask) if trains]
        by_token = [0.0] * len(mask)
        if actions:
            later = sum(score for key, score in scores.items() if key not in here)
            by_token[actions[-1]] += later + (0.0 if outcome is None else outcome)
            at = 0
            for span in response:
                at += len(span.ids)
                trains = mask[at - 1] if span.ids else False
                if span.number in scores and (trains or not span.ids):
                    # A turn without tokens has none of its own to put it on.
                    by_token[max((i for i in actions if i < at), default=actions[0])] += scores[span.number]
        return total, by_token


def joined_media(media: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Join the tensors of several observations by key, in order.

    Args:
        media: Of each observation, as `placed_media` gives it.

    Returns:
        Tensors joined along their first axis; by-token ones, (1, n) from the first token on, laid over each other, and
        left out if an observation has none: a model derives them (`batch.vision.token_types`). `None` without media.

    >>> import torch
    >>> first = {"pixel_values": torch.zeros(2, 3), "mm_token_type_ids": torch.tensor([[0, 1]])}
    >>> second = {"pixel_values": torch.ones(1, 3), "mm_token_type_ids": torch.tensor([[0, 0, 0, 1]])}
    >>> joined = joined_media([first, second])
    >>> joined["pixel_values"].shape, joined["mm_token_type_ids"]
    (torch.Size([3, 3]), tensor([[0, 1, 0, 1]]))
    """
    import torch

    from rollbook.batch.vision import BY_TOKEN

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


def _filled(response: Sequence[Span], name: Literal["logprobs", "versions"]) -> list[Any] | None:
    """[R] What sampled tokens have. On observed ones a log-prob is 0, a version that of the token sampled last, so
    that the oldest and the newest version of a record are those of what was sampled."""
    if any(getattr(span, name) is None for span in response if span.kind == "model"):
        return None
    found: list[Any] = []
    for span in response:
        here = getattr(span, name)
        if span.kind != "model":
            here = [0.0 if name == "logprobs" else found[-1] if found else 0] * len(span.ids)
        found += here
    return found


def _experts(response: Sequence[Span]) -> Any:
    """[R, layers, k] The experts that were chosen, -1 where nobody said."""
    import torch

    known = [span for span in response if span.experts is not None and len(span.ids)]
    if not known:
        return None
    tensors = {span.number: torch.as_tensor(span.experts) for span in known}
    first = tensors[known[0].number]
    kind = torch.int16 if first.dtype == torch.uint8 else first.dtype
    return torch.cat(
        [
            tensors[span.number].to(kind)
            if span.number in tensors
            else torch.full((len(span.ids), *first.shape[1:]), -1, dtype=kind)
            for span in response
        ]
    )


def _sampling(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """The options of the first turn; another turn's, where they differ, and its seed stand on its segment."""
    if not turns:
        return None
    first = turns[0]
    found = {name: value for name, value in first.sampling.items() if name != "seed"}
    has = all(piece.logprobs is not None for turn in turns for piece in turn.pieces)
    found["logprobs"] = first.logprobs_kind if has else None
    return found if first.run_id is None else {**found, "run": first.run_id}


def _metrics(branch: Branch, spans: Sequence[Span], turns: Sequence[Turn], trained: int) -> dict[str, float]:
    """Counts of what the record holds; `trained_tokens` alone are of no other record."""
    counts = {kind: sum(len(span.ids) for span in spans[1:] if span.kind == kind) for kind in ("model", "observation")}
    calls = [turn.message.get("tool_calls") or () for turn in turns if turn.message is not None]
    found: dict[str, float] = {
        "turns": len(turns),
        "sampled_tokens": counts["model"],
        "trained_tokens": trained,
        "observed_tokens": counts["observation"],
        "tool_calls": sum(len(one) for one in calls),
        "tool_messages": sum(one.get("role") == "tool" for one in messages_of(branch)),
        "errors": len(branch.errors),
    }
    return found | {f"drift/{name}": count for name, count in drifts(turns).counts.items()}
