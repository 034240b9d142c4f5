"""What a client asks for: `SamplingParams`, `ServiceTerms`, `Request`. Knows no text, models or scheduling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ropeway.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]
Timeout = Literal["request", "queue"]  # the limit that a request ran into: of its whole time, or of its wait

MAX_SEED = 2**64 - 1
MAX_PRIORITY = 1000  # either way; with ageing it bounds how long anybody can be overtaken
MAX_TIMEOUT_S = 365.0 * 86_400
MAX_WEIGHT = 1e6
MAX_LOGPROBS = 20  # alternatives per position, as OpenAI and vLLM bound them
MAX_NAME_CHARACTERS = 512
MAX_TEXTS, MAX_TEXT_CHARACTERS = 256, 8192  # of `stop`, and of `bad_words`
LEAST_POSITIVE = 1e-9  # what logits may be divided by, twice, and stay within float32
MAX_COUNT = 2**31 - 1  # of tokens and token ids: what an int32 column of a batch holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to end. Spelled as in vLLM; validated on construction.

    n: sequences generated for the one prompt.
    max_tokens: most tokens generated; None means as many as the effective context allows; 0 only reads the prompt.
    min_tokens: the ids that end a sequence are masked until this many tokens were generated.
    temperature: 0 is greedy (then top_k, top_p and min_p have no effect).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
    seed: of the counter-based generator; None draws one on arrival.
    repetition_penalty: over prompt and output (CTRL, Keskar et al. 2019); presence and frequency: over the output.
    logit_bias: token id -> addend to its logit.
    stop: texts that end the sequence; not part of the answer. At most MAX_TEXTS of MAX_TEXT_CHARACTERS in all, as
    bad_words.
    stop_token_ids: ids that end the sequence, beside the model's own.
    ignore_eos: the model's own end tokens do not end the sequence.
    logprobs: None, or how many of the likeliest tokens to report beside the one drawn, at every step.
    prompt_logprobs: the same for every token of the prompt but the first.
    bad_words: texts whose last token is never drawn where it would complete them within the output.
    include_stop_str_in_output: the stop string, or the text of the stop token, is part of the answer.
    skip_special_tokens: control tokens have no text.
    grammar: what every answer must follow, as `ropeway.text.grammar` writes it; plain text here.

    Raises InvalidRequestError with the field's name for a value out of range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Iterable[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, not {_shortened(self.logit_bias)}", param="logit_bias"
            )
        bad_words = _as_tuple("bad_words", self.bad_words)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)
        self._check_numbers()
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, low=0, high=MAX_COUNT)
            _check_float("logit_bias", bias, low=-100.0, high=100.0)
        for name, texts in (("stop", stop), ("bad_words", bad_words)):
            _check_texts(name, texts)
        for token_id in stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0, high=MAX_COUNT)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be true or false, not {_shortened(value)}", param=name)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, low=1, high=128)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=0, high=MAX_COUNT)
        _check_int("min_tokens", self.min_tokens, low=0, high=MAX_COUNT if self.max_tokens is None else self.max_tokens)
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_int("top_k", self.top_k, low=0, high=MAX_COUNT)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=MAX_SEED)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_is_open=True)
        for name in ("temperature", "top_p", "repetition_penalty"):
            if 0 < getattr(self, name) < LEAST_POSITIVE:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name):g}; above 0 it must be at least {LEAST_POSITIVE:g}", param=name
                )
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_int(name, count, low=0, high=MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTerms:
    """On whose account and how soon a request is served; never decides its tokens. Validated on construction.

    tenant: whose share of the service it uses; weight: how large that share is, beside 1 of others; what a tenant's
    newest request says counts. user: divides the share of its tenant; None is a user of its own.
    priority: lower is sooner; 0 unless the policy is `priority`.
    is_background: it takes what interactive requests leave over.
    cache_salt: prefixes are shared only between requests of one tenant and one salt.
    timeout_s, queue_timeout_s: most seconds from its arrival to its end, and to its first step; None is no limit.

    Raises InvalidRequestError with the field's name for a value out of range.
    """

    tenant: str = ""
    weight: float = 1.0
    user: str | None = None
    priority: int = 0
    is_background: bool = False
    cache_salt: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_int("priority", self.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        for name in ("tenant", "user", "cache_salt"):
            text = getattr(self, name)
            if text is not None and len(text) > MAX_NAME_CHARACTERS:
                raise InvalidRequestError(
                    f"{name} has {len(text)} characters; at most {MAX_NAME_CHARACTERS} are taken", param=name
                )
        _check_float("weight", self.weight, low=0.0, high=MAX_WEIGHT, low_is_open=True)
        for name in ("timeout_s", "queue_timeout_s"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), low=0.0, high=MAX_TIMEOUT_S, low_is_open=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request; immutable. Everything that decides its tokens is in here.

    max_tokens: resolved against the effective context, so len(prompt) + max_tokens always fits it.
    seed: resolved, 0..2**64-1. Sequence i of the request draws with the key (seed, i).
    stop_token_ids: every id that ends a sequence: the caller's, and the model's own unless ignore_eos.
    skips_prefix_cache: every position of the prompt is computed, as one must be whose logits are wanted
        (`prompt_logprobs`); others may still share what it computes.
    bad_words: token ids of each text that must not be completed within the output.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    skips_prefix_cache: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def may_end_early(self) -> bool:
        """Whether a token or a text that the caller knows of can end an answer before max_tokens do."""
        return bool(self.stop_token_ids or self.params.stop)


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name} must be a list, not {_shortened(values)}", param=name)
    return tuple(values)


def _check_texts(name: str, texts: tuple[object, ...]) -> None:
    num_characters = 0
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"{name} must hold non-empty strings, not {_shortened(text)}", param=name)
        num_characters += len(text)
    if len(texts) > MAX_TEXTS or num_characters > MAX_TEXT_CHARACTERS:
        raise InvalidRequestError(
            f"{name} holds {len(texts)} texts of {num_characters} characters in all; at most {MAX_TEXTS} texts of "
            f"{MAX_TEXT_CHARACTERS} characters are taken",
            param=name,
        )


def _check_int(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {_shortened(value)}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low} to {high}, not {_shortened(value)}", param=name)


def _check_float(name: str, value: object, *, low: float, high: float, low_is_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {_shortened(value)}", param=name)
    if not low <= value <= high or (low_is_open and value == low):
        span = f"above {low:g} and at most {high:g}" if low_is_open else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{name} must be {span}, not {value:g}", param=name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _shortened(value: object) -> str:
    """The value as Python writes it, cut to a length that fits a message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than a few thousand digits
        text = f"an integer of {int.bit_length(value)} bits"  # type: ignore[arg-type]
    return text if len(text) <= 60 else text[:60] + "..."
