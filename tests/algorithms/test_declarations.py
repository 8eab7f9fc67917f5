"""What estimators and losses declare of themselves, against lists written out by name."""

from __future__ import annotations

from rollbook.algorithms import ESTIMATORS, LOSSES

GROUPED = ["grpo", "dr_grpo", "rloo", "opmd", "asymre", "rec", "cpgd", "pass_at_k", "step_wise_grpo"]


def declared(registry: object, **fields: object) -> list[str]:
    """The names whose entries have these values."""
    names = registry.names()  # type: ignore[attr-defined]
    entries = {name: registry[name] for name in names}  # type: ignore[index]
    return [name for name in names if all(getattr(entries[name], key) == value for key, value in fields.items())]


def test_estimators() -> None:
    assert declared(ESTIMATORS, scores="rows") == GROUPED
    without_kl = ["cpgd", "gigpo", "on_policy_distill", "jsd", "clip_b", "clip_v"]
    assert declared(ESTIMATORS, kl_in_reward=False) == without_kl
    assert declared(ESTIMATORS, discounts=False) == declared(ESTIMATORS, clips_rewards=False) == ["cpgd"]
    assert declared(ESTIMATORS, normalized=True) == ["grpo"]
    assert declared(ESTIMATORS, greedy_baseline=True) == ["remax"]
    assert declared(ESTIMATORS, compares_runs=True) == [
        *("grpo", "dr_grpo", "rloo", "opmd", "asymre", "rec", "cpgd"),
        *("reinforce_plus_plus_baseline", "clip_b", "clip_v"),
    ]
    assert declared(ESTIMATORS, takes_token_rewards=True) == ["gae", "ppo", "reinforce", "reinforce_plus_plus", "remax"]


def test_losses() -> None:
    assert declared(LOSSES, role="critic") == ["value"]
    assert declared(LOSSES, role="regularizer") == ["entropy", "kl"]
    assert declared(LOSSES, data="answers") == ["sft", "sft_is", "sft_phi"]
    assert declared(LOSSES, data="pairs") == ["dpo", "dpo_sums"]
    assert declared(LOSSES, data="mixed") == ["mix", "mix_chord"]
    assert [name for name in LOSSES.names() if LOSSES[name].denominators is not None] == ["dpo", "mix", "mix_chord"]
    assert [name for name in LOSSES.names() if LOSSES[name].needs_reference({})] == ["dpo"]
    assert not LOSSES["dpo"].needs_reference({"reference_free": True})


def test_options_that_the_trainer_supplies() -> None:
    assert {name for entry in ESTIMATORS.values() for name in entry.options if name not in entry.settings} == {
        "process_group"
    }
    for name in LOSSES.names():
        entry = LOSSES[name]
        supplied = [option for option in ("norm", "denominators", "weights") if option in entry.options]
        assert [*entry.settings, *supplied] == list(entry.options) and "denominators" in supplied
