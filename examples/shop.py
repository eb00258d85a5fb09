"""A small shop that keeps events instead of rows: python shop.py STORE

Customers, orders and stock are entities of three journals. The state of an entity is what its events add up to. The shop shows:
an order that changes only as the caller saw it, an e-mail address that only one customer has, an order that takes its goods from
the stock in one transaction, snapshots of what has many events, and a live query by tag. docs/journal.md explains each step.
"""

from __future__ import annotations

import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import headwater as hw

CUSTOMERS, ORDERS, STOCK = "shop/customers", "shop/orders", "shop/stock"
SNAPSHOT_EVERY = 100


class Refused(Exception):
    """The shop says no, and why."""


@dataclass(frozen=True)
class Order:
    """An order as of one of its events."""

    sequence: int = 0
    customer: str = ""
    item: str = ""
    count: int = 0
    state: str = "unknown"

    def after(self, event: hw.Recorded) -> Order:
        """The order after one more event."""
        found = replace(self, sequence=event.sequence)
        match event.type:
            case "placed":
                return replace(found, state="placed", **event.data)
            case "paid" | "shipped" | "cancelled":
                return replace(found, state=event.type)
            case _:
                return found


@dataclass(frozen=True)
class Item:
    """The stock of one item, as of one of its events."""

    sequence: int = 0
    left: int = 0

    def after(self, event: hw.Recorded) -> Item:
        """The stock after one more event."""
        found, count = replace(self, sequence=event.sequence), event.data["count"]
        match event.type:
            case "delivered" | "released":
                return replace(found, left=self.left + count)
            case "reserved":
                return replace(found, left=self.left - count)
            case _:
                return found


class Shop:
    """What customers and staff can do. Any number of processes may do it at once, on one store."""

    def __init__(self, store: hw.Store) -> None:
        self.store = store
        self.customers = store.journal(CUSTOMERS)
        self.orders = store.journal(ORDERS, scaling=hw.Scaling.fixed(4))
        self.stock = store.journal(STOCK)

    def register(self, customer: str, email: str) -> None:
        """Add a customer. Refused if the customer is known, or if another one has the address."""
        mail = f"mail:{email.lower()}"
        try:
            self.customers.persist(
                customer,
                hw.Record("registered", {"email": email}, tags=[mail]),
                expected=0,  # a new customer
                fail_if=hw.Match(tags=(mail,)),  # nobody has this address
            )
        except hw.ConditionFailedError as error:
            raise Refused(f"{customer} is registered" if error.position is None else f"{email} is taken") from error

    def deliver(self, item: str, count: int) -> None:
        """Add goods to the stock. It needs no condition: it is right whatever else happens."""
        self.stock.persist(item, hw.Record("delivered", {"count": count}))

    def place(self, order: str, customer: str, item: str, count: int) -> None:
        """Place an order and reserve its goods, both or neither. The caller chooses the order's id, a UUID for example."""
        facts = {"customer": customer, "item": item, "count": count}
        placed = hw.Record("placed", facts, tags=[f"customer:{customer}", f"item:{item}"])
        reserved = hw.Record("reserved", {"order": order, "count": count})
        while True:
            stock = self.load_item(item)
            if stock.left < count:
                raise Refused(f"only {stock.left} of {item} left")
            try:
                with self.store.transaction() as tx:
                    tx.require_entity(CUSTOMERS, customer, hw.EXISTS)
                    tx.persist(ORDERS, order, placed, expected=0)
                    tx.persist(STOCK, item, reserved, expected=stock.sequence)
                return
            except hw.ConditionFailedError as error:
                if error.id == customer:
                    raise Refused(f"{customer} is no customer") from error
                if error.id == order:
                    raise Refused(f"there is an order {order}") from error
                # Somebody else took from the stock, or added to it: read again, decide again.

    def pay(self, order: str, cents: int) -> None:
        """Note a payment."""
        self._change(order, "placed", hw.Record("paid", {"cents": cents}))

    def ship(self, order: str) -> None:
        """Send a paid order. Of two who send it at once, one is refused."""
        self._change(order, "paid", hw.Record("shipped", None))

    def _change(self, order: str, state: str, event: hw.Record) -> None:
        found = self.load_order(order)
        if found.state != state:
            raise Refused(f"the order {order} is {found.state}, not {state}")
        try:
            self.orders.persist(order, event, expected=found.sequence)
        except hw.ConditionFailedError as error:
            raise Refused(f"somebody else changed the order {order} at this moment") from error

    def cancel(self, order: str) -> None:
        """Cancel an order that was not sent, and give its goods back."""
        while True:
            found = self.load_order(order)
            if found.state not in ("placed", "paid"):
                raise Refused(f"the order {order} is {found.state}: it can't be cancelled")
            try:
                with self.store.transaction() as tx:
                    tx.persist(ORDERS, order, hw.Record("cancelled", None), expected=found.sequence)
                    # Without `expected` it is the sequence at this call.
                    tx.persist(STOCK, found.item, hw.Record("released", {"order": order, "count": found.count}))
                return
            except hw.ConditionFailedError:
                continue  # Somebody else changed the order or the stock: read again, decide again.

    # Reading.

    def load_order(self, order: str) -> Order:
        """The order now: its events from the first on."""
        found = Order()
        for event in self.orders.replay(order):
            found = found.after(event)
        return found

    def load_item(self, item: str) -> Item:
        """The stock of an item now: the last snapshot, and the events after it."""
        snapshot = self.stock.find_snapshot(item)
        found = Item(**snapshot.state) if snapshot is not None else Item()
        start = found.sequence
        for event in self.stock.replay(item, after=start):
            found = found.after(event)
        if found.sequence - start >= SNAPSHOT_EVERY:
            self.stock.snapshot(item, found.sequence, vars(found))
        return found

    def orders_of(self, customer: str) -> list[Order]:
        """A customer's orders now, found by their tag."""
        return [self.load_order(event.id) for event in self.orders.events(tag=f"customer:{customer}")]


def watch(shop: Shop, item: str, start: hw.Cut, count: int, seen: list[str]) -> None:
    """Follow the orders of one item, as somebody who packs them would. It ends after `count` orders; a real one goes on."""
    for event in islice(shop.orders.events(tag=f"item:{item}", start=start, follow=True), count):
        seen.append(event.id)


def main() -> None:
    with hw.open(sys.argv[1]) as store:
        shop = Shop(store)
        buyers = [f"customer-{uuid.uuid4()}" for _ in range(4)]
        for number, buyer in enumerate(buyers):
            shop.register(buyer, f"{number}-{buyer}@shop.example")
        print(f"{len(buyers)} customers registered")
        with suppress(Refused):
            shop.register("somebody-else", f"0-{buyers[0]}@SHOP.example")
            print("two customers have one address")

        shop.deliver("mug", 3 - shop.load_item("mug").left)
        seen: list[str] = []
        packer = threading.Thread(target=watch, args=(shop, "mug", store.cut(ORDERS), 3, seen))
        packer.start()

        # Four buyers want one of three mugs at the same moment.
        placed: list[str] = []

        def buy(buyer: str) -> None:
            order = f"order-{uuid.uuid4()}"
            with suppress(Refused):
                shop.place(order, buyer, "mug", 1)
                placed.append(order)

        threads = [threading.Thread(target=buy, args=(buyer,)) for buyer in buyers]
        for thread in threads:
            thread.start()
        for thread in (*threads, packer):
            thread.join()
        print(f"{len(placed)} orders placed, {len(buyers) - len(placed)} refused, mugs left: {shop.load_item('mug').left}")
        print(f"the live query saw {len(seen)} orders: {'the same' if set(seen) == set(placed) else 'others'}")

        first, second = placed[:2]
        shop.pay(first, 1250)
        shop.ship(first)
        with suppress(Refused):
            shop.ship(first)
            print("an order was sent twice")
        shop.cancel(second)
        print(f"after a cancellation mugs left: {shop.load_item('mug').left}")
        history = " ".join(event.type for event in shop.orders.replay(first))
        states = [order.state for order in shop.orders_of(shop.load_order(first).customer)]
        print(f"an order's history: {history}; its customer's orders: {states}")


if __name__ == "__main__":
    main()
