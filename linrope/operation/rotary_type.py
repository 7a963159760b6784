"""The checks of the class of a rotation."""

from linrope.rotation.rotary import Rotary

# What a call reads of a rotation's angles: with rope_order="before" the first three, which call each other
_ROTATE, _TURNS = ("__call__", "cos_sin", "angles"), "turns_per_position"


def check_overridden(rotary: Rotary, rotates_before_map: bool) -> None:
    """Refuses a subclass that changes the angles where the call does not read them, or whose states look alike."""
    own = [name for name in (*_ROTATE, _TURNS) if getattr(type(rotary), name) is not getattr(Rotary, name)]
    if not own:
        return
    if own != [_TURNS] if rotates_before_map else _TURNS in own:
        if type(rotary).identity is Rotary.identity:
            raise TypeError(
                f"rotary: got {type(rotary).__name__} with its own {', '.join(own)}, expected its own identity "
                "too, which tells apart its objects that turn by other angles"
            )
        return
    order, read = ("before", "angles") if rotates_before_map else ("after", _TURNS)
    raise TypeError(
        f"rotary: got {type(rotary).__name__} with its own {', '.join(own)}, which rope_order={order!r} does not call; "
        f"expected its own {read}, or a plain Rotary and angles that depend on the data as angle_steps"
    )


def check_rotary_type(rotary: object) -> None:
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(
            f"rotary: got {type(rotary).__name__}, expected a Rotary, such as Rotary(dim), or None"
        )
