"""A request to an ``Engine``, and what has been generated for it."""

import hashlib
import random
import reprlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.decode.sampling import check_sampling
from linrope.decode.text import Decoder, TextStream, check_tokens


@dataclass(eq=False)
class Generation:
    """A request, and what has been generated for it.

    Args:
        unread: the tokens that the model has not read: those of the prompt, which ``Engine.encode`` makes of a text,
            then the last one generated.
        max_tokens: the number of tokens to generate, unless the text ends before.
        temperature: 0 takes the likeliest token. Otherwise logits are divided by it.
        top_p: the least likely tokens are left out, as long as the others have at least this probability together;
            None: no token is.
        seed: of the request's own generator of random numbers; None: an arbitrary one.
        stops: the texts, or bytes, before which the text ends.
        session: a file that keeps the states between requests; see ``Engine.load`` and ``Engine.save``. Set it before
            the end.
        inbox: the caller's own; the engine does not use it.
        prefix: how many of the first tokens other requests begin with, too. The engine reads them once, and keeps the
            states after them. At least one token must follow.

    Raises:
        TypeError: unread is no list of integers, or stops is no list of texts or bytes.
        ValueError: a token is negative or no integer of 64 bits, a stop sequence is empty, or a number is out of range.
    """

    unread: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stops: list[Any] = field(default_factory=list)
    session: Path | None = None
    inbox: Any = None
    prefix: int = field(default=0, kw_only=True)
    states: list[Any] | None = None  # those to continue from
    last_states: list[Any] | None = None  # those after the end, of a generation with a session
    submitted: bool = False
    slot: int = -1  # the row in the pools, while it runs
    generated: int = 0
    finish_reason: str | None = None  # "stop", "length", "error", or None: not finished
    cancelled: bool = False  # set it to free the slot before the next step
    prefix_unread: int = 0  # how many tokens of the prefix are still to be read, and then to be kept

    def __post_init__(self) -> None:
        check_tokens("unread", self.unread)
        if not isinstance(self.stops, list) or not all(isinstance(x, str | bytes) for x in self.stops):
            raise TypeError(f"stops: got {reprlib.repr(self.stops)}, expected a list of texts or bytes")
        if not all(self.stops):
            raise ValueError(f"stops={self.stops}: got an empty sequence, which every text contains")
        check_sizes(max_tokens=self.max_tokens)
        check_sampling(self.temperature, top_p=self.top_p, seed=self.seed)
        check_integers(prefix=self.prefix)
        if not 0 <= self.prefix < max(1, len(self.unread)):
            raise ValueError(
                f"prefix={self.prefix}: expected 0 to {max(0, len(self.unread) - 1)}, less than the prompt's tokens"
            )
        if self.prefix and self.session is not None:
            raise ValueError(
                f"prefix={self.prefix}: expected 0 with a session, whose states come before the prompt"
            )
        self.prefix_key = hashlib.sha256(array("q", self.unread[: self.prefix])).digest()
        seed = None if self.seed is None else int(self.seed)
        self.prompt_tokens, self.random = len(self.unread), random.Random(seed)
        self.decoder = Decoder(None, [])  # the engine puts one with its tokenizer here
        self.text = TextStream([x.encode() if isinstance(x, str) else x for x in self.stops])

    def take(self, token: int, ends: bool = False) -> str:
        """Adds a generated token; returns the text to send. ends: the token ends the text and is no part of it."""
        self.unread, self.generated = [token], self.generated + 1
        last = ends or self.generated == self.max_tokens
        text = ""
        for byte in self.decoder.add([] if ends else [token], last):
            piece, stopped = self.text.add(byte)
            text += piece
            if stopped:
                self.finish_reason = "stop"
                return text
        if last:
            self.finish_reason, text = "stop" if ends else "length", text + self.text.end()
        return text


Pieces = list[tuple[Generation, str | Exception | None]]
