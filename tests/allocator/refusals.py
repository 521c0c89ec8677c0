"""Which calls of a driver may be refused, and whether an error is such a refusal."""

from __future__ import annotations

from memferry_allocator import Driver, UnsupportedError

# Calls that a machine may be without, beside those that `Driver` itself refuses.
WITHOUT = frozenset({"host_device_pointer", "stream_from_handle"})
MAY_REFUSE = WITHOUT | {
    name
    for name, call in vars(Driver).items()
    if callable(call) and not name.startswith("_") and not getattr(call, "__isabstractmethod__", False)
}


def is_refusal(error: UnsupportedError) -> bool:
    """Whether an error comes from a call that may be refused."""
    names, trace = set(), error.__traceback__
    while trace is not None:
        names.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return not MAY_REFUSE.isdisjoint(names)
