"""The JSON bodies of the small endpoints. Knows no HTTP and no engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ropeway.server.conversation import ChatMessage

# Field -> the values that ask for nothing; anything else would change the prompt and is not served.
REFUSED_TOKENIZE_FIELDS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
}


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(None, description="Begin with the model's BOS token; only of a prompt.")
    return_token_strs: bool | None = Field(None, description="Also the text of each token.")


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: list[int]


class AbortBody(BaseModel):
    """POST /abort_requests: which, or all."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: str | list[str] | None = Field(None, description="Ids of answers, or x-request-ids of their clients.")
    abort_all: bool | None = None


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: str = Field(description="A file of purpose batch: a request per line.")
    endpoint: str = Field(description="What every line asks for.")
    completion_window: str = Field(description="24h: what is not answered by then never is.")
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = Field(None, description="anchor created_at, and seconds.")
