"""Multi-head latent attention (MLA): its sizes, and which of its two forms is cheaper for some queries.

The cache holds one latent c a token, from which every head h makes its key ``[K_h c | shared key]`` and its value ``V_h c``.
The two forms are the same sums in another order (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)::

    naive       make keys and values of every token seen            queries of nope + rope over them, values of value_dim
    absorbed    q_h -> K_h^T q_h, as long as a latent               queries of latent_dim over the latents themselves,
                                                                    what comes back -> V_h: one KV head for all heads

Making something costs ``A = kv_lora_rank * (nope + value)`` multiplications a head, for each token seen (naive) or each query
(absorbed). A query that meets a key costs ``nope + rope + value`` (naive) or ``2 * kv_lora_rank + rope`` (absorbed).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.model.bounds import Positive, PositiveInt


class MLASpec(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the sizes of its projections.

    A token is kept as one latent that all heads share, `latent_dim` values a layer; every head makes its keys and values from
    it. To the cache and to whoever places it, that is one KV head::

        hidden -> latent [kv_lora_rank] ──norm──→ cache ──→ of each head: key [nope_dim], value [value_dim]
               -> shared key [rope_dim] ──rope──→ cache ──→ rest of every head's key
        hidden (-> [q_lora_rank] ──norm──→) of each head: query [nope_dim + rope_dim]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: PositiveInt | None = None
    """None: queries are made from the hidden states at once."""
    kv_lora_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    norm_eps: Positive = 1e-6
    """Of the norms of the two latents, whatever that of the layers' is."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Values of a token in the cache of a layer: the normed latent, and the shared key rotated by its position."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def _made(self) -> int:
        """A: multiplications of a head for each token seen, or each query."""
        return self.kv_lora_rank * (self.nope_dim + self.value_dim)

    @property
    def _dearer(self) -> int:
        """Multiplications by which a pair of a query and a key costs more when absorbed."""
        return 2 * self.kv_lora_rank - self.nope_dim - self.value_dim

    def absorbs(self, queries: int, keys: int, pairs: int) -> bool:
        """Whether `queries` meet `keys`, in `pairs` that see each other, at less cost absorbed."""
        return pairs * self._dearer < (keys - queries) * self._made

    def absorbs_row(self, new: int, cached: int) -> bool:
        """The same for `new` tokens behind `cached` ones: each sees the cached ones, itself and the new ones before it."""
        return self.absorbs(new, cached + new, new * cached + new * (new + 1) // 2)

    @property
    def crossover(self) -> int | None:
        """New tokens from which on the naive form is cheaper however long the context: the least n with ``n * dearer >= A``.

        None: never. With fewer, it is cheaper behind a context that is short enough.
        """
        return -(-self._made // self._dearer) if self._dearer > 0 else None
