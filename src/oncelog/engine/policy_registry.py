"""The policies of a log: built-in, declared by the application, or stored in the log."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.policy import BUILT_IN_POLICIES, LEDGER, Policy
from oncelog.core.values import Item
from oncelog.errors import SettingsError
from oncelog.storage.store import Store


class PolicyRegistry:
    """Declares policies in the store, which keeps the first declaration of each name permanently."""

    def __init__(self, store: Store, policies: Sequence[Policy]) -> None:
        self._store = store
        self._initial = (*(policy for policy in BUILT_IN_POLICIES if policy is not LEDGER), *policies)
        self._requested_ledger = next((policy for policy in policies if policy.name == LEDGER.name), None)
        self.by_name: Mapping[str, Policy] = {}

    async def declare_all(self) -> None:
        """Declare the policies when the log is opened. The time to live of a log's ledger policy never changes.

        Raises:
            PolicyError: the log has a different policy with one of the names.
            SettingsError: the time to live of the log's ledger policy differs from the requested one.
        """
        requested = self._requested_ledger
        known = await self._store.declare([policy for policy in self._initial if policy is not requested])
        if LEDGER.name not in known:
            known = await self._store.declare([requested or LEDGER])
        stored = known[LEDGER.name]
        if requested is not None and requested != stored:
            raise SettingsError(
                f"the log was created with a time to live of {stored.retention.ttl_ms} ms for ledgers and cannot be "
                f"opened with {requested.retention.ttl_ms} ms. Leave out the ledger policy to use the stored one."
            )
        self.by_name = {**known, **{policy.name: policy for policy in self._initial}}

    def knows(self, item: Item) -> bool:
        """Return whether the policy of an item is declared. Items without a policy need no declaration."""
        policy: Policy | None = getattr(item, "policy", None)
        if policy is None:
            return True
        known = self.by_name.get(policy.name)
        return known is policy or known == policy

    async def declare(self, item: Any) -> None:
        """Declare the policy of an item on first use. Raises PolicyError if the name is taken."""
        policy: Policy = item.policy
        known = await self._store.declare([policy])
        self.by_name = {**known, **self.by_name, policy.name: policy}
