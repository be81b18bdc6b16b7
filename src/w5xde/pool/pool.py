"""The pool: nodes compute the gradients of a script's own loop, whose optimizers stay where they are.

    with w5xde.Pool(model, losses={"loss": loss}, nodes=4) as pool:
        for batch in loader:
            loss = pool.backward(batch, "loss", parts=8)
            optimizer.step(); optimizer.zero_grad()

Starts and ends a pool, and checks what its user asks for. Knows nothing of how parts are lent and summed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from w5xde.api import CLEAR_TEXT
from w5xde.config import Settings
from w5xde.errors import JobError, UsageError
from w5xde.learn.job.job import JobHolder, refuse_while_loading
from w5xde.learn.job.outside_values import outside_values
from w5xde.learn.job.pool_job import PARTS_MAX, PoolJob
from w5xde.setting_sources import resolve
from w5xde.specs.command_settings import COMMAND_SETTINGS
from w5xde.ticket import join_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from w5xde.learn.job.pool_setup import PoolSetup
    from w5xde.runtime.calls.service import CallService
    from w5xde.runtime.node.fork_server import ForkServer

# The port of `w5xde serve`.
SERVE_PORT = 5555
# A pool ends when its user says so, and has as many steps as there are calls.
CALLS_MAX = 2**62


class Pool(JobHolder):
    """Nodes that compute gradients for your own loop.

    model       the module that you train; it holds all networks that a loss uses, for example as a ModuleDict
    losses      functions loss(model, part) by their names; each returns a scalar, the mean over its part
    nodes       processes to start on this machine (default: as many as fit, or none with serve)
    serve       an address to listen on, "0.0.0.0" or "0.0.0.0:5555": the pool prints a ticket, with which
                other machines join ( w5xde join TICKET FILE ); make it at the top level of its file then

    Other settings are those of `w5xde train` that concern nodes: seed, threads, devices, precision, compress,
    verify, canary, insecure, advertise, ticket_file, log, …
    """

    job: PoolJob

    def __init__(
        self,
        model: Module,
        losses: Mapping[str, Callable[[Any, Any], Tensor]],
        *,
        nodes: int | Literal["auto"] | None = None,
        serve: str | None = None,
        **settings: Any,
    ) -> None:
        from torch import nn

        if not isinstance(model, nn.Module):
            raise JobError(
                f"the model of a pool is a {type(model).__name__}",
                code="W5-272",
                fix="give the torch.nn.Module that your optimizers train, not a function that makes one",
            )
        self.model = model
        self.job = PoolJob(model=self._copy_model, losses=losses)
        self._given = {"nodes": nodes, "serve": serve, **settings}
        self._lock = threading.Lock()
        self._open: _OpenPool | None = None

    def _copy_model(self) -> Module:
        from w5xde.learn.job.pool_setup import copy_of

        return copy_of(self.model)

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        refuse_while_loading("w5xde.Pool.__enter__")
        if self._open is not None:
            raise UsageError("this pool is open already", code="W5-277", fix="enter it once")
        self._open = _OpenPool(self.model, self.job, _settings_of(self._given))
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(now=kind is not None)

    def close(self, *, now: bool = False) -> None:
        """End the pool: nodes leave, and those that were started here end. `now`: kill the latter."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close(now=now)

    # --- calls ------------------------------------------------------------------------------------

    def backward(
        self,
        batch: Any,
        loss: str | None = None,
        *,
        parts: int | None = None,
        samples: Sequence[int] | None = None,
    ) -> Tensor:
        """Let nodes compute a loss of this batch, and add its gradient to that of the model's parameters.

        The batch is split along the first dimension of its tensors into `parts`. What is added is the mean
        gradient over all samples, as `loss.backward()` adds it; returns the mean loss. Without `parts`, the
        batch is a list of parts, each of which counts for as many samples as it has rows, or as `samples`
        says. `loss` may be left out if the pool has one loss. Blocks until all parts are computed.
        """
        with self._lock:
            return self._opened().backward(self._loss_name(loss), batch, parts, samples)

    def _loss_name(self, loss: str | None) -> str:
        names = list(self.job.losses)
        if loss is None and len(names) == 1:
            return names[0]
        if loss is None or loss not in names:
            what = "which loss?" if loss is None else f"there is no loss {loss!r}"
            raise UsageError(what, code="W5-270", fix=f"name one of: {', '.join(names)}")
        return loss

    def _opened(self) -> _OpenPool:
        opened = self._open
        if opened is None or opened.owner != os.getpid():
            what = "is not open" if opened is None else "belongs to the process that this one was forked from"
            raise UsageError(f"the pool {what}", code="W5-277", fix="with pool: …  around the loop")
        return opened

    @property
    def ticket(self) -> str | None:
        """The ticket with which other nodes join; None before the first call."""
        service = self._opened().service
        ticket = service.ticket if service is not None else None
        return ticket.to_text() if ticket is not None else None

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that are ready to compute."""
        service = self._opened().service
        return service.nodes if service is not None else []


class _OpenPool:
    """A pool from its beginning to its end; it listens from its first call on."""

    def __init__(self, model: Module, job: PoolJob, settings: Settings) -> None:
        from w5xde.learn.model.device import threads
        from w5xde.runtime.node.fork_server import ForkServer
        from w5xde.runtime.node.local_node import run_local_node
        from w5xde.runtime.system.capacity import plan_nodes, require_capacity
        from w5xde.runtime.system.devices import machine_devices

        self.owner = os.getpid()
        self._model = model
        self._job = job
        self._settings = settings
        self._plan = plan_nodes(machine_devices(settings.devices), settings.threads, settings.node_count)
        require_capacity(len(self._plan.devices))
        # Parameters that a script freezes only for some calls require gradients when it begins.
        self._trained = self._required()
        self._seen = {name: outside_values(loss) for name, loss in job.losses.items()}
        self._fork_server: ForkServer | None = None
        if self._plan.devices:
            # Forked first, before the pool has a thread or a socket.
            with threads(settings.threads):
                self._fork_server = ForkServer(job, settings, run_local_node)
        self._setup: PoolSetup | None = None
        self.service: CallService | None = None
        # For scripts and notebooks that enter a pool and never leave it.
        atexit.register(self.close)

    def _required(self) -> set[str]:
        """The names of the parameters that require a gradient now."""
        return {name for name, each in self._model.named_parameters() if each.requires_grad}

    def close(self, *, now: bool = False) -> None:
        if os.getpid() != self.owner:
            return
        atexit.unregister(self.close)
        service, self.service = self.service, None
        fork_server, self._fork_server = self._fork_server, None
        try:
            if service is not None:
                service.close()
        finally:
            if fork_server is not None:
                fork_server.close(now=now or service is None)

    def backward(self, loss: str, batch: Any, count: Any, samples: Any) -> Tensor:
        import torch

        from w5xde.learn.data.parts import make_parts

        self._require_unchanged(loss)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise JobError(
                "pool.backward is called under autocast, which nodes do not see",
                code="W5-274",
                fix='use autocast inside the loss, or Pool(…, precision="bf16")',
            )
        parts = make_parts(batch, count, samples)
        setup, service = self._setup, self.service
        if setup is None or service is None:
            setup, service = self._begin(loss, parts)
        found = service.call(setup.call(loss, parts[0]), parts, self._waiting)
        return torch.tensor(found)

    def _begin(self, loss: str, parts: list[Any]) -> tuple[PoolSetup, CallService]:
        """Try the first call here, and listen for nodes."""
        from w5xde.learn.job.pool_setup import prepare_pool
        from w5xde.learn.model.device import threads
        from w5xde.runtime.calls.service import CallService
        from w5xde.runtime.coordinator.local.memory import LocalMemory

        settings, memory = self._settings, LocalMemory(self._settings)
        trained = self._trained | self._required()
        with threads(settings.threads):
            setup = prepare_pool(
                self._job, self._model, trained, settings, loss, parts[0], memory.place_state
            )
        service = CallService(setup, settings, (self._fork_server, self._plan), memory)
        service.open()
        self._setup, self.service = setup, service
        if settings.log != "silent":
            self._tell_how_to_join(service)
        return setup, service

    def _tell_how_to_join(self, service: CallService) -> None:
        if service.is_exposed:
            print(f"w5xde: {CLEAR_TEXT}", file=sys.stderr, flush=True)
        if not self._plan.devices or self._settings.host != "127.0.0.1":
            print(f"w5xde: to join:  {self._join_line(service)}", file=sys.stderr, flush=True)

    def _join_line(self, service: CallService) -> str:
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return join_line(service.ticket_shown, Path(script).name if script else "FILE")

    def _waiting(self) -> str:
        line = self._join_line(self.service) if self.service is not None else ""
        return f"no node is there; waiting for one to join:  {line}"

    def _require_unchanged(self, loss: str) -> None:
        """Refuse a loss that reads a variable which has another value now than nodes have."""
        before, now = self._seen[loss], outside_values(self._job.losses[loss])
        for name, value in now.items():
            if name in before and _differ(before[name], value):
                raise JobError(
                    f"loss {loss!r} reads {name}, which was {before[name]!r} when the pool was entered and"
                    f" is {value!r} now",
                    code="W5-278",
                    why="nodes have the value of then",
                    fix=f"pass it with the batch, where numbers go to every part:  {{'{name}': {name}, …}}",
                )


def _differ(one: Any, other: Any) -> bool:
    is_nan = one != one and other != other
    return bool(one != other) and not is_nan


def _settings_of(given: dict[str, Any]) -> Settings:
    arguments = dict(given)
    serve = arguments.pop("serve")
    of_runs = set(arguments) & set(Settings.__struct_fields__) - set(COMMAND_SETTINGS["pool"])
    if of_runs:
        raise UsageError(
            f"{min(of_runs)} is a setting of runs, and not of a pool",
            code="W5-210",
            why="the loop, the batches and the optimizers of a pool are those of your script",
            fix=f"settings of a pool: {', '.join(COMMAND_SETTINGS['pool'])}",
        )
    if serve is not None:
        # As in `w5xde serve`.
        host, port = _address(str(serve))
        arguments = {"port": SERVE_PORT if port is None else port, **arguments, "host": host}
        arguments["nodes"] = arguments["nodes"] or 0
    found = resolve("pool", arguments, environment=os.environ, folder=Path.cwd(), in_python=True)
    # A step is a call, however many parts it has; nothing is kept, and nobody here steps an optimizer.
    return msgspec.structs.replace(
        found,
        mode="sync",
        batches_per_step=PARTS_MAX,
        steps=CALLS_MAX,
        skip_bad_batches=True,
        checkpoint_every="off",
        delay_correction=False,
        max_update_norm="off",
        data="stream",
    )


def _address(text: str) -> tuple[str, int | None]:
    """The host and port of "0.0.0.0", "0.0.0.0:5555", "[::]:5555" or "::"."""
    host, colon, port = text.rpartition(":")
    has_port = colon and port.isdecimal() and (":" not in host or host.endswith("]"))
    if not has_port:
        return text.removeprefix("[").removesuffix("]"), None
    return host.removeprefix("[").removesuffix("]"), int(port)
