"""This rank's slice of the vocabulary, and the one exchange its tp peers need: packed, equal sizes, one all-gather.

    vocab_size 101, three ranks, rows split in blocks of 32:

    rank 0 [ 0 .. 63 ]   rank 1 [ 64 .. 100 | . . . ]   rank 2 [ . . . . . . ]      . padding: -inf, id 101
             own 64                own 37                       own 0               all are 64 columns wide

Rank order is vocabulary order, so "first of equals" among ranks is also the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from actors.groups.group import Group


class VocabShard:
    """One rank's part of the true vocabulary. Making one is a collective of the tp group (16 bytes a rank)."""

    def __init__(self, tp: Group, vocab: range, vocab_size: int, device: torch.device) -> None:
        """`vocab`: this rank's rows of the padded vocabulary; `vocab_size`: the true one."""
        self._tp, self.vocab_size = tp, vocab_size
        self.own = range(min(vocab.start, vocab_size), min(vocab.stop, vocab_size))
        bounds = tp.all_gather(torch.tensor([[self.own.start, self.own.stop]], dtype=torch.int64, device=device))
        self._widths = [stop - start for start, stop in bounds.tolist()]
        self.width = max(self._widths)
        ids = torch.arange(self.own.start, self.own.start + self.width, dtype=torch.int32, device=device)
        ids[len(self.own) :] = vocab_size  # sorts behind every real token, also among those at -inf
        self.ids = ids

    def columns(self, logits: Tensor) -> Tensor:
        """[rows, width] logits of `ids`, from this rank's [rows, padded]. Whatever stood in the padding is -inf now."""
        own = logits[:, : len(self.own)]
        missing = self.width - len(self.own)
        return functional.pad(own, (0, missing), value=-torch.inf) if missing else own

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each part of every rank, [ranks, *shape], in a single all-gather. Shapes and dtypes are equal on all ranks.

        Everything is sent as int32 words: floats keep their bits, and one call carries what several kinds of row need.
        """
        words = torch.cat([part.contiguous().view(-1).view(torch.int32) for part in parts])
        everyone = self._tp.all_gather(words.unsqueeze(0))
        pieces = torch.split(everyone, [part.numel() * part.element_size() // 4 for part in parts], dim=1)
        return [self._restored(piece, part) for piece, part in zip(pieces, parts, strict=True)]

    def join(self, gathered: Tensor) -> Tensor:
        """[rows, vocab_size], from the [ranks, rows, width] columns of every rank."""
        if len(self._widths) == 1:
            return gathered[0]
        return torch.cat([gathered[rank, :, :width] for rank, width in enumerate(self._widths)], dim=1)

    def _restored(self, piece: Tensor, part: Tensor) -> Tensor:
        """Words as what they were: [ranks, *shape]. Eight-byte numbers need the alignment of memory of their own."""
        own = piece.clone(memory_format=torch.contiguous_format) if part.element_size() > 4 else piece.contiguous()
        return own.view(-1).view(part.dtype).view(self._tp.size, *part.shape)
