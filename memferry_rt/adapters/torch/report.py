"""What a runtime says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ...split import UpdateRates
from ...stalls import IterationTimes


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it does, and what has been submitted for it so far, in bytes.

    Attributes
    ----------
    weight_mode, gradient_mode : str
    state_mode : str
        ``"cpu"``, ``"streamed"`` or ``"resident"`` where a plan says it; empty where the runtime chooses.
    loaded_modules : tuple of str
        Modules of it that its mode has nothing for: for these it is loaded.
    pool_nbytes : int
        Its memory in the device pool now: weights, optimizer state and gradients.
    copied_in, copied_out : int
        By copy engines, into device memory and out of it.
    read_in_place, written_in_place : int
        By kernels in host memory: weights and sums of gradients, and gradients.
    """

    name: str
    weight_mode: str
    gradient_mode: str
    state_mode: str
    loaded_modules: tuple[str, ...]
    pool_nbytes: int
    copied_in: int
    copied_out: int
    read_in_place: int
    written_in_place: int


@dataclass(frozen=True)
class HelperReport:
    """A device that lends its host link.

    Attributes
    ----------
    carried_in, carried_out : int
        Bytes submitted to it so far: weights into device memory, and gradients out of it.
    device_nbytes : int
        Its memory that is taken for that now; its context comes on top.
    health : str
        Of its ways, in words.
    """

    device: int
    carried_in: int
    carried_out: int
    device_nbytes: int
    health: str


@dataclass(frozen=True)
class Report:
    """What is where, in bytes, and what has happened.

    Attributes
    ----------
    stream_nbytes : int
        The ring through which optimizer state is streamed.
    panels_nbytes : int
        The ring through which weights go panel by panel.
    updated_parameters : int
        Updated in the last step.
    resident_parameters, streamed_parameters, early_parameters : int
        Of these, where they live on the device, streamed through it, and made by the CPU during backward.
    update_rates : UpdateRates
        What the shares of CPU and device are balanced by.
    times : IterationTimes
        Of the last iteration.
    summed_parameters : int
        Whose gradients alone live on the device, until the sum of all micro-steps is complete.
    dram_nbytes : int
        Host memory traffic so far, by count: what CPU updates read and wrote, what was copied, and what kernels
        read and wrote in place.
    plan_source : str
        Who has planned, and from what.
    plan_notes : tuple of str
        What is done otherwise than the plan has it.
    per_layer : tuple of LayerReport
        In forward order.
    helpers : tuple of HelperReport
    helpers_note : str
        How they were chosen, and where the costs of their ways come from; empty where nobody has asked for any.
    """

    device: str
    device_name: str
    layers: int
    parameters: int
    weight_nbytes: int
    host_nbytes: int
    device_memory: int
    pool_nbytes: int
    ring_nbytes: int
    stream_nbytes: int
    panels_nbytes: int
    device_peak: int
    host_to_device_nbytes: int
    device_to_host_nbytes: int
    updated_parameters: int
    resident_parameters: int
    streamed_parameters: int
    early_parameters: int
    update_rates: UpdateRates
    summed_parameters: int
    times: IterationTimes
    dram_nbytes: int
    steps: int
    skipped_steps: int
    grad_norm: float | None
    plan_source: str
    plan_notes: tuple[str, ...]
    per_layer: tuple[LayerReport, ...]
    helpers: tuple[HelperReport, ...]
    helpers_note: str

    @property
    def helper_nbytes(self) -> int:
        """Bytes that helpers have carried so far, both ways."""
        return sum(helper.carried_in + helper.carried_out for helper in self.helpers)

    @property
    def host_nbytes_per_parameter(self) -> float:
        """Host memory that a parameter takes, in bytes."""
        return self.host_nbytes / self.parameters

    @property
    def dram_nbytes_per_step(self) -> int:
        """Host memory traffic by count, of all steps so far, divided by their number."""
        return self.dram_nbytes // max(self.steps, 1)
