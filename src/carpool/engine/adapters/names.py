"""Names of an adapter's tensors, changed to names that diffusers' loaders read.

Some loaders fail at ComfyUI's prefix of a denoiser's own paths, or at alphas or `.default` there.
"""

import re
from collections.abc import Collection, Mapping

from torch import Tensor

_PEFT = r"(?:base_model\.model\.)?"
_PREFIX = re.compile(
    rf"^{_PEFT}(?:(?:model\.)?diffusion_model\.|transformer\.|lora_(?:unet|transformer)_|lycoris_)?"
)
_WAN = re.compile(
    rf"^(?:{_PEFT}|model\.diffusion_model\.|transformer\.)(?=blocks\.\d+\.(?:\w+_attn\.|ffn\.\d))"
)
_COMFYUI = re.compile(  # original paths of Stable Diffusion, its text encoders, and FLUX.1
    rf"^{_PEFT}(?:model\.)?(?:diffusion_model\.|text_encoders\.clip_(l|g)\.transformer\."
    r"|(?:transformer\.)?(?=(?:double|single)_blocks\.))(.+)\.(lora_\w+|alpha)"
)
_FLUX = "single_transformer_blocks.0.proj_mlp"  # its loader reads kohya's names, too
_KOHYA = {None: "unet", "l": "te1", "g": "te2", "lora_A": "lora_down", "lora_B": "lora_up"}
_LAYER = re.compile(
    r"(.+?)[._](?:lora_\w+|lora(?:_linear_layer)?\.\w+|lokr_\w+|hada_\w+|oft_\w+|ia3_\w+"
    r"|dora_scale|alpha|diff(?:_b)?)(?:\.\w+)*"
)
_PAIR = re.compile(r"\.(?:lora_(?:A|B|down|up)(?:\.default)?\.weight|alpha)$")
_KINDS = {".lora_down.weight": ".lora_A.weight", ".lora_up.weight": ".lora_B.weight"}


def layer_of(name: str) -> str:
    """The layer of an adapter's tensor."""
    match = _LAYER.fullmatch(name)
    return match[1] if match else name.rpartition(".")[0] or name


def readable(
    tensors: Mapping[str, Tensor], component: str, paths: Collection[str]
) -> dict[str, Tensor]:
    """The same adapter under names that a denoiser's loader reads; `paths` are its layers'."""
    if not all(map(_PAIR.search, tensors)):  # not only pairs of a LoRA
        bare = {re.sub(rf"^{_PEFT}", "", name): tensor for name, tensor in tensors.items()}
        if not all(layer_of(name) in paths for name in bare):
            return dict(tensors)
        return {f"{component}.{name}": tensor for name, tensor in bare.items()}
    tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    flat = {path.replace(".", "_"): path for path in paths}
    pairs = dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer = layer_of(name)
        path, kind = _PREFIX.sub("", layer), name.removeprefix(layer)
        if flat.get(path, path) not in paths:
            has_kohya = component == "unet" or _FLUX in paths
            return {_original(name, has_kohya): tensor for name, tensor in tensors.items()}
        kind, alpha = _KINDS.get(kind, kind), tensors.get(f"{layer}.alpha")
        if kind == ".lora_B.weight" and alpha is not None:  # part of the matrix from here on
            tensor = tensor.float() * (alpha.item() / tensor.shape[1])
        if kind != ".alpha":
            pairs[f"{component}.{flat.get(path, path)}{kind}"] = tensor
    return pairs


def _original(name: str, has_kohya: bool) -> str:
    """A tensor's name by a model's original code, with the prefix that the loader reads."""
    if not has_kohya:
        return _WAN.sub("diffusion_model.", name)
    if (match := _COMFYUI.match(name)) is None:
        return name
    part, path, kind = match.groups()
    kind = _KOHYA.get(kind, kind)
    return f"lora_{_KOHYA[part]}_{path.replace('.', '_')}.{kind}{name[match.end() :]}"
