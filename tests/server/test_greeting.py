"""What a server says as it starts: what was loaded, where, and where to go; and no noise."""

import logging

import pytest

from carpool.telemetry.logs import without_noise
from support.server_process import serving


@pytest.mark.timeout(150)
def test_a_start_says_what_was_loaded_where_and_where_the_playground_is() -> None:
    with serving() as server:
        greeting, log = server.stdout, server.stderr

    assert "Serving flux (FluxPipeline, loaded in" in greeting
    assert "On cpu: " in greeting
    assert " of memory left" in greeting
    assert f"Playground: {server.url}/\n" in greeting
    assert "Loading pipeline components" not in log  # a library's bar
    assert "torchvision" not in log  # a library's warning


def record(name: str, level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, text, (), None)


def test_what_libraries_say_of_themselves_is_noise_and_a_truncated_prompt_is_not() -> None:
    warning = logging.WARNING

    assert not without_noise(record("transformers.models.auto", warning, "falling back"))
    assert without_noise(record("diffusers.loaders", logging.ERROR, "cannot read"))
    assert without_noise(record("carpool", warning, "ours"))
    assert without_noise(record("py.warnings", warning, "of Python"))
    truncated = "The following part of your input was truncated because CLIP: ['x']"
    assert without_noise(record("diffusers.pipelines.flux", warning, truncated))
