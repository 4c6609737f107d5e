"""Chat templates: Jinja in a sandbox, with the conventions of the `transformers` library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from placement.model.errors import ReportedError


class TemplateError(ReportedError, ValueError):
    """A conversation that the template refuses, or a template that cannot be read. ``str()`` is the reason."""

    code = "bad_template"


class ChatTemplate:
    """Turns messages into the text of a prompt."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """`variables`: names that the template may use besides the messages, such as ``bos_token``. Raises `TemplateError`."""
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, Any]]]:
        return ChatTemplate, (self.source, self._variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of the prompt for `messages`, each with ``role`` and ``content``.

        `add_generation_prompt` opens the answer; `continue_final_message` instead leaves the last message open, so that it is
        continued. `arguments` are further template variables. Raises `TemplateError` if the template refuses the messages or
        fails, or if the final message to continue is empty or altered by the template.
        """
        values = {"tools": None, "documents": None, **self._variables, **(arguments or {})}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(values)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: anything may go wrong in it
            # Jinja's own messages are about the template; others may quote the conversation.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise TemplateError(f"the chat template failed: {reason}") from error
        return _cut_after(text, str(messages[-1]["content"])) if continue_final_message else text


def _cut_after(text: str, content: str) -> str:
    """Returns `text` up to the end of its last message; templates may have stripped the message's white space. Raises
    `TemplateError`."""
    for wanted in (content, content.lstrip(), content.strip()):
        at = text.rfind(wanted)
        if wanted and at >= 0:
            return text[: at + len(wanted)]
    raise TemplateError("continue_final_message: the template does not show the final message as it is (or it is empty)")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks the assistant's words for training. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own type)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """See `jinja2.ext.Extension.parse`. Returns the nodes of the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Returns plain JSON. Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
