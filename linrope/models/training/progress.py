"""Reports how many pieces of its text a step or an evaluation has read."""

from collections.abc import Callable
from itertools import count

# Called with the number of pieces read and the number of all
OnPiece = Callable[[int, int], object]


def piece_counter(on_piece: OnPiece | None, pieces: int) -> Callable[[], None]:
    """A function that calls on_piece with 0, 1, .. and the number of pieces, one further with each of its own calls."""
    numbers = count()

    def count_piece() -> None:
        if on_piece is not None:
            on_piece(next(numbers), pieces)

    return count_piece
