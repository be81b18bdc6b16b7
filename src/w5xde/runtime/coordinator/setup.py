"""How a coordinator starts: builds its core, its peers and its listener, and opens its ledger.

Only builds: what happens once nodes may join is not known here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from w5xde.compression import is_lossy
from w5xde.config import Settings
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.evaluation_schedule import HOLD, WAIT
from w5xde.control.steps.plan import Plan
from w5xde.errors import UsageError, W5xdeError
from w5xde.learn.calls.call_learner import CallLearner
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.codecs.sender import is_never_encoded
from w5xde.learn.data.parts import PartSource
from w5xde.learn.data.sources import Key, MapSource, Start
from w5xde.learn.job.cacheable import slots_for
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.learn.model.buffers import Buffers
from w5xde.learn.step.incoming import UpdateReader
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.look_ahead import momentum_of
from w5xde.learn.step.sums import StepNotFinite
from w5xde.messages import TRAINED, Welcome
from w5xde.runtime.admission.code_offers import CodeOffers
from w5xde.runtime.admission.gatekeeper import Gatekeeper
from w5xde.runtime.coordinator.call_ports import CallBatches, CallParameters
from w5xde.runtime.coordinator.canary_check import CanaryCheck
from w5xde.runtime.coordinator.known_samples import KnownSamples
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.parameters import ParameterEncoder
from w5xde.runtime.coordinator.peers import Host, Peers
from w5xde.runtime.coordinator.round_parameters import RoundParameters
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.net.listener import Listener, resolve_addresses
from w5xde.runtime.net.sockets import configure
from w5xde.runtime.pipeline.ports import Parameters
from w5xde.runtime.system.memory import return_freed


def build_core(
    prepared: Prepared, settings: Settings, life: int, cut: Cut | None, *, decides: bool = False
) -> CoordinatorCore:
    """Build the core for this life of the coordinator, from the `cut` of an earlier life if there is one.

    `decides`: a callback decides by the results of evaluations how training goes on.
    """
    is_lossy_run = is_lossy(settings.directions.up) or is_lossy(settings.directions.down)
    # In rounds mode the coordinator rounds what it computes as nodes do, so that both can be compared.
    if settings.verify and settings.mode != "rounds" and is_lossy_run:
        raise UsageError(
            f"verify compares exact updates, and compress {settings.compress!r} makes them others",
            code="W5-210",
            fix="leave out --verify, or compress without loss: --compress auto",
        )
    if settings.verify and prepared.validation is not None and prepared.validation.source.draws:
        raise UsageError(
            "verify: the validation set draws random numbers while it is read, beside what is computed again",
            code="W5-210",
            fix="draw nothing in __getitem__ of the validation set, or leave out --verify",
        )
    if (
        settings.verify
        and prepared.source.draws
        and prepared.rules.data == "stream"
        and not settings.loader_workers
    ):
        raise UsageError(
            "verify: the data set draws random numbers while it is read, beside what is computed again",
            code="W5-210",
            fix="let others read it: --loader-workers 1, or --data local",
        )
    rounds = prepared.rounds
    core = CoreSettings(
        mode=settings.mode,
        staleness=settings.staleness,
        seconds=settings.seconds,
        evaluate_every=settings.evaluate_every,
        evaluates=prepared.evaluate is not None,
        evaluation_policy=_evaluation_policy(prepared, settings, decides=decides),
        incarnation=life,
        skip_bad_batches=settings.skip_bad_batches,
        all_or_nothing=isinstance(prepared.learner, CallLearner),
        save_seconds=settings.save_seconds,
        save_steps=settings.save_steps,
        logs_steps=settings.durability == "step",
        max_update_norm=str(settings.max_update_norm),
        # Where updates are differences, a step that we made ourselves shows how large they are.
        own_norm=rounds.rate * prepared.own_step_norm if rounds is not None else prepared.own_norm,
        verify=settings.verify,
        is_large=prepared.learner.route.is_large and rounds is None,
        delay_correction=settings.delay_correction,
        looks_ahead=settings.delay_correction and momentum_of(prepared.learner.optimizer) > 0,
        stretches=_may_step_locally(prepared.learner, settings),
        own_step_norm=prepared.own_step_norm,
        robust=settings.robust_rule,
        chooses_rounds=settings.local_steps == "auto",
        validation_sizes=prepared.validation.sizes if prepared.validation is not None else (),
    )
    # Not seeded by the run: a node that knows the run's seed must not foresee which answers are verified.
    return CoordinatorCore(build_plan(prepared, settings), core, cut, random.SystemRandom())


def _evaluation_policy(prepared: Prepared, settings: Settings, *, decides: bool) -> str:
    """Whether training waits for evaluations: always, if their results decide how it goes on."""
    is_decisive = decides or bool(prepared.plateau_metric)
    return HOLD if is_decisive and settings.evaluate == WAIT else settings.evaluate


def build_plan(prepared: Prepared, settings: Settings) -> Plan:
    """Build the plan of a run, from its beginning."""
    return Plan(
        step_batches=settings.step_batches,
        epoch_limit=settings.epoch_limit,
        step_limit=settings.steps,
        samples=prepared.source.epoch_samples,
        batch_size=prepared.source.batch_size,
        rounds=settings.round_lengths,
    )


def _may_step_locally(learner: Learner, settings: Settings) -> bool:
    """Whether nodes may make steps of their own, and send the difference that these made.

    A difference is never encoded, and is rolled back if it breaks the model. A schedule, clipping, the step
    log and verification need the gradient of each step, and so does a norm limit that the user set.
    """
    is_small = learner.can_roll_back and is_never_encoded(settings.directions.up, learner.vector_bytes)
    has_buffers = any(group.role != TRAINED for group in learner.flat.blueprint.moving_groups)
    needs_gradients = (
        learner.scheduler is not None
        or settings.clip_norm is not None
        or settings.durability == "step"
        or settings.verify > 0
        or settings.max_update_norm not in ("auto", "off")
    )
    is_asked = settings.steps_locally and settings.mode == "async" and settings.step_batches == 1
    return is_asked and is_small and not has_buffers and not needs_gradients


def reading_start(plan: Plan) -> Start:
    """Where reading starts: at the plan's cursor, and earlier for batches of steps that were not applied."""
    also = frozenset(key for step in plan.undone for key in step.keys)
    return Start(plan.cursor.epoch, plan.cursor.first, also)


def build_loader(
    prepared: Prepared, settings: Settings, start: Start, is_wanted: Callable[[Key], bool] | None
) -> Loader | CallBatches:
    """Build what gives batches to lend: read from the data set, or given by the caller of a pool."""
    if isinstance(prepared.source, PartSource):
        return CallBatches(prepared.source)
    return Loader(prepared.source, settings, start, is_wanted)


def build_known_samples(
    prepared: Prepared, settings: Settings, peers: Peers, failed: Callable[[BaseException], None]
) -> KnownSamples | None:
    """Build what is known of the samples that nodes keep; None if they keep none."""
    source, form = prepared.source, prepared.samples
    if form is None or not isinstance(source, MapSource):
        return None
    slots = slots_for(form, source.samples, settings.cache_bytes)
    return KnownSamples(source, form, slots, lambda: (peer for peer in peers if peer.is_ready), failed)


def build_reader(learner: Learner, settings: Settings, *, weighs: bool = False) -> UpdateReader:
    """Build the reader, which turns the updates of nodes into vectors; `weighs`: of batches with weights."""
    if learner.route.is_large:
        # Updates need memory, and models that were only tried have left some.
        return_freed()
    blueprint = learner.vectors
    receiver = CodecReceiver(
        settings.directions.up,
        blueprint.moving_groups,
        learner.vector_bytes,
        Buffers().take,
        # In rounds mode the codec decides the bits.
        allows_raw=learner.rounds is None,
    )
    return UpdateReader(blueprint, learner.gauge, receiver, Buffers().take, weighs=weighs)


def build_parameters(prepared: Prepared, settings: Settings, clock: Callable[[], float]) -> Parameters:
    """Build what encodes parameters for nodes."""
    down, rounds = settings.directions.down, prepared.rounds
    if rounds is not None:
        return RoundParameters(prepared.learner, rounds, down)
    if isinstance(prepared.learner, CallLearner):
        return CallParameters(prepared.learner, down, clock)
    return ParameterEncoder(prepared.learner, down, clock)


def build_peers(
    host: Host, prepared: Prepared, settings: Settings, run_folder: RunFolder, life: int, reader: UpdateReader
) -> Peers:
    """Build the table of peers, with all that a node is checked against when it joins."""
    layout, offer = prepared.learner.flat.blueprint.layout, prepared.offer
    welcome = Welcome(run_folder.name, life, "", layout, prepared.rules)
    peers = Peers(
        host,
        welcome=msgspec.structs.replace(welcome, code=offer.sha256, versions=offer.versions),
        vector_bytes_max=reader.body_bytes_max,
        configure=lambda sock: configure(sock, settings),
        gatekeeper=Gatekeeper(run_folder.folder, run_folder.facts["id"], settings),
        canary_check=CanaryCheck(prepared, verifies=settings.verify > 0),
    )
    peers.offers = CodeOffers(offer)
    return peers


async def listen(
    peers: Peers, settings: Settings, port_before: int | None, note: Callable[[str], None]
) -> Listener:
    """Open the listener; for a resumed run on its port of before if that is free, so that nodes find it."""
    # A ticket that was made before the run leads nodes to its own port.
    known_port = peers.gatekeeper.read_known_ticket()
    port = settings.port or known_port
    places = await resolve_addresses(settings.host, port)
    listener = Listener(peers.make_connection, peers.connection_limits, peers.log_refusal)
    try:
        if port or not port_before:
            listener.listen(places, settings.host, port, settings.road)
        else:
            try:
                listener.listen(places, settings.host, port_before, settings.road)
            except UsageError:
                note(f"port {port_before} is taken meanwhile; nodes from before must join anew")
                listener.listen(places, settings.host, 0, settings.road)
        # Only now: a run that cannot get its port must neither create nor replace a key. No connection is
        # served before the next `await`.
        listener.context = peers.gatekeeper.guard(places)
        peers.gatekeeper.open(*listener.address)
        for warning in peers.gatekeeper.warnings:
            note(warning)
        if settings.new_identity and settings.goes_on:
            note(
                "the run has a new identity: nobody comes by a ticket or credential of before, banned or not"
            )
    except BaseException:
        listener.close()
        raise
    return listener


def describe_failure(error: BaseException) -> str:
    """A sentence that says why training cannot continue."""
    if isinstance(error, W5xdeError):
        return error.what
    return str(error) if isinstance(error, StepNotFinite) else describe(error)
