"""Text from token ids as they arrive: no half character, nothing taken back, nothing of the prompt.

`tokenizers.decoders.DecodeStream` is not used: it has no way to flush what it holds back, and repeats the whole prompt
(or raises) when the prompt's last token ends in the middle of a character.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3  # a character has at most 4 bytes, so at most 3 replacement marks can still turn into one
_CONTEXT = 16  # prompt tokens decoded along with the output, for decoders that treat the first token differently


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `tokenizers.Tokenizer` and those of transformers have it."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids, with U+FFFD for bytes that are not UTF-8."""
        ...


class Detokenizer:
    """Incremental text of one sequence. The deltas joined do not depend on how the ids are split over calls.

    A character whose first bytes are in the prompt belongs to the output that completes it.

    Example:
        >>> detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        >>> text = detokenizer.push([12, 7]) + detokenizer.push([99]) + detokenizer.finish()
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        """Starts after the prompt; `skip_special_tokens` drops them from the text."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        prompt = [int(token) for token in prompt_token_ids]
        tail = prompt[-_CONTEXT:]
        self._context = tail if self._decode(tail) else prompt  # ids whose text is out, decoded with the pending ones
        self._pending: list[int] = []  # ids whose text is not, or only partly, out
        self._known = self._prompt_texts()  # the text of what is out; several spellings if the prompt is cut

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is certain now and was not returned before."""
        return "".join([self._push_one(int(token)) for token in token_ids])

    def finish(self) -> str:
        """Returns what was held back; bytes of an unfinished character become U+FFFD."""
        text, known = self._decode_pending()
        self._known = (text,)
        return text[len(known) :]

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text, known = self._decode_pending()
        num_held = min(_MAX_HELD, len(text) - len(text.rstrip(_REPLACEMENT)))
        stable = text[: len(text) - num_held]
        if len(stable) <= len(known):
            return ""
        if num_held:
            self._known = (stable,)
        else:
            self._context, self._pending = self._pending, []
            self._known = (self._decode(self._context),)
        return stable[len(known) :]

    def _decode_pending(self) -> tuple[str, str]:
        """Text of context and pending ids, and the part of it that is out."""
        text = self._decode(self._context + self._pending)
        for known in self._known:
            if text.startswith(known):
                return text, known
        # A byte-fallback decoder spoils a whole run of bytes if its last character is incomplete: begin a new run.
        self._context, self._known = [], ("",)
        return self._decode(self._pending), ""

    def _prompt_texts(self) -> tuple[str, ...]:
        """Texts of the prompt, the likeliest first: as it is; if it is cut, without the mark, without 1 to 3 tokens."""
        text = self._decode(self._context)
        if not text.endswith(_REPLACEMENT):
            return (text,)
        ends = [max(0, len(self._context) - cut) for cut in range(1, _MAX_HELD + 1)]
        return (text, text[:-1], *(self._decode(self._context[:end]) for end in ends))
