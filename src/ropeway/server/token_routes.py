"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes: what a prompt becomes, and back. Knows no engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway.errors import InvalidRequestError
from ropeway.inputs import EncodedPrompt
from ropeway.llm import AsyncLLM
from ropeway.server.bodies import REFUSED_TOKENIZE_FIELDS, DetokenizeBody, TokenizeBody
from ropeway.server.config import ServerConfig
from ropeway.server.conversation import conversation_of
from ropeway.server.errors import json_response
from ropeway.server.logprobs import token_text
from ropeway.server.openai import check_served, off_loop_if_long
from ropeway.server.protocol import parse_body
from ropeway.server.reading import read_json
from ropeway.server.tools import tool_use


def token_routes(llm: AsyncLLM, config: ServerConfig) -> list[Route]:
    """The three routes."""
    tokenizer = llm.builder.tokenizer

    async def tokenize(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(TokenizeBody, fields, REFUSED_TOKENIZE_FIELDS, ())
        _check_model(llm, body.model)
        token_ids = await _token_ids(llm, body)
        texts = [token_text(tokenizer, token_id) for token_id in token_ids] if body.return_token_strs else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": llm.facts.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_json(request, config.max_body_bytes), {}, ())
        _check_model(llm, body.model)
        if not all(0 <= token_id < tokenizer.vocab_size for token_id in body.tokens):
            wrong = next(token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size)
            raise InvalidRequestError(
                f"tokens holds {wrong}; the vocabulary has ids 0 to {tokenizer.vocab_size - 1}", param="tokens"
            )
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    async def tokenizer_info(request: Request) -> Response:
        marks = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        return json_response(
            {
                **{name: None if mark is None else tokenizer.token_text(mark) for name, mark in marks.items()},
                "chat_template": llm.builder.chat_template_source,
            }
        )

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]


async def _token_ids(llm: AsyncLLM, body: TokenizeBody) -> list[int]:
    builder = llm.builder
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise InvalidRequestError(f"{name} goes with messages, not with a prompt", param=name)
        prompt, has_bos = body.prompt, body.add_special_tokens is not False
        return await off_loop_if_long(len(prompt), lambda: builder.tokenizer.encode(prompt, add_bos=has_bos))
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for a prompt: the chat template writes its own", param="add_special_tokens"
        )
    messages, tools = conversation_of(body.messages or ()), tool_use(body.tools, None, None).tools
    num_characters = sum(len(str(message["content"])) for message in messages) + len(str(body.tools or ""))

    def encoded() -> EncodedPrompt:
        return builder.encode_chat(messages, tools, body.chat_template_kwargs)

    return list((await off_loop_if_long(num_characters, encoded)).token_ids)


def _check_model(llm: AsyncLLM, name: str | None) -> None:
    if name is not None:
        check_served(name, llm.facts.served_model_names)
