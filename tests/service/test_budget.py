"""What was let go counts until a status knows of it, whatever becomes of the clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.standin import StandInServer
from sglang_capture.service import monitor
from sglang_capture.service.budget import SpoolBudget
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.problems import ProblemError


def test_a_clock_that_was_set_back_holds_nobody_up_for_as_long(
    sglang: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "STATUS_STALE_SECONDS", 3.0)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    sglang.free = 1000
    sglang.write_status()

    async def take(budget: SpoolBudget, patience: float) -> None:
        async with budget.room(600, patience):
            pass

    async def run() -> None:
        watched = SpoolMonitor(sglang.spool)
        budget = SpoolBudget(watched, lambda: None)
        reading = asyncio.create_task(watched.run())
        await take(budget, 1.0)
        monkeypatch.setattr(time, "time", lambda: 1e9)
        with pytest.raises(ProblemError, match="no more than 1,000 free"):
            await take(budget, 0.1)
        await take(budget, 30.0)
        reading.cancel()

    asyncio.run(run())
