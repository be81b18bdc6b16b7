"""Memory of processes: of many alike only some are asked, and the sum is right all the same."""

from __future__ import annotations

import pytest

from w5xde.runtime.system import memory


@pytest.mark.parametrize("count", [0, 1, 2, memory.PROCESSES_MAX, 1000])
def test_some_nodes_stand_for_all_and_the_coordinator_for_itself(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(pid: int) -> int:
        asked.append(pid)
        return 5_000 if pid == 1 else 10

    monkeypatch.setattr(memory, "_pss_bytes", measure)
    assert memory.pss_bytes([1, *range(2, count + 2)]) == 5_000 + 10 * count
    assert len(asked) <= memory.PROCESSES_MAX + 1
    assert memory.pss_bytes([]) == 0
