"""A model's chat template: messages to one prompt text, through a sandboxed Jinja2.

Owns what a template is given and how its failures are told. A template comes with the model file, so it is a
stranger's program: `template_sandbox` bounds what it can do. Knows nothing of tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ropeway.errors import ConfigError, InvalidRequestError, ModelFileError
from ropeway.text.template_sandbox import new_environment, render

MAX_SOURCE_CHARS = 1_000_000
# What a template is given by us: a caller's variable of this name would change what the conversation is.
RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)


class _TemplateRefusal(Exception):
    """A template called raise_exception(): the messages are not what it can render."""


class ChatTemplate:
    """One compiled template.

    source: Jinja2; None for a model that has none: rendering then fails with the remedy.
    bos_token, eos_token: texts that the template may refer to.
    clock: seconds since the epoch, for templates that tell the model today's date.

    Raises ModelFileError for a source that does not compile.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = None if source is None else _compile(source, clock)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], *, clock: Callable[[], float] = time.time) -> ChatTemplate:
        """The template that a GGUF file carries, if it carries one.

        Raises ModelFileError for metadata of the wrong type or a template that does not compile.
        """
        source = metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise ModelFileError(f"tokenizer.chat_template must be a string, not {type(source).__name__}")
        return cls(
            source,
            bos_token=_special_token_text(metadata, "bos"),
            eos_token=_special_token_text(metadata, "eos"),
            clock=clock,
        )

    @property
    def knows_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        return "tools" in (self.source or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages`, each with a role and a content: a string, or OpenAI's list of parts, of which
        only text is accepted, one part a line.

        add_generation_prompt: end with the beginning of the assistant's answer. tools: as OpenAI writes them.
        variables: further ones that the template may look at, such as enable_thinking.

        Raises InvalidRequestError for messages that are malformed or that the template refuses, for variables of a
        reserved name, and for a model without template.
        """
        check_variables(variables or {})
        plain = [_plain_message(message, index) for index, message in enumerate(_checked_list(messages))]
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; send a plain prompt to /v1/completions (LLM.generate) instead"
            )
        given: dict[str, object] = {
            **(variables or {}),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "documents": None,
            **self._special_tokens,
        }
        try:
            return render(self._template, given)
        except _TemplateRefusal as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except SecurityError as error:
            raise InvalidRequestError(
                f"the model's chat template does something that is not allowed: {error}"
            ) from error
        except Exception as error:  # a template is a program: whatever it raises, these messages cannot be rendered
            raise InvalidRequestError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error


def template_source(given: str | os.PathLike[str]) -> str:
    """The template that somebody names: the path of a file, or a template itself. Raises ConfigError."""
    try:
        return Path(given).read_text()
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError, as is a path with a null character
        text = os.fspath(given)
        if not isinstance(given, os.PathLike) and any(sign in text for sign in "{}\n"):
            return text
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"the chat template {text[:200]!r} is no template, and as a file: {reason}") from None


def check_variables(variables: Mapping[str, object]) -> None:
    """Raises InvalidRequestError for names that no template could use, and for those that are taken."""
    for name in variables:
        if name in RESERVED_NAMES:
            raise InvalidRequestError(
                f"chat_template_kwargs holds {name}, which the server gives the template itself; leave it out",
                param="chat_template_kwargs",
            )
        if not (name.isascii() and name.isidentifier()) or name.startswith("_"):
            raise InvalidRequestError(
                f"chat_template_kwargs holds {name[:40]!r}, which is no name of a variable",
                param="chat_template_kwargs",
            )


def _compile(source: str, clock: Callable[[], float]) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelFileError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
    environment = new_environment()

    def strftime_now(pattern: str) -> str:
        return time.strftime(pattern, time.localtime(clock()))

    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise ModelFileError(f"the chat template does not compile: {type(error).__name__}: {error}") from error


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _special_token_text(metadata: Mapping[str, object], name: str) -> str:
    tokens, token_id = metadata.get("tokenizer.ggml.tokens"), metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(tokens, list) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return ""
    return str(tokens[token_id])


def _checked_list(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(f"messages must be a list, not {type(messages).__name__}", param="messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return messages


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy of the message with its content as one string."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object, not {type(message).__name__}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a non-empty string, not {role!r}", param="messages")
    return {**message, "content": _plain_content(message.get("content"), where)}


def _plain_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content must be a string or a list of parts, not {type(content).__name__}", param="messages"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{where}.content[{index}] has type {kind!r}; only 'text' parts are supported", param="messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.content[{index}].text must be a string", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)  # as vLLM and llama.cpp join them
