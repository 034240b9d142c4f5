"""A Jinja2 environment in which a stranger's template can do little harm.

Owns the limits of one rendering. Jinja's own sandbox keeps a template away from Python's internals and from changing
what it is given; it does not keep it from looping for hours or filling the memory. Here every turn of a loop and
every call counts as a step, every text or list that an operator or a call makes, or a filter is given, counts its
length, and both are bounded; what makes something huge in one go is checked before it is made. Not covered: what
comparing and searching long texts costs (`in`, `==`), and what sorting costs beyond the length sorted. Knows
nothing of chats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
STEPS_PER_CALL = 10
MAX_MADE = 50_000_000  # characters, over the whole rendering
CHARACTERS_PER_ITEM = 8  # what an item of a list counts for, being a pointer
MAX_WIDTH = 1000  # of what is padded or indented
MAX_JSON_INDENT = 16

_ALLOWANCE = " allowance"  # a variable that no template can name
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_REFUSED_METHODS = frozenset({"format_map", "translate", "maketrans"})
_REFUSED_FILTERS = ("batch", "center", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_WIDE_OR_NESTED_FIELD = re.compile(r"\{[^{}]*(\d{4,}|\{)")
_WIDE_CONVERSION = re.compile(r"%[^%]*?(\d{4,}|\*)")


class Allowance:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._num_steps_left = MAX_STEPS
        self._num_made_left = MAX_MADE

    def step(self, num_steps: int = 1) -> None:
        """Raises SecurityError when too many were taken."""
        self._num_steps_left -= num_steps
        if self._num_steps_left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def make(self, size: int) -> None:
        """Counts a text or list of `size`. Raises SecurityError when too much was made."""
        self._num_made_left -= size
        if self._num_made_left < 0:
            raise SecurityError(f"the texts and lists it makes exceed {MAX_MADE} characters")


def new_environment() -> TemplateSandbox:
    """An environment with whitespace control and extensions as chat templates expect them."""
    # Without the optimizer: it evaluates constant expressions at compile time, where nothing is counted.
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, LoopControlExtension]
    )
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    for name in _REFUSED_FILTERS:
        del environment.filters[name]
    sizes: dict[str, Callable[..., int]] = {
        "replace": _replaced_size,
        "join": _joined_size,
        "indent": _indented_size,
        "string": _printed_size,
        "tojson": _printed_size,
    }
    environment.filters["tojson"] = to_json
    environment.finalize = _finalized
    for name, filter_ in environment.filters.items():
        environment.filters[name] = _measured(filter_, sizes.get(name, _input_size))
    environment.filters["metered"] = _metered
    environment.filters["concatenated"] = _concatenated
    return environment


def render(template: Template, variables: dict[str, object]) -> str:
    """The template's output. Raises SecurityError when it exceeds its allowance, and whatever the template raises."""
    allowance = Allowance()
    pieces = []
    for piece in template.generate({**variables, _ALLOWANCE: allowance}):
        pieces.append(piece)
    return "".join(pieces)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted loops, calls and operators."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        allowance = _allowance(context)
        allowance.step(STEPS_PER_CALL)
        _check_method(allowance, obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        allowance.make(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        allowance = _allowance(context)
        if operator == "**":
            raise SecurityError("it computes powers")
        if operator == "%" and isinstance(left, str) and _WIDE_CONVERSION.search(left):
            raise SecurityError(f"it formats wider than {MAX_WIDTH}")
        if operator == "*":
            allowance.make(_product_size(left, right))
        elif operator == "%":
            allowance.make(_printed_size(right))
        result = super().call_binop(context, operator, left, right)
        if operator != "*":
            allowance.make(_size(result))
        return result


class _Meter(NodeTransformer):
    """Rewrites loops, `~` and plain text so that they pass through what counts."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "metered", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "concatenated", [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)  # which, unlike plain template text, is finalized: counted


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training: the mark is ignored here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: unlike Jinja's own filter it escapes nothing for HTML and keeps the order of
    keys.
    """
    if indent is not None and indent > MAX_JSON_INDENT:
        raise SecurityError(f"it indents JSON by more than {MAX_JSON_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _metered(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """`items`, each a step. Lists stay lists, because loops may ask for their length."""
    allowance = _allowance(context)
    if isinstance(items, list | tuple | str | dict):
        allowance.step(len(items))
        return items
    return _counted(allowance, items)


def _counted(allowance: Allowance, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        allowance.step()
        yield item


@pass_context
def _concatenated(context: Context, parts: list[Any]) -> str:
    _allowance(context).make(_printed_size(parts))
    return str_join(parts)


@pass_context
def _finalized(context: Context, value: Any) -> Any:
    """What a template writes out: counted before a list becomes a text."""
    _allowance(context).make(_printed_size(value))
    return value


def _measured(filter_: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    """The filter, counting what it is about to read or make."""
    what_first = getattr(filter_, "jinja_pass_arg", None)  # what Jinja would pass to it before the value

    @pass_context
    def measured(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        allowance = _allowance(context)
        allowance.step()
        if size is not _input_size and isinstance(value, Iterator):
            value = list(_counted(allowance, value))
        allowance.make(size(value, *args, **kwargs))
        if what_first is None:
            return filter_(value, *args, **kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return filter_(first[what_first.name], value, *args, **kwargs)

    return measured


def _check_method(allowance: Allowance, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses or counts calls of str methods that can make something huge from something small."""
    method = getattr(method, "__wrapped__", method)  # Jinja's sandbox wraps str.format
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in _REFUSED_METHODS:
        raise SecurityError(f"it calls str.{name}")
    if name in _PADDING_METHODS:
        for argument in (*args, *kwargs.values()):
            _check_width(argument)
    elif name == "format":
        if _WIDE_OR_NESTED_FIELD.search(text):
            raise SecurityError(f"it formats wider than {MAX_WIDTH}, or with a computed width")
        allowance.make(text.count("{") * _printed_size([*args, *kwargs.values()]))
    elif name == "replace":
        allowance.make(_replaced_size(text, *args))
    elif name == "join" and args:
        allowance.make(_joined_size(args[0], text))


def _check_width(width: Any) -> None:
    if (isinstance(width, int) and width > MAX_WIDTH) or (isinstance(width, str) and len(width) > MAX_WIDTH):
        raise SecurityError(f"it pads or indents by more than {MAX_WIDTH}")


def _replaced_size(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    whole, part = _printable(text), _printable(old)
    return len(whole) + whole.count(part) * _printed_size(new)


def _joined_size(items: Any, separator: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(items, list | tuple | str | dict | range):
        return 0  # nothing that join accepts
    return sum(_printed_size(item) for item in items) + len(items) * _printed_size(separator)


def _indented_size(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    _check_width(width)
    whole = _printable(text)
    return len(whole) + (whole.count("\n") + 1) * MAX_WIDTH


def _product_size(left: Any, right: Any) -> int:
    if isinstance(right, str | list | tuple):
        left, right = right, left
    return _size(left) * max(right, 0) if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _printable(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        raise SecurityError("it treats a list as a text")
    return str(value)


def _printed_size(value: Any, *_: Any, **__: Any) -> int:
    """About how long a value is as text. A list that holds one long text many times is short until it is printed."""
    if isinstance(value, dict):
        return sum(_printed_size(key) + _printed_size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_printed_size, value)) + len(value)
    return len(value) if isinstance(value, str) else 8


def _input_size(value: Any, *_: Any, **__: Any) -> int:
    return _size(value)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return len(value) * CHARACTERS_PER_ITEM if isinstance(value, list | tuple | dict | range) else 0


def _allowance(context: Context) -> Allowance:
    allowance = context.resolve(_ALLOWANCE)
    assert isinstance(allowance, Allowance)
    return allowance
