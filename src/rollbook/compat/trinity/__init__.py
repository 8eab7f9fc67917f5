"""Names of Trinity-RFT's `trinity.common.experience`: the record, and functions that the record does not have."""

from rollbook.compat.trinity.collate import (
    from_hf_datasets,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    to_hf_datasets,
)
from rollbook.core.experience import CustomField, Experience
from rollbook.core.experience import split_preference_pairs as split_dpo_experience_to_single_turn
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID

__all__ = [
    "EID",
    "CustomField",
    "Experience",
    "Experiences",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
]
