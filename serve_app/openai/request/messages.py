"""The messages of a conversation, in the form that a chat template expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.openai.request.errors import ApiError, invalid

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def conversation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the `messages` of a chat request with every content as a text: text parts are joined by newlines, and an
    assistant's missing content is empty. Other fields go to the template unchanged.

    Raises `ApiError` (400) for a missing or unknown role, and for content that is not text.
    """
    return [{**message, "content": _content(message, at)} for at, message in enumerate(messages) if _role(message, at)]


def _role(message: dict[str, Any], at: int) -> bool:
    if message.get("role") not in _ROLES:
        raise invalid("messages", f"message {at} has no role, or one that is not {', '.join(_ROLES)}")
    return True


def _content(message: dict[str, Any], at: int) -> str:
    """Returns the text of a message, with text parts joined by newlines. An assistant's message may have no content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""
    if not isinstance(content, list):
        raise invalid("messages", f"the content of message {at} must be a text or a list of text parts")
    return "\n".join(_part(part, at) for part in content)


def _part(part: Any, at: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ApiError(
            400, f"messages: message {at} has a part that is not of type text; only text is read", param="messages",
            code="unsupported_content",
        )  # fmt: skip
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid("messages", f"a text part of message {at} has no text")
    return text
