"""Chat templates that change earlier turns like common templates, and a tokenizer with merges."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests import tiny

END, ASSISTANT, TOOL, USER = 2, 5, 6, 4

NEWLINES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Ends a turn with a token that is sampled and a line break that is not."""

THINKING = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|' + m.role + '|>' + text + '<|end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""Drops the thinking of turns before the last user message."""

TRIMMING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HOISTING = (
    "{% for m in messages if m.role == 'system' %}<|system|>{{ m.content }}<|end|>{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Puts system messages first."""

CALLING = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.index0 == 0 or not (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') -%}
{{- raise_exception('a tool answers a call') -}}
{%- endif -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|user|>' -}}{%- endif -%}
{{- '[' + m.content + ']' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|' + m.role + '|>' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' -}}
{%- endfor -%}
{{- '<|end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""Writes calls as JSON, puts the messages of several tools into one turn, and rejects a tool without a call."""


def with_template(template: str, tokenizer: Any = None) -> PreTrainedTokenizerFast:
    """Return a copy of a tokenizer (by default the byte-level one) with this template."""
    base = tiny.bytes_() if tokenizer is None else tokenizer
    copy = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(base.backend_tokenizer.to_str()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=tiny.SPECIAL[4:],
    )
    copy.chat_template = template
    return copy


@functools.cache
def merging() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: `the` is one token, and can also be written as three."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=tiny.SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([tiny.TEXT] * 4, trainer)
    return with_template(tiny.TEMPLATE, PreTrainedTokenizerFast(tokenizer_object=inner))


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
