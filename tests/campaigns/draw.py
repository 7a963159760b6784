"""A random configuration of two calls: a first one, which makes a state, and one that is looked at."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrope import Rotary, feature_maps
from linrope.feature_maps import ELEMENTWISE, FeatureMap, Features
from linrope.feature_maps.unit import ACTIVATIONS
from linrope.rotation.rotary import MAX_POSITION
from tests.support.contract import SETTINGS, refused
from tests.support.maps import MAPS
from tests.support.oracle import DATA, computes, randoms

MOST_FEATURES = 64  # with gates per unit, of which the equation has one for each query, key and feature
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


class Given(FeatureMap):
    """Features that another map has made already; of a log_scaled one the last number is the log_scale."""

    def __init__(self, made: FeatureMap) -> None:
        super().__init__()
        self.feature_dim, self.positive, self.log_scaled = made.feature_dim, made.positive, made.log_scaled

    def queries(self, q: Tensor) -> Features:
        return (q[..., :-1], q[..., -1].detach().double()) if self.log_scaled else q

    def keys(self, k: Tensor) -> Features:
        return self.queries(k)


@dataclass
class Piece:
    """One call's tensors and options."""

    qkv: list[Tensor]
    how: dict[str, Any]

    def wide(self) -> "Piece":
        data = {name: self.how[name].double() for name in DATA if name in self.how}
        return Piece([x.double() for x in self.qkv], self.how | data)


class Configuration:
    """A first piece, which makes a state, and a second, which is looked at, both drawn from one number."""

    def __init__(self, seed: int, index: int, dtypes: list[str], most: int) -> None:
        """most: tokens of a sequence that is looked at."""
        self.chance = chance = random.Random(f"{seed}/{index}")
        torch.manual_seed(1_000_003 * seed + index)  # of learned maps' weights
        self.generator = torch.Generator().manual_seed(chance.getrandbits(60))
        self.dtype_name = chance.choice(dtypes)
        self.dtype = DTYPES[self.dtype_name]
        self.scale = chance.choice([0.1, 1.0, 1.0, 2.0, 3.0, 6.0])
        self.kind = chance.choice(["causal"] * 5 + ["packed"] * 2 + ["bidirectional", "cross", "packed both"])
        self.causal = self.kind in ("causal", "packed")
        self.packed = self.kind.startswith("packed")
        self.g, self.r = chance.choice([1, 1, 2, 3]), chance.choice([1, 1, 2, 3])
        self.e = chance.choice([1, 3, 4, 8, 16, 33])
        self.most = most
        self._draw_tokens()
        self._draw_map()
        self._draw_rotation()
        self._draw_fading()
        self._draw_write(random.Random(f"{seed}/{index}/write"))
        self._draw_positions()
        self.eps = chance.choice([1e-6, 1e-6, 1e-3, 1.0])
        self.eps_mode = chance.choice(["clamp", "clamp", "add"])
        self.strength: Tensor | None = None
        self.nearly_equal_keys = False
        self._draw_erase(random.Random(f"{seed}/{index}/erase"))
        self._draw_units(random.Random(f"{seed}/{index}/units"))
        self._build()

    def __repr__(self) -> str:
        names = (
            "kind", "before", "lengths", "dtype_name", "scale", "g", "r", "e", "map", "normalize", "rotary",
            "order", "eps", "eps_mode", "given", "gap", "decay", "nearly_equal_keys",
        )  # fmt: skip
        text = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{text}, data={ {name: tuple(x.shape) for name, x in self.data.items()} }, m={self.m}"

    @property
    def rounds(self) -> bool:
        """Whether something is done to q and k before the map."""
        return self.rotary is not None and (self.order == "before" or self.rotary.attention_factor != 1)

    def computed_by(self, backend: str) -> bool:
        """False if the backend refuses an input of each token, the value of a setting, or the map."""
        elementwise = "" if self.map is None else self.map.elementwise or ""
        return not any(
            name in self.data or (name in SETTINGS and getattr(self, name) != SETTINGS[name])
            for name in refused(backend)
        ) and computes(backend, elementwise)

    def rand(self, *shape: int) -> Tensor:
        numbers = torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return numbers.to(torch.get_default_device())

    def _draw_tokens(self) -> None:
        chance = self.chance

        def length() -> int:
            return chance.choice([0, 1, 1, 2, chance.randint(1, 40), chance.randint(1, self.most)])

        sequences = chance.choice([1, 2, 3]) if self.packed else chance.choice([1, 1, 2, 3])
        has_state = chance.random() < 0.5
        if self.packed:
            self.lengths = [length() if i < 2 else chance.randint(0, 5) for i in range(sequences)]
            before = [chance.choice([0, 1, chance.randint(0, 40)]) * has_state for _ in range(sequences)]
        else:
            self.lengths = [length()] * sequences
            before = [chance.choice([1, chance.randint(1, 60)]) * has_state] * sequences
        self.before, self.sequences, self.has_state = before, sequences, has_state
        self.b = 1 if self.packed else sequences
        self.m = length() if self.kind == "cross" else None  # keys, where they are not as many as queries

    def _draw_map(self) -> None:
        chance = self.chance
        kind = chance.choice(["elementwise"] * 3 + ["unit", "other", "other", "features", "features signed"])
        self.d = chance.choice([1, 2, 3, 4, 6, 8, 8, 16, 32])
        self.map: FeatureMap | None = None
        if kind == "elementwise":
            self.map = feature_maps.make(chance.choice([*ELEMENTWISE, "softmax"]), self.d)
        elif kind == "unit":
            activation, factor = chance.choice(ACTIVATIONS), chance.choice([1, 0.25, 3.0])
            self.map = feature_maps.make("unit", self.d, activation=activation, query_factor=factor)
        elif kind == "other":
            self.d = max(2, self.d - self.d % 2)
            label, options = MAPS[chance.choice([name for name in MAPS if name not in ELEMENTWISE])]
            if "num_heads" in options:
                options = options | {"num_heads": self.g * self.r, "num_kv_heads": self.g}
            if "max_length" in options:
                options = options | {"max_length": 4 * self.most}
            self.map = feature_maps.make(label, self.d, **options)
            if self.map.feature_dim > 64:
                self.map = feature_maps.make("elu+1", self.d)
        positive = kind == "features" if self.map is None else self.map.positive
        self.normalize = positive and chance.random() < 0.7
        self.positive = positive
        self.f = self.d if self.map is None else self.map.feature_dim

    def _draw_rotation(self) -> None:
        chance, f = self.chance, self.f
        names = "none pairs pairs pairs partial heads axes yarn xpos before"
        name = chance.choice(names.split())
        layout, pairs = chance.choice(["interleaved", "half"]), f // 2
        self.order, self.rotary = "after", None
        few = f < 4  # to turn with two axes
        if name == "before" and self.d % 2 == 0:
            self.order, self.rotary = "before", Rotary(self.d, layout=layout)
        elif f % 2 or name in ("none", "before"):
            pass
        elif name == "pairs" or (name, self.causal) == ("xpos", False) or (name == "axes" and few):
            self.rotary = Rotary(f, layout=layout, base=chance.choice([1e4, 10.0, 1e6]))
        elif name == "partial":
            self.rotary = Rotary(f, layout=layout, rotary_dim=2 * chance.randint(1, pairs))
        elif name == "heads":
            self.rotary = Rotary(f, layout=layout, theta=3 * self.rand(self.g, pairs))
        elif name == "axes":
            self.rotary = Rotary.axial(f, 2, layout=layout)
        elif name == "yarn":
            scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
            self.rotary = Rotary(f, layout=layout, scaling=scaling)
        else:
            self.rotary = Rotary(f, layout=layout, xpos=chance.choice([20.0, 512.0]))

    def _draw_fading(self) -> None:
        chance, n = self.chance, sum(self.lengths) if self.packed else self.lengths[0]
        n += sum(self.before) if self.packed else self.before[0]
        heads, rows = chance.choice([1, self.g]), chance.choice([1, self.b])
        own = chance.choice([self.dtype, torch.float32])
        axes = self.rotary is not None and self.rotary.axes is not None
        xpos = self.rotary is not None and self.rotary.xpos is not None
        self.data: dict[str, Tensor] = {}
        self.decay = None
        if self.causal and not axes and chance.random() < 0.35:
            known = [1e-30, 1e-3, 0.1, 0.5, 0.8, 0.9, 0.99, 0.999, 1 - 2.0**-20, 1.0]
            self.decay = torch.tensor([chance.choice(known) for _ in range(self.g)], dtype=torch.float64)
        if self.causal and chance.random() < 0.4:
            gates = -self.rand(rows, n, heads).square() * chance.choice([1e-4, 0.05, 0.5, 4, 30])
            for strength in (0, -20, -1e4, -6e4):
                if chance.random() < 0.4:
                    gates.masked_fill_(self.rand(rows, n, heads) < chance.choice([0.02, 0.3]), strength)
            self.data["log_decay"] = gates.to(own)
        if self.m is None and not xpos and self.order == "after" and self.f >= 2 and chance.random() < 0.35:
            pairs = self.f // 2 if self.rotary is None else self.rotary.rotary_dim // 2
            steps = chance.choice([0.01, 1.0, 6.0]) * (2 * self.rand(rows, n, heads, pairs) - 1)
            self.data["angle_steps"] = steps.to(own)
        self.fades_by_position = self.decay is not None or xpos
        self.gap = 1 if xpos else chance.choice([1, 1, 1, 1, 3, 10**6])

    def _draw_write(self, chance: random.Random) -> None:
        """The factors of values. They have a chance of their own, so that older numbers still draw the same calls."""
        if chance.random() < 0.3:
            keys = self.before[0] + (self.lengths[0] if self.m is None else self.m)
            if self.packed:
                keys = sum(self.lengths) + sum(self.before)
            shape = chance.choice([1, self.b]), keys, chance.choice([1, self.g])
            generator = torch.Generator().manual_seed(chance.getrandbits(60))
            factors = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.data["write"] = factors.to(chance.choice([self.dtype, torch.float32]))

    def _draw_erase(self, chance: random.Random) -> None:
        """The delta rule, for calls that may have it, with a chance of its own."""
        xpos = self.rotary is not None and self.rotary.xpos is not None
        refused = self.map is not None and (self.map.log_scaled or self.map.long_keys)
        if not self.causal or xpos or refused or chance.random() < 0.4:
            return
        self.normalize = False
        self.nearly_equal_keys = chance.random() < 0.3
        n = sum(self.before) + sum(self.lengths) if self.packed else self.before[0] + self.lengths[0]
        shape = chance.choice([1, self.b]), n, chance.choice([1, self.g])
        generator = torch.Generator().manual_seed(chance.getrandbits(60))

        def numbers() -> Tensor:
            x = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
            return x.to(torch.get_default_device())

        self.dtype_of_erase = chance.choice([self.dtype, torch.float32])
        self.strength = chance.choice([0.1, 1, 2]) * numbers()
        for value in (0, 1, 2):
            if chance.random() < 0.2:
                self.strength.masked_fill_(numbers() < chance.choice([0.1, 1]), value)
        if chance.random() < 0.3:  # gates of all sizes, beside each other or alike
            power = 10 * numbers() - 6 if chance.random() < 0.5 else torch.full(shape, chance.uniform(-6, 4))
            self.data["log_decay"] = -(10**power).to(chance.choice([self.dtype, torch.float32]))

    def _draw_units(self, chance: random.Random) -> None:
        """Gates per unit in place of gates per head: each unit's are a multiple of the head's, and some are closed."""
        gates = self.data.get("log_decay")
        rotates_before = self.order == "before" and self.rotary is not None
        if gates is None or rotates_before or self.f > MOST_FEATURES or chance.random() < 0.6:
            return
        pairs = self.data["angle_steps"].shape[-1] if "angle_steps" in self.data else 0
        pairs = pairs if self.rotary is None else self.rotary.rotary_dim // 2
        generator = torch.Generator().manual_seed(chance.getrandbits(60))
        powers = 4 * torch.rand(self.f - pairs, generator=generator, dtype=torch.float64, device="cpu") - 3
        by_unit = gates.double()[..., None] * 10 ** powers.to(gates.device)
        closed = torch.rand(by_unit.shape, generator=generator, device="cpu") < chance.choice([0, 0, 0.05])
        by_unit = by_unit.masked_fill(closed.to(gates.device), -1e4)
        self.data["log_decay"] = by_unit.clamp(min=-6e4).to(gates.dtype)  # the least of float16

    def _erase(self, k: Tensor) -> Tensor:
        """The share that each token erases: of the largest one with which a state surely does not grow, 1 / |psi|^2."""
        assert self.strength is not None
        keys = k.double()
        if (
            self.order == "before"
        ):  # each feature is at most as large as its pair, which is turned before the map
            assert self.rotary is not None
            inner = self.rotary.layout == "interleaved"
            pairs = keys.unflatten(-1, (-1, 2) if inner else (2, -1)).norm(dim=-1 if inner else -2)
            keys = pairs.repeat_interleave(2, -1) if inner else pairs.repeat(1, 1, 1, 2)
        if self.map is not None:
            keys = self.map.keys(keys).double()
        squared = keys.square().sum(-1)
        rows, _, heads = self.strength.shape
        squared = squared if rows > 1 else squared.amax(0, keepdim=True)
        squared = squared if heads > 1 else squared.amax(2, keepdim=True)
        return (self.strength / squared.clamp(min=2.0**-20)).to(self.dtype_of_erase)

    def _draw_positions(self) -> None:
        """Of all tokens of both pieces, per sequence; None: by default."""
        chance, axes = self.chance, self.rotary is not None and self.rotary.axes is not None
        self.given = chance.choice(["none", "none", "first", "both"])
        if axes:
            self.given = "both"
        falls = not self.fades_by_position and chance.random() < 0.2
        self.positions: list[Tensor] = []
        start = chance.choice([0, 7, 10**6, chance.randint(0, MAX_POSITION - 10**9)])
        if self.order == "before" and self.dtype == torch.float64:
            # The angles of this order are rounded to float64; those of the equation are not.
            start, self.gap = 7, min(self.gap, 3)
        for before, length in zip(self.before, self.lengths, strict=True):
            count = before + length
            if axes:
                self.positions.append((self.rand(count, 2) * chance.choice([50, MAX_POSITION])).long())
                continue
            steps = torch.ones(count, dtype=torch.int64)
            if self.gap > 1:
                steps = (self.rand(count) * (self.gap + 1)).long()
            x = start + steps.cumsum(0)
            self.positions.append(x[self.rand(count).argsort()] if falls else x)

    def _build(self) -> None:
        """The tensors of both pieces."""
        chance = self.chance
        total = [x + y for x, y in zip(self.before, self.lengths, strict=True)]
        n = sum(total) if self.packed else total[0]
        m = None if self.m is None else self.before[0] + self.m
        softmax = type(self.map).__name__ == "SoftmaxMap"
        exponential = softmax or (self.map is not None and self.map.elementwise == "exp")
        if exponential and self.dtype == torch.float32:
            # Rounding an exponent x costs u |x|, before any backend sees it.
            self.scale = min(self.scale, 1.0)
        q, k, v = randoms(
            self.b, n, self.g * self.r, self.d, g=self.g, m=m, e=self.e, dtype=self.dtype,
            seed=chance.getrandbits(31), scale=self.scale,
        )  # fmt: skip
        if self.map is None and self.positive:
            q, k = q.abs(), k.abs()
        if self.nearly_equal_keys:
            k = k[:, :1] + k / 100
        if chance.random() < 0.2:  # heads first in memory
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        self.mask = None
        if chance.random() < 0.3:
            self.mask = self.rand(self.b, n if m is None else m) > chance.choice([0.1, 0.5, 0.95])
        self.by_backend = by_backend = self.map is None or (
            self.map.elementwise is not None and not self.map.log_scaled
        )
        if not by_backend and not exponential and self.dtype == torch.float32 and self.order == "after":
            # Its float32 exponents and sums are off by many u: the bound is the backend's, on the features.
            q, k = self._features(q, k)
            self.map = Given(self.map)
        self.tensors = q, k, v
        if self.strength is not None:
            with torch.no_grad():
                self.data["erase"] = self._erase(k)
        first, second, at, tokens = [], [], 0, torch.arange(n)
        for before, both in zip(self.before, total, strict=True):
            first.append(tokens[at : at + before])
            second.append(tokens[at + before : at + both])
            at += both if self.packed else 0
        if not self.packed:
            first, second = first[:1], second[:1]
        self.which = [torch.cat(x) for x in (first, second)]

    @torch.no_grad()
    def _features(self, q: Tensor, k: Tensor) -> list[Tensor]:
        found = []
        for of, x in ((self.map.queries, q), (self.map.keys, k)):
            made = of(x)
            found.append(torch.cat((made[0], made[1][..., None]), -1) if self.map.log_scaled else made)
        return [x.float() for x in found]

    def piece(self, number: int) -> Piece:
        which = self.which[number]
        at_keys = which
        if self.m is not None:
            at_keys = torch.arange(self.before[0]) if number == 0 else self.before[0] + torch.arange(self.m)
        q, k, v = self.tensors
        qkv = [q[:, which], k[:, at_keys], v[:, at_keys]]
        how: dict[str, Any] = {
            "feature_map": self.map, "rotary": self.rotary, "rope_order": self.order, "causal": self.causal,
            "normalize": self.normalize, "eps": self.eps, "eps_mode": self.eps_mode, "decay": self.decay,
        }  # fmt: skip
        how |= {name: x[:, at_keys] for name, x in self.data.items()}
        if self.mask is not None:
            how["key_mask"] = self.mask[:, at_keys]
        if self.packed:
            counts = self.before if number == 0 else self.lengths
            how["cu_seqlens"] = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
        if self.given == "both" or (self.given == "first" and number == 0):
            how |= self._places(number)
        return Piece(qkv, how)

    def _places(self, number: int) -> dict[str, Tensor]:
        cut = zip(self.positions, self.before, strict=True)
        parts = [x[:before] if number == 0 else x[before:] for x, before in cut]
        joined = torch.cat(parts) if self.packed else torch.stack(parts)
        if not self.packed and self.b == 1:
            joined = joined[0]
        places = {"positions": joined}
        if self.m is not None and number == 1:
            axes = () if self.rotary is None or self.rotary.axes is None else (2,)
            places["key_positions"] = (self.rand(self.m, *axes) * 1000).long()
        return places
