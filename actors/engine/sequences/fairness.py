"""Fairness between tenants with a virtual token counter (VTC): the tenant that was served the fewest tokens goes first.

The algorithm is that of Sheng et al., "Fairness in Serving Large Language Models", 2024, section 4. It counts the tokens served
to each tenant. The counter of a tenant that becomes active is raised to the minimum of the active tenants, so that a tenant
earns no credit while it is idle.
"""

from __future__ import annotations

from collections import Counter


class TenantCounters:
    """Counters of the tokens served to each tenant, comparable between the tenants that have requests now."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def join(self, tenant: str) -> None:
        """Record that a request of `tenant` arrived. If it is the tenant's only one, the tenant's counter is raised to the
        minimum of the active tenants."""
        if self._requests[tenant] == 0:
            floor = min((self._served[other] for other, n in self._requests.items() if n > 0), default=0)
            self._drop_up_to(floor)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Record that a request of `tenant`, for which `join` was called, ended. When no request of any tenant is left, all
        counters restart at 0."""
        self._requests[tenant] -= 1
        if self._requests[tenant] == 0:
            del self._requests[tenant]
            if not self._requests:
                self._served.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """Add `tokens`, the number of tokens that were run, to the counter of `tenant`. Raises `KeyError` if it has no
        counter."""
        self._served[tenant] += tokens

    def served(self, tenant: str) -> int:
        """Return the token counter of `tenant`, which must have a request (`KeyError` otherwise)."""
        return self._served[tenant]

    def _drop_up_to(self, floor: int) -> None:
        """Remove idle tenants whose counter would be raised anyway when they become active, so that the table stays small."""
        for tenant in [t for t, served in self._served.items() if served <= floor and t not in self._requests]:
            del self._served[tenant]
