"""The differential matrix: for each family and task, requests that differ in all that may."""

from support.matrix import (
    control,
    ernie,
    flux2,
    glm,
    helios,
    hunyuan,
    hunyuan3d,
    ltx2,
    qwen,
    sana,
    sparse,
    stable,
    wan,
    zimage,
)
from support.matrix.case import Case

CASES: list[Case] = [
    *stable.CASES, *flux2.CASES, *qwen.CASES, *sana.CASES, *zimage.CASES, *wan.CASES, *sparse.CASES,
    *hunyuan.CASES, *ltx2.CASES, *helios.CASES, *ernie.CASES, *glm.CASES, *control.CASES,
    *hunyuan3d.CASES,
]  # fmt: skip
