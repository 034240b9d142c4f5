"""Chat templates: what they are given, how they fail, and what a hostile one cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ropeway.errors import ConfigError, InvalidRequestError, ModelFileError
from ropeway.model.gguf import GgufFile
from ropeway.text.chat_template import RESERVED_NAMES, ChatTemplate, template_source

HELLO: list[Mapping[str, Any]] = [{"role": "user", "content": "Hello"}]
GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_chat.json"


def render(source: str, messages: list[Mapping[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_default_model_renders_as_recorded(model_path: Path) -> None:
    template = ChatTemplate.from_metadata(GgufFile.open(model_path).metadata)
    for case in json.loads(GOLDEN.read_text()):
        rendered = template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"])
        assert rendered == case["prompt"]


def test_template_sees_messages_tokens_and_flag() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert render(source) == "<s>user: Hello</s>assistant:"
    assert render(source, add_generation_prompt=False) == "<s>user: Hello</s>"


def test_tools_and_documents_are_defined_as_none() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_extra_fields_of_a_message_reach_the_template() -> None:
    messages = [{"role": "user", "content": "hi", "name": "Ada"}]
    assert render("{{ messages[0].name }}", messages) == "Ada"


def test_blocks_leave_no_whitespace() -> None:
    assert render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_and_generation_marks() -> None:
    source = "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "012"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_loop_variables_know_the_length() -> None:
    source = "{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert render(source) == "1/3,2/3,3/3"


def test_tojson_escapes_nothing_and_keeps_the_order() -> None:
    assert render("{{ {'b': '<é>', 'a': [1, true]} | tojson }}") == '{"b": "<é>", "a": [1, true]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_date_comes_from_the_clock() -> None:
    noon = time.mktime((2031, 5, 6, 12, 0, 0, 0, 0, -1))
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: noon)
    assert template.render(HELLO) == "06 May 2031"


def test_parts_of_text_are_lines() -> None:
    content = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "Hel\nlo"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hi", "messages must be a list, not str"),
        (["hi"], r"messages\[0\] must be an object, not str"),
        ([{"content": "hi"}], r"messages\[0\].role must be a non-empty string, not None"),
        ([{"role": "user"}], r"messages\[0\].content must be a string or a list of parts, not NoneType"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has type 'image_url'; only 'text'"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] has type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refusal:
        render("", messages)
    assert refusal.value.param == "messages"


def test_template_may_refuse_with_its_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_template_that_fails_is_an_error_of_the_request() -> None:
    with pytest.raises(InvalidRequestError, match="UndefinedError: 'dict object' has no attribute 'name'"):
        render("{{ messages[0].name.first }}")


def test_template_that_does_not_compile_is_an_error_of_the_file() -> None:
    for source in ("{% if %}", "{{ 1 | no_such_filter }}", "{" + "{" * 3, "x" * 1_000_001):
        with pytest.raises(ModelFileError, match="chat template"):
            ChatTemplate(source)


def test_template_of_the_wrong_type_is_an_error_of_the_file() -> None:
    with pytest.raises(ModelFileError, match="must be a string, not int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3})


def test_missing_template_names_the_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template; send a plain prompt to /v1/completions"):
        ChatTemplate.from_metadata({}).render(HELLO)


HOSTILE = {
    "internals": "{{ ''.__class__.__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "power": "{{ 2 ** 100000000000 }}",
    "product of a text": "{{ 'a' * 10000000000 }}",
    "product of a list": "{% set x = [0] * 1000000000 %}",
    "range": "{% for a in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling with +": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) | length }}",
    "replace filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) | length }}",
    "join": "{% set x = 'a' * 100000 %}{{ x.join(x) | length }}",
    "join filter": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | select | join | length }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "indent": "{{ 'a' | indent(1000000000, true) }}",
    "wide field": "{{ '{:1000000000}'.format(1) }}",
    "computed width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide conversion": "{{ '%1000000000d' % 1 }}",
    "computed conversion": "{{ '%*d' % (1000000000, 1) }}",
    "printed list": "{% set x = 'a' * 1000000 %}{{ [x] * 100000 }}",
    "list as JSON": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | tojson | length }}",
    "list as string": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | string | length }}",
    "JSON indent": "{{ [1] | tojson(indent=1000000000) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "wide recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "long output": "{% for a in range(90000) %}" + "x" * 1000 + "{% endfor %}",
    "long text in a macro": "{% macro f() %}{% for a in range(90000) %}"
    + "x" * 90000
    + "{% endfor %}{% endmacro %}{{ f() | length }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="not allowed|fails on these messages"):
        render(source)


def test_allowance_is_of_one_rendering() -> None:
    template = ChatTemplate("{% for a in range(90000) %}{% for b in 'abc' %}{% endfor %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


def test_long_conversation_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] | trim ~ '\n' }}{% endfor %}"
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "x" * 2000}] * 2000
    assert len(render(source, messages)) == 2000 * 2007


def test_variables_reach_the_template_and_may_be_unknown_to_it() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}quick{% else %}slow{% endif %}"
    template = ChatTemplate(source)
    assert template.render(HELLO) == "slow"
    assert template.render(HELLO, variables={"enable_thinking": False, "nobody_looks": [1]}) == "quick"


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "", " allowance", "a b", "1", "_x", "__class__", "\u00e9"])
def test_variables_of_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs") as caught:
        ChatTemplate("x").render(HELLO, variables={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_is_a_file_or_itself(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}")
    assert template_source(str(file)) == template_source(file) == file.read_text()
    assert template_source("{{ bos_token }}") == "{{ bos_token }}"
    for wrong in (str(tmp_path / "none.jinja"), tmp_path / "{none}", str(tmp_path), ""):
        with pytest.raises(ConfigError, match="chat template"):
            template_source(wrong)
    file.write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="not UTF-8"):
        template_source(file)
