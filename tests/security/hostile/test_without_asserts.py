"""In processes of their own: the checks under `python -O`, and a training that is watched for code.

pytest's asserts vanish under -O, so that its own run there would prove nothing. These checks have none, and
each is seen to fail when a decoder is broken on purpose.
"""

from __future__ import annotations

import functools

from tests.processes import run_python

run = functools.partial(run_python, seconds_max=110)


def test_every_check_holds_under_python_o():
    done = run("-O", "-m", "tests.security", "--examples", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: none" in done.stdout


def test_under_python_o_a_broken_decoder_is_found_out():
    done = run("-O", "-m", "tests.security", "--examples", "50", "--break-it")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "zlib:1: 32 MiB of zeros: " in done.stdout


def test_nothing_that_is_decoded_runs_code():
    done = run("-m", "tests.security.audited")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen: nothing; blind to: nothing" in done.stdout


def test_a_decoder_that_runs_code_is_found_out():
    done = run("-m", "tests.security.audited", "--break-it")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "seen: compile " in done.stdout
