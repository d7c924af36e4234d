"""The text of one sequence as it may be shown: incremental, cut at stop strings, nothing taken back."""

from collections.abc import Iterable, Sequence

from paged_jax.detokenizer import Detokenizer, Tokenizer


class TextStream:
    """Text of one sequence whose tokens arrive in pieces, and the stop string that ends it.

    The result depends on the tokens alone, not on how they are split over calls of push(): after a preemption a new
    stream that gets the same tokens again is in the same state.

    Which stop string ends the text: the one that is complete first; of those complete at the same character the
    longest; of those that start there too and are complete with the same token, again the longest.

    Attributes:
        stopped_by: the stop string that ended the text, None while there is none.

    Example:
        >>> stream = TextStream(tokenizer, prompt_token_ids, stop=("\\n\\n",))
        >>> num_kept = stream.push([12, 7, 99])
        >>> print(stream.delta(), end="")
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Starts after the prompt.

        Args:
            tokenizer: see `Tokenizer`.
            prompt_token_ids: what the text continues; nothing of it is shown.
            stop: strings that end the text, none of them empty.
            min_tokens: a stop string counts only if a later token than this many completes it.
            include_stop_str_in_output: end the text behind the stop string, not before it.
            skip_special_tokens: leave special tokens out of the text.
        """
        self.stopped_by: str | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._num_tokens = 0
        self._text = ""  # all that is certain
        self._num_shown = 0  # characters that delta() has returned
        # A later token can still complete a stop string that starts this far before the end.
        self._num_held = 0 if include_stop_str_in_output else max((len(s) for s in self._stop), default=1) - 1

    @property
    def text(self) -> str:
        """What may be shown so far: a beginning of the final text."""
        return self._text[: len(self._text) - self._num_held] if self._num_held < len(self._text) else ""

    def push(self, token_ids: Iterable[int]) -> int:
        """Takes the next tokens, up to the one that completes a stop string.

        Returns:
            How many of them belong to the sequence; fewer than given only if `stopped_by` is set now. None of them once
            it is set.
        """
        num_kept = 0
        for token in token_ids:
            if self.stopped_by is not None:
                break
            num_kept += 1
            self._num_tokens += 1
            new = self._detokenizer.push([token])
            self._text += new
            if new and self._num_tokens > self._min_tokens:
                self._look_for_stop(len(self._text) - len(new))
        return num_kept

    def finish(self) -> str:
        """No more tokens will come: all of the text may be shown, which is returned.

        Bytes of an unfinished character become U+FFFD; they are not searched for stop strings.
        """
        if self.stopped_by is None:
            self._text += self._detokenizer.finish()
        self._num_held = 0
        return self._text

    def delta(self) -> str:
        """What may be shown and was not returned before."""
        text = self.text
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new

    def _look_for_stop(self, num_old: int) -> None:
        """Cuts the text at a stop string that ends behind its first `num_old` characters."""
        found = []  # (end, start, stop string)
        for stop in self._stop:
            start = self._text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return
        start = min(found)[1]
        end, _, self.stopped_by = max(match for match in found if match[1] == start)
        self._text = self._text[: end if self._include_stop else start]
        self._num_held = 0
