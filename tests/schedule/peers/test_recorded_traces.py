"""Batches of `dynamic` and `request` beside those that the peers' own schedulers formed.

`recorded/` has 200 traces of each, with the version they were recorded from by
`proof/record_peers.py` at 4ba7b035: what was set, the requests with their arrivals, and the
batches.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.schedule.batch_modes import Dynamic, Waves
from carpool.schedule.peers.compatibility import cost, request_key, resolution, signature
from carpool.schedule.views import QueuedRequest
from carpool.settings.peers.sglang_rules import Caps, Server, caps, parse_rules
from carpool.types import CheckedRequest

RECORDED = Path(__file__).parent / "recorded"
OUTPUT_S = 0.25  # as it was recorded: a batch takes so long for each output
SPIN_S = 0.0025  # vLLM-Omni's engine looks every 2 ms
Trace = Mapping[str, Any]
Formed = tuple[float, tuple[int, ...], str]  # when, which requests, why no more


def traces(name: str) -> list[Trace]:
    recorded: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    assert len(recorded["traces"]) == 200
    found: list[Trace] = recorded["traces"]
    return found


def checked(index: int, request: Trace) -> CheckedRequest:
    said = {name: one for name, one in request["arguments"].items() if one is not None}
    lora = request.get("lora")
    return CheckedRequest(
        str(index), seed=0, arguments={"prompt": f"cat {index}", **said},
        task="image-to-image" if "image" in said else "text-to-image",
        lora=((lora, 1.0),) if lora else (),
        group=str(index), group_size=request["n"],
    )  # fmt: skip


def queued(requests: Sequence[Trace]) -> Iterator[tuple[int, QueuedRequest]]:
    """Every output of every request in line, as the engine queues them, with its request."""
    number = 0
    for index, request in enumerate(requests):
        one = checked(index, request)
        for _ in range(request["n"]):
            number += 1
            yield index, QueuedRequest(
                number, arrived_s=request["at_s"], group=one.group, group_size=one.group_size,
                cost=cost(resolution(one.arguments, None), vae_scale_px=8),
                signature=signature(one, {}), wave=request_key(one, {}),
            )  # fmt: skip


def replay(policy: Dynamic | Waves, requests: Sequence[Trace]) -> list[Formed]:
    """The batches that a policy forms, on a virtual clock."""
    line, formed, now_s = list(queued(requests)), list[Formed](), 0.0
    owner = {one.request: index for index, one in line}
    while line:
        waiting = [one for _, one in line if one.arrived_s <= now_s + 1e-9]
        admission = policy.admit(waiting, 0, now_s)
        if admission.requests:
            members = tuple(dict.fromkeys(owner[one] for one in admission.requests))
            formed.append((now_s, members, admission.stop_reason))
            line = [(index, one) for index, one in line if one.request not in admission.requests]
            policy.admit((), len(admission.requests), now_s)  # while it runs
            now_s += OUTPUT_S * len(admission.requests)
            continue
        arrivals = [one.arrived_s for _, one in line if one.arrived_s > now_s + 1e-9]
        now_s = min([*arrivals, admission.wake_s])
    return formed


@pytest.mark.parametrize("number", range(0, 200, 10))
def test_dynamic_forms_the_batches_of_sglang_diffusion(number: int) -> None:
    for trace in traces("sglang")[number : number + 10]:
        most = trace["batching_max_size"]
        server = Server("tiny", device_memory_gib=None, is_offloaded=False)
        rules = parse_rules(trace["rules"], "recorded") if trace["rules"] else ()

        def caps_of(head: QueuedRequest) -> Caps:
            size = resolution(head.signature, None)
            return caps(rules, server, size, most)  # noqa: B023

        policy = Dynamic(most, trace["batching_delay_ms"] / 1000, caps=caps_of if rules else None)
        ours = replay(policy, trace["requests"])

        assert [one[1:] for one in ours] == [
            (tuple(one["members"]), one["stop_reason"]) for one in trace["batches"]
        ]
        times = [one["at_s"] for one in trace["batches"]]
        assert [at_s for at_s, *_ in ours] == pytest.approx(times, abs=1e-3)


@pytest.mark.parametrize("number", range(0, 200, 10))
def test_request_forms_the_waves_of_vllm_omni(number: int) -> None:
    for trace in traces("vllm_omni")[number : number + 10]:
        policy = Waves(trace["max_num_seqs"], trace["request_batch_max_wait_ms"] / 1000)

        ours = replay(policy, trace["requests"])

        assert [members for _, members, _ in ours] == [
            tuple(one["members"]) for one in trace["batches"]
        ]
        times = [one["at_s"] for one in trace["batches"]]
        assert [at_s for at_s, *_ in ours] == pytest.approx(times, abs=SPIN_S * len(times))
