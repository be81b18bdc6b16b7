"""Stories: conversations with the real CoordinatorCore, told as text and compared as text.

    run mode=sync samples=4 step=2
    join a                  → "a joined"
                            → lend a #1: batch 0 (step 0, v0)
    answer a #1             → fold #1

Left of the arrow is what happens, right of it what the core wants, one effect a line. Leases are numbered
from #1. Time stands still except for `advance` (ticks come, everybody who is not muted beats) and `sleep`
(the coordinator itself is stopped: nobody is heard, no tick comes).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator

from tests.control.driver import BATCH_SECONDS, Driver
from w5xde.control import events as ev
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import INCARNATION_SHIFT, Lease
from w5xde.control.steps.plan import Plan
from w5xde.specs.robust_rule import parse_robust
from w5xde.tree import Span

ARROW = "→"
COLUMN_MIN = 24
UNITS = {"ms": 0.001, "s": 1.0, "h": 3600.0}


def retold(text: str) -> str:
    """The story with the effects that the core really wants."""
    events = [line.split(ARROW)[0].strip() for line in text.splitlines()]
    told = [
        (event, is_event)
        for event, line in zip(events, text.splitlines(), strict=True)
        for is_event in [bool(event) and not event.startswith(("#", "run "))]
        if event or ARROW not in line
    ]
    column = max([COLUMN_MIN, *(len(event) + 1 for event, is_event in told if is_event)])
    teller = Teller(next((event for event, _ in told if event.startswith("run ")), "run"))
    lines: list[str] = []
    for event, is_event in told:
        if not is_event:
            lines.append(event)
            continue
        effects = list(teller.tell(event)) or ["nothing"]
        lines += [
            f"{left:{column}}{ARROW} {right}"
            for left, right in zip([event, *[""] * (len(effects) - 1)], effects, strict=True)
        ]
    return "\n".join(lines) + "\n"


class Teller(Driver):
    """Understands the words of a story and asks the core; performs nothing that the story does not tell."""

    def __init__(self, header: str) -> None:
        given = dict(word.split("=", 1) for word in header.split()[1:])
        samples = given.pop("samples", "8")
        steps, epochs, seconds = (
            given.pop("steps", None),
            given.pop("epochs", "1"),
            given.pop("seconds", None),
        )
        staleness = given.pop("staleness", "64")
        own_norm = float(given.pop("own", "0"))
        is_pool = given.pop("pool", "no") == "yes"
        super().__init__(
            Plan(
                step_batches=int(given.pop("step", "4")),
                epoch_limit=None if epochs == "any" else int(epochs),
                step_limit=None if steps is None else int(steps),
                samples=None if samples == "unknown" else int(samples),
                batch_size=int(given.pop("size", "1")),
            ),
            CoreSettings(
                mode=given.pop("mode", "sync"),
                staleness=None if staleness == "auto" else int(staleness),
                delay_correction=given.pop("delay", "no") == "yes",
                looks_ahead=given.pop("ahead", "no") == "yes",
                seconds=None if seconds is None else float(seconds),
                evaluates="evaluates" in given,
                # `evaluates=skip`, `wait` or `hold`.
                evaluation_policy=given.pop("evaluates", "wait"),
                evaluate_every=int(given.pop("every", "0")) or None,
                skip_bad_batches=is_pool or given.pop("skip", "no") == "yes",
                all_or_nothing=is_pool,
                save_steps=int(given.pop("save", "0")) or None,
                max_update_norm=given.pop("norm", "off"),
                own_norm=own_norm,
                own_step_norm=own_norm,
                verify=float(given.pop("verify", "0")),
                stretches=given.pop("stretches", "no") == "yes",
                robust=parse_robust(given.pop("robust", "off")),
            ),
        )
        if given:
            raise ValueError(f"a run knows nothing of {', '.join(given)}")
        self.now = 100.0
        self._epoch = 0
        self._muted: list[str] = []
        self._heard: dict[str, float] = {}
        self._applying: deque[ev.Step] = deque()
        self._words: dict[str, Callable[[list[str]], Iterator[str]]] = {
            "join": self._join,
            "leave": lambda words: self._say(ev.Left(words[0], " ".join(words[1:]))),
            "answer": self._answer,
            "fail": lambda words: self._say(ev.Failed(words[0], lease(words[1]), " ".join(words[2:]))),
            "spoil": lambda words: self._say(
                ev.Failed(words[0], lease(words[1]), "its gradient is not finite", math.inf)
            ),
            "verified": lambda words: self._say(ev.Verified(words[0], lease(words[1]), " ".join(words[2:]))),
            "undone": self._undone,
            "drop": lambda words: self._say(ev.Dropped(words[0], lease(words[1]))),
            "stepped": self._stepped,
            "evaluated": lambda words: self._say(ev.Evaluated()),
            "saved": lambda words: self._say(ev.Saved(int(words[0]))),
            "unsaved": lambda words: self._say(ev.SaveFailed(" ".join(words))),
            "discover": self._discover,
            "call": self._call,
            "withdraw": lambda words: self._say(ev.Withdrawn(self._epoch - 1, " ".join(words))),
            "broke": lambda words: self._say(ev.Broke(" ".join(words))),
            "stop": lambda words: self._say(ev.Stop(" ".join(words))),
            "hurry": lambda words: self._say(ev.Stop(" ".join(words), interrupts=True, hurries=True)),
            "mute": self._mute,
            "advance": self._advance,
            "sleep": self._sleep,
            "tick": lambda words: self._tick(),
        }

    def tell(self, event: str) -> Iterator[str]:
        """What the core wants because of this, in the words of the story."""
        word, *words = event.split()
        if word not in self._words:
            raise ValueError(f"a story knows no '{word}', only {', '.join(self._words)}")
        return self._words[word](words)

    def _say(self, event: ev.Event) -> Iterator[str]:
        for effect in self.handle(event):
            if isinstance(effect, ev.Step):
                self._applying.append(effect)
            yield in_words(effect)

    def _join(self, words: list[str]) -> Iterator[str]:
        """`join a`, or `join a guess 200ms`: so long a batch may take it, by what it took to prove itself."""
        guess = seconds(words[2]) if words[1:2] == ["guess"] else None
        return self._say(ev.Joined(words[0], guess_seconds=guess))

    def _answer(self, words: list[str]) -> Iterator[str]:
        """`answer a #1`, `answer a #1 in 200ms` (a batch took so long), `answer a #1 norm 2` (so large)."""
        node, number, *rest = words
        self._heard[node] = self.now
        said = dict(zip(rest[::2], rest[1::2], strict=True))
        took = seconds(said["in"]) if "in" in said else BATCH_SECONDS
        norms = [float(said["norm"])] if "norm" in said else []
        return self._say(ev.Answered(node, [lease(number)], took, norms=norms))

    def _stepped(self, words: list[str]) -> Iterator[str]:
        if not self._applying:
            raise ValueError("no step is being applied")
        return self._say(ev.Stepped([self._applying.popleft().plan.index]))

    def _undone(self, words: list[str]) -> Iterator[str]:
        """`undone too large`: the learner could not make the next step, because of that; nor those after.

        `undone for good a hook raises`: and the run ends with it.
        """
        is_final = words[:2] == ["for", "good"]
        words = words[2:] if is_final else words
        first, *others = self._applying
        self._applying.clear()
        yield from self._say(ev.Undone(first, " ".join(words), is_final=is_final))
        for step in others:
            yield from self._say(ev.Undone(step, is_final=is_final))

    def _discover(self, words: list[str]) -> Iterator[str]:
        """`discover 2 2 1 end`: a stream gives batches of these sizes, and its epoch ends."""
        for word in words:
            yield from self._say(ev.Discovered(self._epoch, [0 if word == "end" else int(word)]))
            self._epoch += word == "end"

    def _call(self, words: list[str]) -> Iterator[str]:
        """`call 2 2 1`: the caller of a pool wants a step of batches of these sizes."""
        self._epoch += 1
        return self._say(ev.Called(self._epoch - 1, [int(word) for word in words]))

    def _mute(self, words: list[str]) -> Iterator[str]:
        self._muted += words
        return iter(())

    def _advance(self, words: list[str]) -> Iterator[str]:
        began = self.now
        ticks = round(seconds(words[0]) / TICK_SECONDS)
        for tick in range(1, ticks + 1):
            self.now = began + tick * TICK_SECONDS
            for member in self.core.view.members:
                if member.name not in self._muted:
                    self._heard[member.name] = self.now
            for told in self._tick():
                yield f"{self.now - began:.1f}s: {told}"

    def _tick(self) -> Iterator[str]:
        heard, self._heard = self._heard, {}
        return self._say(ev.Ticked(heard=heard))

    def _sleep(self, words: list[str]) -> Iterator[str]:
        self.now += seconds(words[0])
        return iter(())


# --- words ----------------------------------------------------------------------------------------


def seconds(word: str) -> float:
    found = re.fullmatch(r"([\d.]+)(ms|s|h)", word)
    if found is None:
        raise ValueError(f"{word} is no time: write 200ms, 7s or 1h")
    return float(found[1]) * UNITS[found[2]]


def lease(word: str) -> int:
    return (1 << INCARNATION_SHIFT) + int(word.removeprefix("#"))


def short(number: int) -> str:
    return f"#{number & ((1 << INCARNATION_SHIFT) - 1)}"


def shortened(text: str) -> str:
    return re.sub(r"\d{12,}", lambda found: short(int(found[0])), text)


def batches(span: Span) -> str:
    return f"batch {span.start}" if span.count == 1 else f"batches {span.start}–{span.stop - 1}"


def lent(given: Lease) -> str:
    ahead = f", {given.ahead:g} ahead" if given.ahead else ""
    return f"{short(given.id)}: {batches(given.span)} (step {given.step.index}, v{given.version}{ahead})"


def in_words(effect: ev.Effect) -> str:
    match effect:
        case ev.Assign():
            return f"lend {effect.node} {', '.join(map(lent, effect.leases))}"
        case ev.CancelLeases():
            return f"cancel {effect.node} {' '.join(map(short, effect.leases))}"
        case ev.Expire():
            return f"expire {effect.node} {' '.join(map(short, effect.leases))}: {effect.reason}"
        case ev.SetAside():
            return f"set aside {batches(effect.span)} of step {effect.plan.index}"
        case ev.Save():
            undone = " ".join(str(step.index) for step in effect.cut.undone)
            return f"save v{effect.cut.version}" + (f", undone {undone}" if undone else "")
        case ev.Reject():
            return f"refuse {effect.node} {short(effect.lease)}: {shortened(effect.reason)}"
        case ev.Fold():
            return f"fold {short(effect.lease.id)}"
        case ev.Step():
            shares = ", ".join(
                f"{batches(Span(start, stop))} by {node}" for start, stop, node, _ in effect.shares
            )
            rate = f", rate × {effect.rate:.2g}" if effect.rate != 1.0 else ""
            return f"apply step {effect.plan.index} to v{effect.version}: {shares}{rate}"
        case ev.Verify():
            return f"verify {short(effect.lease.id)}"
        case ev.Reopen():
            return f"open step {effect.plan.index} again"
        case ev.Evaluate():
            return f"evaluate after {effect.step} steps"
        case ev.Close():
            return f"close {effect.node}: {effect.reason}"
        case ev.Ban():
            return f"ban {effect.node}: {effect.reason}"
        case ev.Note():
            return f'"{effect.text}"'
        case ev.Finish():
            return f"fail the run: {effect.error}" if effect.error else f"finish: {effect.reason}"
