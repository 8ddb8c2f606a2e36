"""Chat templates of the shape of gpt-oss's, Qwen's and Gemma 4's, with all that the real ones ask of the server."""

GPT_OSS = """\
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}{{ type_of(spec["items"]) if spec["items"] else "any" }}[]
    {%- elif spec.enum is defined -%}"{{ spec.enum | join('" | "') }}"
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
    {%- elif spec.type in ("number", "integer") -%}number
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}{{ type_of(variant) }}{% if not loop.last %} | {% endif %}{%- endfor -%}
    {%- else -%}{{ spec.type | default("any") }}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (" }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "_: {\\n" }}
            {%- for key, spec in tool.parameters.properties.items() %}
                {{- key + ("" if key in (tool.parameters.required or []) else "?") }}
                {{- ": " + type_of(spec) + ",\\n" }}
            {%- endfor %}
            {{- "}" }}
        {%- endif %}
        {{- ") => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>" + model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
{%- if builtin_tools %}{%- for tool in builtin_tools %}{{- "## " + tool + "\\n" }}{%- endfor %}{%- endif %}
{{- "# Valid channels: analysis, commentary, final." }}
{%- if tools %}{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- "<|end|>" }}
{%- set rest = messages %}
{%- set instructions = "" %}
{%- if messages[0].role in ("developer", "system") %}
    {%- set instructions = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if instructions %}{{- "# Instructions\\n\\n" + instructions + "\\n\\n" }}{%- endif %}
    {%- if tools %}{{- "# Tools\\n\\n" + namespace_of("functions", tools) }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == "assistant" -%}
        {%- for key in ("content", "thinking") %}
            {%- if key in message and "<|channel|>final<|message|>" in message[key] %}
                {{- raise_exception("Put the final message into content, without its tags.") }}
            {%- endif %}
        {%- endfor %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(answer=false) %}
            {%- for other in rest[loop.index:] %}
                {%- if other.role == "assistant" and "tool_calls" not in other %}
                    {%- set later.answer = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("A message with a call has content or thinking, not both.") }}
            {%- elif (message.content or message.thinking) and not later.answer %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) }}
                {{- "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary " }}
            {{- (call.content_type if call.content_type is defined else "json") + "<|message|>" }}
            {{- call.arguments | tojson }}
            {{- "<|call|>" }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == "tool" -%}
        {%- if last_call.name is none %}{{- raise_exception("A tool's message needs a call before it.") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

_QWEN = """\
{%- if tools %}{{- "<|im_start|>system\\n# Tools\\n" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
    {{- CALLS + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and "</think>" in content %}
        {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}
    {%- else %}{{- OPENING }}{%- endif %}
{%- endif %}
"""
_JSON = """'<tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>'"""
_XML = "'<tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>'"
QWEN3 = _QWEN.replace("CALLS", _JSON).replace("OPENING", "''")
QWEN3_5 = _QWEN.replace("CALLS", _XML).replace("OPENING", "'<think>\\n'")

GEMMA4 = """\
{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ "true" if value else "false" }}
    {%- elif value is mapping -%}
        {{ "{" }}{% for key, item in value | dictsort -%}{{ "," if not loop.first }}{{ key }}:{{ written(item) }}
        {%- endfor %}{{ "}" }}
    {%- elif value is sequence -%}
        [{% for item in value %}{{ "," if not loop.first }}{{ written(item) }}{% endfor %}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools or enable_thinking -%}
    {{- "<|turn>system\\n" + ("<|think|>\\n" if enable_thinking else "") -}}
    {%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name }}{}<tool|>{%- endfor -%}
    {{- "<turn|>\\n" -}}
{%- endif -%}
{%- set last = namespace(kind=none) -%}
{%- for message in messages -%}
    {%- if message.role == "tool" -%}
        {%- set last.kind = "response" -%}
        {%- for call in messages[loop.index0 - 1].tool_calls if call.id == message.tool_call_id -%}
            <|tool_response>response:{{ call.function.name }}{value:{{ written(message.content) }}}<tool_response|>
        {%- endfor -%}
    {%- else -%}
        {{- "<|turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" -}}
        {%- if message.reasoning_content and message.tool_calls -%}
            {{- "<|channel>thought\\n" + message.reasoning_content + "\\n<channel|>" -}}
        {%- endif -%}
        {%- for call in message.tool_calls -%}
            <|tool_call>call:{{ call.function.name }}{{ written(call.function.arguments) }}<tool_call|>
        {%- endfor -%}
        {{- message.content | trim -}}
        {{- "<turn|>\\n" if not message.tool_calls -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and last.kind is none -%}
    {{- "<|turn>model\\n" + ("" if enable_thinking else "<|channel>thought\\n<channel|>") -}}
{%- endif -%}
"""
