"""Defaults of requests that a server is told to take."""

import logging

import pytest

from carpool.errors import SettingRejected
from carpool.request.parameters import check
from carpool.settings.peers.sampling_defaults import sampling_defaults
from carpool.types import Request
from support.engine_driver import driving


def test_both_forms_are_read() -> None:
    plain = {"num_inference_steps": 4, "guidance_scale": 1.5}

    text = '{"num_inference_steps": 4, "guidance_scale": 1.5, "seed": null}'
    assert sampling_defaults(text) == sampling_defaults(f'{{"0": {text}}}') == plain
    assert sampling_defaults(None) == sampling_defaults("{}") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps=4", "must be a JSON object, such as"),
        ("[4]", "must be an object, such as"),
        ("[" * 200, "must be a JSON object"),
        ('{"0": {}, "1": {}}', "has 2 stages: give those of the diffusion stage"),
    ],
)
def test_what_is_no_mapping_is_refused(text: str, says: str) -> None:
    with pytest.raises(SettingRejected, match=says):
        sampling_defaults(text)


def test_requests_get_them_where_they_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    text = '{"num_inference_steps": 3, "temperature": 0.4, "seed": 42}'
    with driving("flux", default_sampling_params=text) as drive:
        card = drive.engine.loaded.card

        assert check(card, Request("a")).arguments["num_inference_steps"] == 3
        own = check(card, Request("a", num_inference_steps=5))
        assert own.arguments["num_inference_steps"] == 5
    warned = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warned == [
        "default_sampling_params: temperature is ignored: the model takes no such parameter",
        "default_sampling_params: seed is ignored: requests without a seed get a new one",
    ]


def test_a_default_that_no_request_may_say_ends_the_start() -> None:
    with (
        pytest.raises(SettingRejected, match="default_sampling_params: num_inference_steps=-3"),
        driving("flux", default_sampling_params='{"num_inference_steps": -3}'),
    ):
        pass
