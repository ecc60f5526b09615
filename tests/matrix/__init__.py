"""The differential matrix: for each family and task, requests that differ in all that may."""

from matrix import stable
from matrix.case import Case

CASES: list[Case] = [*stable.CASES]
