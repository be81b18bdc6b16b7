"""How many strangers may stand at the door, and what is told of them. Time comes in through the door."""

from __future__ import annotations

from w5xde.control.pool import connection_limits as limits
from w5xde.control.pool.connection_limits import ConnectionLimits


def knock(
    doorman: ConnectionLimits,
    address: str,
    now: float = 0.0,
    *,
    here: bool = False,
    tls: bool = False,
    oldest: float = 0.0,
) -> str:
    return doorman.refusal(address, now, is_here=here, shakes_hands=tls, oldest_came_at=oldest)


def test_one_address_takes_only_its_part_of_the_places():
    doorman = ConnectionLimits()
    outcomes = [knock(doorman, "a") for _ in range(100)]
    assert outcomes.count("") == limits.UNAUTHENTICATED_PER_ADDRESS_MAX
    assert knock(doorman, "b") == ""
    doorman.release("a")
    assert knock(doorman, "a") == ""
    assert knock(doorman, "a") == "too many at a time"


def test_this_machine_may_bring_more_but_not_all():
    doorman = ConnectionLimits()
    outcomes = [knock(doorman, "127.0.0.1", here=True) for _ in range(99)]
    assert outcomes.count("") == limits.UNAUTHENTICATED_HERE_MAX
    assert knock(doorman, "b") == ""


def test_all_strangers_together_have_a_limit():
    doorman = ConnectionLimits()
    outcomes = [knock(doorman, f"a{number // 8}") for number in range(200)]
    assert outcomes.count("") == limits.UNAUTHENTICATED_MAX == doorman.unauthenticated
    assert outcomes[-1] == "too many strangers at a time"


def test_who_has_said_nothing_for_a_while_makes_room_for_who_comes():
    """Who holds all places from many addresses would keep everybody else out for as long as it likes."""
    doorman = ConnectionLimits()
    for number in range(limits.UNAUTHENTICATED_MAX):
        knock(doorman, f"a{number // 8}", 5.0)
    soon, later = 5.0 + limits.PROTECTED_SECONDS - 0.1, 5.0 + limits.PROTECTED_SECONDS
    assert knock(doorman, "b", soon, oldest=5.0) == "too many strangers at a time"
    assert not doorman.is_over_limit
    assert knock(doorman, "b", later, oldest=5.0) == ""
    assert doorman.is_over_limit
    doorman.release("a0")
    assert not doorman.is_over_limit


def test_who_may_not_stay_anyway_takes_nobodys_place():
    doorman = ConnectionLimits()
    for _ in range(limits.UNAUTHENTICATED_PER_ADDRESS_MAX):
        knock(doorman, "a")
    for number in range(limits.UNAUTHENTICATED_MAX - limits.UNAUTHENTICATED_PER_ADDRESS_MAX):
        knock(doorman, f"b{number}")
    assert knock(doorman, "a", 60.0) == "too many at a time"
    while knock(doorman, "c", 60.0, tls=True) == "":
        doorman.release("c")
    assert knock(doorman, "c", 60.0, tls=True) == "too many handshakes a second"
    assert not doorman.is_over_limit


def test_handshakes_have_a_rate_and_clear_text_does_not():
    doorman = ConnectionLimits()
    begun = 0
    for tenth in range(100):
        if knock(doorman, "a", tenth / 10, tls=True) == "":
            begun += 1
            doorman.release("a")
        if knock(doorman, "a", tenth / 10, tls=True) == "":
            begun += 1
            doorman.release("a")
    assert begun <= limits.HANDSHAKES_AT_ONCE + 10 * limits.HANDSHAKES_PER_SECOND
    assert begun >= 10 * limits.HANDSHAKES_PER_SECOND
    for _ in range(1000):
        assert knock(doorman, "b", 10.0) == ""
        doorman.release("b")


def test_a_flood_from_everywhere_has_a_rate_too():
    doorman = ConnectionLimits()
    outcomes = []
    for number in range(1000):
        outcomes.append(knock(doorman, f"a{number}", 0.0, tls=True))
        if not outcomes[-1]:
            doorman.release(f"a{number}")
    assert outcomes.count("") == limits.HANDSHAKES_AT_ONCE_ALL


def test_who_comes_seldom_is_let_in_while_a_hundred_others_flood_the_door():
    doorman = ConnectionLimits()
    outcomes = []
    for millisecond in range(12_000):
        now, flooding = millisecond / 1000, f"a{millisecond % 100}"
        if not knock(doorman, flooding, now, tls=True):
            doorman.release(flooding)
        # Once it is seen who comes often. A node looks at the certificate, and then comes in.
        if millisecond % 1000 == 999 and now > 2:
            for _ in range(2):
                outcomes.append(knock(doorman, "honest", now, tls=True))
                if not outcomes[-1]:
                    doorman.release("honest")
    assert outcomes == [""] * 20


def test_one_that_is_turned_away_because_of_others_has_not_used_its_own_share():
    doorman = ConnectionLimits()
    for number in range(1000):
        if not knock(doorman, f"a{number}", 0.0, tls=True):
            doorman.release(f"a{number}")
    for _ in range(100):
        assert knock(doorman, "b", 0.0, tls=True) == "too many handshakes a second, from everywhere"
    assert knock(doorman, "b", 1.0, tls=True) == ""


def test_who_guesses_is_not_heard_for_a_minute():
    doorman = ConnectionLimits()
    for second in range(limits.FAILURES_MAX):
        assert knock(doorman, "a", float(second)) == ""
        doorman.release("a")
        doorman.failed("a", float(second))
    assert knock(doorman, "a", 5.0) == "wrong secrets came from there"
    assert knock(doorman, "b", 5.0) == ""
    assert knock(doorman, "a", 5.0 + limits.BLOCKED_SECONDS) == ""


def test_who_is_wrong_now_and_then_is_heard():
    doorman = ConnectionLimits()
    for minute in range(50):
        doorman.failed("a", minute * 20.0)
        assert knock(doorman, "a", minute * 20.0) == ""
        doorman.release("a")


def test_a_thousand_of_one_kind_are_two_lines():
    doorman = ConnectionLimits()
    told = [doorman.should_log("a", "W5-113", 0.0) for _ in range(1000)]
    assert told == [True] + [False] * 999
    assert doorman.should_log("a", "W5-120", 0.0)
    assert doorman.should_log("b", "W5-113", 0.0)
    assert doorman.log_lines(limits.LOG_SECONDS - 1) == []
    assert doorman.log_lines(limits.LOG_SECONDS) == [
        "999 more connections were turned away from a within 60 s (W5-113)"
    ]
    assert doorman.log_lines(10 * limits.LOG_SECONDS) == []
    assert doorman.should_log("a", "W5-113", 100.0)


def test_what_is_remembered_has_a_limit():
    doorman = ConnectionLimits()
    knock(doorman, "first")
    for number in range(3 * limits.ADDRESSES_MAX):
        # The second time is counted, to be told later of each address that is remembered.
        doorman.should_log(f"a{number}", "W5-113", 0.0)
        doorman.should_log(f"a{number}", "W5-113", 0.0)
    assert 0 < len(doorman.log_lines(limits.LOG_SECONDS)) <= limits.ADDRESSES_MAX
    doorman.release("first")
    assert doorman.unauthenticated == 0
