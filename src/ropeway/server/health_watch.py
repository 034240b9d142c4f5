"""Tells the log when /health turns red or green, whether or not anybody asks for it. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging

from ropeway.engine.async_engine import AsyncEngine
from ropeway.errors import EngineStoppedError

logger = logging.getLogger(__name__)

CHECKS_PER_STALL = 4
MAX_PERIOD_S = 5.0


class HealthWatch:
    """Looks at the engine a few times within stall_s, which is how long it may have work without completing a step."""

    def __init__(self, engine: AsyncEngine, stall_s: float) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._is_red = False

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(min(self._stall_s / CHECKS_PER_STALL, MAX_PERIOD_S))
            self.look()

    def look(self) -> None:
        """Logs a change since the last look."""
        try:
            self._engine.check_health(self._stall_s)
        except EngineStoppedError as error:
            if not self._is_red:
                logger.error("/health is red: %s", error)
            self._is_red = True
        else:
            if self._is_red:
                logger.warning("/health is green again")
            self._is_red = False
