"""The differential matrix: for each family and task, requests that differ in all that may."""

from matrix import ernie, flux2, glm, hunyuan, sana, stable, wan, zimage
from matrix.case import Case

CASES: list[Case] = [
    *stable.CASES,
    *flux2.CASES,
    *sana.CASES,
    *zimage.CASES,
    *wan.CASES,
    *hunyuan.CASES,
    *ernie.CASES,
    *glm.CASES,
]
