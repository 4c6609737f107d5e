"""The messages of a conversation, in the form that a chat template expects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from serve_app.openai.request.errors import ApiError, invalid
from serve_app.openai.request.tool_calls import read_tool_calls
from serve_app.text.template import ChatTemplate

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_READ_AS = {"developer": "system", "function": "tool"}
"""What a role is read as under a template that does not know it: the other name of the same role."""


def conversation(messages: Sequence[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Returns the `messages` of a chat request in the form that `template` expects.

    - Every content is a text: text parts are joined by newlines, and the missing content of an assistant's or a tool's message
      is empty. It is None in a message with tool calls, if the template tests for that.
    - ``developer`` is read as ``system``, and ``function`` as ``tool``, unless the template knows the role. Such a system
      message and the system messages beside it become one.
    - Tool calls are in the form of `read_tool_calls`. Other fields that are null or empty are left out.

    Raises `ApiError` (400) for a missing or unknown role, content that is not text, and tool calls that cannot be read.
    """
    read = [_message(message, at, template) for at, message in enumerate(messages)]
    merged: list[dict[str, Any]] = []
    pairs = zip(read, messages, strict=True)
    for role, run in groupby(pairs, key=lambda pair: pair[0]["role"]):
        together = list(run)
        is_one = role == "system" and any(given["role"] == "developer" for _, given in together)
        merged += [_joined([made for made, _ in together])] if is_one else [made for made, _ in together]
    return merged


def _message(message: dict[str, Any], at: int, template: ChatTemplate) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise invalid("messages", f"message {at} has no role, or one that is not {', '.join(_ROLES)}")
    content = _content(message, at)
    given = {name: value for name, value in message.items() if not _is_empty(value)}
    rest = read_tool_calls(given, at)
    is_none = not content and "tool_calls" in rest and template.tests_content_for_none
    known = role if template.knows_role(role) else _READ_AS.get(role, role)
    return {**rest, "role": known, "content": None if is_none else content}


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one system message with the contents of several, a blank line between them."""
    return {**messages[0], "content": "\n\n".join(each["content"] for each in messages if each["content"])}


def _content(message: dict[str, Any], at: int) -> str:
    """Returns the text of a message, with text parts joined by newlines. A message of an assistant or a tool may have none; the
    text of a refusal is its reason."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] in ("assistant", "tool", "function"):
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else ""
    if not isinstance(content, list):
        raise invalid("messages", f"the content of message {at} must be a text or a list of text parts")
    return "\n".join(_part(part, at) for part in content)


def _part(part: Any, at: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise ApiError(
            400, f"messages: message {at} has a part that is not of type text; only text is read", param="messages",
            code="unsupported_content",
        )  # fmt: skip
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid("messages", f"a text part of message {at} has no text")
    return text
