"""The name of a class in the identities of states."""


def name_of(kind: type) -> str:
    """Its name, with its module outside of linrope: two classes of other authors may have one name."""
    ours = kind.__module__.startswith("linrope.")
    return kind.__name__ if ours else f"{kind.__module__}.{kind.__qualname__}"
