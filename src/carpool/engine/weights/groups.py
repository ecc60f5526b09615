"""Groups of blocks, as formed by diffusers' group offloading, with the places of their weights.

`apply_group_offloading` hooks the blocks of a module: each hook calls its group to load (`onload_`)
before the block runs and to unload (`offload_`) after it. Diffusers' own functions wait for the
copying stream, and copy tensor by tensor; Carpool replaces them. A group is one block. Weights
outside of blocks, and weights shared by two blocks, are never streamed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import GroupOffloadingHook
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from carpool.errors import LoadFailed

ALIGNMENT_BYTES = 256  # alignment of weights in a slot: at least torch's own
CPU_ALIGNMENT_BYTES = 64  # CPU kernels choose by alignment up to this, which changes last bits
HOOK = "group_offloading"  # diffusers' name of the hook
WORTH_LOADING = 0.05  # share of the largest block: smaller blocks stay on the device

_LISTS = (nn.ModuleList, nn.Sequential)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a weight's plain tensor: on a parameter, or inside a quantized one."""

    owner: Tensor
    attribute: str  # "data" of a parameter or buffer
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    at: int  # offset in its group, bytes
    n_bytes: int

    def read(self) -> Tensor:
        """Read the current value."""
        value: Tensor = getattr(self.owner, self.attribute)
        return value

    def put(self, value: Tensor) -> None:
        setattr(self.owner, self.attribute, value)

    def flat(self, value: Tensor) -> Tensor:
        """The bytes of a value as stored in its group; a copy only if the layout differs."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=self.dtype).copy_(value)
        return value.cpu().as_strided((value.numel(),), (1,)).view(torch.uint8)

    def in_(self, buffer: Tensor) -> Tensor:
        """View its part of a group's bytes as a tensor, without a copy."""
        part = buffer[self.at : self.at + self.n_bytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(slots=True, eq=False)
class BlockGroup:
    """A block whose weights are loaded and unloaded together."""

    component: str
    place: int  # index among all groups
    name: str  # path of the block
    block: nn.Module
    places: tuple[Place, ...] = ()
    n_bytes: int = 0

    def __repr__(self) -> str:
        return f"<{self.component}.{self.name}>"


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks that group offloading would load one at a time, by path, in order.

    An entry of a list that is itself a list is never called, and so never loaded: it is left out.
    A module with a list that has gaps has no blocks: diffusers cannot offload it.
    """
    blocks: dict[str, nn.Module] = {}
    lists = (part for part in module.modules() if isinstance(part, _LISTS))
    if any(block is None for container in lists for block in container._modules.values()):
        return blocks

    def look(parent: nn.Module, path: str) -> None:
        for name, child in parent.named_children():
            if isinstance(child, _LISTS):
                for number, block in enumerate(child):
                    if not isinstance(block, _CONTAINERS):
                        blocks[f"{path}{name}.{number}"] = block
            elif _has_list(child):
                look(child, f"{path}{name}.")

    look(module, "")
    shared = _shared(blocks.values())
    sizes = {path: bytes_of(block) for path, block in blocks.items()}
    threshold = WORTH_LOADING * max(sizes.values(), default=0)
    return {
        path: block
        for path, block in blocks.items()
        if sizes[path] > threshold and not any(id(tensor) in shared for tensor in _tensors(block))
    }


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(part, _LISTS) for part in module.modules())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _shared(blocks: Any) -> set[int]:
    """Ids of tensors that belong to several blocks."""
    counts = Counter(number for block in blocks for number in {*map(id, _tensors(block))})
    return {number for number, count in counts.items() if count > 1}


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's weights, each counted once."""
    return sum(plain.nbytes for plain in plain_weights(module))


def plain_weights(module: nn.Module) -> Iterator[Tensor]:
    """The plain tensors of a module's weights, each once."""
    return (plain for _, _, plain in _plain_parts(module))


def _plain_parts(module: nn.Module) -> Iterator[tuple[Tensor, str, Tensor]]:
    for tensor in {id(tensor): tensor for tensor in _tensors(module)}.values():
        yield from plain_parts(tensor, "data", tensor)


def plain_parts(
    owner: Tensor, attribute: str, value: Tensor
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """The plain tensors of a weight: itself, or the parts of a quantized one."""
    wrapper: Any = value
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from plain_parts(value, name, getattr(value, name))
    else:
        yield owner, attribute, value.data


def form(
    component: str,
    module: nn.Module,
    paths: Sequence[str],
    device: torch.device,
    first: int,
    onload: Callable[[BlockGroup], None],
    offload: Callable[[BlockGroup], None],
) -> list[BlockGroup]:
    """Hook the chosen blocks of a module.

    Args:
        component: the pipeline's name for the module.
        paths: paths of the blocks, from `blocks_of`.
        device: the device on which they compute.
        first: the index of the first group.
        onload: called before a block computes.
        offload: called after it has computed.
    """
    blocks = blocks_of(module)
    groups = [
        BlockGroup(component, first + number, path, blocks[path])
        for number, path in enumerate(paths)
    ]
    by_block = {id(group.block): group for group in groups}
    for group in groups:
        group.places, group.n_bytes = _lay_out(group.block, device)
    containers = {
        name
        for path, container in module.named_modules()
        if path and not isinstance(container, _LISTS) and _has_list(container)
        for name in [path.rpartition(".")[2]]
    }
    apply_group_offloading(
        module,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        block_modules=sorted(containers) or None,
    )
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = registry.get_hook(HOOK) if registry is not None else None
        if not isinstance(hook, GroupOffloadingHook):
            continue
        streamed = by_block.pop(id(part), None)
        if streamed is None:
            hook.group.onload_ = hook.group.offload_ = lambda: None  # resident
        else:
            hook.group.onload_ = _calling(onload, streamed)
            hook.group.offload_ = _calling(offload, streamed)
    if by_block:
        names = ", ".join(group.name for group in by_block.values())
        raise LoadFailed(f"{component} cannot be streamed: diffusers does not offload {names}")
    return groups


def unhook(module: nn.Module) -> None:
    """Remove the hooks and restore each module's own methods."""
    for part in module.modules():
        registry = part.__dict__.get("_diffusers_hook")
        if registry is None or registry.get_hook(HOOK) is None:
            continue
        registry.remove_hook(HOOK, recurse=False)
        forward = part.__dict__.get("forward")
        if getattr(forward, "__func__", None) is type(part).forward:
            del part.__dict__["forward"]
        if not registry.hooks:
            del part.__dict__["_diffusers_hook"]


def _calling(function: Callable[[BlockGroup], None], group: BlockGroup) -> Callable[[], None]:
    disable: Any = torch.compiler.disable
    called: Callable[[], None] = disable(lambda: function(group))
    return called


def _lay_out(block: nn.Module, device: torch.device) -> tuple[tuple[Place, ...], int]:
    """The places of a block's weights in its group's bytes, and the total number of bytes.

    Memory-mapped files put weights at odd addresses. On a CPU their offset beyond the alignment is
    kept, so that a streamed block gives the bits of a resident one.
    """
    places, at = [], 0
    for owner, attribute, value in _plain_parts(block):
        stride = (value if is_dense(value) else torch.empty(value.shape, device="meta")).stride()
        odd = value.data_ptr() % CPU_ALIGNMENT_BYTES if device.type == "cpu" else 0
        begin = at + (0 if odd % value.itemsize else odd)
        form = value.dtype, value.shape, stride
        places.append(Place(owner, attribute, *form, begin, value.nbytes))
        at = aligned(begin + value.nbytes)
    return tuple(places), at


def aligned(n_bytes: int) -> int:
    """Round up to the next aligned address."""
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_dense(value: Tensor) -> bool:
    """Whether its elements are adjacent in some order of axes, as in `channels_last`."""
    expected = 1
    axes = [(s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n != 1]
    for stride, size in sorted(axes):
        if stride != expected:
            return False
        expected *= size
    return True
