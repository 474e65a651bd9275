"""Deterministic mock model: the next token is a pure function of all tokens before it.

A rolling hash represents the tokens so far, so each step has constant cost. From the hash come the next token (with
the request's seed mixed in when sampling), its logprob, the ids that could be sampled, and the experts that a position
is routed to. None of them depends on where the prompt ends: a generation that is aborted and resumed with its own
tokens as prompt yields the same tokens as one that runs undisturbed. The exception are penalties, as in real engines:
most of them count only the tokens that their own request has generated.

The model generates words, and some text that is hard to handle: CJK, emoji of several tokens, the Unicode line
separators, quotes, backslashes, line breaks, a lookalike of the end marker, and special tokens. After the first byte of
such a piece it generates the rest of it.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from streamfold.loopback.core.causal_lm import WeightsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy.typing as npt

    from streamfold.loopback.core.causal_lm import LogprobsOf, SequenceState
    from streamfold.loopback.core.request_params import RequestParams
    from streamfold.loopback.core.tokenizer import MockTokenizer

__all__ = ["Context", "MockModel", "MockSequence"]

# No piece is a prefix of another one, so the bytes so far show whether a piece is complete.
PIECES = (
    *("\n", "\t", '"', "'", "\\", ", ", ". ", "! ", "? ", ": ", "\x00", "\x7f"),
    *("é", "ß", "ñ", "Ω", "я", "\u0085", "\u2028", "\u2029", "\ufeff", "\ufffd"),
    *("你好", "世界", "日本語", "한국어", "、", "。", "𠮷"),
    *("🙂", "🚀", "👍🏽", "👩‍🚀", "🇪🇺", "❤️"),
    *("</s>", "<data: [DONE]>", "{}", "[]"),
)

_Trie = dict[int, "_Trie"]

_MASK = (1 << 64) - 1
_MULTIPLIER = 0xD1342543DE82EF95  # odd, so that it has an inverse modulo 2**64
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64

# Mixed into the hash: one constant for each value that is drawn from it.
_GREEDY, _SAMPLED, _LOGPROB, _KEPT, _EXPERTS, _PENALTY = 0x1001, 0x2003, 0x3005, 0x4007, 0x5009, 0x600B

_SPECIAL_PER_1024 = 8
_MOST_KEPT = 8
_FLOAT32 = struct.Struct("f")
_FLOAT64_BITS = struct.Struct("<d"), struct.Struct("<Q")


class Context:
    """State of the model after some tokens: their hash, and the piece that is incomplete."""

    __slots__ = ("_node", "_root", "hash")

    def __init__(self, start: int, root: _Trie) -> None:
        self.hash: int = start
        self._root = root
        self._node = root

    def push(self, token: int) -> None:
        """Add one token."""
        self.hash = (self.hash * _MULTIPLIER + token + 1) & _MASK
        self._node = self._node.get(token) or self._root.get(token) or self._root

    @property
    def continuations(self) -> tuple[int, ...]:
        """The tokens that continue an incomplete piece; empty between pieces."""
        return () if self._node is self._root else tuple(self._node)


class MockSequence:
    """A prompt and what was generated after it: see :class:`streamfold.loopback.core.causal_lm.SequenceState`."""

    rank = 1  # nobody computes a distribution here

    def __init__(
        self, model: MockModel, params: RequestParams, stop_ids: Collection[int], counts_prompt: frozenset[str]
    ) -> None:
        sampling = params.sampling
        self._model = model
        self._prompt = params.prompt
        self._context = model.read(params.prompt)
        salt = model.salt(None if sampling.greedy else params.seed)
        penalties = sampling.penalties
        whole = [value for name, value in penalties.items() if name in counts_prompt]
        self._salt = model.penalize(salt, whole, 0) if whole else salt  # what they count is the context itself
        self._penalties = [value for name, value in penalties.items() if name not in counts_prompt]
        self._counted = model.read(())  # what it has generated itself
        self._greedy = sampling.greedy
        self._stop_ids, self._fewest = stop_ids, sampling.min_new_tokens
        self._token = -1
        self.generated: int = 0

    def __len__(self) -> int:
        return len(self._prompt) + self.generated

    def draw(self) -> int:
        """Draw the next token and append it."""
        forbidden = self._stop_ids if self.generated < self._fewest else ()
        salt = self._salt
        if self._penalties and self.generated:
            salt = self._model.penalize(salt, self._penalties, self._counted.hash)
        token = self._token = self._model.draw(self._context, salt, forbidden)
        self._context.push(token)
        self._counted.push(token)
        self.generated += 1
        return token

    @property
    def logprob(self) -> float:
        """The logprob of the token that was drawn last."""
        return self._model.logprob(self._context.hash)

    @property
    def kept(self) -> list[int]:
        """The ids that could have been drawn."""
        return [self._token] if self._greedy else self._model.kept(self._context.hash, self._token)

    @property
    def kept_logprob(self) -> float:
        """The same logprob: nothing is renormalised here."""
        return self.logprob

    def candidates(self, count: int) -> list[tuple[float, int]]:
        """The token that was drawn last, and the ids behind it."""
        logprob, size = self.logprob, self._model.vocab_size
        return [(logprob - i, (self._token + i) % size) for i in range(count)]

    def prompt_logprobs(self, start: int) -> list[tuple[float | None, int]]:
        """The prompt's tokens from ``start`` on, with their logprobs."""
        prompt, hashes = self._prompt, self._model.hashes(self._prompt)
        rest = ((self._model.logprob(int(hashes[i])), prompt[i]) for i in range(start + 1, len(prompt)))
        # The first one has no logprob: no token precedes it.
        return [(None, prompt[start]), *rest]

    def experts(self, start: int, output: Sequence[int]) -> npt.NDArray[np.int32]:
        """The experts of the positions from ``start`` to the last but one, int32 ``[positions, layers, top_k]``."""
        tokens = [*self._prompt, *output]
        return self._model.experts(self._model.hashes(tokens[:-1])[start:])

    def retract(self) -> None:
        """Do nothing: there is no KV cache."""

    def release(self) -> None:
        """Do nothing: there is no KV cache."""


class MockModel:
    """Draws tokens, logprobs and routed experts from the hash of the context.

    Args:
        tokenizer: its vocabulary.
        seed: seed of the mock model, in place of weights.
        stop_probability: probability of the end-of-sequence token between two pieces.
        piece_probability: probability that a free choice is a piece of text that is hard to handle, in place of a word
            or a special token; with 1, the text is as dense as that of CJK languages, which have no spaces.
        num_layers: layers with experts.
        top_k: experts per token and layer.
        num_experts: experts per layer.
    """

    blocking: bool = False

    def __init__(
        self,
        tokenizer: MockTokenizer,
        *,
        seed: int = 0,
        stop_probability: float = 1 / 256,
        piece_probability: float = 1 / 8,
        num_layers: int = 4,
        top_k: int = 2,
        num_experts: int = 16,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.vocab_size
        self._start = _mix(seed & _MASK)
        self._trie = _trie(PIECES)
        self._stop_below = int(stop_probability * 2**32)
        self._pieces_per_1024 = round(piece_probability * 1024)
        self._num_layers, self._top_k, self._num_experts = num_layers, top_k, num_experts
        # Steps that are coprime to the number of experts: no expert is chosen twice.
        self._expert_steps = np.array([s for s in range(1, num_experts + 1) if math.gcd(s, num_experts) == 1])

    def start(
        self,
        params: RequestParams,
        *,
        stop_ids: Collection[int] = (),
        counts_prompt: frozenset[str] = frozenset(),
        logprobs_of: LogprobsOf = "scaled",  # noqa: ARG002  # it has one distribution
    ) -> MockSequence:
        """Return a sequence without generated tokens."""
        return MockSequence(self, params, stop_ids, counts_prompt)

    def forward(self, sequences: Sequence[SequenceState]) -> None:
        """Do nothing: each token is computed when it is drawn."""

    def used_tokens(self, sequences: Sequence[SequenceState]) -> int:
        """The tokens of these sequences, prompts included."""
        return sum(len(sequence) for sequence in sequences if isinstance(sequence, MockSequence))

    def load_weights(self, path: str) -> None:
        """Raise WeightsError."""
        msg = f"the mock model has no weights to take from {path}: run the engine with model='hf:PATH'"
        raise WeightsError(msg)

    def load_bucket(self, data: bytes) -> None:
        """Raise WeightsError."""
        msg = f"the mock model has no weights to replace by {len(data)} bytes: run the engine with model='hf:PATH'"
        raise WeightsError(msg)

    def read(self, tokens: Iterable[int]) -> Context:
        """Return the context after some tokens."""
        context = Context(self._start, self._trie)
        for token in tokens:
            context.push(token)
        return context

    def salt(self, seed: int | None) -> int:
        """Return the value that a request mixes into its draws. ``seed`` None is greedy decoding."""
        return _GREEDY if seed is None else _mix((seed ^ _SAMPLED) & _MASK)

    def penalize(self, salt: int, penalties: Iterable[float], counted: int) -> int:
        """Return the salt of a draw under penalties; ``counted`` is the hash of the tokens that they count."""
        as_float, as_bits = _FLOAT64_BITS
        for penalty in penalties:
            salt = _mix(salt ^ _PENALTY ^ as_bits.unpack(as_float.pack(penalty))[0])
        return _mix(salt ^ counted)

    def draw(self, context: Context, salt: int, forbidden: Collection[int] = ()) -> int:
        """Return the next token; forbidden tokens are never returned."""
        bits = _mix(context.hash ^ salt)
        choices = context.continuations
        for _ in range(64):
            token = choices[bits % len(choices)] if choices else self._free_choice(bits)
            if token not in forbidden:
                return token
            bits, choices = _mix(bits), ()
        return next(token for token in range(self._tokenizer.vocab_size) if token not in forbidden)

    def _free_choice(self, bits: int) -> int:
        tokenizer = self._tokenizer
        if bits >> 32 < self._stop_below:
            return tokenizer.eos_token_id
        kind, rest = bits & 1023, (bits & 0xFFFFFFFF) >> 10
        if kind < self._pieces_per_1024:
            return PIECES[rest % len(PIECES)].encode()[0]
        if kind < self._pieces_per_1024 + _SPECIAL_PER_1024:
            # Not the end-of-sequence token, which has its own probability.
            specials = tokenizer.special_ids
            token = specials[rest % len(specials)]
            return tokenizer.pad_token_id if token == tokenizer.eos_token_id else token
        return tokenizer.first_word_id + rest % (tokenizer.vocab_size - tokenizer.first_word_id)

    def logprob(self, hash_after: int) -> float:
        """Return the logprob of the token that led to this hash: a float32 as a Python float, as engines send it."""
        uniform = (_mix(hash_after ^ _LOGPROB) >> 11) * 2.0**-53
        value: float = _FLOAT32.unpack(_FLOAT32.pack(math.log1p(-uniform)))[0]
        return value

    def kept(self, hash_after: int, token: int) -> list[int]:
        """Return the ids that could have been sampled in place of ``token``: 1 to 8 ids, ``token`` first."""
        bits = _mix(hash_after ^ _KEPT)
        vocab_size = self._tokenizer.vocab_size
        step = 1 + (bits >> 8) % (vocab_size // _MOST_KEPT - 1)
        return [(token + i * step) % vocab_size for i in range(1 + bits % _MOST_KEPT)]

    def hashes(self, tokens: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return the hash after each token, uint64 ``[n]``: ``Context.push`` for a whole array."""
        n = len(tokens)
        # h[i] = M**(i+1) * (start + sum of (token[j] + 1) * M**-(j+1) over j <= i), modulo 2**64.
        up = _powers(_MULTIPLIER, n)
        down = _powers(pow(_MULTIPLIER, -1, 1 << 64), n)
        terms = (np.asarray(tokens, np.uint64) + np.uint64(1)) * down
        found: npt.NDArray[np.uint64] = up * (np.uint64(self._start) + np.cumsum(terms, dtype=np.uint64))
        return found

    def experts(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Route positions to experts: int32 ``[len(hashes), num_layers, top_k]``, no expert twice in a layer."""
        layers = np.arange(self._num_layers, dtype=np.uint64) * np.uint64(_GOLDEN)
        bits = _mix_array((hashes ^ np.uint64(_EXPERTS))[:, None] + layers)
        first = (bits % np.uint64(self._num_experts)).astype(np.int64)
        step = self._expert_steps[(bits >> np.uint64(32)) % np.uint64(len(self._expert_steps))]
        ids: npt.NDArray[np.int64] = (first[..., None] + step[..., None] * np.arange(self._top_k)) % self._num_experts
        return ids.astype(np.int32)


def _trie(pieces: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for piece in pieces:
        node = root
        for byte in piece.encode():
            node = node.setdefault(byte, {})
    return root


def _mix(value: int) -> int:
    """Scatter 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    powers: npt.NDArray[np.uint64] = np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)
    return powers
