"""SIGHUP from the start of the process on, before there is an event loop that could hear it. Knows no reloading."""

from __future__ import annotations

import signal
from types import FrameType


class Hangups:
    """Whether somebody asked to have files read again. Without `watch` a SIGHUP ends the process, as it does any."""

    def __init__(self) -> None:
        self.is_watching = False
        self.has_come = False

    def watch(self) -> None:
        """Notes SIGHUPs instead of ending by one. Called on the main thread."""
        self.is_watching = True
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
