"""The JSON bodies of requests: which fields exist, their types, and what becomes of each. Knows no HTTP and no engine.

A field is served, inert (accepted, changes no answer), or refused by name unless it holds its neutral value. Any other
field is unknown and refused too, as a misspelt one would be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ropeway.core.params import MAX_LOGPROBS, SamplingParams, ServiceTerms
from ropeway.errors import InvalidRequestError, UnsupportedFieldError
from ropeway.server.conversation import ChatMessage, conversation_of
from ropeway.server.structured import grammar_of
from ropeway.server.tools import ToolUse, tool_use
from ropeway.server.validation import from_validation, json_type

DEFAULT_COMPLETION_TOKENS = 16
MAX_COMPLETION_LOGPROBS = 5

INERT_FIELDS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

# Fields that would change the answer and are not served -> the values that ask for nothing. null always asks for
# nothing.
_REFUSED_EVERYWHERE: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
REFUSED_COMPLETION_FIELDS = {
    **_REFUSED_EVERYWHERE,
    "best_of": (1,),
    "suffix": ("",),
}
REFUSED_CHAT_FIELDS = {
    **_REFUSED_EVERYWHERE,
    "echo": (False,),
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="End with a chunk that holds the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk holds the counts so far.")
    include_obfuscation: bool | None = Field(None, description="Changes nothing: chunks are not padded.")


class SamplingBody(BaseModel):
    """What both kinds of completion share. null means the default."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="A name from /v1/models; may be omitted.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = Field(None, description="0 and -1 keep all.")
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, description="Lower is sooner; needs --scheduling-policy priority.")
    user: str | None = Field(None, description="Whose share of the caller's service it uses.")
    cache_salt: str | None = Field(None, description="Prefixes are shared only between requests with the same.")
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, description="-1 keeps what leaves room for max_tokens.")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice and grammar (Lark or GBNF)."
    )

    timeout: float | None = Field(None, description="Most seconds from arrival to the end; then 504.")
    queue_timeout: float | None = Field(None, description="Most seconds from arrival to the first step; then 503.")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every chunk tells the counts so far. Raises InvalidRequestError where the last one may not."""
        is_asked = self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        if is_asked and not self.includes_usage:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats needs include_usage to be true", param="stream_options"
            )
        return is_asked

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None reports nothing. Raises InvalidRequestError."""
        return None

    def sampling_params(
        self, max_tokens: int | None, defaults: Mapping[str, float] | None = None, grammar: str | None = None
    ) -> SamplingParams:
        """The parameters asked for, `defaults` where a field is not given. Raises InvalidRequestError with the field's
        name.
        """
        names = (
            "n",
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "bad_words",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "prompt_logprobs",
        )
        given: dict[str, Any] = dict(defaults or {})
        given |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.logit_bias:
            given["logit_bias"] = {_bias_token_id(key): bias for key, bias in self.logit_bias.items()}
        given["logprobs"] = self.num_logprobs
        if self.echoes and self.num_logprobs is not None:
            given["prompt_logprobs"] = max(self.num_logprobs, self.prompt_logprobs or 0)
        return SamplingParams(max_tokens=max_tokens, grammar=grammar, **given)

    def grammar(self) -> str | None:
        """What the answer must follow; None leaves it free. Raises InvalidRequestError."""
        return grammar_of(self.response_format, self.structured_outputs)

    def service_terms(self) -> ServiceTerms:
        """On whose account and how soon it is to be served. Raises InvalidRequestError with the field's name."""
        try:
            return ServiceTerms(
                user=self.user,
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
                timeout_s=self.timeout,
                queue_timeout_s=self.queue_timeout,
            )
        except InvalidRequestError as error:
            if error.param in ("timeout_s", "queue_timeout_s"):  # the name of the field, without the unit
                raise InvalidRequestError(str(error), param=error.param.removesuffix("_s")) from None
            raise


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any = Field(description="Text, a list of texts, token ids, or a list of lists of token ids.")
    echo: bool | None = None
    logprobs: int | bool | None = Field(None, description="0 to 5 alternatives per token.")

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None or self.logprobs is False:
            return None
        if self.logprobs is True or not 0 <= self.logprobs <= MAX_COMPLETION_LOGPROBS:
            raise InvalidRequestError(
                f"logprobs must be an integer from 0 to {MAX_COMPLETION_LOGPROBS}, not {self.logprobs}",
                param="logprobs",
            )
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one; token ids are not checked yet. Raises InvalidRequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(type(item) is int for item in prompt):
                return [prompt]
            if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
                return prompt
        if prompt == []:
            raise InvalidRequestError("prompt is empty; give at least one", param="prompt")
        raise InvalidRequestError(
            "prompt must be text, a list of texts, a list of token ids, or a list of lists of token ids", param="prompt"
        )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, or a function by name.")
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )

    def tool_use(self) -> ToolUse:
        """The tools, and whether one must be called. Raises InvalidRequestError with the field's name."""
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if use.must_call and self.grammar() is not None:
            raise InvalidRequestError(
                "tool_choice asks for a call, and another field for an answer in a format of its own; leave out one of "
                "them, or let tool_choice be auto",
                param="tool_choice",
            )
        return use

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {self.top_logprobs}", param="top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_tokens_asked(self) -> int | None:
        """max_completion_tokens, or its old name. Raises InvalidRequestError where both are given and differ."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequestError(
                f"max_completion_tokens is {new} and max_tokens is {old}; give one of them", param="max_tokens"
            )
        return old if new is None else new

    def conversation(self) -> list[dict[str, object]]:
        """The messages for the chat template: role, content as one text, name. Raises InvalidRequestError."""
        return conversation_of(self.messages)

    @property
    def names_given(self) -> Mapping[str, str]:
        """Of the fields that came under another name: what the caller calls them."""
        is_new = self.max_tokens is None and self.max_completion_tokens is not None
        return {"max_tokens": "max_completion_tokens"} if is_new else {}

    def as_given(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, told of the field that the caller sent."""
        name = self.names_given.get(error.param or "")
        if name is None:
            return error
        return type(error)(re.sub(rf"\b{error.param}\b", name, str(error)), param=name.split(".")[0])


Body = TypeVar("Body", bound=BaseModel)


def parse_body(
    kind: type[Body],
    fields: object,
    refused: Mapping[str, tuple[object, ...]],
    inert: Collection[str] = INERT_FIELDS,
) -> Body:
    """A validated body from decoded JSON. Raises InvalidRequestError or UnsupportedFieldError naming the field."""
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {json_type(fields)}")
    kept = {}
    for name, value in fields.items():
        if name in refused:
            if value is not None and not any(_is_same(value, neutral) for neutral in refused[name]):
                raise UnsupportedFieldError(
                    f"{name} is not supported and would change the answer; leave it out", param=name
                )
        elif name not in inert:
            kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise from_validation(error) from None


def _is_same(value: object, neutral: object) -> bool:
    # 0 == False in Python, but not in JSON.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _bias_token_id(key: str) -> int:
    # isdecimal takes no sign, space or underscore, which int() would.
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        raise InvalidRequestError(f"logit_bias has the key {key[:40]!r}; keys are token ids", param="logit_bias")
    return int(key)
