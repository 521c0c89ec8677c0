"""Which devices help the one that a model trains on: alone, and among the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from memferry_allocator import Driver
from memferry_transport import TransferFailedError
from memferry_transport.options import MAX_HELPERS

from ...errors import RankError
from ...helpers import NO_HELP, Help, reach, require_able, require_no_helper, share_out, training_on
from ...options import OffloadOptions
from ...parallel import host_key
from .parallel import Ranks

if TYPE_CHECKING:
    from .runtime import Runtime


def require_arrived(runtime: Runtime) -> None:
    """Before anything is updated, refuse what a lost helper has not brought: weights, or gradients.

    Raises
    ------
    TransferFailedError
        Device copies of weights are given up, for they may not be whole; nothing else was changed.
    """
    try:
        runtime.memory.engine.require_arrived()
    except TransferFailedError as error:
        runtime.step_updates.skip()
        runtime.memory.forget_copies()
        advice = (
            "call optimizer.zero_grad() and repeat the iteration, now without that device"
            if runtime.ranks is None
            else "the other ranks end with this one; start the job again from its last checkpoint"
        )
        raise TransferFailedError(f"{error}. Nothing was updated: {advice}") from error


@dataclass(frozen=True)
class _Seat:
    """What a rank trains on, and the helpers that it was told of: devices of a host, by names that all ranks know.

    Attributes
    ----------
    device : str
    helpers : mapping of int to str
        By the numbers that this rank has for them.
    asked : bool
        Whether it wants any.
    """

    host: str
    device: str
    helpers: Mapping[int, str]
    asked: bool


def refuse_helpers(options: OffloadOptions, driver: Driver, device: int) -> None:
    """Refuse what this process alone can tell: helpers that cannot be, and a device that helps another model.

    Raises
    ------
    InvalidRequestError, UnsupportedError
    """
    require_no_helper(driver, device)
    if options.helpers != "auto":
        require_able(driver, device, options.helpers)


def find_help(options: OffloadOptions, driver: Driver, device: int, ranks: Ranks | None) -> Help:
    """The devices that help, and what their ways cost.  All ranks call this alike.

    Raises
    ------
    RankError
        A rank names a device that another trains on; with the same message on all ranks.
    CalibrationError
        The costs cannot be read or measured; the other ranks raise `RankError`.
    """
    if ranks is None:
        return _help(options, driver, device, [device], 0)
    seats = _meet(options, driver, device, ranks)
    _refuse_trained(seats)
    if not any(seat.asked for seat in seats):
        return NO_HELP
    ordinals = {driver.device_info(each).uuid: each for each in range(driver.device_count)}
    own = seats[ranks.rank].host
    here = {
        rank: ordinals[seat.device]
        for rank, seat in enumerate(seats)
        if seat.host == own and seat.device in ordinals
    }
    with ranks.refused_together():
        found = _help(options, driver, device, list(here.values()), list(here).index(ranks.rank))
    ranks.agree({})
    return found


def _help(options: OffloadOptions, driver: Driver, device: int, trained: list[int], place: int) -> Help:
    """Help for the one that trains at a place of `trained`."""
    if options.helpers == "auto":
        busy = training_on(driver) - set(trained)
        idle = [each for each in range(driver.device_count) if each not in busy]
        shares = share_out(idle, trained, lambda one, other: reach(driver, one, other))
        return Help.over(driver, device, shares[place][:MAX_HELPERS], named=False)
    return Help.over(driver, device, options.helpers, named=True) if options.helpers else NO_HELP


def _meet(options: OffloadOptions, driver: Driver, device: int, ranks: Ranks) -> list[_Seat]:
    named = () if options.helpers == "auto" else options.helpers
    names = {each: driver.device_info(each).uuid for each in named}
    found = [_Seat(host_key(), driver.device_info(device).uuid, names, bool(options.helpers))] * ranks.size
    with contextlib.nullcontext() if ranks.device is None else torch.cuda.device(ranks.device):
        dist.all_gather_object(found, found[ranks.rank], group=ranks.group)
    return found


def _refuse_trained(seats: list[_Seat]) -> None:
    for rank, seat in enumerate(seats):
        for number, name in seat.helpers.items():
            for other, trained in enumerate(seats):
                if (trained.host, trained.device) == (seat.host, name):
                    raise RankError(
                        f"helpers: rank {rank} names device {number}, and rank {other} trains on it; name devices "
                        "on which no rank trains, or write 'auto'"
                    )
