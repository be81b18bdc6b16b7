"""Memory of processes: of many alike only some are asked, and the sum is right all the same."""

from __future__ import annotations

import subprocess
import sys

import psutil
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


def test_memory_that_was_freed_is_used_again_without_the_system() -> None:
    code = (
        "import resource, numpy\n"
        "from w5xde.runtime.system.memory import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "for _ in range(20):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    blocks = [numpy.ones(900_000, numpy.uint8) for _ in range(20)]\n"
        "    del blocks\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout
    # 4,400 if the system provided each of the last round's pages again.
    assert int(faults) < 440


def test_freed_memory_is_returned_where_psutil_can(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(psutil, "heap_trim", lambda: called.append("trimmed"), raising=False)
    memory.return_freed()
    assert called == ["trimmed"]
    monkeypatch.delattr(psutil, "heap_trim")
    memory.return_freed()
