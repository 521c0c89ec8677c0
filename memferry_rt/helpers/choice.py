"""Which devices are to help, as the user says it, and whether they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memferry_allocator import Driver, InvalidRequestError
from memferry_transport import Calibration, TransferOptions

from ..errors import UnsupportedError
from .costs import find_costs
from .trainings import training_on


@dataclass(frozen=True)
class Help:
    """The devices that help one, and what its transfer engine has to know of them.

    Attributes
    ----------
    helpers : tuple of int
    named : bool
        Whether they are used even while they are busy.
    options : TransferOptions or None
    calibration : Calibration or None
    note : str
        How they were chosen, and where their costs come from; empty where nobody has asked.
    """

    helpers: tuple[int, ...] = ()
    named: bool = False
    options: TransferOptions | None = None
    calibration: Calibration | None = None
    note: str = ""

    @classmethod
    def over(cls, driver: Driver, device: int, helpers: Sequence[int], *, named: bool) -> Help:
        """Help by chosen devices; errors as for `find_costs`."""
        chosen = tuple(helpers)
        how = "named" if named else "auto"
        if not chosen:
            return cls(note="auto: no device here is idle and reaches this one" if not named else "")
        costs = find_costs(driver, device, chosen)
        # "auto" takes what the calibration knows, as long as it is idle; these are all that it knows.
        options = TransferOptions(helpers=chosen if named else "auto")
        devices = ", ".join(map(str, chosen))
        return cls(chosen, named, options, costs.calibration, f"{how}: device {devices}; {costs.source}")


NO_HELP = Help()


def require_able(driver: Driver, device: int, helpers: Sequence[int]) -> None:
    """Refuse devices that cannot help, or that train in this process.

    Raises
    ------
    InvalidRequestError
        One is the device that trains, or is not there.
    UnsupportedError
        One trains another model, or the two do not reach each other's memory.
    """
    count = driver.device_count
    training = training_on(driver)
    for helper in helpers:
        if helper == device:
            raise InvalidRequestError(
                f"helpers: device {helper} is the one that trains; name others, or write 'auto'"
            )
        if helper >= count:
            raise InvalidRequestError(
                f"helpers: there is no device {helper}; this process sees {count}, the first is 0"
            )
        if helper in training:
            raise UnsupportedError(
                f"helpers: device {helper} trains another model of this process; restore that model first, or "
                "write 'auto', which leaves busy devices alone"
            )
        if not reach(driver, device, helper):
            raise UnsupportedError(
                f"helpers: devices {helper} and {device} have no peer access, so that nothing can pass between "
                "them; name devices that reach each other (`memferry topo` shows which), or write 'auto'"
            )


def reach(driver: Driver, device: int, helper: int) -> bool:
    """Whether two devices can read and write each other's memory."""
    return driver.can_access_peer(device, helper) and driver.can_access_peer(helper, device)
