"""A node's mind: it comes back after a break, works in order, and knows when to give up."""

from __future__ import annotations

import random

import pytest

from w5xde.control import node as nd
from w5xde.control.pool.members import BEAT_SECONDS

WAIT_SECONDS = 30.0


class Story:
    """A node and a clock: what is said to it, and the effects it wants."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS, seed: int = 0) -> None:
        self.core = nd.NodeCore(random.Random(seed), wait_seconds)
        self.now = 0.0
        self.started = self.core.start(self.now)

    def tell(self, event: nd.Event) -> list[nd.Effect]:
        return self.core.handle(event, self.now)

    def ticks(self, seconds: float) -> list[nd.Effect]:
        """Let time pass as the body does; returns all that was wanted."""
        wanted: list[nd.Effect] = []
        for _ in range(round(seconds / nd.TICK_SECONDS)):
            self.now += nd.TICK_SECONDS
            wanted += self.tell(nd.TimePassed())
        return wanted

    def joined(self) -> Story:
        self.tell(nd.Opened())
        self.tell(nd.Welcomed())
        assert self.tell(nd.Checked()) == [nd.SayReady()]
        return self

    def dial_after(self, event: nd.Event) -> float:
        """Tell bad news and wait as long as the node wants before it tries again."""
        (effect,) = self.tell(event)
        assert isinstance(effect, nd.Dial)
        self.now += effect.after_seconds
        return effect.after_seconds


# --- joining --------------------------------------------------------------------------------------


def test_a_node_dials_greets_checks_and_is_ready() -> None:
    story = Story()
    assert story.started == [nd.Dial(0.0)]
    assert story.tell(nd.Opened()) == [nd.Greet()]
    assert story.tell(nd.Welcomed()) == [nd.CheckModel()]
    assert story.tell(nd.Checked()) == [nd.SayReady()]
    assert story.core.has_joined


@pytest.mark.parametrize("seed", range(20))
def test_a_node_that_never_joined_gives_up_after_its_wait(seed: int) -> None:
    story = Story(seed=seed)
    while True:
        (effect,) = story.tell(nd.Lost("refused"))
        if not isinstance(effect, nd.Dial):
            break
        assert story.now < WAIT_SECONDS
        story.now += effect.after_seconds
    assert effect == nd.Exit("refused", error="refused")
    assert WAIT_SECONDS <= story.now < WAIT_SECONDS + nd.RETRY_SECONDS_MOST_AT_FIRST


@pytest.mark.parametrize(
    ("wait_seconds", "patience_seconds"),
    [(WAIT_SECONDS, nd.RECONNECT_SECONDS), (3600.0, 3600.0), (0.0, nd.RECONNECT_SECONDS)],
)
def test_after_a_break_a_node_looks_as_long_as_it_would_have_waited_or_longer(
    wait_seconds: float, patience_seconds: float
) -> None:
    story = Story(wait_seconds).joined()
    while not isinstance(effect := story.tell(nd.Lost("killed"))[0], nd.Exit):
        assert isinstance(effect, nd.Dial)
        assert story.now < patience_seconds
        story.now += effect.after_seconds
    assert patience_seconds <= story.now < patience_seconds + nd.RETRY_SECONDS_MOST


def test_a_node_that_waits_for_ever_never_gives_up() -> None:
    story = Story(float("inf"))
    for story.now in (0.0, 1e3, 1e6, 1e9):
        assert isinstance(story.tell(nd.Lost("nobody"))[0], nd.Dial)


def test_a_node_that_will_not_wait_gives_up_at_once() -> None:
    assert Story(wait_seconds=0.0).tell(nd.Lost("refused")) == [nd.Exit("refused", error="refused")]


def test_a_coordinator_that_lets_in_and_hangs_up_does_not_reset_the_wait() -> None:
    """Else a node would knock at a wrong door for ever."""
    story = Story()
    while story.now < WAIT_SECONDS:
        story.tell(nd.Opened())
        story.dial_after(nd.Lost("closed"))
    assert story.tell(nd.Lost("closed")) == [nd.Exit("closed", error="closed")]


# --- coming back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_waits_double_up_to_the_most_and_are_shortened_by_chance(seed: int) -> None:
    """Short in the first minute: the coordinator is just being started again."""
    story = Story(seed=seed).joined()
    waits = [(story.now, story.dial_after(nd.Lost("reset")))]
    while story.now < 2 * nd.AT_FIRST_SECONDS:
        waits.append((story.now, story.dial_after(nd.Lost("refused"))))
    for attempt, (at, wait) in enumerate(waits):
        longest = nd.RETRY_SECONDS_MOST_AT_FIRST if at < nd.AT_FIRST_SECONDS else nd.RETRY_SECONDS_MOST
        most = min(longest, nd.RETRY_SECONDS_FIRST * 2**attempt)
        assert most / 2 <= wait <= most


def test_nodes_do_not_come_back_as_one() -> None:
    waits = {Story(seed=seed).joined().dial_after(nd.Lost("reset")) for seed in range(20)}
    assert len(waits) == 20


def test_a_wait_stays_short_after_a_thousand_attempts() -> None:
    story = Story(wait_seconds=1e9)
    for _ in range(2000):
        assert story.dial_after(nd.Lost("refused")) <= nd.RETRY_SECONDS_MOST


def test_a_node_that_was_part_of_the_run_is_patient() -> None:
    story = Story(wait_seconds=1.0).joined()
    story.dial_after(nd.Lost("reset"))
    while story.now < nd.RECONNECT_SECONDS - nd.RETRY_SECONDS_MOST:
        story.dial_after(nd.Lost("refused"))
    story.now = nd.RECONNECT_SECONDS
    assert story.tell(nd.Lost("refused")) == [nd.Exit("refused", error="refused")]


def test_after_coming_back_patience_and_waits_begin_anew() -> None:
    story = Story().joined()
    for _ in range(6):
        story.dial_after(nd.Lost("reset"))
    story.joined()
    story.now += nd.RECONNECT_SECONDS
    assert story.dial_after(nd.Lost("reset")) <= nd.RETRY_SECONDS_FIRST


def test_a_check_of_a_broken_connection_says_nothing_on_the_next() -> None:
    """Building the model takes a while; a node that is ready before its welcome breaks the protocol."""
    story = Story()
    story.tell(nd.Opened())
    story.tell(nd.Welcomed())
    story.dial_after(nd.Lost("reset"))
    story.tell(nd.Opened())
    assert story.tell(nd.Checked()) == []
    assert story.tell(nd.Welcomed()) == [nd.CheckModel()]
    assert story.tell(nd.Checked()) == [nd.SayReady()]


def test_a_node_is_ready_once_for_each_connection() -> None:
    """Two checks are under way when the connection broke during the first: the second one counts."""
    story = Story()
    story.tell(nd.Opened())
    story.tell(nd.Welcomed())
    story.dial_after(nd.Lost("reset"))
    story.tell(nd.Opened())
    story.tell(nd.Welcomed())
    assert story.tell(nd.Checked()) + story.tell(nd.Checked()) == [nd.SayReady()]


def test_a_check_that_ends_after_the_connection_is_kept_for_the_next() -> None:
    story = Story()
    story.tell(nd.Opened())
    story.tell(nd.Welcomed())
    story.dial_after(nd.Lost("reset"))
    assert story.tell(nd.Checked()) == []
    story.joined()


# --- work -----------------------------------------------------------------------------------------


def test_work_is_done_in_order_and_one_thing_at_a_time() -> None:
    story = Story().joined()
    assert story.tell(nd.Given("params")) == [nd.Handle("params")]
    assert story.tell(nd.Given("first", [1])) == []
    assert story.tell(nd.Given("second", [2])) == []
    assert story.tell(nd.Finished()) == [nd.Handle("first")]
    assert story.tell(nd.Finished()) == [nd.Handle("second")]
    assert story.tell(nd.Finished()) == []


def test_a_cancelled_lease_is_known_until_it_is_dropped() -> None:
    story = Story().joined()
    story.tell(nd.Given("first", [1]))
    story.tell(nd.Given("second", [2, 3]))
    assert story.tell(nd.Cancelled([1, 3])) == []
    assert story.core.cancelled == {1, 3}
    story.tell(nd.Finished())
    assert story.core.cancelled == {3}
    story.tell(nd.Finished())
    assert story.core.cancelled == set()


def test_a_cancelled_lease_we_never_had_is_forgotten_at_once() -> None:
    """Our answer and the cancellation crossed; nothing may pile up."""
    story = Story().joined()
    story.tell(nd.Cancelled([1, 2, 3]))
    assert story.core.cancelled == set()


def test_leases_of_a_broken_connection_are_void() -> None:
    story = Story().joined()
    story.tell(nd.Given("old, in hand", [1]))
    story.tell(nd.Given("old, waiting", [2]))
    story.tell(nd.Cancelled([1]))
    story.dial_after(nd.Lost("reset"))
    assert story.core.cancelled == set()
    story.joined()
    assert story.tell(nd.Given("new", [3])) == []
    assert story.tell(nd.Finished()) == [nd.Handle("new")]


# --- silence --------------------------------------------------------------------------------------


def test_a_node_beats_while_it_works() -> None:
    story = Story().joined()
    story.tell(nd.Given("long work", [1]))
    beats = []
    for _ in range(10):
        story.core.heard(story.now)
        beats += story.ticks(BEAT_SECONDS)
    assert beats == [nd.SayBeat()] * 10


def test_a_node_beats_while_it_builds_its_model() -> None:
    story = Story()
    story.tell(nd.Opened())
    assert story.ticks(BEAT_SECONDS) == []  # before its welcome it may say nothing
    story.tell(nd.Welcomed())
    story.core.heard(story.now)
    assert nd.SayBeat() in story.ticks(BEAT_SECONDS)


def test_a_node_without_a_connection_neither_beats_nor_hangs_up() -> None:
    story = Story().joined()
    story.dial_after(nd.Lost("reset"))
    assert story.ticks(60.0) == []


def test_a_silent_coordinator_is_hung_up_on() -> None:
    story = Story().joined()
    before = story.ticks(nd.COORDINATOR_SILENCE_SECONDS)
    assert all(effect == nd.SayBeat() for effect in before)
    (effect,) = story.ticks(nd.TICK_SECONDS)
    assert isinstance(effect, nd.HangUp)
    assert effect.reason == "the coordinator was silent for 8 s"
    assert isinstance(story.tell(nd.Lost("aborted"))[0], nd.Dial)


def test_any_word_of_the_coordinator_breaks_its_silence() -> None:
    story = Story().joined()
    for _ in range(5):
        assert not any(
            isinstance(effect, nd.HangUp) for effect in story.ticks(nd.COORDINATOR_SILENCE_SECONDS)
        )
        story.core.heard(story.now)


# --- leaving --------------------------------------------------------------------------------------


def test_leaving_politely_finishes_the_work_in_hand_and_no_other() -> None:
    story = Story().joined()
    story.tell(nd.Given("in hand", [1]))
    story.tell(nd.Given("waiting", [2]))
    assert story.tell(nd.LeaveRequested()) == []
    assert story.tell(nd.Finished()) == [nd.Exit("left as asked")]
    assert story.core.is_over


def test_an_idle_node_leaves_at_once() -> None:
    assert Story().joined().tell(nd.LeaveRequested()) == [nd.Exit("left as asked")]


def test_work_that_comes_after_the_wish_to_leave_is_not_begun() -> None:
    story = Story().joined()
    story.tell(nd.Given("in hand", [1]))
    story.tell(nd.LeaveRequested())
    assert story.tell(nd.Given("late", [2])) == []
    assert story.tell(nd.Finished()) == [nd.Exit("left as asked")]


def test_a_node_that_wants_to_leave_does_not_come_back() -> None:
    story = Story().joined()
    story.tell(nd.Given("in hand", [1]))
    story.tell(nd.LeaveRequested())
    assert story.tell(nd.Lost("reset")) == [nd.Exit("left as asked")]


def test_a_node_that_leaves_in_a_hurry_gives_back_what_takes_long() -> None:
    story = Story().joined()
    story.tell(nd.Given("in hand", [1]))
    assert story.tell(nd.LeaveRequested(hurries=True)) == []
    story.core.heard(story.now)
    assert not any(isinstance(each, nd.Exit) for each in story.ticks(nd.LEAVE_SECONDS - 1))
    # Told again, it does not begin to count anew.
    assert story.tell(nd.LeaveRequested(hurries=True)) == []
    assert nd.Exit("left as asked") in story.ticks(1.5)
    assert story.core.is_over


def test_a_node_that_leaves_in_a_hurry_finishes_what_takes_a_moment() -> None:
    story = Story().joined()
    story.tell(nd.Given("in hand", [1]))
    assert story.tell(nd.LeaveRequested(hurries=True)) == []
    assert story.tell(nd.Finished()) == [nd.Exit("left as asked")]


def test_a_node_that_looks_for_its_coordinator_leaves_at_once() -> None:
    assert Story().tell(nd.LeaveRequested(hurries=True)) == [nd.Exit("left as asked")]


def test_a_run_that_is_over_is_no_error() -> None:
    assert Story().joined().tell(nd.Parted("all steps done", finished=True)) == [nd.Exit("all steps done")]


def test_being_turned_out_is_an_error() -> None:
    turned_out = nd.Parted("5 leases in a row failed there", finished=False)
    assert Story().joined().tell(turned_out) == [nd.Exit(turned_out.reason, error=turned_out.reason)]


def test_when_all_is_over_nothing_is_wanted() -> None:
    story = Story().joined()
    story.tell(nd.Parted("all steps done", finished=True))
    for event in (nd.Lost("closed"), nd.Given("late", [1]), nd.LeaveRequested(), nd.Opened()):
        assert story.tell(event) == []
    assert story.ticks(60.0) == []
