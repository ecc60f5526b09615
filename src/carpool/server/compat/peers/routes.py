"""Endpoints that SGLang's clients query before they send work."""

from typing import Literal

from pydantic import BaseModel, Field

import carpool
from carpool.server.dependencies import AuthenticatedRoute, ServerState, router_of

router = router_of(AuthenticatedRoute)


class ModelInfo(BaseModel):
    """The served model in SGLang's format."""

    model_path: str = Field(description="the name for requests")
    is_generation: bool = True
    model_type: Literal["diffusion"] = "diffusion"
    architectures: list[str] = Field(description="the diffusers class")
    has_image_understanding: bool = Field(description="whether it takes pictures")
    has_audio_understanding: bool = False
    task_type: str = Field(description="the task without an input picture")
    supported_task_types: list[str]
    output_types: list[str] = Field(description="IMAGE, VIDEO, AUDIO")
    is_image_gen: bool


class ServerInfo(BaseModel):
    """The server in SGLang's format."""

    model_path: str = Field(description="the model's name for requests")
    served_model_name: str
    tp_size: int = 1
    dp_size: int = 1
    version: str = Field(description="Carpool's version")


_OUTPUTS = {"pictures": "IMAGE", "videos": "VIDEO", "sound": "AUDIO", "meshes": "MESH"}
_OUTPUTS |= {"text": "TEXT"}


@router.get("/model_info")
@router.get("/v1/model_info")
async def model_info(state: ServerState) -> ModelInfo:
    """The served model in SGLang's format; prefer `GET /v1/models`."""
    model = await state.load(None, "loaded")
    tasks = model.card.tasks
    return ModelInfo(
        model_path=model.id,
        architectures=[model.card.pipeline],
        has_image_understanding=any(task.takes("image") for task in tasks),
        task_type=tasks[0].name,
        supported_task_types=[task.name for task in tasks],
        output_types=sorted({_OUTPUTS[task.makes] for task in tasks}),
        is_image_gen=tasks[0].makes == "pictures",
    )


@router.get("/server_info")
async def server_info(state: ServerState) -> ServerInfo:
    """The server in SGLang's format."""
    name = state.model_names[0]
    return ServerInfo(model_path=name, served_model_name=name, version=carpool.__version__)
