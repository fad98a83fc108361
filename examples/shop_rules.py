"""What a shop demands of new events. The server of examples/validated.py asks it: `--set validate=shop_rules:check`."""

from oncelog import NewEvent


def check(event: NewEvent) -> None:
    """Raises for what must not be committed. Its text is what the client is told."""
    if event.type == "order.placed":
        total = event.body.get("total")
        if not isinstance(total, int) or total <= 0:
            raise ValueError("total must be a whole number of cents, above 0")
        if event.actor != "user:developer" and f"customer/{event.client_id}" not in event.partitions:
            raise ValueError("an order must be in the partition of its customer")
