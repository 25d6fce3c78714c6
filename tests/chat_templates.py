"""Chat templates with the habits of those that models come with, as small as the habit allows."""

from __future__ import annotations

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Thoughts stay only behind the last question; the last answer has some, be they empty. Tools are told of in the
# system's turn, tools' results are the user's. (Qwen3 does so.)
FORGETS_THOUGHTS = """\
{%- set last = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|system|>You have {% for t in tools %}{{ t.function.name }} {% endfor %}<|eos|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>
{% if loop.index0 > last.question and (loop.last or m.reasoning_content) -%}
<think>
{{ m.reasoning_content or '' }}
</think>

{% endif -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor -%}
<|eos|>
{% elif m.role == 'tool' -%}
<|user|>
<tool_response>{{ m.content }}</tool_response><|eos|>
{% else -%}
<|{{ m.role }}|>
{{ m.content }}<|eos|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""

# The prompt for an answer opens a thought, which answers that are there never show. (DeepSeek-R1 does so.)
OPENS_A_THOUGHT = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}
{%- else -%}
<|{{ m.role }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>
{% endif -%}
"""

# Here it opens a thought too, and answers that are there show that they have none. (DeepSeek-V3.1 does so.)
CLOSES_A_THOUGHT = OPENS_A_THOUGHT.replace("<|assistant|>{{", "<|assistant|></think>{{")

# Answers up to the last one that called no tool have empty thoughts. (Kimi-K2-Thinking does so.)
EMPTIES_THOUGHTS = """\
{%- set last = namespace(plain=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set last.plain = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>says<|pad|><think>{% if loop.index0 > last.plain %}{{ m.reasoning_content or '' }}{% endif %}</think>
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
(call {{ call.function.name }} {{ call.function.arguments | tojson }})
{%- endfor -%}
<|eos|>
{%- else -%}
<|{{ 'user' if m.role == 'tool' else m.role }}|>says<|pad|>{{ m.content }}<|eos|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>says<|pad|>{%- endif -%}
"""

# A turn has no end of its own: what follows it is its end. (GLM-4.5 does so.)
WITHOUT_ENDS = """\
{%- set last = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|><think>{% if loop.index0 > last.question %}{{ m.reasoning_content or '' }}{% endif %}</think>
{{- m.content }}
{%- for call in m.tool_calls or [] -%}(call {{ call.function.name }}){%- endfor -%}
{%- else -%}
<|{{ 'pad' if m.role == 'tool' else m.role }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

# Nothing asks for an answer, and a call's result is answered without a new header.
WITHOUT_HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[ask] {{ m.content }} [/ask]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
