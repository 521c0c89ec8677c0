"""The ranks of a process group that train one model together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from memferry_allocator import Driver, InvalidRequestError
from memferry_allocator.sizes import align_up

from ....errors import RankError, UnsupportedError
from ....layout import LayerLayout
from ....parallel import ArenaAddress, Board, BoardLayout, RankArena, Share, SharedWords, host_key
from ..optimizer import AmpScaling


@dataclass(frozen=True)
class _Told:
    """What ranks tell each other before training."""

    facts: dict[str, str]
    refusal: str | None
    host: str
    processors: set[int]


class Ranks:
    """This process among the others of its group.  Made by `join`.

    Attributes
    ----------
    group : ProcessGroup
    share : Share
        What of every layer is this rank's.
    arena : RankArena
        The host state of all ranks; there after `open`.
    board : Board
        On which they keep step; there after `open`.
    cores : int
        Processors that this rank has for itself, of those that several may run on; known after `agree`.
    """

    arena: RankArena
    board: Board

    def __init__(self, group: Any) -> None:
        self.group = group
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))
        self.cores = 1
        self.device: torch.device | None = None  # CUDA's, on which NCCL carries objects too

    @classmethod
    def join(cls, group: Any) -> Ranks | None:
        """The ranks of a group; None where there is none, or nobody else in it.

        Raises
        ------
        InvalidRequestError
            This process is not in the group.
        """
        if group is None:
            return None
        if dist.get_rank(group) < 0:
            raise InvalidRequestError("process_group: this process is not a member of it; offload on its members")
        return cls(group) if dist.get_world_size(group) > 1 else None

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def size(self) -> int:
        return self.share.size

    @property
    def first(self) -> bool:
        """Whether it is this rank that fills what all share."""
        return self.rank == 0

    # -- before training ------------------------------------------------------------------------------
    def agree(self, facts: Mapping[str, str], refusal: Exception | None = None) -> None:
        """Refuse on every rank what one refuses, or has otherwise than the first.

        Parameters
        ----------
        facts : mapping of str to str
            What must be alike, by names that a user understands.
        refusal : Exception, optional
            Why this rank cannot go on.

        Raises
        ------
        Exception
            `refusal`, on the rank that has one.
        RankError
            On the others; or ranks differ, with the same message on all.
        """
        own = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        mine = os.sched_getaffinity(0)
        told = _Told(dict(facts), own, host_key(), mine)
        found = [told] * self.size
        with self._on_device():
            dist.all_gather_object(found, told, group=self.group)
        if refusal is not None:
            raise refusal
        for rank, other in enumerate(found):
            if other.refusal is not None:
                raise RankError(f"rank {rank} refuses, and so do all: {other.refusal}")
        self._require_one_host([other.host for other in found])
        self._require_alike([other.facts for other in found])
        self.cores = max(1, len(mine) // sum(bool(mine & other.processors) for other in found))

    @staticmethod
    def _require_alike(found: Sequence[Mapping[str, str]]) -> None:
        for rank, theirs in enumerate(found):
            for name in [*found[0], *theirs]:
                mine, other = found[0].get(name), theirs.get(name)
                if mine != other:
                    raise RankError(
                        f"ranks differ in {name}: rank 0 has {mine or 'none'}, rank {rank} has {other or 'none'}; "
                        "give every rank the same model, optimizer and options"
                    )

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device)

    def _require_one_host(self, hosts: Sequence[str]) -> None:
        if len(set(hosts)) > 1:
            names = ", ".join(f"rank {rank} on {host.split()[0]}" for rank, host in enumerate(hosts))
            raise UnsupportedError(
                f"process_group: its ranks are on several hosts or in several containers ({names}), and the host "
                "state is shared within one; start all ranks on one host, in one container"
            )

    @contextlib.contextmanager
    def refused_together(self) -> Iterator[None]:
        """Before training: what one rank refuses in here, all refuse where they `agree`."""
        try:
            yield
        except Exception as error:
            self.agree({}, error)
            raise

    def require_backend(self, wanted: str) -> None:
        """Refuse a group that cannot carry the device's tensors by ``"nccl"`` or ``"gloo"``.

        Raises
        ------
        UnsupportedError
        """
        device = torch.device("cuda" if wanted == "nccl" else "cpu")
        try:
            name = self.group._get_backend(device).name()
        except RuntimeError:
            name = "none"
        if name != wanted:
            raise UnsupportedError(
                f"process_group: its backend for {device.type} tensors is {name}, and {wanted} is needed; call "
                f"torch.distributed.init_process_group({wanted!r}), and offload to that device"
            )

    # -- shared memory --------------------------------------------------------------------------------
    def open(self, driver: Driver, layouts: Sequence[LayerLayout], nbytes: int) -> None:
        """Map one arena of `nbytes` bytes on all ranks.

        Raises
        ------
        OutOfMemory, RegistrationError
            On a rank that cannot; the others raise `RankError` with its message.  Nothing is left.
        """
        slots = sum(len(layout.slots) for layout in layouts)
        layout = BoardLayout(self.size, len(layouts), 16 + len(layouts) + 3 * slots)
        board = align_up(layout.nbytes, 4096)
        try:
            if self.first:
                self._try(lambda: RankArena.create(driver, board + nbytes))
            else:
                self.agree({})
            addresses = [self.arena.address if self.first else None]
            with self._on_device():
                dist.broadcast_object_list(addresses, group=self.group, group_src=0)
            self._try(lambda: self.arena if self.first else self._attach(driver, addresses[0]))
            words = SharedWords(self.arena.array(self.arena.cut(board)).view(np.int64))
            self.board = Board(words, layout, self.rank, self._timeout())
            self._leave = weakref.finalize(self, _leave, self.board, os.getpid())  # not only when the process ends
            self.agree({})  # every rank is on the board before another looks for it there
        except BaseException:
            if hasattr(self, "arena"):
                self.arena.close()
            raise

    def _try(self, take: Callable[[], RankArena]) -> None:
        refusal = None
        try:
            self.arena = take()
        except Exception as error:
            refusal = error
        self.agree({}, refusal)

    @staticmethod
    def _attach(driver: Driver, address: ArenaAddress | None) -> RankArena:
        assert address is not None
        return RankArena.attach(driver, address)

    def _timeout(self) -> float:
        """The group's time-out in seconds."""
        for device in ("cpu", "cuda"):
            try:
                timeout = self.group._get_backend(torch.device(device)).options._timeout
            except (RuntimeError, AttributeError):
                continue
            return float(timeout / timedelta(seconds=1))
        return 1800.0

    # -- during training ------------------------------------------------------------------------------
    def fence(self, what: str) -> None:
        """Block until every rank is here."""
        self.board.gather([], what)

    def agree_on_step(self, scaling: AmpScaling | None, settings: Sequence[Any]) -> AmpScaling | None:
        """What the scalers of all ranks say together: finite where it is for all.

        Raises
        ------
        RankError
            They scale differently, or their optimizers have other settings.
        """
        inverse = 0.0 if scaling is None or scaling.inverse is None else scaling.inverse
        finite = scaling is None or scaling.finite
        own = [scaling is not None, finite, int(np.float64(inverse).view(np.int64)), digest(repr(settings))]
        found = [message.tolist() for message in self.board.gather(own, "their step")]
        for rank, other in enumerate(found):
            if (other[0], other[2]) != (found[0][0], found[0][2]):
                raise RankError(f"ranks differ in their GradScaler: rank {rank} has another scale than rank 0")
            if other[3] != found[0][3]:
                raise RankError(
                    f"ranks differ in the optimizer's settings: rank {rank} has others than rank 0, perhaps a "
                    "learning rate; schedule them alike on all ranks"
                )
        return None if scaling is None else replace(scaling, finite=all(other[1] for other in found))

    def refuse_write(self, name: str) -> NoReturn:
        """Nobody may write to a weight in place: every rank would do it once more to what all share."""
        with self.told():
            raise UnsupportedError(
                f"{name} was written to in place; with process_group all ranks share it, and each would write: "
                "load a state dict on all ranks, or change weights before offload()"
            )

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Let the other ranks know of an error: they end with it, instead of waiting."""
        try:
            yield
        except BaseException as error:
            if hasattr(self, "board"):
                self.board.fail(error)
            raise

    def close(self) -> None:
        """Take part no more."""
        self._leave()


def _leave(board: Board, pid: int) -> None:
    if os.getpid() == pid:  # a fork is no rank
        board.leave()


def digest(text: str) -> int:
    """63 bits that differ where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
