"""Adapt a pipeline's scheduler to a file's marks about the model's training.

A checkpoint of Stable Diffusion or SDXL may mark that its answers are velocities (`v_pred`), and
that its noise schedule ends at zero signal (`ztsnr`): a scheduler without these settings generates
wrong images.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor

from carpool.engine.model.checkpoint import HEADER
from carpool.errors import LoadFailed

logger = logging.getLogger(__name__)

PREDICTIONS = {"v": "v_prediction", "v_prediction": "v_prediction", "epsilon": "epsilon"}
"""Kinds of denoisers' answers: headers' names, and schedulers' names."""


def apply_marks(pipe: Any, marks: Mapping[str, Any]) -> None:
    """Replace a pipeline's scheduler by one that matches the weights' training.

    Args:
        marks: a checkpoint's marks: tensors by the names of `MARKS`, and its header's `HEADER`.

    Raises:
        LoadFailed: a mark is not supported; the text names it.
    """
    changes: dict[str, Any] = {}
    if (prediction := PREDICTIONS.get(str(marks.get(HEADER)))) is not None:
        changes["prediction_type"] = prediction
    if "v_pred" in marks:
        changes["prediction_type"] = "v_prediction"
    if "ztsnr" in marks:  # other spacings skip the last timestep of training
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    _check_edm(pipe, marks)
    config = pipe.scheduler.config if changes else {}
    changes = {name: value for name, value in changes.items() if config.get(name) != value}
    if not changes:
        return
    if "prediction_type" in changes and "prediction_type" not in config:
        if set(marks) == {HEADER}:  # a flow model: the header means other schedulers
            return
        kind = type(pipe.scheduler).__name__
        raise LoadFailed(
            f"the file has the marks {', '.join(marks)}, and {kind} knows no prediction_type: "
            "is it of another model?"
        )
    cls = type(pipe.scheduler)
    if not changes.keys() <= config.keys():  # such as PNDM, whose noise cannot end at zero signal
        cls = DDIMScheduler
    pipe.register_modules(scheduler=cls.from_config(config, **changes))
    summary = ", ".join(f"{name}={value}" for name, value in changes.items())
    logger.info("%s by the marks of the file: %s", cls.__name__, summary)


def _check_edm(pipe: Any, marks: Mapping[str, Tensor]) -> None:
    """Check that a pipeline has the parameters of a model trained with EDM.

    Raises:
        LoadFailed: a mark differs; the text names it.
    """
    scheduler, vae = pipe.scheduler.config if marks else {}, getattr(pipe, "vae", None)
    buffers = {
        "edm_mean": getattr(getattr(vae, "config", None), "latents_mean", None),
        "edm_std": getattr(getattr(vae, "config", None), "latents_std", None),
        "edm_vpred.sigma_max": scheduler.get("sigma_max"),
        "edm_vpred.sigma_min": scheduler.get("sigma_min"),
    }
    for name in buffers.keys() & marks.keys():
        marked = marks[name].float().flatten()
        number = buffers[name]
        values = torch.tensor([] if number is None else number).float().flatten()
        if marked.shape != values.shape or not torch.allclose(values, marked, rtol=1e-2):
            raise LoadFailed(
                f"the file has the mark {name}={[round(x, 4) for x in marked.tolist()]}, and the "
                f"configuration has {number}: give --model-config of a pipeline for this model"
            )
