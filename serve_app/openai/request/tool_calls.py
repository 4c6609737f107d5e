"""Tool calls in the history of a conversation, as clients send them back.

Clients have the arguments of a call as a JSON text. Most templates iterate over them as an object; some join them to a text.
"""

from __future__ import annotations

import json
from typing import Any

from serve_app.openai.request.body import parse
from serve_app.openai.request.errors import ApiError, invalid


class CallArguments(dict[str, Any]):
    """The arguments of a call as an object, for templates that iterate over it. Written out or joined to a text, it is its JSON
    text, for templates that expect a text."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        """`text`: the JSON text of `values`."""
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_tool_calls(message: dict[str, Any], at: int) -> dict[str, Any]:
    """Returns `message`, the message with the index `at`, with its tool calls in the form that chat templates expect.

    Arguments that are the JSON text of an object become that object; absent and blank ones are the empty object; another text
    stays as it is. A ``function_call``, the older form, becomes a tool call. Null fields of a call are left out. A message
    without calls is returned unchanged.

    Raises `ApiError` (400) if the calls are not a list of objects, each with a function that has a name, or if arguments are
    neither a text nor an object.
    """
    calls, older = message.get("tool_calls"), message.get("function_call")
    if calls is None and older is not None:
        calls = [{"type": "function", "function": older}]
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise invalid("messages", f"tool_calls of message {at} must be a list")
    rest = {name: value for name, value in message.items() if name != "function_call"}
    return {**rest, "tool_calls": [_call(call, at) for call in calls]}


def _call(call: Any, at: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise invalid("messages", f"a tool call of message {at} has no function with a name")
    return {**_given(call), "function": {**_given(function), "arguments": _arguments(function.get("arguments"), at)}}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _arguments(arguments: Any, at: int) -> CallArguments | str:
    if isinstance(arguments, dict):
        return CallArguments(arguments, json.dumps(arguments, ensure_ascii=False))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return CallArguments({}, "{}")
    if not isinstance(arguments, str):
        raise invalid("messages", f"the arguments of a tool call of message {at} must be a JSON text or an object")
    try:
        values = parse(arguments.encode())
    except ApiError:
        return arguments
    return CallArguments(values, arguments) if isinstance(values, dict) else arguments
