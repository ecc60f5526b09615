"""Imported by the fork server of the harness: what is done once for all forks."""

import gc

import torch

import support.custom.harness  # noqa: F401  # all that forks need
from support.custom.base import REQUESTS, Custom, Kind
from support.custom.judge import plain

torch.set_num_threads(1)
plain(*Kind("", Custom).build(), REQUESTS[0])
gc.freeze()
