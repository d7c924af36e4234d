"""The process that renders chat templates: a job as JSON on standard input, a line [text, error] per conversation.

It is run as a script and imports nothing of this package. It lives until its job is done or a limit ends it.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text in templates for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Unlike jinja2's own filter: no HTML escapes, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


def _render(source: str, variables: dict[str, Any], max_text: int) -> str:
    pieces, length = [], 0
    for piece in _environment().from_string(source).generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > max_text:
            raise ValueError(f"its text is longer than {max_text} characters")
    return "".join(pieces)


def main() -> None:
    """Renders one conversation after the other."""
    job = json.load(sys.stdin)
    limits = job["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"],) * 2)
    for messages in job["conversations"]:
        # The default action of the timer's signal ends the process, inside one long operation as well.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
        text = error = None
        try:
            text = _render(job["source"], job["variables"] | {"messages": messages}, limits["text"])
        except Exception as failure:  # whatever a foreign template manages to raise
            error = f"{type(failure).__name__}: {str(failure)[:1000]}"
        print(json.dumps([text, error]), flush=True)


if __name__ == "__main__":
    main()
