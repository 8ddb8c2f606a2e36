"""Chat templates: rendering, errors, the sandbox and its bounds."""

from __future__ import annotations

import datetime
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import CheckpointError, TemplateError
from octavo.text import chat_template
from octavo.text.chat_template import render

# The signal of the time limit may arrive in a callback of the garbage collector, which drops it; the next one counts.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

USER = [{"role": "user", "content": "Hi"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


def run(template: str, messages=USER, **kwargs) -> str:
    return render(template, messages, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **kwargs)


def fails(template: str, *words: str, messages=USER, **kwargs) -> None:
    start = time.perf_counter()
    with pytest.raises(TemplateError) as caught:
        run(template, messages, **kwargs)
    assert time.perf_counter() - start < 60
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_chatml_is_rendered():
    template = (
        "{% for m in messages %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' + m['content'] | trim + '<|im_end|>\\n' -}}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    messages = [{"role": "system", "content": " Be brief. "}, *USER]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert run(template, messages, add_generation_prompt=False) == turns
    assert run(template, messages) == turns + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{%- for m in messages %}\n  {%- if true %}\nx\n  {%- endif %}\n{% endfor %}", "x"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trimmed and stripped blocks
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "023",
        ),
        ("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}", '{"b": "<é>", "a": [1, null, true]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% generation %}{{ 'x' }}{% set y = 1 %}{% endgeneration %}z", "xz"),
        ("{% macro f(n) %}<{{ n }}>{% endmacro %}{{ f(8000000) }}", "<8000000>"),
        ("{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}", "1"),
        ("{% for i in [1, 2] recursive %}{{ loop.index }}{% endfor %}{{ 'a' ~ 1 ~ 'b' }}", "12a1b"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{{ '%s-%5d' % ('a', 1700000000) }}{{ '{:>3}'.format(7) }}{{ '%s' | format(2) }}", "a-1700000000  72"),
        ("{{ 'a\\nb' | indent(2) }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 4 }}", "a\n  babab[1, 2]10243"),
        ("{{ 'x'.ljust(3) }}|{{ messages[0].missing }}|{{ messages[0].missing is defined }}", "x  ||False"),
        ("{{ tools is none }}{{ enable_thinking }}", "TrueFalse"),
        ("{{ messages[0].content.split('i')[0] }}{{ 'a b'.replace(' ', '') }}", "Hab"),
        (
            "{{ ['a', 'b'] | join('-') }}{{ messages | join(',', attribute='role') }}{{ '-'.join([1 | string]) }}",
            "a-buser1",
        ),
        ("{{ 'aXbX' | replace('X', '--') }}{{ 'aXbX' | replace('X', '', 1) }}{{ 2.345 | round(2) }}", "a--b--abX2.35"),
        ("{{ [1, 2] | sum }}{{ [{'n': 3}] | sum(attribute='n') }}{{ (1, 2)[0] }}{{ {'k': [1]}.k[0] }}", "3311"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{% set c, d = 1, 2 %}{{ c }}{{ d }}", "x112"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'q' in ['q', 'r'] }}", "1True"),
    ],
)
def test_features_that_templates_use(template, text):
    assert run(template, enable_thinking=False) == text


def test_strftime_now():
    assert run("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year - d) for d in (0, 1)}


def test_tools_are_passed_to_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert run("{% if tools %}{{ tools[0].function.name }}{% endif %}", tools=tools) == "f"
    assert run("{% if tools %}x{% endif %}", tools=[]) == ""


# ---- going on with the final message

TRIMMED = TURNS.replace("m.content", "m.content | trim")


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (TURNS, "Once upon", "<user>Hi</user><assistant>Once upon"),
        (TURNS, "Once upon ", "<user>Hi</user><assistant>Once upon "),
        (TRIMMED, "Once upon ", "<user>Hi</user><assistant>Once upon"),
        (TURNS, "Hi", "<user>Hi</user><assistant>Hi"),
        ("{{ messages[-1].content }}!" + TURNS, "So", "So!<user>Hi</user><assistant>So"),
    ],
)
def test_continue_final_message(template, content, text):
    messages = [*USER, {"role": "assistant", "content": content}]
    assert run(template, messages, add_generation_prompt=False, continue_final_message=True) == text
    assert messages[-1]["content"] == content


def test_continue_final_message_of_parts():
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert run(template, messages, add_generation_prompt=False, continue_final_message=True) == "[a][b"


def test_messages_that_cannot_be_continued():
    fails(TURNS, "exclude each other", continue_final_message=True)
    for content in (None, [], [{"type": "image"}], 7):
        messages = [{"role": "assistant", "content": content}]
        fails(TURNS, "ends in text", messages=messages, add_generation_prompt=False, continue_final_message=True)
    fails("nothing", "omits the final message", add_generation_prompt=False, continue_final_message=True)


# ---- what a template must not do


@pytest.mark.parametrize("messages", [None, [], {}, "Hi", ["Hi"], [None], [USER]])
def test_invalid_messages_are_rejected(messages):
    fails("x", "list of at least one object", messages=messages)


def test_template_may_reject_messages():
    fails("{{ raise_exception('roles must\nalternate') }}", "rejects the messages: roles must alternate")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "line 1"),
        ("a\n{{ x | nosuchfilter }}", "line 2"),
        ("{% include 'x' %}", "fails"),
        ("{{ messages.x.y }}", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ none + 1 }}", "fails"),
        ("{{ messages | tojson | fromjson }}", "line 1"),
        ("{{ range | tojson }}", "JSON"),
        ("{{" + "(" * 3000 + "}}", "compiled"),
        ("x" * (1 << 21), "1,048,576"),
    ],
)
def test_template_errors_are_one_line(template, words):
    fails(template, words)


ENDLESS = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
WRONG_TEMPLATES = [
    ("{% if %}", "line 1"),
    ("{{ messages.append(1) }}", "unsafe"),
    (ENDLESS, "longer than 0.2 s"),
]


@pytest.mark.parametrize(("template", "words"), WRONG_TEMPLATES)
def test_check_rejects_broken_templates(template, words, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    with pytest.raises(TemplateError, match=words):
        chat_template.check(template)
    with pytest.raises(CheckpointError, match=words) as caught:
        chat_template.load(template)
    assert "another template" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }}",
        TURNS,
        "{{ raise_exception('system first') }}",
        "{{ messages[7].content + 'x' }}",
        "{{ 1 / 0 }}",
    ],
)
def test_check_accepts_templates_that_reject_its_sample(template):
    chat_template.check(template)
    assert chat_template.load(template) == template


def test_template_is_loaded_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("ü {{ messages[0].content }}\n", encoding="utf-8")
    assert run(chat_template.load(str(file))) == "ü Hi"
    file.write_bytes(b"\xff{{ x }}")
    for path, words in ((file, "not UTF-8"), (tmp_path, "directory"), (tmp_path / "absent", "No such file")):
        with pytest.raises(CheckpointError, match=words) as caught:
            chat_template.load(str(path))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ strftime_now.__globals__['datetime'].sys.modules.os.system('x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('x').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0.__class__}'.format_map({'0': ''}) }}",
        "{{ ''.format.__self__.__class__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% set x = messages.clear() %}",
        "{{ tick() }}",
        "{{ environment }}{{ environment.filters }}",
    ],
)
def test_sandbox_blocks_escapes(template):
    before = [dict(m) for m in USER]
    try:
        text = run(template)
    except TemplateError as e:
        assert "\n" not in str(e)  # noqa: PT017 - refused, or without effect
    else:
        assert "class" not in text
        assert "function" not in text
        assert "module" not in text
    assert before == USER


TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
POWERS = "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        TWICE,
        POWERS,
        "{{ 9 ** (9 ** 9) }}",
        "{% set x = 'x' * 999999 %}" + "{% set y = x[::-1] %}" * 9999,
    ],
)
def test_templates_are_bounded_in_time(template, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    fails(template, "longer than 0.2 s")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for a in [[]] recursive %}{{ loop([a]) }}{% endfor %}", "recursion"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% for a in range(999) %}{{ 'x' * 9999 }}{% endfor %}", "longer than 1,048,576"),
    ],
)
def test_templates_are_bounded_in_depth_and_length(template, words, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 50)  # on a slow processor too, time is not the bound they meet
    fails(template, words)


def test_time_is_limited_on_the_main_thread_only(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.02)
    slow = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}x"
    with ThreadPoolExecutor(1) as other:
        assert other.submit(run, slow).result() == "x"
    fails(slow, "longer than 0.02 s")
    assert (signal.getitimer(signal.ITIMER_PROF), signal.getsignal(signal.SIGPROF)) == ((0, 0), signal.SIG_DFL)


def test_long_chats_are_within_the_bounds():
    messages = [{"role": "user", "content": "x" * 1000}] * 900
    assert len(run(TURNS, messages)) == 900 * 1013


def test_renderings_share_no_state(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    template = "{% set ns = namespace(x=1) %}{{ x is defined }}{% set x = 1 %}"
    assert run(template) == run(template) == "False"
    fails(ENDLESS, "longer than 0.2 s")
    assert run(template) == "False"  # its clock is its own
