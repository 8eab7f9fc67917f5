"""Cases of both systems for means over tokens and whitening; and that every shared case of the area is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollbook.algorithms.aggregate import aggregate, masked_mean
from rollbook.algorithms.groups import whiten
from rollbook.models.logprobs import entropy_from_logits
from tests.conformance.algorithms import LIGHTRFT, TRINITY, decoded

WHOLE_AREAS = ("kl", "policy_loss", "schedule")
"""Areas of which a test takes every case there is."""
FAMILIES = ("grpo_zero_variance_blowup_",)
ELSEWHERE = {"calc_pre_cpgd": "what CPGD leaves as it is is not an estimate; its estimate is `cpgd_2d_*`"}


def test_every_shared_case_is_tested() -> None:
    folder = Path(__file__).parent
    files = [*folder.glob("test_*.py"), *(folder.parent / "algorithms").glob("test_*.py")]
    sources = "".join(path.read_text() for path in files)
    for case in [*TRINITY.values(), *LIGHTRFT.values()]:
        name = case["id"]
        tested = f'"{name}"' in sources or case.get("area") in WHOLE_AREAS or name.startswith(FAMILIES)
        assert tested or name in ELSEWHERE, name


@pytest.mark.parametrize("case", ["agg_seq-mean-token-sum", "agg_seq-mean-token-sum-norm"])
def test_trinity_aggregation(case: str) -> None:
    values, mask = (torch.tensor(TRINITY[case]["inputs"][key]) for key in ("values", "mask"))
    mode = case.removeprefix("agg_")
    norm = values.shape[1] if mode.endswith("norm") else None  # upstream's default: the padded width
    assert aggregate(values, mask, mode=mode, norm=norm).item() == pytest.approx(TRINITY[case]["expected"]["data"])


def test_trinity_unknown_mode() -> None:
    assert TRINITY["agg_bad"]["expected_error"]["type"] == "ValueError"
    with pytest.raises(ValueError, match="mode: got 'mean', expected one of 'token-mean'"):
        aggregate([[1.0]], mode="mean")


def test_a_constant_to_divide_by_must_be_given() -> None:
    with pytest.raises(ValueError, match="norm: got None, expected the constant"):
        aggregate([[1.0]], mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="norm: got 0, expected a positive number"):
        aggregate([[1.0]], mode="seq-mean-token-sum-norm", norm=0)


def test_trinity_whitening_where_tokens_count() -> None:
    inputs = TRINITY["masked_whiten"]["inputs"]
    values, mask = torch.tensor(inputs["values"]), torch.tensor(inputs["mask"])
    expected = decoded(TRINITY["masked_whiten"]["expected"])
    whitened = whiten(values, mask)
    torch.testing.assert_close(whitened[mask > 0], expected[mask > 0])
    assert whitened[mask == 0].tolist() == [0]


def test_lightrft_masked_mean() -> None:
    inputs = LIGHTRFT["masked_mean_dim"]["inputs"]
    mean = masked_mean(inputs["tensor"], inputs["mask"], dim=inputs["dim"])
    torch.testing.assert_close(mean, decoded(LIGHTRFT["masked_mean_dim"]["lightrft_output"]))
    empty = LIGHTRFT["masked_mean_empty_row_nan"]
    mean = masked_mean(empty["inputs"]["tensor"], empty["inputs"]["mask"], dim=empty["inputs"]["dim"])
    assert mean.tolist() == empty["better"]


def test_lightrft_entropy() -> None:
    case = LIGHTRFT["entropy_from_logits"]
    entropy = entropy_from_logits(torch.tensor(case["inputs"]["logits"]))
    torch.testing.assert_close(entropy, decoded(case["lightrft_output"]), rtol=1e-6, atol=1e-6)
