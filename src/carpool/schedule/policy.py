"""The interface of a policy (a scheduling mode), and the choice of one by settings.

A policy has no tensors and no clock. At every turn the engine or the simulator asks it for the
requests to admit and the calls of the next forward; it keeps a small memory of past choices.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from carpool.config import EngineSettings
from carpool.errors import SettingRejected
from carpool.schedule.batch_modes import Dynamic, Off, Waves
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs
from carpool.schedule.views import Admission, Choice, ParkedCall, QueuedRequest
from carpool.settings.peers.sglang_rules import BatchingRule, Caps, Server, caps, load_rules
from carpool.telemetry.sglang_metrics import Dispatches, started
from carpool.types import Phase

WHOLE_BATCH = 1 << 30  # more rows than any batch has


class Policy(Protocol):
    """A scheduling mode."""

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        """Choose the requests to admit.

        Args:
            waiting: the whole queue, oldest first.
            running: the number of running requests.
            now_s: engine clock.
        """
        ...

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        """Choose the calls of the next forward: all of one key; never empty while calls are parked.

        Args:
            parked: calls waiting, in any order; no two with the same `order`.
            waiting_s: predicted work of the queued requests.
            now_s: engine clock.
            all_parked: `parked` plus calls that are still parked but not eligible now; None: all
                are eligible.
        """
        ...


def build(
    settings: EngineSettings,
    costs: Costs,
    server: Server,
    dispatches: Dispatches,
    say: Callable[[str], None],
) -> Policy:
    """The policy of the settings' mode.

    Raises:
        SettingRejected: the batching config or a tenant's weight breaks a rule.
    """
    match settings.batching_mode:
        case "off":
            return Off()
        case "dynamic":
            max_size, delay_s = settings.batching_max_size, settings.batching_delay_ms / 1000
            rules = _rules(settings)
            for line in started(max_size, server.device_memory_gib, len(rules)):
                say(line)
            return Dynamic(max_size, delay_s, _caps(rules, server, max_size), dispatches, say)
        case "request":
            return Waves(settings.max_num_seqs, settings.request_batch_max_wait_ms / 1000)
        case "continuous":
            return Continuous(
                costs, settings.max_running, settings.min_gain, weights(settings.fair_share)
            )


def widest(settings: EngineSettings, phase: Phase) -> int:
    """Max rows of a forward, memory permitting.

    Modes that batch at admission run whole batches: their own caps are the limit.
    """
    if phase == "decode":
        return settings.max_decode_size
    is_own_cap = settings.batching_mode in ("dynamic", "request")
    return WHOLE_BATCH if is_own_cap else settings.max_batch_size


def reload(policy: Policy, settings: EngineSettings, server: Server) -> None:
    """Reload the batching config, if the policy has one; on an error the old one stays.

    Raises:
        SettingRejected: the config cannot be read or breaks a rule.
    """
    if isinstance(policy, Dynamic):
        policy.caps = _caps(_rules(settings), server, settings.batching_max_size)


def _rules(settings: EngineSettings) -> tuple[BatchingRule, ...]:
    return load_rules(Path(settings.batching_config)) if settings.batching_config else ()


def _caps(
    rules: Sequence[BatchingRule], server: Server, user_max: int
) -> Callable[[QueuedRequest], Caps] | None:
    if not rules:
        return None

    def of(head: QueuedRequest) -> Caps:
        width, height = head.signature.get("width"), head.signature.get("height")
        size = (width, height) if isinstance(width, int) and isinstance(height, int) else None
        return caps(rules, server, size, user_max)

    return of


def weights(entries: Sequence[str]) -> Mapping[str, float] | None:
    """Tenants' weights from the setting's entries, each `TENANT=WEIGHT`; None for no entries.

    Raises:
        SettingRejected: an entry has another form, or its weight is not above 0.
    """
    parsed: dict[str, float] = {}
    for entry in entries:
        tenant, _, weight = entry.rpartition("=")
        try:
            parsed[tenant] = float(weight)
        except ValueError:
            parsed[tenant] = 0.0
        if not tenant or not 0 < parsed[tenant] < float("inf"):
            raise SettingRejected(
                f"fair_share={entry!r}: write TENANT=WEIGHT, as team-a=2; '*' is all other tenants"
            )
    return parsed or None
