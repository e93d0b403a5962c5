"""The one outcome of reading and writing that is not a formula or a tensor."""


class Unreadable(Exception):  # noqa: N818, an outcome and not an error
    """The reason why a value has no formula, or a formula cannot be a tensor of the graph."""
