"""What a transformer's training asks of a device allocator, as an allocation log; no framework needed.

Sequence lengths are drawn anew for every step, so that sizes hardly ever repeat: the case in which caching
allocators fragment.  Activations live until their layer's backward and leave in reverse order; temporaries
live for one operation; the workspace and a layer's weights, which are loaded for each pass, come and go;
gradients of weights stay until the optimizer has run; resident state stays for good.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from memferry_allocator.device.log import Action, LogEntry

COMPUTE, COPY = 0, 1
MIB = 1 << 20


@dataclass(frozen=True)
class TrainingLog:
    """A model and a loop; iterate over it for the log.

    Attributes
    ----------
    layers, hidden, feed_forward, heads, vocabulary : int
        The model; weights and activations have two bytes an element.
    batch : int
        Sequences a step.
    shortest, longest : int
        Between which tokens a sequence the length of every step is drawn.
    steps : int
    accumulate : int
        Micro-batches a step, each of a length of its own.
    resident : float
        Part of the layers whose weights stay on the device; the others are loaded for each pass.
    checkpointing : bool
        Whether a layer keeps its input only and computes the rest again.
    seed : int
    """

    layers: int = 24
    hidden: int = 2048
    feed_forward: int = 5632
    heads: int = 16
    vocabulary: int = 32000
    batch: int = 4
    shortest: int = 128
    longest: int = 2048
    steps: int = 20
    accumulate: int = 1
    resident: float = 0.5
    checkpointing: bool = False
    seed: int = 0

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(_Run(self).entries)

    @property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights of a layer."""
        h, f = self.hidden, self.feed_forward
        return (3 * h * h * 2, h * h * 2, 2 * h * f * 2, h * f * 2, h * 2, h * 2)


class _Run:
    """One walk through the training loop; every method is a phase of it."""

    def __init__(self, log: TrainingLog) -> None:
        self.log = log
        self.entries: list[LogEntry] = []
        self._random = random.Random(log.seed)
        self._sizes: dict[int, int] = {}
        self._gradients: list[int] = []
        for _ in range(round(log.layers * log.resident)):
            for nbytes in log.weights:
                self.take(nbytes)
        embedding = log.vocabulary * log.hidden * 2
        self.take(embedding)
        self.take(embedding)
        for _ in range(log.steps):
            self.step()

    def take(self, nbytes: int, stream: int = COMPUTE) -> int:
        number = len(self._sizes) + 1
        self._sizes[number] = nbytes
        self._note(Action.ALLOCATE, number, stream)
        return number

    def give(self, *numbers: int, stream: int = COMPUTE) -> None:
        for number in numbers:
            self._note(Action.FREE, number, stream)

    def step(self) -> None:
        for _ in range(self.log.accumulate):
            self.micro_batch(self.log.batch * self._random.randint(self.log.shortest, self.log.longest))
        self.optimizer()

    def micro_batch(self, tokens: int) -> None:
        layers = range(self.log.layers)
        ids = self.take(tokens * 8, COPY)
        hidden = self.take(tokens * self.log.hidden * 2)
        saved = []
        for layer in layers:
            loaded = self.load(layer)
            saved.append((hidden, *self.forward(tokens, keep=not self.log.checkpointing)))
            hidden = self.take(tokens * self.log.hidden * 2)
            self.give(*loaded)
        gradient = self.head(tokens, hidden)
        for layer in reversed(layers):
            loaded = self.load(layer)
            activations = saved.pop()
            if self.log.checkpointing:
                activations = (*activations, *self.forward(tokens, keep=True))
            gradient = self.backward(tokens, gradient, activations)
            self.give(*loaded)
        self.give(gradient, ids)

    def load(self, layer: int) -> list[int]:
        """Weights of a layer that is not resident, on the stream of the copies."""
        if layer < round(self.log.layers * self.log.resident):
            return []
        return [self.take(sum(self.log.weights), COPY)]

    def forward(self, tokens: int, *, keep: bool) -> tuple[int, ...]:
        """A layer's forward; what it keeps for its backward, in the order of making."""
        h, f, heads = self.log.hidden, self.log.feed_forward, self.log.heads
        kept = []
        for nbytes, temporaries in (
            (tokens * h * 2, (tokens * 4,)),  # norm
            (tokens * 3 * h * 2, (8 * MIB,)),  # queries, keys, values
            (tokens * h * 2, (tokens * heads * 4, tokens * 3 * h * 2)),  # attention
            (tokens * h * 2, (8 * MIB, tokens * h * 2)),  # projection
            (tokens * 2 * f * 2, (8 * MIB,)),  # gate and up
            (tokens * f * 2, (tokens * f * 4,)),  # activation
        ):
            inside = [self.take(temporary) for temporary in temporaries]
            kept.append(self.take(nbytes))
            self.give(*reversed(inside))
            if self._random.random() < 0.3:  # a mask or a statistic
                kept.append(self.take(tokens * self._random.choice((1, 4, heads * 4))))
        if keep:
            return tuple(kept)
        self.give(*kept)
        return ()

    def head(self, tokens: int, hidden: int) -> int:
        """Logits, loss, and the gradient that enters the last layer."""
        logits = self.take(tokens * self.log.vocabulary * 2)
        wide = self.take(tokens * self.log.vocabulary * 4)
        loss = self.take(4)
        self.give(logits)
        gradient = self.take(tokens * self.log.hidden * 2)
        self._gradients.append(self.take(self.log.vocabulary * self.log.hidden * 2))
        self.give(wide, loss, hidden)
        return gradient

    def backward(self, tokens: int, gradient: int, activations: tuple[int, ...]) -> int:
        """A layer's backward: activations leave in reverse, gradients of weights stay."""
        weights = list(self.log.weights)
        h, f = self.log.hidden, self.log.feed_forward
        flowing = gradient
        for index, activation in enumerate(reversed(activations)):
            workspace = self.take(8 * MIB)
            after = self.take(tokens * (f if index % 3 == 0 else h) * 2)
            if weights:
                self._gradients.append(self.take(weights.pop(0)))
            self.give(workspace, activation, flowing)
            flowing = after
        last = self.take(tokens * h * 2)
        self.give(flowing)
        return last

    def optimizer(self) -> None:
        """Gradients leave, in the order in which they came."""
        for gradient in self._gradients:
            temporary = self.take(self._sizes[gradient])
            self.give(gradient, temporary)
        self._gradients.clear()

    def _note(self, action: Action, number: int, stream: int) -> None:
        seconds = len(self.entries) * 1e-5
        self.entries.append(LogEntry(action, seconds, 0, number, number << 8, self._sizes[number], stream))
