"""Chat templates in the manner of real families, written for these tests, with what each calls its marks."""

from __future__ import annotations

HERMES = (  # as Qwen2.5: calls as JSON between tags, results as a user's turn, tools in the system turn
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{% if m['content'] or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERED = (  # as Llama 3.1: a call is the whole turn, a result is JSON text under a role of its own
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m['content'] | tojson }}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['tool_calls'] %}"
    "{% if m['tool_calls'] | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ m['content'] | trim }}{% endif %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
BRACKETED = (  # as Mistral: no header before an answer, calls with an id of nine letters, in a list
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'tool' %}[TOOL_RESULTS] {{ m['content'] }}[/TOOL_RESULTS]"
    "{% elif m['tool_calls'] %}[TOOL_CALLS] [{% for c in m['tool_calls'] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
TAGGED = (  # as Qwen3-Coder: every argument between tags of its own
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ARGUMENTS = (  # as DeepSeek-V3: arguments are text, and a content beside a call is not shown
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' and m['tool_calls'] %}"
    "<call>{{ m.tool_calls[0].function.name + '\n' + m.tool_calls[0].function.arguments }}</call>"
    "{{ eos_token }}{% elif m['role'] == 'assistant' %}<bot>{{ m['content'] }}{{ eos_token }}"
    "{% elif m['role'] == 'tool' %}<out>{{ m['content'] }}</out>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
)
CHANNELS = (  # as gpt-oss: the function's name stands in the header, and again in that of its result
    "{% set ns = namespace(name='') %}{% for m in messages %}"
    "{% if m['tool_calls'] %}{% set ns.name = m.tool_calls[0].function.name %}"
    "<|start_header_id|>assistant to={{ ns.name }}<|end_header_id|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|eot_id|>"
    "{% elif m['role'] == 'tool' %}<|start_header_id|>{{ ns.name }} to=assistant<|end_header_id|>"
    "{{ m['content'] | tojson }}<|im_end|>"
    "{% else %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>{{ m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"
)
THINKING = (  # as Qwen3: thoughts apart or inside, older ones dropped, an empty block in front of the last
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n"
    "{% elif m['role'] != 'assistant' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% else %}"
    "{% set content = m['content'] %}{% set thought = '' %}"
    "{% if m['reasoning_content'] is string %}{% set thought = m['reasoning_content'] %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_CALLS = {
    "hermes": HERMES,
    "headered": HEADERED,
    "bracketed": BRACKETED,
    "tagged": TAGGED,
    "text_arguments": TEXT_ARGUMENTS,
    "channels": CHANNELS,
    "thinking": THINKING,
}
