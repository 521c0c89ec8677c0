"""The ranks of a process group that train one model together."""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from memferry_allocator import Driver, InvalidRequestError, Span
from memferry_allocator.sizes import align_up

from ....errors import UnsupportedError
from ....layout import LayerLayout
from ....parallel import (
    ArenaAddress,
    Board,
    BoardLayout,
    Part,
    RankArena,
    Share,
    SharedWords,
    count_hosts,
    held_spans,
)
from .agreement import Told, cores_of, require_agreement
from .assembly import Assembly, message_words
from .network import Network, backend_of, network_of, timeout_of
from .notice import Notice


class Ranks:
    """This process among the others of its group.  Made by `join`.

    Attributes
    ----------
    group : ProcessGroup
    share : Share
        What of every layer is this rank's; on how many hosts they are is known after `agree`.
    network : Network or None
        What connects ranks of several hosts; None on one, and before `open`.
    arena : RankArena
        The host state of this host's ranks; there after `open`.
    board : Board
        On which they keep step; there after `open`.
    assembly : Assembly
        Where all ranks of all hosts meet; there after `open`.
    cores : int
        Processors that this rank has for itself, of those that several may run on; known after `agree`.
    """

    arena: RankArena
    board: Board
    assembly: Assembly

    def __init__(self, group: Any) -> None:
        self.group = group
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))
        self.network: Network | None = None
        self.cores = 1
        self.device: torch.device | None = None  # CUDA's, on which NCCL carries objects too
        self.failed = False
        self._notice: Notice | None = None

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
        """Whether it is this rank whose weights count, and which writes checkpoints."""
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether it is this rank that fills what all of its host share."""
        return self.share.local == 0

    @property
    def several_hosts(self) -> bool:
        return self.share.hosts > 1

    # -- before training ------------------------------------------------------------------------------
    def agree(self, facts: Mapping[str, str], refusal: Exception | None = None) -> None:
        """Refuse on every rank what one refuses, or has otherwise than the first; learn who is on which host.

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
        UnsupportedError
            They are placed on hosts in a way that they cannot train in.
        """
        found = self._tell_all(Told.own(facts, refusal))
        if refusal is not None:
            raise refusal
        require_agreement(found)
        self.share = replace(self.share, hosts=count_hosts([other.host for other in found]))
        self.cores = cores_of(self.rank, found)

    def _tell_all(self, told: Any) -> list[Any]:
        found = [told] * self.size
        with contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device):
            dist.all_gather_object(found, told, group=self.group)
        return found

    @contextlib.contextmanager
    def refused_together(self) -> Iterator[None]:
        """Before training: what one rank refuses in here, all refuse where they `agree`."""
        try:
            yield
        except Exception as error:
            self.agree({}, error)
            raise

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all must have done before any goes on."""
        with self.refused_together():
            yield
        self.agree({})

    def require_backend(self, wanted: str) -> None:
        """Refuse a group that cannot carry the device's tensors by ``"nccl"`` or ``"gloo"``.

        Raises
        ------
        UnsupportedError
        """
        device = "cuda" if wanted == "nccl" else "cpu"
        name = backend_of(self.group, device)
        if name != wanted:
            raise UnsupportedError(
                f"process_group: its backend for {device} tensors is {name}, and {wanted} is needed; call "
                f"torch.distributed.init_process_group({wanted!r}), and offload to that device"
            )

    # -- shared memory --------------------------------------------------------------------------------
    def open(self, driver: Driver, layouts: Sequence[LayerLayout], nbytes: int) -> None:
        """Map one arena for `nbytes` bytes of slabs on all ranks of a host, and meet those of the others.

        Raises
        ------
        OutOfMemory, RegistrationError
            On a rank that cannot; the others raise `RankError` with its message.  Nothing is left.
        """
        words = 16 + len(layouts) + 3 * sum(len(layout.slots) for layout in layouts)
        layout = BoardLayout(self.share.locals, len(layouts), message_words(self.share.hosts, words))
        board = align_up(layout.nbytes, 4096)
        parts = [Span(0, board), *held_spans(layouts, self.share, board)] if self.several_hosts else None
        timeout = timeout_of(self.group)
        try:
            if self.several_hosts:
                with self._together():
                    self.network = network_of(self.group, self.share)
            with self._together():
                if self.leads:
                    self.arena = RankArena.create(driver, board + nbytes, parts)
            self._find(driver)
            with self._together():  # every rank is on the board before another looks for it there
                memory = SharedWords(self.arena.array(self.arena.cut(board)).view(np.int64))
                self._meet_on(memory, layout, words, timeout)
        except BaseException:
            if hasattr(self, "arena"):
                self.arena.close()
            raise

    def _find(self, driver: Driver) -> None:
        """Attach to the arena that the host's leader has made; learn how all call this training."""
        address = self.arena.address if self.leads else None
        found = self._tell_all((address, uuid.uuid4().hex if self.first else ""))
        theirs: ArenaAddress = found[self.rank - self.share.local][0]
        if self.several_hosts:
            self._notice = Notice(self.group, found[0][1], self.rank)
        with self._together():
            if not self.leads:
                self.arena = RankArena.attach(driver, theirs)

    def _meet_on(self, memory: SharedWords, layout: BoardLayout, words: int, timeout: float) -> None:
        share, notice = self.share, self._notice
        elsewhere = {} if notice is None else {"elsewhere": notice.read}
        self.board = Board(memory, layout, share.local, timeout, first=share.rank - share.local, **elsewhere)
        carriers = None if self.network is None else self.network.carriers
        self.assembly = Assembly(self.board, share, words, carriers, notice)
        self._leave = weakref.finalize(self, _leave, self.board, os.getpid())  # not only when the process ends

    # -- the beginning of training ----------------------------------------------------------------------
    def held(self, layout: LayerLayout) -> Sequence[Part] | None:
        """The elements of a layer whose state this host has; None for all."""
        return self.share.held(layout) if self.several_hosts else None

    def first_value(self, own: torch.Tensor) -> torch.Tensor | None:
        """What a parameter begins with, on the rank that fills its host's pages: the value of rank 0."""
        if not self.leads or not self.several_hosts:
            return own if self.leads else None
        exact = torch.float32 if own.is_floating_point() and own.element_size() <= 4 else own.dtype
        value = torch.empty(own.shape, dtype=exact, device="cpu").copy_(own)
        if value.numel():
            self.assembly.spread(value, "the first weights")
        return value

    # -- during training ------------------------------------------------------------------------------
    def gather(self, message: Sequence[int] | npt.NDArray[np.int64], what: str) -> list[npt.NDArray[np.int64]]:
        """See `Assembly.gather`."""
        return self.assembly.gather(message, what)

    def fence(self, what: str) -> None:
        """Block until every rank is here."""
        self.gather([], what)

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
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, and why."""
        self.failed = True
        self.board.fail(error)
        if self._notice is not None:
            self._notice.put(error)

    def close(self) -> None:
        """Take part no more."""
        self._leave()


def _leave(board: Board, pid: int) -> None:
    if os.getpid() == pid:  # a fork is no rank
        board.leave()
