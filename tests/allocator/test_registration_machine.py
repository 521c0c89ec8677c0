"""The registration map against a list of bytes, whatever is registered, borrowed, refused or closed meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from memferry_allocator import (
    AdoptedRange,
    DriverError,
    Foreign,
    InvalidRequestError,
    Registration,
    RegistrationMap,
    Span,
    adopt,
)

from .machine import address, pages
from .test_registration import Counting

UNIT = 1024  # a quarter of a page
WORLD = 40  # units
CHUNK = 6  # most units a driver call
ranges = st.tuples(st.integers(0, WORLD - 1), st.integers(0, 16)).map(lambda r: (r[0], min(r[1], WORLD - r[0])))
failures = st.sampled_from([None, None, None, 0, 1, 2])


class Refusing(Counting):
    """Refuses one call, so many calls from now."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_after: int | None = None

    def _called(self, call: str, where: int, nbytes: int = 0) -> None:
        super()._called(call, where, nbytes)
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                raise DriverError("CUDA_ERROR_OPERATING_SYSTEM", call, "not today")


class Model:
    """For every unit which chunk it is in, and for every chunk who holds it."""

    def __init__(self) -> None:
        self.chunk_of = [0] * WORLD
        self.foreign_of = [0] * WORLD
        self.holders: dict[int, list[int]] = {}
        self.read_only: dict[int, bool] = {}
        self.borrowed: set[int] = set()
        self.count = 0

    def chunks_in(self, at: int, size: int) -> list[int]:
        return list(dict.fromkeys(chunk for chunk in self.chunk_of[at : at + size] if chunk))

    def stale(self, chunk: int) -> bool:
        return chunk in self.borrowed and not all(
            self.foreign_of[unit] for unit in range(WORLD) if self.chunk_of[unit] == chunk
        )

    def gaps(self, at: int, size: int) -> list[tuple[int, int]]:
        """Runs of units in no chunk, cut to the largest chunk."""
        found: list[tuple[int, int]] = []
        for unit in range(at, at + size):
            if self.chunk_of[unit]:
                continue
            if found and sum(found[-1]) == unit and found[-1][1] < CHUNK:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((unit, 1))
        return found

    def add(self, at: int, size: int, read_only: bool, borrowed: bool) -> None:
        self.count += 1
        self.chunk_of[at : at + size] = [self.count] * size
        self.holders[self.count], self.read_only[self.count] = [], read_only
        if borrowed:
            self.borrowed.add(self.count)

    def remove(self, chunk: int) -> None:
        self.chunk_of = [0 if other == chunk else other for other in self.chunk_of]

    def runs(self, at: int, size: int) -> list[tuple[int, int]]:
        """A gap, cut where one foreign registration ends and the next begins."""
        cuts = [u for u in range(at, at + size) if u == at or self.foreign_of[u] != self.foreign_of[u - 1]]
        return [(low, high - low) for low, high in zip(cuts, [*cuts[1:], at + size], strict=True)]


class Registering(RuleBasedStateMachine):
    held: Bundle[tuple[int, Registration | AdoptedRange]] = Bundle("held")
    foreign: Bundle[int] = Bundle("foreign")

    def __init__(self) -> None:
        super().__init__()
        self.driver, self.data = Refusing(), pages(WORLD * UNIT)
        self.start = address(self.data)
        self.known = RegistrationMap(self.driver, max_chunk=CHUNK * UNIT)
        self.driver._registration_map = self.known  # type: ignore[attr-defined]
        self.model = Model()
        self.number = self.calls = 0

    # -- what may be asked ------------------------------------------------------------------------------
    @rule(
        target=held,
        where=ranges,
        read_only=st.booleans(),
        foreign=st.sampled_from(Foreign),
        fail=failures,
        adopted=st.booleans(),
    )
    def register(
        self, where: tuple[int, int], read_only: bool, foreign: Foreign, fail: int | None, adopted: bool
    ) -> tuple[int, Registration | AdoptedRange]:
        at, size = where
        self.number += 1

        def ask() -> Registration | AdoptedRange:
            if adopted:
                part = self.data[at * UNIT : (at + size) * UNIT]
                return adopt(self.driver, part, read_only=read_only, foreign=foreign)
            span = (self.start + at * UNIT, size * UNIT)
            return self.known.register(*span, read_only=read_only, foreign=foreign)

        answer, made = self._expected(at, size, read_only, foreign, fail)
        self.driver.fail_after = fail
        registration = self._ask(ask, answer)
        self.driver.fail_after = None
        if registration is None:
            if answer != "read-only":
                self._undone(at, size, made, fail if answer != "OPERATING_SYSTEM" else None)
            return 0, self.known.register(0, 0)
        for gap in made:
            self.model.add(*gap)
        for chunk in self.model.chunks_in(at, size):
            self.model.holders[chunk].append(self.number)
        return self.number, registration

    def _expected(
        self, at: int, size: int, read_only: bool, foreign: Foreign, fail: int | None
    ) -> tuple[str, list[tuple[int, int, bool, bool]]]:
        """What the map must say, and the chunks that it must make."""
        model = self.model
        inside = model.chunks_in(at, size)
        if not read_only and any(model.read_only[chunk] and not model.stale(chunk) for chunk in inside):
            return "read-only", []
        for chunk in inside:
            if model.stale(chunk):
                model.remove(chunk)
        made = []
        for calls, (low, count) in enumerate(model.gaps(at, size)):
            self.calls = calls + 1
            if calls == fail:
                return "OPERATING_SYSTEM", made
            taken = model.foreign_of[low : low + count]
            if not any(taken):
                made.append((low, count, read_only, False))
            elif foreign is Foreign.BORROW and all(taken):
                made.extend((*run, read_only, True) for run in model.runs(low, count))
            else:
                return "HOST_MEMORY_ALREADY_REGISTERED", made
        return "", made

    def _undone(self, at: int, size: int, made: list[tuple[int, int, bool, bool]], fail: int | None) -> None:
        """What was made goes again, last first, and what an undo left behind earlier; but for one that fails."""
        model = self.model
        left = [chunk for chunk in model.chunks_in(at, size) if not model.holders[chunk]]
        for gap in made:
            model.add(*gap)
            left.append(model.count)
        undo = None if fail is None else fail - self.calls
        for chunk in reversed(left):
            if chunk not in model.borrowed and undo is not None:
                undo -= 1
                if undo == -1:
                    continue
            model.remove(chunk)

    def _ask(
        self, ask: Callable[[], Registration | AdoptedRange], answer: str
    ) -> Registration | AdoptedRange | None:
        if not answer:
            return ask()
        if answer == "read-only":
            with pytest.raises(InvalidRequestError, match="read-only"):
                ask()
        else:
            with pytest.raises(DriverError) as caught:
                ask()
            assert caught.value.code == f"CUDA_ERROR_{answer}"
        return None

    @rule(which=consumes(held))
    def close(self, which: tuple[int, Registration | AdoptedRange]) -> None:
        number, registration = which
        registration.close()
        registration.close()
        self._closed(number)

    @rule(which=consumes(held), fail=st.integers(0, 2))
    def close_with_a_failure(self, which: tuple[int, Registration | AdoptedRange], fail: int) -> None:
        """What could be undone is; the rest stays registered until the next attempt."""
        number, registration = which
        self.driver.fail_after = fail
        try:
            registration.close()
        except DriverError:
            assert self.driver.registered > 0
            registration.close()
        self.driver.fail_after = None
        self._closed(number)

    @rule(which=consumes(held))
    def drop(self, which: tuple[int, Registration | AdoptedRange]) -> None:
        """What nobody closes, its finaliser does; hypothesis may keep the object, so it is asked to here."""
        number, registration = which
        handle = registration.registration if isinstance(registration, AdoptedRange) else registration
        handle._finalizer()
        self._closed(number)

    def _closed(self, number: int) -> None:
        for chunk, holders in self.model.holders.items():
            if number in holders:
                holders.remove(number)
                if not holders:
                    self.model.remove(chunk)

    @rule(target=foreign, where=ranges)
    def somebody_registers(self, where: tuple[int, int]) -> int:
        at, size = where
        mine = (unit in range(at, at + size) and chunk for unit, chunk in enumerate(self.model.chunk_of))
        taken = any(chunk and chunk not in self.model.borrowed for chunk in mine)
        if size == 0 or taken or any(self.model.foreign_of[at : at + size]):
            return 0
        Counting.__mro__[1].host_register(self.driver, self.start + at * UNIT, size * UNIT)
        self.model.foreign_of[at : at + size] = [at + 1] * size
        return at + 1

    @rule(which=consumes(foreign))
    def somebody_unregisters(self, which: int) -> None:
        if which:
            Counting.__mro__[1].host_unregister(self.driver, self.start + (which - 1) * UNIT)
            self.model.foreign_of = [0 if other == which else other for other in self.model.foreign_of]

    # -- what must be so --------------------------------------------------------------------------------
    @rule(where=ranges)
    def look(self, where: tuple[int, int]) -> None:
        at, size = where
        chunks = self.model.chunk_of
        span = Span(self.start + at * UNIT, size * UNIT)
        assert self.known.covers(*span) == all(chunks[at : at + size])
        cuts = [unit for unit in range(at, at + size) if unit == at or chunks[unit] != chunks[unit - 1]]
        ends = [*cuts[1:], at + size]
        expected = [
            Span(self.start + low * UNIT, (high - low) * UNIT) for low, high in zip(cuts, ends, strict=False)
        ]
        assert self.known.split(*span) == list(self.known.pieces(span)) == expected
        if size and all(chunks[at : at + size]) and not any(map(self.model.stale, chunks[at : at + size])):
            ptr = self.known.device_ptr(span.ptr, 0, span.nbytes)
            assert ptr == self.driver.host_device_pointer(span.ptr, 0)

    @invariant()
    def the_driver_and_the_map_agree(self) -> None:
        model = self.model
        ours = sum(bool(chunk) and chunk not in model.borrowed for chunk in model.chunk_of)
        assert self.known.nbytes == ours * UNIT
        assert self.driver.registered == (ours + sum(map(bool, model.foreign_of))) * UNIT
        found = {(chunk.start - self.start) // UNIT: len(chunk.holders) for chunk, _ in self.known.snapshot()}
        expected = {
            model.chunk_of.index(chunk): len(holders)
            for chunk, holders in model.holders.items()
            if chunk in model.chunk_of
        }
        assert found == expected

    def teardown(self) -> None:
        self.driver.close()


TestRegistering = Registering.TestCase
TestRegistering.settings = settings(
    max_examples=2 * settings.default.max_examples, stateful_step_count=30, parent=settings.default
)
