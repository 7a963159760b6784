"""Redrawing random projections in training."""

import hashlib

from torch import nn

from linrope.feature_maps.random_features import RandomFeatureMap


class Redraw:
    """Redraws all random feature maps of a model every so many optimizer steps, as Performers train.

    Call ``step()`` once after each optimizer step. A new projection is a function of the map before, of
    which every process of a distributed run has the same: all draw alike. Maps of equal projections stay
    equal. **States made before a redraw are invalid after it** and are refused: start sequences anew, or
    carry no state across steps. The step counter is all there is to save: ``Redraw(model, every, done)``.

    Args:
        model: whose modules are looked through at each redraw.
        every: how many steps between two redraws.
        done: the steps taken before, of a run that goes on; ``redraw.done`` of the one before.

    Raises:
        ValueError: every < 1, or done < 0.

    Choromanski et al. 2021, arXiv 2009.14794, and its public codes.

    >>> layer = LinearRoPEAttention(32, 2, feature_map="favor+")
    >>> redraw = feature_maps.Redraw(layer, every=1000)
    >>> redraw.step()
    False
    """

    def __init__(self, model: nn.Module, every: int, done: int = 0) -> None:
        if every < 1 or done < 0:
            raise ValueError(f"every={every}, done={done}: expected every >= 1 and done >= 0")
        self.model, self.every, self.done = model, every, done

    def step(self) -> bool:
        """Counts an optimizer step; redraws if it is due, and says whether it did."""
        self.done += 1
        if self.done % self.every:
            return False
        for module in self.model.modules():
            if isinstance(module, RandomFeatureMap):
                digest = hashlib.blake2b(module.identity.encode(), digest_size=7).digest()
                module.redraw(int.from_bytes(digest, "big"))
        return True
