"""Redraws random projections in training."""

import hashlib

from torch import nn

from linrope.common.argument_checks import check_integers
from linrope.feature_maps.random_features import RandomFeatureMap


class Redraw:
    """Redraws all random feature maps of a model at regular intervals, as in the training of Performers.

    Call ``step()`` once after each optimizer step. A new projection is seeded by the old map, which is
    the same in every process of a distributed run, so all processes draw the same one. Maps with equal projections
    stay equal. **States from before a redraw are rejected after it**: carry no state across optimizer
    steps. To resume, save the step counter ``redraw.done`` and call ``Redraw(model, every, done)``.

    Args:
        model: the model, whose modules are searched at each redraw.
        every: the number of steps between two redraws.
        done: the number of steps before this run.

    Raises:
        TypeError: every or done is not an integer.
        ValueError: every < 1, or done < 0.

    Choromanski et al. 2021, arXiv 2009.14794, and its public implementations.

    >>> layer = LinearRoPEAttention(32, 2, feature_map="favor+")
    >>> redraw = feature_maps.Redraw(layer, every=1000)
    >>> redraw.step()
    False
    """

    def __init__(self, model: nn.Module, every: int, done: int = 0) -> None:
        check_integers(every=every, done=done)
        if every < 1 or done < 0:
            raise ValueError(f"every={every}, done={done}: expected every >= 1 and done >= 0")
        self.model, self.every, self.done = model, every, done

    def step(self) -> bool:
        """Counts an optimizer step; redraws if it is time to, and returns whether it did."""
        self.done += 1
        if self.done % self.every:
            return False
        for module in self.model.modules():
            if isinstance(module, RandomFeatureMap):
                digest = hashlib.blake2b(module.identity.encode(), digest_size=7).digest()
                module.redraw(int.from_bytes(digest, "big"))
        return True
