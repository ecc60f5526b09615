"""Streamed weights of models that are prepared otherwise, too: what works, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.engine.weights.placement import place
from carpool.errors import SettingRejected
from support.engine_driver import driving, gap
from support.prepared import alone, drawn, gguf_of, requests_of
from support.streamed import CPU, Tower
from support.tiny import checkpoint

CLOSE, HALF = 1e-4, 3e-2  # the most that sharing may change a value 0-1, float32 and bfloat16


@pytest.mark.filterwarnings(
    "ignore:.*Quant:FutureWarning",  # quanto goes with diffusers 1.0
    "ignore::UserWarning:torchao",
)
@pytest.mark.parametrize(
    ("said", "most"),
    [
        ({"quantize": "int8"}, CLOSE),
        ({"quantize": "int8,text_encoder_2=quanto-int8", "stream": "text_encoder_2"}, CLOSE),
        pytest.param({"gguf": True}, CLOSE, marks=pytest.mark.slow),
        pytest.param({"quantize": "quanto-int8"}, CLOSE, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32,transformer=bfloat16"}, HALF, marks=pytest.mark.slow),
        pytest.param({"attention_backend": "_native_math"}, CLOSE, marks=pytest.mark.slow),
        pytest.param({"place": "text_encoder=cpu"}, CLOSE, marks=pytest.mark.slow),
        pytest.param({"vae_tiling": True}, CLOSE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_streamed_requests_get_what_a_resident_model_gives(
    said: dict[str, Any], most: float, tmp_path: Path
) -> None:
    prepared = {name: value for name, value in said.items() if name != "stream"}
    streamed = {"stream": "transformer", **said}
    if "gguf" in said:
        [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")
        tuned = gguf_of(load_file(file), tmp_path / "flux.gguf")
        prepared = {"component": (f"transformer={tuned}",)}
        streamed = {"stream": "transformer", **prepared}
    wanted = requests_of("flux")
    with driving(checkpoint("flux"), **prepared) as drive:
        solos = [alone(drive.engine.loaded.pipe, one) for one in wanted]

    with driving(checkpoint("flux"), stream_dir=str(tmp_path), **streamed) as drive:
        heard = [drive.submit(**one) for one in wanted]
        drive.finish()
        moved = drive.engine.statistics()["streaming"]["moved_bytes"]

    assert moved > 0
    for one, solo in zip(heard, solos, strict=True):
        assert one.error is None
        assert gap(drawn(one.outcome.fields), solo) <= most


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"compile": True}, "compile: blocks of transformer are streamed.*leave compile out"),
        ({"quantize": "fp8"}, "layerwise cannot be: take transformer=int8"),
        ({"quantize": "transformer=nf4"}, "bitsandbytes_4bit cannot be: take transformer=int8"),
        ({"place": "transformer=cpu"}, "leave transformer out of place, or of stream"),
    ],
    ids=str,
)
def test_what_cannot_be_streamed_is_refused_before_anything_is_loaded(
    said: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingRejected, match=told):
        EngineSettings(device="cpu", stream="transformer", **said)

    EngineSettings(device="cpu", stream="text_encoder_2", **said)  # of others it may be


@pytest.mark.parametrize("said", [{"compile": True}, {"quantize": "fp8"}], ids=str)
def test_what_cannot_be_streamed_is_refused_where_the_budget_has_it_streamed(
    said: dict[str, Any], tmp_path: Path
) -> None:
    settings = EngineSettings(device="cpu", memory="100KiB", stream_dir=str(tmp_path), **said)

    with pytest.raises(SettingRejected, match="blocks of transformer are streamed"):
        place({"transformer": Tower(blocks=8)}, CPU, settings, None)


def test_a_compiled_denoiser_may_have_a_streamed_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.model.load.warm_up", lambda *_: None)
    settings = EngineSettings(
        device="cpu", stream="text_encoder_2", stream_dir=str(tmp_path), compile=True
    )

    loaded = load(checkpoint("flux"), settings)

    assert loaded.streamer is not None
    assert list(loaded.streamer.components) == ["text_encoder_2"]
    loaded.undo()
