"""What no handler expected: logged with the request's name, answered without a word of its inside. Knows no routes."""

from __future__ import annotations

import logging
from typing import Any

from ropeway.server.errors import error_response
from ropeway.server.request_ids import STATUS
from ropeway.server.sse import Message, Receive, Send

logger = logging.getLogger(__name__)


class FailureGuard:
    """ASGI middleware, inside of what names requests and lets browsers read answers, so that failures have both."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or scope[STATUS]:
                raise  # uvicorn logs it and cuts the connection, so that no client takes the answer for whole
            logger.exception("%s failed", scope["method"])
            await error_response(error, scope["path"])(scope, receive, send)
