"""This rank's vocabulary shard, and the exchange with its TP peers: packed, of equal sizes, one all-gather.

    vocab_size 101, three ranks, rows split in blocks of 32:

    rank 0 [ 0 .. 63 ]   rank 1 [ 64 .. 100 | . . . ]   rank 2 [ . . . . . . ]      . padding: -inf, id 101
             own 64                own 37                       own 0               all are 64 columns wide

Rank order is vocabulary order, so the first rank among equals also has the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from actors.groups.group import Group


class VocabShard:
    """One rank's part of the true vocabulary. Creating one is a collective of the TP group (16 bytes a rank)."""

    def __init__(self, tp: Group, vocab: range, vocab_size: int, device: torch.device) -> None:
        """`vocab` are this rank's rows of the padded vocabulary; `vocab_size` is the size of the true one."""
        self._tp, self.vocab_size = tp, vocab_size
        self.own = range(min(vocab.start, vocab_size), min(vocab.stop, vocab_size))
        bounds = tp.all_gather(torch.tensor([[self.own.start, self.own.stop]], dtype=torch.int64, device=device))
        self._widths = [stop - start for start, stop in bounds.tolist()]
        self.width = max(self._widths)
        ids = torch.arange(self.own.start, self.own.start + self.width, dtype=torch.int32, device=device)
        ids[len(self.own) :] = vocab_size  # sorts after every real token, even one with -inf
        self.ids = ids

    def columns(self, logits: Tensor) -> Tensor:
        """Return the logits [rows, width] of the ids `ids`, from this rank's `logits` [rows, rows of the padded vocabulary].
        Columns without a real token become -inf. `width` is equal on all ranks."""
        own = logits[:, : len(self.own)]
        missing = self.width - len(self.own)
        return functional.pad(own, (0, missing), value=-torch.inf) if missing else own

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each of `parts` of every TP rank, [ranks, *shape of the part], with a single all-gather. Shapes and dtypes, of
        4 or 8 bytes an element, must be equal on all ranks.

        Everything is sent as int32 words: floats keep their bits, and one call carries the data of several kinds of row.
        """
        words = torch.cat([part.contiguous().view(-1).view(torch.int32) for part in parts])
        everyone = self._tp.all_gather(words.unsqueeze(0))
        pieces = torch.split(everyone, [part.numel() * part.element_size() // 4 for part in parts], dim=1)
        return [self._restored(piece, part) for piece, part in zip(pieces, parts, strict=True)]

    def join(self, gathered: Tensor) -> Tensor:
        """Return whole logits [rows, vocab_size] from `gathered` [ranks, rows, width], the `columns` of every rank."""
        if len(self._widths) == 1:
            return gathered[0]
        return torch.cat([gathered[rank, :, :width] for rank, width in enumerate(self._widths)], dim=1)

    def _restored(self, piece: Tensor, part: Tensor) -> Tensor:
        """Return words in their original dtype, [ranks, *shape]. Eight-byte numbers are copied to new memory, for alignment."""
        own = piece.clone(memory_format=torch.contiguous_format) if part.element_size() > 4 else piece.contiguous()
        return own.view(-1).view(part.dtype).view(self._tp.size, *part.shape)
