"""From request fields to the options for writing text."""

from __future__ import annotations

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.schema import GenerationFields
from serve_app.openai.response.writer import Writing


def writing(model: ServedModel, fields: GenerationFields, echo: bool = False) -> Writing:
    """Returns the options for writing the text of a request's choices, from its `fields` and the model's tokenizer. `echo`:
    whether the text begins with the prompt."""
    return Writing(
        tokenizer=model.tokenizer,
        ends=model.eos_token_ids,
        stops=fields.stops,
        include_stop=fields.include_stop_str_in_output,
        min_tokens=fields.min_tokens,
        skip_special_tokens=fields.skip_special_tokens,
        echo=echo,
    )
