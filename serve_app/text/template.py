"""Chat templates: Jinja in a sandbox, with the conventions of the `transformers` library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from placement.model.errors import ReportedError

_BYTE_ORDER_MARK = "\ufeff"


class TemplateError(ReportedError, ValueError):
    """A conversation that the template refuses, or a template that cannot be read. ``str()`` is the reason."""

    code = "bad_template"


class ChatTemplate:
    """Turns messages into the text of a prompt.

    `tests_content_for_none`: whether the template compares a message's content with ``none``, so that it can tell an empty
    content from none at all.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """`source` is Jinja, without the byte order mark that may be at its head. `variables`: names that the template may use
        besides the messages, such as ``bos_token``. Raises `TemplateError`."""
        self.source = source.removeprefix(_BYTE_ORDER_MARK)
        self._variables = dict(variables or {})
        environment = _environment()
        try:
            tree = environment.parse(self.source)
            self._roles = frozenset(node.value for node in _alternatives(tree) if isinstance(node, nodes.Const))
            self.tests_content_for_none = _tests_content_for_none(tree)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, Any]]]:
        return ChatTemplate, (self.source, self._variables)

    def knows_role(self, role: str) -> bool:
        """Returns whether the template compares a value with `role`, so that it may have a form of its own for its messages."""
        return role in self._roles

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
        return _cut_after(text, str(messages[-1]["content"] or "")) if continue_final_message else text


def _cut_after(text: str, content: str) -> str:
    """Returns `text` up to the end of its last message; templates may have stripped the message's white space. Raises
    `TemplateError`."""
    for wanted in (content, content.lstrip(), content.strip()):
        at = text.rfind(wanted)
        if wanted and at >= 0:
            return text[: at + len(wanted)]
    raise TemplateError("continue_final_message: the template does not show the final message as it is (or it is empty)")


def _alternatives(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Returns the expressions that a template tells apart, roles among them: what it compares with, and the items of its lists
    and the keys of its tables. The fields of an object (``'function' in call``) and the kinds of a tool are others."""
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if not any(_is_field(side, "type") for side in sides):
            yield from sides[1:] if comparison.ops[0].op in ("in", "notin") else sides
    for row in tree.find_all((nodes.List, nodes.Tuple)):
        yield from row.iter_child_nodes()
    for pair in tree.find_all(nodes.Pair):
        yield pair.key


def _tests_content_for_none(tree: nodes.Template) -> bool:
    tested = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        tested += sides if any(isinstance(side, nodes.Const) and side.value is None for side in sides) else []
    return any(_is_field(node, "content") for node in tested)


def _is_field(node: nodes.Node, name: str) -> bool:
    """Returns whether an expression is ``x.name``, ``x['name']`` or a variable of that name."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return (isinstance(node, nodes.Getattr) and node.attr == name) or (isinstance(node, nodes.Name) and node.name == name)


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
