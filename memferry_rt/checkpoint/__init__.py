"""Checkpoints on disk, without torch: files of tensors, and a folder that always holds a whole save."""

from .folder import CheckpointReader, TensorFile, write_checkpoint
from .info import CheckpointInfo, checkpoint_info
from .tensorfile import TensorSpec

__all__ = [
    "CheckpointInfo",
    "CheckpointReader",
    "TensorFile",
    "TensorSpec",
    "checkpoint_info",
    "write_checkpoint",
]
