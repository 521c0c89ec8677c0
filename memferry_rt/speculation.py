"""Whether updates made ahead of `step` are likely to be used."""

from __future__ import annotations

PATIENCE = 2  # steps in a row that throw the work away before it is no longer done
RETURN = 4  # steps in a row that would have used it before it is done again


class Speculation:
    """Stops work ahead of time while clipping bites often, and resumes it later.

    Attributes
    ----------
    active : bool
        Whether to work ahead now.
    """

    def __init__(self) -> None:
        self.active = True
        self._row = 0

    def learn(self, useful: bool) -> None:
        """A step was made: could it use gradients as they are?"""
        self._row = self._row + 1 if useful is not self.active else 0
        if self._row >= (PATIENCE if self.active else RETURN):
            self.active, self._row = not self.active, 0
