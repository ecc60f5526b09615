"""`carpool serve`: starts the front and its workers; drains them on a signal."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.config import ServeSettings
from carpool.errors import LoadFailed, SettingRejected, StoreFailed
from carpool.fleet.fleet import Fleet
from carpool.fleet.local import WorkerOptions, local_fleet
from carpool.fleet.models import ModelSpec
from carpool.jobs.journal_files import JobJournals
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import unpacked
from carpool.schedule.policy import weights
from carpool.server.access.keys import Keyring
from carpool.server.deliveries import courier_of
from carpool.server.draining import DrainingServer
from carpool.server.greeting import greet
from carpool.server.routes.artifacts import write_mesh, write_sound
from carpool.server.routes.jobs import write_images
from carpool.server.routes.videos import write_video
from carpool.server.startup import check_address, say, set_limits
from carpool.telemetry import logs, tracing
from carpool.telemetry.tracing import Tracing
from carpool.worker import encoding
from carpool.worker.journals import Journals
from carpool.worker.start import ForkingStarter, check_python

log = logging.getLogger("carpool")

ROOM_AGAIN_S = 1.0  # retry interval on a full disk; each try opens the database


def serve(models: Sequence[ModelSpec], settings: ServeSettings, starter: ForkingStarter) -> int:
    """Serve until a signal; returns the exit status. The starter's fork server may run already."""
    logs.set_up(settings.log_level, settings.log_format, prompts=settings.log_prompts)
    check_address(settings)
    set_limits()
    keys = Keyring(settings.api_key, settings.api_key_file)
    unknown = set(weights(settings.fair_share) or ()) - {*keys.names, "*"}
    if unknown and (keys.names or settings.api_key_file):
        log.warning("fair_share names no API key: %s", ", ".join(sorted(unknown)))
    otel = tracing.is_wanted(settings.otel, os.environ)
    traces = tracing.start("front") if otel else Tracing()
    try:
        try:
            store = opened_store(settings)
        except StoreFailed as error:
            say(settings, str(error), is_error=True)
            return 1
        with contextlib.closing(store):
            return asyncio.run(_serve(store, models, settings, keys, traces, starter))
    finally:
        traces.stop()


def opened_store(settings: ServeSettings) -> JobStore:
    """Open the job store; on a full disk, wait for free space.

    Raises:
        StoreFailed: it cannot be opened.
    """
    is_told = False
    while True:
        try:
            return JobStore.of(state_folder(settings, os.environ), settings)
        except StoreFailed as error:
            if not error.wants_room:
                raise
            if not is_told:
                say(settings, f"{error}; the server starts once there is some", is_error=True)
            is_told = True
        time.sleep(ROOM_AGAIN_S)


async def _serve(
    store: JobStore,
    models: Sequence[ModelSpec],
    settings: ServeSettings,
    keys: Keyring,
    traces: Tracing,
    starter: ForkingStarter,
) -> int:
    journals = job_journals = None
    if settings.journal != "off":
        journals = Journals(of_all=settings.journal != "jobs")
        if settings.journal != "memory":
            job_journals = JobJournals(store.journals, journals, settings.max_store_bytes // 10)
    cluster = None
    if settings.ray is not None:
        from carpool.fleet.ray import connected

        cluster = await asyncio.to_thread(connected, settings)
    if settings.worker_python is not None:
        await asyncio.to_thread(check_python, settings.worker_python)
    options = WorkerOptions(
        spool=store.passing, timeout_s=settings.worker_timeout, otel=traces.is_on,
        log=(settings.log_level, settings.log_format, settings.log_prompts),
        journals=journals, start=starter.start,
    )  # fmt: skip
    fleet = local_fleet(models, options, settings.max_loaded, cluster)
    at_once = sum(len(spec.devices) * spec.settings.max_running for spec in models)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, fleet, keys)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, fleet.roll)
    courier = courier_of(store, settings)
    runner = Runner(
        store,
        fleet,
        {"image": write_images, "video": write_video, "mesh": write_mesh, "sound": write_sound},
        model=lambda: fleet.names,
        max_running=at_once,
        read=lambda file, mode: encoding.pack(unpacked(file, mode)),
        journals=job_journals,
    )
    runner.listen(courier)
    server = DrainingServer(fleet, settings, runner, keys, traces)
    at_start = [spec for spec in models if not spec.is_on_demand]
    for spec in at_start:
        workers = f" on {len(spec.devices)} workers" if len(spec.devices) > 1 else ""
        say(settings, f"Loading {spec.factory or spec.model}{workers} ...")
    worker = fleet.start()
    http = asyncio.create_task(server.serve())
    greeting = asyncio.create_task(greet(fleet, server, settings))
    jobs = [asyncio.create_task(work) for work in (runner.run(), courier.run())]
    tasks: list[asyncio.Future[Any]] = [worker, http, *jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and not worker.cancelled() and (error := worker.exception()):
            if not isinstance(error, LoadFailed):
                raise error
            say(settings, str(error), is_error=True)
            return 1
        for job in filter(asyncio.Task.done, jobs):
            job.result()  # this task ends only by an error, raised here
        return server.exit_status if server.started else 1
    finally:
        for task in (greeting, *jobs):
            task.cancel()
        server.should_exit = True
        await asyncio.wait(tasks[1:])
        if server.unix is not None:
            await asyncio.to_thread(server.unix.remove)
        await runner.stop()
        await fleet.stop()
        if cluster is not None:
            await asyncio.to_thread(cluster.disconnect)
        await starter.close()


def _reload(fleet: Fleet, keys: Keyring) -> None:
    """On SIGHUP, reload keys here, and adapters and batching rules in the worker."""
    try:
        log.info("reloading; API keys: %d", keys.read())
    except SettingRejected as error:
        log.error("not reloaded: %s", error)
    fleet.reload()


def state_folder(settings: ServeSettings, environ: Mapping[str, str]) -> Path | None:
    """The folder of jobs, by default one for each port in the XDG state directory; None: jobs stay
    in memory."""
    if settings.state_dir is not None:
        return None if settings.state_dir == "none" else Path(settings.state_dir).expanduser()
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "carpool"
    if settings.uds is not None:
        return state / Path(settings.uds).absolute().as_posix().strip("/").replace("/", "-")
    if settings.port == 0:  # the port changes at each start: jobs would be lost
        return None
    return state / str(settings.port)
