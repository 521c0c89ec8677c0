"""What ``memferry profile`` can be told, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ToolError
from ..train.options import DEFAULT, DTYPES
from ..train.presets import ModelShape
from ..train.shapes import find_model

_DEVICE = re.compile(r"auto|emulated(:0)?|cuda(:\d+)?")


@dataclass(frozen=True)
class ProfileOptions:
    """Settings of one run of ``memferry profile``.

    Attributes
    ----------
    model : str
        Its name.
    shape : ModelShape
    micro_batch, sequence : int
    checkpointing : bool
    dtype : str
        ``"auto"``, ``"fp32"`` or ``"bf16"``.
    device : str
    anew : bool
        Measure, whatever is kept of before.
    json : Path, optional
    """

    model: str
    shape: ModelShape
    micro_batch: int
    sequence: int
    checkpointing: bool
    dtype: str
    device: str
    anew: bool
    json: Path | None

    @classmethod
    def build(
        cls,
        *,
        preset: str | None = None,
        config: str | None = None,
        shape: str | None = None,
        micro_batch: int | None = None,
        sequence: int | None = None,
        checkpointing: bool | None = None,
        dtype: str = "auto",
        device: str = "auto",
        anew: bool = False,
        json: str | None = None,
    ) -> ProfileOptions:
        """Options from what a user writes.

        Raises
        ------
        ToolError
            Something that makes no sense; the message begins with the option's name.
        """
        if preset is not None and config is not None:
            raise ToolError("--preset: give it, or --config, but not both")
        if config == "":
            raise ToolError("--config: the name is empty; leave the option out, or name a file")
        model, known = find_model(preset or DEFAULT, None if config is None else Path(config), shape)
        if _DEVICE.fullmatch(device) is None:
            raise ToolError(f"--device: {device!r} is none; write auto, cuda:0 or emulated")
        if dtype not in ("auto", *DTYPES):
            raise ToolError(f"--dtype: {dtype!r} is not known; write auto, {' or '.join(DTYPES)}")
        for name, given in (("--micro-batch", micro_batch), ("--seq", sequence)):
            if given is not None and given < 1:
                raise ToolError(f"{name}: {given} is less than 1, the smallest that makes sense")
        if json == "":
            raise ToolError("--json: the name is empty; leave the option out, or name a file")
        return cls(
            model,
            known.shape,
            micro_batch or known.micro_batch,
            sequence or known.seq,
            known.checkpointing if checkpointing is None else checkpointing,
            dtype,
            device,
            anew,
            None if json is None else Path(json),
        )
