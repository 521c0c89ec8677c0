"""Why a measurement gives no number."""

from __future__ import annotations

from ..errors import TransportError


class NotRunError(TransportError):
    """A case cannot run here; the message says why."""


class CorruptedError(TransportError):
    """The bytes that arrived are not those that were sent; a speed of such copies means nothing."""
