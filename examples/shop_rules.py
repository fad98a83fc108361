"""A shop's validation of new events. examples/validated.py starts a server with `--set validate=shop_rules:check`."""

from oncelog import NewEvent


def check(event: NewEvent) -> None:
    """Raise an error for an event that must not be committed. The client gets the error's text."""
    if event.type == "order.placed":
        total = event.body.get("total")
        if not isinstance(total, int) or total <= 0:
            raise ValueError("total must be a whole number of cents, above 0")
        if event.actor != "user:developer" and f"customer/{event.client_id}" not in event.partitions:
            raise ValueError("an order must be in the partition of its customer")
