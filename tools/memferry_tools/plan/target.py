"""The model and the machine that a plan is for."""

from __future__ import annotations

from dataclasses import replace

from memferry_rt.errors import PlanError
from memferry_rt.plan import (
    H200,
    Batch,
    Dimensions,
    Machine,
    Profile,
    Workload,
    load_profile,
    machine_from_profile,
    machine_from_topology,
    transformer,
    workload_from_profile,
)
from memferry_rt.plan.shapes import TRAIN, Names
from memferry_transport import TopologyError
from memferry_transport.topology import load, machine, machine_names

from ..errors import ToolError
from ..train.presets import ModelShape, find_preset
from ..train.shapes import find_model, name_of
from .configs import read_config
from .options import DEFAULT, Host, Model

_RECOMPUTE = {"on": True, "off": False, "auto": None}


def dimensions(shape: ModelShape) -> Dimensions:
    """The sizes of a preset, as the planner takes them."""
    return Dimensions(
        shape.hidden,
        shape.layers,
        shape.ffn,
        shape.heads,
        shape.vocabulary,
        kv_width=shape.kv_width,
        fused=True,
        tied=shape.tied,
    )


def find_batch(model: Model) -> Batch:
    """The micro-batch: what is said, else the preset's."""
    micro_batch, sequence = 8, 1024
    if model.config is None:
        preset = find_preset(model.preset or DEFAULT)
        micro_batch, sequence = preset.micro_batch, preset.seq
    return Batch(
        model.micro_batch or micro_batch, model.sequence or sequence, model.dtype, _RECOMPUTE[model.checkpointing]
    )


def find_workload(model: Model, profile: Profile | None = None) -> Workload:
    """The model: of its config, its preset, or, where neither is named, of the profile.

    Raises
    ------
    ToolError
        Its file cannot be used.
    """
    names: Names = TRAIN
    if model.preset is None and model.config is None and model.shape is None and profile is not None:
        return workload_from_profile(profile, "the profile's model")
    if model.config is not None and model.shape is None:
        size, names = read_config(model.config)
        name = name_of(model.config)
    else:
        name, found = find_model(model.preset or DEFAULT, model.config, model.shape)
        size = dimensions(found.shape)
    if model.tied:
        size = replace(size, tied=True)
    batch = find_batch(model)
    if size.positions and batch.sequence > size.positions:
        if model.sequence is not None:
            raise ToolError(f"--seq: {model.sequence} is more than the {size.positions} positions of {name}")
        batch = replace(batch, sequence=size.positions)
    return transformer(name, size, batch, names)


def find_machine(host: Host) -> tuple[Machine, Profile | None]:
    """The machine, and the profile if there is one.

    Raises
    ------
    ToolError
        A file cannot be used, or the machine has not such devices.
    """
    measured, profile = None, None
    try:
        if host.profile is not None:
            profile = load_profile(host.profile)
            measured = machine_from_profile(profile)
        if host.topology is not None or host.fixture is not None:
            found = _with_links(host, measured, profile)
        else:
            found = replace(measured or H200, ranks=host.ranks)
    except (PlanError, TopologyError) as error:
        raise ToolError(f"{_option(host, error)}: {error}") from None
    return found, profile


def _with_links(host: Host, measured: Machine | None, profile: Profile | None) -> Machine:
    if host.fixture is not None:
        if host.fixture not in machine_names():
            raise ToolError(f"--fixture: {host.fixture!r} is none; there are {', '.join(machine_names())}")
        topology = machine(host.fixture)
    else:
        assert host.topology is not None
        try:
            topology = load(host.topology)
        except OSError as error:
            raise ToolError(f"--topology: {host.topology} cannot be read: {error.strerror}") from None
    linked = machine_from_topology(topology, host.device, helpers=host.helpers, ranks=host.ranks, like=measured)
    if profile is not None and profile.device != linked.name:
        raise ToolError(
            f"--profile: it is of {profile.device}, and device {host.device} of the topology is {linked.name}; "
            "profile on that device, or leave the profile out: formulas do without"
        )
    return linked


def _option(host: Host, error: Exception) -> str:
    if str(error).startswith("profile"):
        return "--profile"
    return "--fixture" if host.fixture is not None else "--topology"
