"""Fifteen seconds of chaos: the short form of `make evidence-soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import soak


def test_after_chaos_every_block_is_free_and_every_request_counted_once(tmp_path: Path) -> None:
    warm_up = {"warm_up_requests": 20, "warm_up_responses": 5, "warm_up_sequences": 0}
    options = {"seed": 3, "duration_s": 15, "checks_memory": False, **warm_up}
    document: dict[str, Any] = {"options": options}
    assert soak.run(document, tmp_path) == []
    assert document["client"]["num_requests"] > 100 and document["client"]["unseen"]
