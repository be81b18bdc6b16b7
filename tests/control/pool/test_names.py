"""A name belongs to one node while the coordinator runs, local nodes included."""

from __future__ import annotations

from w5xde.control.pool.names import NodeNames, free_name, local_name

ONE, TWO = b"1" * 8, b"2" * 8


def test_a_node_keeps_its_name_and_no_other_node_gets_it():
    names = NodeNames()
    assert names.assign("lab", ONE, ()) == "lab"
    # It has gone; its name is still its own, and by another it does not come back.
    assert names.assign("lab", TWO, ()) == "lab-2"
    assert names.assign("another", ONE, ()) == "lab"
    assert (names.owner_of("lab"), names.owner_of("lab-2"), names.owner_of("lab-3")) == (ONE, TWO, None)


def test_a_node_that_comes_back_while_it_is_still_connected_keeps_its_name():
    names = NodeNames()
    names.assign("lab", ONE, ())
    assert names.assign("lab", ONE, ("lab",)) == "lab"
    assert names.assign("lab", TWO, ("lab",)) == "lab-2"


def test_a_node_that_only_looks_takes_a_free_name_and_leaves_it():
    names = NodeNames()
    names.assign("lab", ONE, ())
    assert names.assign("lab", b"", ()) == "lab-2"
    assert names.assign("doctor", b"", ("doctor",)) == "doctor-2"
    assert names.owner_of("lab-2") is None
    assert names.assign("lab", TWO, ("lab-2",)) == "lab-3"


def test_the_name_of_a_local_node_is_its_own_even_while_it_is_not_there():
    names = NodeNames()
    assert names.assign("local-1", ONE, ()) == "local-1-2"
    assert names.assign(local_name(1), local_name(1), ()) == "local-1"
    assert names.assign("local-1", TWO, ()) == "local-1-3"
    # Started again, with its old connection still there or not, it is the same node.
    assert names.assign("local-1", "local-1", ("local-1",)) == "local-1"
    assert names.owner_of("local-1") == "local-1"


def test_a_name_with_a_number_is_still_a_name():
    taken = {"x" * 64}
    assert free_name("x" * 64, taken.__contains__) == "x" * 58 + "-2"
    assert len(free_name("x" * 64, lambda name: not name.endswith("-20000"))) == 64
