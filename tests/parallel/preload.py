"""What the fork server imports once for all ranks."""

import gc

import torch._dynamo  # which the first backward or optimizer imports
import torch.distributed.tensor
import torch.utils.checkpoint

import memferry_rt
import memferry_rt.adapters.torch
import tests.runtime.models

gc.collect()
gc.freeze()  # no rank's collector goes through it, nor writes to its pages, which all share

__all__ = ["memferry_rt", "tests", "torch"]
