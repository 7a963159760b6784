"""The states after texts that several requests begin with."""

import copy
import logging
import math
from collections import OrderedDict
from typing import Any

from torch import Tensor

from linrope.decode.request import Generation


class Prefixes:
    """Copies of states after prefixes, by their tokens. Those used least recently are given up first.

    Args:
        most_bytes: the size of all copies together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes, self.hits = most_bytes, 0, 0
        self.kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        # The length of the shortest prefix whose states were too large
        self.too_long = math.inf if most_bytes else 0

    def take(self, generation: Generation) -> Any:
        """A copy of the states after the generation's prefix, which it then need not read. None: there are none."""
        if generation.prefix_key not in self.kept:
            generation.prefix_unread = generation.prefix if generation.prefix < self.too_long else 0
            return None
        self.kept.move_to_end(generation.prefix_key)
        generation.unread, self.hits = generation.unread[generation.prefix :], self.hits + 1
        return copy.deepcopy(self.kept[generation.prefix_key][0])

    def keep(self, generation: Generation, states: Any) -> None:
        """Keeps a copy of the states after the generation's prefix, if all copies can be smaller than the bound."""
        copied: dict[int, Any] = {}
        try:
            states = copy.deepcopy(states, copied)  # which lists every copy that it makes
        except Exception:  # no memory: the request goes on
            logging.exception("a prefix was not kept")
            return
        nbytes = sum(x.untyped_storage().nbytes() for x in copied.values() if isinstance(x, Tensor))
        if nbytes > self.most_bytes:
            self.too_long = min(self.too_long, generation.prefix)
            return
        self.kept[generation.prefix_key] = states, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.most_bytes:
            _, (_, given_up) = self.kept.popitem(last=False)
            self.nbytes -= given_up
