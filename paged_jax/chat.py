"""Chat templates: from messages to the text that a model was trained on. Templates are foreign code."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Limits of one rendering; the process that renders enforces them.
MAX_TEXT = 1 << 24  # characters
MAX_CPU_SECONDS = 10.0
MAX_MEMORY = 1 << 30  # bytes

_RENDERER = Path(__file__).with_name("chat_renderer.py")

#: One conversation, e.g. [{"role": "user", "content": "Hello"}].
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A model's chat template and the special tokens that it may write.

    The source is rendered by jinja2 in its immutable sandbox, as transformers does it (blocks trimmed, `break` and
    `continue`, `raise_exception`, `strftime_now`, `tojson`), in a process of its own with limits on time, memory and
    text: a template that hangs or grows without bound fails alone. The text contains the special tokens, so encode it
    with `add_special_tokens=False`.

    Attributes:
        source: jinja2 source.
        bos_token, eos_token: text of these tokens; "" if there is none.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The text of one conversation; with `add_generation_prompt` it ends with the header of the answer.

        Raises:
            ValueError: the messages are malformed; the template is broken, refuses them, or exceeds a limit.
            ImportError: jinja2 is not installed.
        """
        (result,) = self.render_all([messages], add_generation_prompt=add_generation_prompt)
        if isinstance(result, ValueError):
            raise result
        return result

    def render_all(
        self, conversations: Sequence[Messages], *, add_generation_prompt: bool = True
    ) -> list[str | ValueError]:
        """The text of each conversation, or the error that `render` would raise for it alone."""
        results: list[str | ValueError | None] = [_malformed(messages) for messages in conversations]
        todo = [index for index, result in enumerate(results) if result is None]
        while todo:
            answers, limit = self._run([conversations[index] for index in todo], add_generation_prompt)
            for index, (text, error) in zip(todo, answers, strict=False):
                results[index] = text if error is None else ValueError(f"the chat template failed: {error}")
            todo = todo[len(answers) :]
            if limit is not None:  # the process has died of the first one without an answer
                results[todo.pop(0)] = ValueError(f"the chat template failed: {limit}")
        return [result for result in results if result is not None]

    def _run(self, conversations: list[Messages], add_generation_prompt: bool) -> tuple[list[list[Any]], str | None]:
        """Answers [text, error] for the first conversations, for all unless a limit was hit: then which."""
        variables = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        limits = {"text": MAX_TEXT, "cpu_seconds": MAX_CPU_SECONDS, "memory": MAX_MEMORY}
        job = {"source": self.source, "variables": variables, "conversations": conversations, "limits": limits}
        # -P: the folder of this package, which the script lies in, is no place to import from.
        done = subprocess.run(
            [sys.executable, "-P", str(_RENDERER)], input=json.dumps(job).encode(), capture_output=True, check=False
        )
        answers = [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]
        if len(answers) == len(conversations):
            return answers, None
        if b"No module named 'jinja2'" in done.stderr:
            raise ImportError("chat templates need jinja2: pip install 'paged_jax[load]'")
        if done.returncode >= 0:
            raise RuntimeError(f"the renderer of chat templates does not run: {done.stderr.decode(errors='replace')}")
        return answers, f"it used more than {MAX_CPU_SECONDS:g} s or {MAX_MEMORY >> 20} MiB and was stopped"


def _malformed(messages: object) -> ValueError | None:
    """What is wrong with a conversation, None if nothing is."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return ValueError(f"messages must be a list with at least one message, got {messages!r:.80}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return ValueError(f"messages[{index}] must have 'role' and 'content', got {message!r:.80}")
    try:
        json.dumps(messages)
    except (TypeError, ValueError, RecursionError) as error:
        return ValueError(f"messages must consist of texts, numbers, lists and dicts: {error}")
    return None
