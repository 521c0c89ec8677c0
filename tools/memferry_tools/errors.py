"""The errors of the tools."""


class ToolError(Exception):
    """Something that the user of a command can put right; it is printed as one line.

    Not a ``MemFerryError``, although commands treat both alike: the reference run of ``memferry train`` raises
    it too, and imports nothing of the runtime.
    """
