"""Prompts and parameters become `Request`s: encoding, chat rendering, every check that needs the model's facts.

Knows nothing of engines, threads or HTTP. Drawing a missing seed is the one act of chance.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.errors import InvalidRequestError, RequestTooLargeError
from ropeway.text.chat_template import ChatTemplate
from ropeway.text.grammar import Grammars
from ropeway.text.reasoning import thinks
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_calls import ToolFormat, tool_format_of
from ropeway.text.tool_prompts import Tool, described_conversation

Prompt = str | Sequence[int] | Mapping[str, object]
Message = Mapping[str, object]

NUM_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """token_ids of a prompt, and the text they came from, where there was one."""

    token_ids: tuple[int, ...]
    text: str | None = None

    def shown(self, tokenizer: Tokenizer, *, skip_special: bool) -> str:
        """Its text, or that of its tokens."""
        return tokenizer.decode(self.token_ids, skip_special=skip_special) if self.text is None else self.text


class RequestBuilder:
    """Builds requests for one loaded model. Thread-safe.

    max_model_len: the effective context, in tokens. vocab_size: rows of the embedding. has_priorities: the scheduler
    looks at them.
    default_sampling: fields of SamplingParams as the model's makers advise them, for callers who do not say.
    grammars: shared with the engine, so that what is compiled here is found there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        max_model_len: int,
        vocab_size: int,
        has_priorities: bool = False,
        default_sampling: Mapping[str, float] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.default_sampling = dict(default_sampling or {})
        self.grammars = grammars or Grammars(tokenizer)
        self._chat_template = chat_template
        self._vocab_size = vocab_size
        self._has_priorities = has_priorities
        # One body may ask for thousands of requests with the same words.
        self._bad_words = lru_cache(maxsize=64)(self._spellings)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a text, of token ids, or of vLLM's {"prompt": text} and {"prompt_token_ids": ids}.

        Raises InvalidRequestError for anything else, for an empty prompt, for an id outside the vocabulary.
        """
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not known or set(prompt) - {"prompt_token_ids", "prompt"}:
                raise InvalidRequestError(
                    f"a prompt given as a mapping has the key prompt or prompt_token_ids, not {sorted(prompt)}",
                    param="prompt",
                )
            return self.encode(prompt[known[0]])  # type: ignore[arg-type]  # checked by the recursion
        if isinstance(prompt, str):
            return EncodedPrompt(self._check_not_empty(self.tokenizer.encode(prompt)), prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            return EncodedPrompt(self._check_token_ids("prompt", prompt))
        raise InvalidRequestError(
            f"a prompt is text or a list of token ids, not {type(prompt).__name__}", param="prompt"
        )

    @property
    def chat_template_source(self) -> str | None:
        """The chat template as its authors wrote it; None where the model has none."""
        return self._chat_template.source

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        return tool_format_of(self._chat_template.source)

    @property
    def has_reasoning(self) -> bool:
        """Whether the model thinks aloud before it answers."""
        return thinks(self._chat_template.source)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_variables: Mapping[str, object] | None = None,
    ) -> EncodedPrompt:
        """Token ids of a conversation, through the model's chat template, with the assistant's turn opened.

        template_variables: what else the template may look at. Raises InvalidRequestError for a model without a
        template, for messages that it refuses, and for variables of a reserved name.
        """
        if self._chat_template.knows_tools:
            listed = [tool.as_openai() for tool in tools]
            text = self._chat_template.render(messages, tools=listed, variables=template_variables)
        else:
            plain = described_conversation(messages, tools) if tools or _mentions_tools(messages) else messages
            text = self._chat_template.render(plain, variables=template_variables)
        return EncodedPrompt(self._check_not_empty(self.tokenizer.encode(text)), text)

    def truncate(self, prompt: EncodedPrompt, num_tokens: int | None, max_tokens: int | None) -> EncodedPrompt:
        """The last num_tokens tokens of a prompt; -1 keeps as many as leave room for max_tokens; None keeps all.

        Raises InvalidRequestError for a number that keeps none.
        """
        if num_tokens is None:
            return prompt
        if num_tokens == -1:
            num_tokens = self.max_model_len - (1 if max_tokens is None else max_tokens)
        if num_tokens < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens leaves {num_tokens} tokens of the prompt; give at least 1, or -1",
                param="truncate_prompt_tokens",
            )
        return prompt if len(prompt.token_ids) <= num_tokens else EncodedPrompt(prompt.token_ids[-num_tokens:])

    def build(
        self, prompt: EncodedPrompt, params: SamplingParams, request_id: str, terms: ServiceTerms | None = None
    ) -> Request:
        """A request that fits the effective context, with its seed drawn if missing and every ending id.

        Raises RequestTooLargeError with the numbers, InvalidRequestError for ids outside the vocabulary and for a
        priority that nothing would look at.
        """
        num_prompt_tokens, limit = len(prompt.token_ids), self.max_model_len
        room = limit - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if room < (0 if params.max_tokens == 0 else 1):
            raise RequestTooLargeError(
                f"the prompt has {num_prompt_tokens} tokens and the effective context is {limit}, prompt and output "
                f"together; shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
            )
        if max_tokens > room:
            raise RequestTooLargeError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, more than the effective context of {limit}; "
                f"ask for at most {room} tokens or shorten the prompt",
                param="max_tokens",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens} but at most {max_tokens} tokens can be generated",
                param="min_tokens",
            )
        if terms is not None and terms.priority and not self._has_priorities:
            raise InvalidRequestError(
                f"priority is {terms.priority}, but this server does not schedule by priority; leave it out, or start "
                "with --scheduling-policy priority",
                param="priority",
            )
        self._check_token_ids("stop_token_ids", tuple(params.stop_token_ids))
        self._check_token_ids("logit_bias", tuple(params.logit_bias or ()))
        if params.grammar is not None:
            self.grammars.check(params.grammar)
        bad_words = self._bad_words(tuple(params.bad_words))
        own_stops = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        seed = secrets.randbits(64) if params.seed is None else params.seed % NUM_SEEDS
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=own_stops | frozenset(params.stop_token_ids),
            bad_words=bad_words,
            skips_prefix_cache=params.prompt_logprobs is not None,
            terms=terms or ServiceTerms(),
        )

    def _spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        encoded = [tuple(self.tokenizer.encode(text, add_bos=False, parse_special=False)) for text in texts]
        return tuple(dict.fromkeys(encoded))

    def _check_token_ids(self, name: str, token_ids: Sequence[object]) -> tuple[int, ...]:
        for token_id in token_ids:
            if type(token_id) is not int:
                raise InvalidRequestError(f"{name} must hold integers, not {token_id!r}", param=name)
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {token_id}; the vocabulary has ids 0 to {self._vocab_size - 1}", param=name
                )
        if name == "prompt":
            self._check_not_empty(token_ids)
        return tuple(token_ids)  # type: ignore[arg-type]  # checked above

    def _check_not_empty(self, token_ids: Sequence[object]) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
        return tuple(token_ids)  # type: ignore[arg-type]  # callers pass ints


def _mentions_tools(messages: Sequence[Message]) -> bool:
    return any(isinstance(each, Mapping) and ("tool_calls" in each or each.get("role") == "tool") for each in messages)
