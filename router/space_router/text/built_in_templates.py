"""Built-in chat templates by name, for checkpoints without one."""

from collections.abc import Mapping

_VICUNA = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." -%}{%- set turns = messages -%}
{%- endif -%}
{{ bos_token or '' }}{{ system }}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{ ('' if loop.previtem is defined and loop.previtem.role == 'assistant' else ' ') + 'USER: ' + message.content }}
{%- elif message.role == 'assistant' -%}{{ ' ASSISTANT: ' + message.content + (eos_token or '') }}
{%- else -%}{{ raise_exception('The vicuna template knows system (first), user and assistant messages only.') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}
"""

_LLAMA_2 = """\
{%- if messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{ raise_exception('The llama-2 template wants user and assistant messages in turn, user first.') }}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ (bos_token or '') + '[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
{%- else -%}{{ ' ' + message.content | trim + ' ' + (eos_token or '') }}
{%- endif -%}
{%- endfor -%}
"""

_CHATML = """\
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if tools -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{{ '<|im_start|>system\\n' + system }}\
These functions can be called, each described by a JSON schema:
<tools>
{% for tool in tools -%}{{ (tool.function if tool.function is defined else tool) | tojson }}
{% endfor -%}
</tools>
To call one, write its name and its arguments as a JSON object between tags, and nothing behind it:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{{ ('' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user')
   + '\\n<tool_response>\\n' + message.content + '\\n</tool_response>'
   + ('' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n') }}
{%- elif message.tool_calls -%}
{{ '<|im_start|>assistant\\n' + message.content + ('\\n' if message.content else '') }}
{%- for call in message.tool_calls -%}
{{ ('' if loop.first else '\\n') + '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": '
   + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_ALPACA = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = 'Below is an instruction that describes a task. Write a response that appropriately completes the \
request.' -%}{%- set turns = messages -%}
{%- endif -%}
{{ (bos_token or '') + system }}
{%- for message in turns -%}
{%- if message.role == 'user' -%}{{ '\\n\\n### Instruction:\\n' + message.content }}
{%- elif message.role == 'assistant' -%}{{ '\\n\\n### Response:\\n' + message.content + (eos_token or '') }}
{%- else -%}{{ raise_exception('The alpaca template knows system (first), user and assistant messages only.') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n\\n### Response:\\n' }}{%- endif -%}
"""

BUILT_IN: Mapping[str, str] = {"vicuna": _VICUNA, "llama-2": _LLAMA_2, "chatml": _CHATML, "alpaca": _ALPACA}
