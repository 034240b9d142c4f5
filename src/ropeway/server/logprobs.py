"""Log-probabilities as OpenAI's completions, its chat and vLLM's prompt_logprobs spell them. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from ropeway.core.plan import TokenLogprobs
from ropeway.server.choices import ScoredToken
from ropeway.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""The token's text; `bytes:\xe2\x82` where its bytes are not whole characters, as OpenAI writes them."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, object]:
    """Four lists by token. The alternatives of a token hold the token itself too."""
    return {
        "tokens": [token_text(tokenizer, each.token_id) for each in scored],
        "token_logprobs": [each.logprobs and _floored(each.logprobs.logprob) for each in scored],
        "top_logprobs": [each.logprobs and _by_text(tokenizer, each.logprobs) for each in scored],
        "text_offset": [each.text_offset for each in scored],
    }


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, object]:
    """An entry per token, each with its alternatives."""
    entries = []
    for each in scored:
        found = each.logprobs
        assert found is not None, "every token of an answer has a log-probability"
        alternatives = [_entry(tokenizer, *pair) for pair in zip(found.top_ids, found.top_logprobs, strict=True)]
        entries.append({**_entry(tokenizer, found.token_id, found.logprob), "top_logprobs": alternatives})
    return {"content": entries, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs | None]) -> list[object]:
    """By position, the first null: token id -> its log-probability, rank and text; the prompt's own first."""
    return [each and _by_id(tokenizer, each) for each in scores]


def _by_text(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, float]:
    texts: dict[str, float] = {}
    for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        texts.setdefault(token_text(tokenizer, token_id), _floored(logprob))  # of two of one text the likelier
    texts.setdefault(token_text(tokenizer, found.token_id), _floored(found.logprob))
    return texts


def _by_id(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, object]:
    ranked = {
        token_id: (logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), start=1)
    }
    ranked = {found.token_id: (found.logprob, found.rank), **{k: v for k, v in ranked.items() if k != found.token_id}}
    return {
        str(token_id): {"logprob": _floored(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _floored(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _floored(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
