"""libmemferry on the stand-in for libcuda."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .bound import Device, Native
from .compiling import build_stub


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: installed without the library")
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def loaded(stub: Path) -> Native:
    return Native(stub)


@pytest.fixture
def native(loaded: Native) -> Iterator[Native]:
    """Every test leaves nothing with the driver, and gives back the context it was called under."""
    loaded.stub.stub_reset()
    before = (loaded.stub.stub_used(), loaded.stub.stub_contexts(), loaded.stub.stub_registrations())
    events = loaded.stub.stub_events()
    yield loaded
    loaded.stub.stub_reset()
    assert (loaded.stub.stub_used(), loaded.stub.stub_contexts(), loaded.stub.stub_registrations()) == before
    assert loaded.stub.stub_events() == events
    assert loaded.stub.stub_depth() == 0


@pytest.fixture
def device(native: Native) -> Iterator[Device]:
    device = native.open()
    yield device
    device.close()
