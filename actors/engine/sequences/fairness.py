"""Fairness between tenants: the one that was served least goes first.

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024, section 4): each tenant's tokens
are counted, and one that joins is lifted to the least of those present, so that having been away earns no credit.
"""

from __future__ import annotations

from collections import Counter


class TenantCounters:
    """Tokens served to each tenant, comparable between the tenants that have requests now."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def join(self, tenant: str) -> None:
        """A request of `tenant` arrived."""
        if self._requests[tenant] == 0:
            floor = min((self._served[other] for other, n in self._requests.items() if n > 0), default=0)
            self._drop_up_to(floor)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` ended. When the last of all ends, everyone starts anew."""
        self._requests[tenant] -= 1
        if self._requests[tenant] == 0:
            del self._requests[tenant]
            if not self._requests:
                self._served.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """`tokens` were run for `tenant`."""
        self._served[tenant] += tokens

    def served(self, tenant: str) -> int:
        return self._served[tenant]

    def _drop_up_to(self, floor: int) -> None:
        """Forget absent tenants whom joining would lift anyway, so that the table stays small."""
        for tenant in [t for t, served in self._served.items() if served <= floor and t not in self._requests]:
            del self._served[tenant]
