"""Multi-head latent attention (MLA): its sizes, and which of its two forms, naive or absorbed, is cheaper for a batch.

The cache holds one latent c per token, from which every head h derives its key ``[K_h c | shared key]`` and its value
``V_h c``. The two forms compute the same sums in a different order (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)::

    naive       up-project the latent of every visible token        queries of nope + rope dims attend to these keys;
                to keys and values                                  values have value_dim dims
    absorbed    project each query, q_h -> K_h^T q_h, to the        queries of latent_dim dims attend to the latents
                size of a latent                                    as one KV head; the output is projected by V_h

A projection costs ``A = kv_lora_rank * (nope + value)`` multiplications per head, for each visible token (naive) or for each
query (absorbed). One query-key pair costs ``nope + rope + value`` (naive) or ``2 * kv_lora_rank + rope`` (absorbed).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.model.bounds import Positive, PositiveInt


class MLASpec(BaseModel):
    """Projection sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token is cached as one latent that all heads share, `latent_dim` values per layer; every head derives its keys and values
    from it. The cache and the placement treat the latent as one KV head::

        hidden -> latent [kv_lora_rank] ──norm──→ cache ──→ per head: key [nope_dim], value [value_dim]
               -> shared key [rope_dim] ──rope──→ cache ──→ remaining dims of every head's key
        hidden (-> [q_lora_rank] ──norm──→) per head: query [nope_dim + rope_dim]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: PositiveInt | None = None
    """Rank of the query projection; None: queries are projected directly from the hidden states."""
    kv_lora_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    norm_eps: Positive = 1e-6
    """Epsilon of the norms of the query and KV latents, independent of the epsilon of the layer norms."""

    @property
    def query_dim(self) -> int:
        """Number of dimensions of a head's query, and of its key: ``nope_dim + rope_dim``."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Number of values cached per token and layer: the normed latent, and the shared key rotated by its position."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def _made(self) -> int:
        """A: multiplications per head of projecting one visible token (naive) or one query (absorbed)."""
        return self.kv_lora_rank * (self.nope_dim + self.value_dim)

    @property
    def _dearer(self) -> int:
        """Additional multiplications of one query-key pair in the absorbed form."""
        return 2 * self.kv_lora_rank - self.nope_dim - self.value_dim

    def absorbs(self, queries: int, keys: int, pairs: int) -> bool:
        """Whether the absorbed form of attention needs fewer multiplications than the naive one, for `queries` queries and
        `keys` keys of which `pairs` query-key pairs are unmasked."""
        return pairs * self._dearer < (keys - queries) * self._made

    def absorbs_row(self, new: int, cached: int) -> bool:
        """Whether the absorbed form of attention needs fewer multiplications than the naive one, for a row of `new` tokens
        after `cached` ones, under a causal mask."""
        return self.absorbs(new, cached + new, new * cached + new * (new + 1) // 2)

    @property
    def crossover(self) -> int | None:
        """Smallest number of new tokens of a row for which the naive form is cheaper at any context length: ``n * dearer >=
        A``.

        None if there is no such number. With fewer new tokens, the naive form is cheaper only if the context is short enough.
        """
        return -(-self._made // self._dearer) if self._dearer > 0 else None
