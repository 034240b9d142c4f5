"""Says in the log when latency targets cannot be met, and when they can again. Knows no requests."""

from __future__ import annotations

import logging

from ropeway.core.stats import PacingStats

logger = logging.getLogger(__name__)


class TargetLog:
    """Looks at the pacing after each step; a line per change, not per step."""

    def __init__(self) -> None:
        self._is_overloaded = False
        self._is_out_of_reach = False

    def observe(self, pacing: PacingStats) -> None:
        if pacing.is_overloaded != self._is_overloaded:
            self._is_overloaded = pacing.is_overloaded
            if pacing.is_overloaded:
                logger.warning("TTFT target of %g s out of reach: refusing requests at the door", pacing.ttft_s)
            else:
                logger.info("accepting requests again; %d refused since the start", pacing.num_refused)
        if pacing.is_tpot_out_of_reach != self._is_out_of_reach:
            self._is_out_of_reach = pacing.is_tpot_out_of_reach
            if pacing.is_tpot_out_of_reach:
                logger.warning("TPOT target of %g s out of reach: what runs takes longer by itself", pacing.tpot_s)
            else:
                logger.info("the TPOT target is within reach again")
