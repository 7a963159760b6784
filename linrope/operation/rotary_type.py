"""The checks of the class of a rotation."""

from linrope.rotation.rotary import Rotary

# What a call reads of a rotation's angles: with rope_order="before" the first three, which call each other
_ROTATE, _TURNS = ("__call__", "cos_sin", "angles"), "turns_per_position"
_GIVEN = ("theta", "frequencies", "xpos_log_decay")  # what Rotary's own arguments say


def check_overridden(rotary: Rotary, rotates_before_map: bool) -> None:
    """Refuses a subclass that changes the angles where the call does not read them, or whose states look alike."""
    kind = type(rotary)
    own = [name for name in (*_GIVEN, *_ROTATE, _TURNS) if getattr(kind, name) is not getattr(Rotary, name)]
    if not own:
        return
    got = f"rotary: got {kind.__name__} with its own {', '.join(own)}"
    if any(name in own for name in _GIVEN):
        raise TypeError(
            f"{got}; expected to give Rotary theta or xpos, or its own angles or {_TURNS}, and identity"
        )
    is_read = own != [_TURNS] if rotates_before_map else _TURNS in own
    if not is_read:
        order, read = ("before", "angles") if rotates_before_map else ("after", _TURNS)
        raise TypeError(
            f"{got}, which rope_order={order!r} does not call; expected its own {read}, or a plain Rotary and "
            "angles that depend on the data as angle_steps"
        )
    for parent in kind.__mro__:
        alike = issubclass(parent, Rotary) and parent.identity is kind.identity
        if alike and any(getattr(parent, name) is not getattr(kind, name) for name in own):
            raise TypeError(
                f"{got}, expected its own identity too, which tells apart its objects that turn by other angles"
            )


def check_rotary_type(rotary: object) -> None:
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(
            f"rotary: got {type(rotary).__name__}, expected a Rotary, such as Rotary(dim), or None"
        )
