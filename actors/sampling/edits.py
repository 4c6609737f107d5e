"""Logits processors applied before temperature: logit bias, penalties, and the min_tokens mask."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from actors.sampling.rows import SampleRow


def edit(logits: Tensor, row: SampleRow, own: range) -> None:
    """Modify the fp32 `logits` of one row in place by its logit bias, penalties and min_tokens mask. They are those of the
    vocabulary ids `own` of this rank; other token ids belong to other ranks and are ignored.

    The order is: bias; repetition penalty over prompt and output (positive logits divided, others multiplied, once per distinct
    token: Keskar et al., "CTRL", 2019, section 4.1, with the sign rule of transformers); presence and frequency penalties over
    the output; stop tokens masked until the output has `min_tokens` tokens.
    """
    params = row.sampling
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias.items(), strict=True)
        columns, held = _columns(ids, own, logits.device)
        logits[columns] += torch.tensor(biases, dtype=torch.float32, device=logits.device)[held]
    if params.repetition_penalty != 1.0:
        _repetition(logits, _columns(row.tokens, own, logits.device)[0], params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids, repeats = zip(*Counter(row.tokens[row.prompt_length :]).items(), strict=True) if row.num_output else ((), ())
        columns, held = _columns(ids, own, logits.device)
        counts = torch.tensor(repeats, dtype=torch.float32, device=logits.device)
        logits[columns] -= params.presence_penalty + params.frequency_penalty * counts[held]
    if params.stop_token_ids and row.num_output < params.min_tokens:
        logits[_columns(params.stop_token_ids, own, logits.device)[0]] = -torch.inf


def _repetition(logits: Tensor, columns: Tensor, penalty: float) -> None:
    """Apply the repetition penalty. A column that occurs twice is read before any is written, and the same value is written
    twice."""
    seen = logits[columns]
    logits[columns] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _columns(ids: object, own: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the columns of the `ids` that are in `own`, and a mask of the ids that these are."""
    columns = torch.tensor(ids, dtype=torch.int64, device=device) - own.start
    held = (columns >= 0) & (columns < len(own))
    return columns[held], held
