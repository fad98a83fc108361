"""The policies of one log: those that are built in, those of the application, and those that the log already knows."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.policy import BUILT_IN_POLICIES, LEDGER, Policy
from oncelog.core.values import Item
from oncelog.errors import SettingsError
from oncelog.storage.store import Store


class PolicyRegistry:
    """Declares policies in the store, which keeps their first declaration for good."""

    def __init__(self, store: Store, policies: Sequence[Policy]) -> None:
        self._store = store
        self._initial = (*(policy for policy in BUILT_IN_POLICIES if policy is not LEDGER), *policies)
        self._requested_ledger = next((policy for policy in policies if policy.name == LEDGER.name), None)
        self.by_name: Mapping[str, Policy] = {}

    async def declare_all(self) -> None:
        """Declare the policies when the log is opened. The log keeps the time to live that its ledgers began with.

        Raises:
            PolicyError: the log knows another policy by one of the names.
            SettingsError: a ledger policy with another time to live was requested.
        """
        requested = self._requested_ledger
        known = await self._store.declare([policy for policy in self._initial if policy is not requested])
        if LEDGER.name not in known:
            known = await self._store.declare([requested or LEDGER])
        stored = known[LEDGER.name]
        if requested is not None and requested != stored:
            raise SettingsError(
                f"the log was made with a time to live of {stored.retention.ttl_ms} ms for ledgers and cannot be "
                f"opened with {requested.retention.ttl_ms} ms. Leave it out to open the log with what it has."
            )
        self.by_name = {**known, **{policy.name: policy for policy in self._initial}}

    @property
    def ledger(self) -> Policy:
        """The ledger policy of the log."""
        return self.by_name[LEDGER.name]

    def knows(self, item: Item) -> bool:
        """Return whether the log knows the item's policy, if it has one, by its name."""
        policy: Policy | None = getattr(item, "policy", None)
        if policy is None:
            return True
        known = self.by_name.get(policy.name)
        return known is policy or known == policy

    async def declare(self, item: Any) -> None:
        """Declare the policy of an item at its first use. Raises PolicyError if the name stands for another policy."""
        policy: Policy = item.policy
        known = await self._store.declare([policy])
        self.by_name = {**known, **self.by_name, policy.name: policy}
