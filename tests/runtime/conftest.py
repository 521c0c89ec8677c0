"""One computing thread: the models are too small for more, and the bits do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo  # which the first optimizer imports, and so a part of what stays

from .trained import Trained

torch.set_num_threads(1)


@pytest.fixture
def trained() -> Iterator[Trained]:
    both = Trained()
    yield both
    both.runtime.close()
