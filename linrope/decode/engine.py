"""Continuous batching: requests join and leave a running batch, and prompts are read in pieces.

docs/examples/serve.py serves an ``Engine`` over HTTP.
"""

import hashlib
import json
import logging
import reprlib
import threading
import time
from collections.abc import Callable
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_sizes
from linrope.common.files import parse_json
from linrope.decode.parts import DecodableModel
from linrope.decode.prefixes import Prefixes
from linrope.decode.request import Generation, Pieces
from linrope.decode.sampling import LOWEST_TEMPERATURE, likeliest_first
from linrope.decode.serving_models import serving_model
from linrope.decode.text import Decoder, check_tokens, encode
from linrope.decode.with_cache import longest_text
from linrope.layer.states import forms, read_states, write_states

_SESSION = "linrope.Session"


class Engine:
    """Runs generations together on one thread. Each has a slot.

    Each step first generates the next token of every generation with a single unread token. The others then read up to
    ``budget`` tokens of their prompts, which also gives the first token of those whose prompt ends there. A long prompt
    therefore delays the others by one such piece for each token that they generate.

    A LanguageModel or LinRopeForCausalLM with linear layers only is batched: a slot is a row in every layer's pool of
    states, and one call of the model reads all generations. Hybrids, softmax attention and models of transformers read
    each prompt by itself, then decode all generations in one call. The engine checks at its start that a model gives
    each of them the logits that it has alone. If not, the model reads one generation after another, and
    ``serving.reason`` says why. Only the first kind has sessions.

    Args:
        model: a ``linrope.models.LanguageModel``, a ``LinRopeForCausalLM``, or a causal language model of transformers,
            on any device. The engine freezes it.
        slots: how many generations run at once.
        queue: how many more may wait.
        budget: the number of prompt tokens in one step, at least 16; None: as many as the model reads in 15 ms.
        tokenizer: of transformers. Its end-of-sequence token ends a text, as do those of the model's generation_config.
            None: tokens are bytes.
        prefix_bytes: the size of the states that are kept of prefixes. Those used least recently are given up first.

    Raises:
        TypeError, ValueError: the model is of another kind, the tokenizer does not fit it, or a number is too small.

    >>> from linrope.decode import Engine, Generation
    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_heads=2, num_layers=1))
    >>> engine = Engine(model, slots=2, queue=2, budget=64)
    >>> requests = [Generation([*b"prompt"], max_tokens=count) for count in (3, 5, 4)]
    >>> all(engine.submit(request) for request in requests)
    True
    >>> while any(request.finish_reason is None for request in requests):
    ...     pieces = engine.step()  # pairs of a generation and the text to send
    >>> [request.generated for request in requests]
    [3, 5, 4]
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        queue: int,
        budget: int | None = None,
        tokenizer: Any = None,
        prefix_bytes: int = 2**28,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel or another module")
        check_sizes(slots=slots)
        check_sizes(0, queue=queue, prefix_bytes=prefix_bytes)
        check_sizes(16, budget=budget)
        if tokenizer is not None and not hasattr(tokenizer, "eos_token_id"):
            raise TypeError(
                f"tokenizer: got {type(tokenizer).__name__}, expected one of transformers, such as "
                "PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
            )
        self.model, self.slots, self.queue = model.eval().requires_grad_(False), slots, queue
        self.serving = serving_model(model, slots)
        self.tokenizer, tokens = tokenizer, 256 if tokenizer is None else len(tokenizer)
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab_size: int = config.vocab_size
        if tokenizer is None and self.vocab_size != 256:
            raise ValueError(
                f"tokenizer: got None for {self.vocab_size} tokens, expected the model's tokenizer"
            )
        if tokens > self.vocab_size:
            raise ValueError(
                f"tokenizer: got {tokens} tokens, expected at most the model's {self.vocab_size}"
            )
        self.longest: int | None = longest_text(self.serving.model)
        self.prefixes = Prefixes(prefix_bytes)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.ends = {getattr(tokenizer, "eos_token_id", None), *(ends if isinstance(ends, list) else [ends])}
        self.oldest_reads = False  # the oldest prompt, where only one is read in a step
        self.budget = budget or self._measured_budget()
        self.free, self.stopped, self.changed = list(range(slots)), False, threading.Condition()
        self.running: list[Generation] = []
        self.waiting: list[Generation] = []

    def __repr__(self) -> str:
        return (
            f"Engine({type(self.model).__name__}, {self.slots} slots, {len(self.running)} running, "
            f"{len(self.waiting)} of {self.queue} waiting, budget {self.budget})"
        )

    @cached_property
    def digest(self) -> str:
        """A digest of the model's configuration and weights, which its sessions hold."""
        hashed = hashlib.sha256(repr(self.model.config).encode())
        for x in self.model.state_dict().values():
            hashed.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy())
        return hashed.hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text: its bytes without a tokenizer.

        special: with the tokens that a model of transformers expects in front of a text.
        """
        return encode(self.tokenizer, text, special and not isinstance(self.model, DecodableModel))

    def _measured_budget(self, seconds: float = 0.015) -> int:
        """The number of prompt tokens that the model reads in this time: a power of two, 64 to 4096."""
        budget, longest = 64, min(4096, self.longest or 4096)
        while budget < longest / 2 and min(self._seconds_to_read(2 * budget) for _ in range(3)) <= seconds:
            budget *= 2
        return budget

    def _seconds_to_read(self, count: int) -> float:
        self.serving.join(0, None)
        start = time.perf_counter()
        self._read([Generation([0] * count, slot=0)], count)[1].cpu()  # which waits for a GPU
        seconds = time.perf_counter() - start
        self.serving.leave(0)
        return seconds if self.serving.failed.pop(0, None) is None else float("inf")  # too long for the model

    def submit(self, generation: Generation) -> bool:
        """Puts a generation into the queue. False: the queue is full, or the engine was stopped.

        Raises:
            TypeError: generation is no Generation.
            ValueError: the generation has nothing to read, was submitted before, has a token that the model does not
                know or states that do not fit the model, or a session that the model does not support.
        """
        if not isinstance(generation, Generation):
            raise TypeError(
                f"generation: got {reprlib.repr(generation)}, expected Generation(engine.encode(text))"
            )
        if not generation.unread:
            raise ValueError("unread: got no tokens, expected at least one")
        check_tokens("unread", generation.unread, self.vocab_size)
        if generation.submitted:
            raise ValueError("generation: got one that was submitted before, expected a new one")
        empty = self.serving.empty
        if empty is None and (generation.session or generation.states):
            name = "session" if generation.session else "states"
            raise ValueError(
                f"{name}: expected None with {type(self.model).__name__}, whose states the engine cannot save: it has "
                "layers that are not linear layers of linrope"
            )
        if generation.states is not None and generation.prefix:
            raise ValueError(
                f"prefix={generation.prefix}: expected 0 with states, which come before the prompt"
            )
        if generation.states is not None and empty is not None:
            found, expected = forms(generation.states), forms(empty)
            if different := [pair for pair in zip_longest(found, expected) if pair[0] != pair[1]]:
                raise ValueError("states: got {}, expected {} in a layer".format(*different[0]))
        tokens = len(generation.unread) + generation.max_tokens
        if self.longest is not None and tokens > self.longest:
            raise ValueError(
                f"unread, max_tokens: got {tokens} tokens together, expected at most {self.longest}, for which the "
                "model has positions"
            )
        generation.decoder = Decoder(self.tokenizer, generation.unread)
        with self.changed:
            room = not self.stopped and len(self.running) + len(self.waiting) < self.slots + self.queue
            if room:
                generation.submitted = True
                self.waiting.append(generation)
                self.changed.notify()
        return room

    def stop(self) -> None:
        """Ends ``run``. Those that run or wait end with an error."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self, send: Callable[[Pieces], object]) -> None:
        """Makes steps until ``stop`` is called, and sends the pieces of each. If a step fails, the running ones end."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.running or self.waiting or self.stopped)
            if self.stopped:
                break
            try:
                pieces = self.step()
            except Exception as error:  # the states may be half written: end all that use them
                logging.exception("a step failed")
                pieces = [self.fail(x, error) for x in [*self.running]]
            if pieces:
                send(pieces)
        stopped = RuntimeError("the engine was stopped")
        left, self.waiting = self.waiting, []
        for x in left:
            x.finish_reason = "error"
        ended: Pieces = [self.fail(x, stopped) for x in [*self.running]]
        ended += [(x, stopped) for x in left]
        if ended:
            send(ended)

    @torch.no_grad()
    def step(self) -> Pieces:
        """Returns the text that can be sent now as (generation, text), and (generation, None) for each that ended.

        A generation that the model cannot read ends as (generation, exception), if the others have states of their own.
        """
        with self.changed:
            for generation in [x for x in self.running if x.cancelled]:
                self._leave(generation)
            self.waiting = [x for x in self.waiting if not x.cancelled]
            self._admit()
        steps: list[tuple[list[Generation], Tensor]] = []
        decoding = [x for x in self.running if len(x.unread) == 1]
        reading = [x for x in self.running if len(x.unread) > 1]
        if decoding:
            steps.append(self._decode(decoding))
        if reading:
            steps.append(self._read(reading, self.budget))
        failed = self.serving.failed
        pieces: Pieces = [self.fail(x, failed.pop(x.slot)) for x in [*self.running] if x.slot in failed]
        ready = [x for generations, _ in steps for x in generations]
        if not ready:
            return pieces
        logits = torch.cat([logits for generations, logits in steps if generations])
        for x, token in zip(ready, choose(ready, logits), strict=True):
            if piece := x.take(token, token in self.ends):
                pieces.append((x, piece))
            if x.finish_reason:
                if x.session:
                    x.last_states = self.serving.states(x.slot)
                self._leave(x)
                pieces.append((x, None))
        return pieces

    def _decode(self, generations: list[Generation]) -> tuple[list[Generation], Tensor]:
        """Reads one token of each; returns those that the model could read, and the logits of their next tokens."""
        logits = self.serving.decode([x.slot for x in generations], [x.unread for x in generations])
        return [x for x in generations if x.slot not in self.serving.failed], logits

    def _read(self, generations: list[Generation], budget: int) -> tuple[list[Generation], Tensor]:
        """Reads pieces of prompts: even shares of the budget, but no fewer tokens than ``least_piece``.

        The shortest prompts come first, so none of them waits for a long one. The prompt that has waited longest, the
        first of ``generations``, always gets a share too, or every second budget that is too small for two. Returns the
        generations whose prompts end here, and the logits of their first tokens.
        """
        pieces: list[list[int]] = []
        oldest, *others = generations
        others = sorted(others, key=lambda x: len(x.unread))[: max(1, budget // self.serving.least_piece - 1)]
        generations = sorted([oldest, *others], key=lambda x: len(x.unread))
        if budget < 2 * self.serving.least_piece:
            self.oldest_reads = not self.oldest_reads
            generations = [oldest] if self.oldest_reads else generations[:1]
        for i, x in enumerate(generations):
            share = min(budget // (len(generations) - i), x.prefix_unread or budget)
            pieces.append(x.unread[:share])
            x.unread, budget = x.unread[share:], budget - len(pieces[-1])
        ended = [i for i, x in enumerate(generations) if not x.unread]
        logits = self.serving.read([x.slot for x in generations], pieces, ended)
        for x, piece in zip(generations, pieces, strict=True):
            if x.prefix_unread and x.slot not in self.serving.failed:
                x.prefix_unread -= len(piece)
                if not x.prefix_unread:
                    self.prefixes.keep(x, self.serving.states(x.slot))
        return [x for i in ended if (x := generations[i]).slot not in self.serving.failed], logits

    def _admit(self) -> None:
        """Lets those that wait join, as far as there are slots, but none whose prefix another one is reading."""
        for generation in [*self.waiting]:
            being_read = {x.prefix_key for x in self.running if x.prefix_unread}
            if self.free and generation.prefix_key not in being_read:
                self.waiting.remove(generation)
                self._join(generation)

    def _join(self, generation: Generation) -> None:
        """Gives a generation a slot, with its states, those after its prefix, or empty ones."""
        generation.slot = self.free.pop()
        self.running.append(generation)
        states = self.prefixes.take(generation) if generation.prefix else generation.states
        self.serving.join(generation.slot, states)

    def fail(self, generation: Generation, error: Exception) -> tuple[Generation, Exception]:
        """Ends a generation with an error."""
        generation.finish_reason = "error"
        self._leave(generation)
        return generation, error

    def _leave(self, generation: Generation) -> None:
        """Frees the slot of a generation."""
        self.running.remove(generation)
        self.free.append(generation.slot)
        self.serving.leave(generation.slot)
        self.serving.failed.pop(generation.slot, None)  # a step that raised leaves it

    def load(self, generation: Generation) -> bool:
        """Lets a generation continue from the file of its session. False: another model saved it."""
        session = _session_of(generation)
        if generation.states is not None:
            raise ValueError("generation: got one that has states, expected a new one")
        states, metadata = read_states(session, _SESSION, next(self.model.parameters()).device)
        if metadata.get("model") != self.digest:
            return False
        name = f"unread of {session}"
        unread = parse_json(metadata.get("unread", "null"), name)
        check_tokens(name, unread, self.vocab_size)
        generation.states, generation.unread = states, unread + generation.unread
        return True

    def save(self, generation: Generation) -> None:
        """Keeps the last states and the last token, which they have not read, for the next request of the session.

        Raises:
            ValueError: the generation has no session, or has not ended with "stop" or "length" while it had one.
        """
        session = _session_of(generation)
        if generation.last_states is None:
            raise ValueError(
                f"generation: got one without last states, finish_reason={generation.finish_reason!r}, expected one "
                "that ended with 'stop' or 'length' and had its session then"
            )
        metadata = {"model": self.digest, "unread": json.dumps(generation.unread)}
        write_states(session, _SESSION, generation.last_states, metadata)


def _session_of(generation: Generation) -> Path:
    if generation.session is None:
        raise ValueError("session: got None, expected the file that keeps the states")
    return generation.session


def choose(generations: list[Generation], logits: Tensor) -> list[int]:
    """The next token of each: the likeliest one at temperature 0, else a random one by its own generator."""
    if not any(x.temperature for x in generations):  # without a sort of large vocabularies
        return logits.argmax(-1).tolist()
    settings = [
        (x.temperature, 1 if x.top_p is None else x.top_p, x.random.random() if x.temperature else 0)
        for x in generations
    ]
    temperature, top_p, draws = logits.new_tensor(settings, dtype=torch.float64)[..., None].unbind(1)
    temperature = temperature.clamp(min=LOWEST_TEMPERATURE)
    # Stable, so that temperature 0 takes the same one of equally likely tokens as argmax
    tokens, p = likeliest_first(logits.double(), temperature, top_p, stable=True)
    sums = p.cumsum(-1)
    rank = (sums <= draws * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return tokens.gather(-1, rank)[:, 0].tolist()
