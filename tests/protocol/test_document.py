"""The numbers in docs/protocol.md are those in force; its examples and its table are read by their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from w5xde.control.node import COORDINATOR_SILENCE_SECONDS
from w5xde.control.pool import connection_limits as early
from w5xde.control.pool.members import BEAT_SECONDS, SILENCE_SECONDS
from w5xde.control.pool.patience import (
    GREETING_SECONDS,
    SLOW_BYTES_PER_SECOND,
    SLOW_SECONDS,
    STUCK_SECONDS,
)
from w5xde.learn.job.code.packages import DIFFERENCES_MAX
from w5xde.message_types import (
    CODE_BYTES_MAX,
    CODE_FILES_MAX,
    ENTRIES_MAX,
    METRIC_ROWS_MAX,
    METRICS_MAX,
    NAME_CHARACTERS_MAX,
    NODE_NAME_PATTERN,
    PACKAGE_PATTERN,
    PACKAGES_MAX,
    PROBE_BYTES_MAX,
    VERSION_PATTERN,
)
from w5xde.messages import PROTOCOL_VERSION
from w5xde.protocol.wire import GREETING_LIMITS, WIRE_VERSION
from w5xde.runtime.admission.code_offers import OFFER_SECONDS, OFFERS_AT_A_TIME_MAX
from w5xde.runtime.coordinator.canary_check import CHECK_FACTOR, CHECK_SECONDS_MIN
from w5xde.runtime.coordinator.peers import ABSENT_BYTES_MAX, ANSWER_BYTES_MAX, WORDS_BYTES_MAX
from w5xde.runtime.net.connection import GOODBYE_SECONDS, LAST_WORDS_SECONDS
from w5xde.runtime.node import limits as expected
from w5xde.runtime.node.limits import OFFER_LIMITS, WELCOME_LIMITS

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")

SENTENCES = [
    f"Version of the wire: **{WIRE_VERSION}**.",
    f"(`protocol` in `Hello`): **{PROTOCOL_VERSION}**.",
    f"| before `Ready` | {GREETING_LIMITS.meta_bytes_max:,} | {GREETING_LIMITS.body_bytes_max}; after",
    f"| after `Ready` | {WORDS_BYTES_MAX:,} and {ANSWER_BYTES_MAX:,} for each of those leases,",
    f"with {ABSENT_BYTES_MAX} more for each entry of the layout |",
    f"| before `Ready` | {WELCOME_LIMITS.meta_bytes_max:,} | {WELCOME_LIMITS.body_bytes_max:,} |",
    f"that `asks_code` | {OFFER_LIMITS.meta_bytes_max:,} | {OFFER_LIMITS.body_bytes_max:,} |",
    f"| the code of the job, until it has all been sent | {OFFER_SECONDS:.0f} |",
    f"more than {OFFERS_AT_A_TIME_MAX} nodes are being sent it",
    f"`metrics` (array of at most {METRICS_MAX} labels, empty)",
    f"| `metrics` | array of at most {METRIC_ROWS_MAX} arrays, empty |",
    f"1 to {CODE_FILES_MAX} files, {CODE_BYTES_MAX:,} bytes in all",
    f"at most {NAME_CHARACTERS_MAX}\ncharacters in all",
    f"name of package → version, at most {PACKAGES_MAX}:",
    f"the node's own, at most {DIFFERENCES_MAX}, that are not",
    f"a part of {expected.MEMORY_PART} of the memory that it had when it joined, ",
    f"at least {expected.WORK_BYTES_LEAST:,} bytes",
    f"A layout has at most {ENTRIES_MAX:,} entries",
    f"| `frozen` | bytes, at most {ENTRIES_MAX // 8:,}, empty |",
    f"| `evaluating` | bytes, at most {ENTRIES_MAX // 8:,}, empty |",
    f"| `probe` | count up to {PROBE_BYTES_MAX:,}, 0 |",
    f"`Welcome` at most {WELCOME_LIMITS.values_max:,} MessagePack values",
    f"at most {expected.META_BYTES_MAX:,}, and 1/{expected.GROWTH} of that part",
    f"more than {expected.WAITING_MAX} messages",
    f"{CHECK_FACTOR:,.0f} times what the canary took here, if longer | {CHECK_SECONDS_MIN:.0f} |",
    f"| between two beats, from `Welcome` on | {BEAT_SECONDS:.0f} |",
    f"| from a node's first packet until its greeting was accepted | {early.AUTHENTICATION_SECONDS:.0f} |",
    f"| silence of a node between `Welcome` and `Ready` | {GREETING_SECONDS:.0f} |",
    f"| a node takes nothing of what waits for it | {STUCK_SECONDS:.0f} |",
    f"| a frame arrives with less than {SLOW_BYTES_PER_SECOND:,} bytes a second | {SLOW_SECONDS:.0f} |",
    f"| silence of a node until its leases are lent again | {SILENCE_SECONDS:.0f} |",
    f"the node hangs up and dials again | {COORDINATOR_SILENCE_SECONDS:.0f} |",
    f"| last words after a goodbye | {LAST_WORDS_SECONDS:.0f} |",
    f"(without TLS); what it sends is thrown away | {GOODBYE_SECONDS:.0f} |",
    f"At most {early.UNAUTHENTICATED_MAX} strangers are at the door at a time",
    f"{early.UNAUTHENTICATED_PER_ADDRESS_MAX} from one address",
    f"({early.UNAUTHENTICATED_HERE_MAX} from the",
    f"After {early.FAILURES_MAX} wrong secrets within {early.FAILURES_SECONDS:.0f} s",
    f"{early.HANDSHAKES_PER_SECOND:.0f} a second from one address",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_documented_number_is_the_one_in_force(sentence):
    assert sentence in TEXT


def test_the_documented_pattern_of_names_is_the_one_in_force():
    pattern = NODE_NAME_PATTERN.removeprefix("^").removesuffix("$").removesuffix(r"\Z")
    assert f"A *name* matches `{pattern}`, all of it" in TEXT


def test_the_documented_patterns_of_packages_are_those_in_force():
    bare = [pattern.removeprefix("^").removesuffix(r"\Z") for pattern in (PACKAGE_PATTERN, VERSION_PATTERN)]
    assert f"name matches\n`{bare[0]}`, a version `{bare[1]}`." in TEXT
