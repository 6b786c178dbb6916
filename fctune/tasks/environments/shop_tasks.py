"""Task generators of the shop: question, initial state, and the calls that solve it."""

from __future__ import annotations

from typing import Any

from fctune.tasks.environments.base import TaskSpec
from fctune.tasks.environments.writing import Writer

_THINGS = (
    "kettle", "lamp", "backpack", "notebook", "umbrella", "headphones", "blanket", "toaster", "bicycle pump", "mug",
    "tent", "keyboard", "frying pan", "scarf", "desk chair", "water bottle", "alarm clock", "drill", "yoga mat",
    "cushion", "hammock", "coffee grinder", "suitcase", "flashlight", "vase", "bookshelf", "rain jacket", "speaker",
)  # fmt: skip
_KINDS = (
    "red", "blue", "green", "black", "white", "small", "large", "foldable", "wooden", "steel", "grey", "yellow",
)  # fmt: skip
_CODES = ("SPRING10", "WELCOME5", "FAMILY15", "STAFF20", "LUCKY7", "NIGHT12", "RETURN8", "SUMMER25")
_STATES = ("processing", "packed", "shipped", "delivered")
_CARRIERS = ("Postrunner", "Blueline", "Parcelo", "Nordsend", "Quickvan", "Cargona", "Hermano", "Swiftbox")


class _Scene:
    """The shop of a task: products, several of them similar, a basket and orders."""

    def __init__(self, w: Writer):
        self.products: dict[str, dict[str, Any]] = {}
        for thing in w.sample(_THINGS, 4):
            for kind in w.sample(_KINDS, 2):
                number = len(self.products) + 1
                price = w.random.randint(400, 15_000) / 100
                stock = w.random.randint(6, 60)
                self.products[f"p{number}"] = {"name": f"{kind} {thing}", "price": price, "stock": stock}
        self.chosen, self.other, *rest = w.random.sample(list(self.products), 5)
        self.basket: dict[str, int] = {}
        self.orders: dict[str, dict[str, Any]] = {}
        for number, product in enumerate(rest[: w.random.randint(2, 3)], start=w.random.randint(100, 900)):
            self.add_order(f"o{number}", product, w.random.choice(_STATES), w.random.choice(_CARRIERS))
        self.coupons = {code: w.random.choice((5, 10, 15)) for code in w.sample(_CODES, 2)}

    @property
    def name(self) -> str:
        return str(self.products[self.chosen]["name"])

    @property
    def other_name(self) -> str:
        return str(self.products[self.other]["name"])

    def add_order(self, order_id: str, product: str, status: str, carrier: str) -> None:
        has_carrier = status in ("shipped", "delivered")
        price = self.products[product]["price"]
        order = {"items": {product: 1}, "coupon": None, "total": price, "status": status}
        self.orders[order_id] = {**order, "carrier": carrier if has_carrier else None}

    def order_chosen(self, w: Writer, status: str) -> str:
        """Add an order of the chosen product and return its id."""
        order_id = f"o{w.random.randint(910, 990)}"
        self.add_order(order_id, self.chosen, status, w.pick(_CARRIERS))
        return order_id

    def lookup(self) -> tuple[str, dict[str, Any]]:
        return "search_products", {"text": self.name}

    def to_task(
        self, question: str, calls: list[tuple[str, dict[str, Any]]], category: str, facts: tuple[str, ...] = ()
    ) -> TaskSpec:
        state = {
            "products": self.products,
            "basket": self.basket,
            "coupon": None,
            "coupons": self.coupons,
            "orders": self.orders,
            "next_order": 1001,
        }
        return TaskSpec(question, state, tuple(calls), facts, category)


def _count_of(name: str, quantity: int) -> str:
    return f"one {name}" if quantity == 1 else f"{quantity} pieces of the {name}"


def _add(w: Writer) -> TaskSpec:
    scene, quantity = _Scene(w), w.random.randint(1, 5)
    question = w.request(
        (
            "put {what} into my basket",
            "add {what} to the basket",
            "I would like {what}; put that in the basket",
            "lay {what} in my basket, but do not order yet",
        ),
        what=_count_of(scene.name, quantity),
    )
    calls = [scene.lookup(), ("add_to_basket", {"product_id": scene.chosen, "quantity": quantity})]
    return scene.to_task(question, calls, "add")


def _cheapest(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    thing = scene.name.partition(" ")[2]
    kinds = sorted((p["price"], key) for key, p in scene.products.items() if p["name"].endswith(f" {thing}"))
    if kinds[0][0] == kinds[1][0]:
        scene.products[kinds[1][1]]["price"] += 1
    question = w.request(
        (
            "put the cheapest {thing} that you have into my basket",
            "add one {thing} to the basket, the one with the lowest price",
            "I need a {thing}, whichever costs least; put it into the basket",
            "find the least expensive {thing} and add it to my basket",
        ),
        thing=thing,
    )
    calls: list[tuple[str, dict[str, Any]]] = [
        ("search_products", {"text": thing}),
        ("add_to_basket", {"product_id": kinds[0][1], "quantity": 1}),
    ]
    return scene.to_task(question, calls, "cheapest")


def _remove(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    scene.basket = {scene.chosen: w.random.randint(1, 4), scene.other: w.random.randint(1, 4)}
    question = w.request(
        (
            "take the {name} out of my basket",
            "remove the {name} from the basket",
            "I do not want the {name} any more; take it out of the basket",
            "delete the {name} from what I have in the basket",
        ),
        name=scene.name,
    )
    calls = [("view_basket", {}), ("remove_from_basket", {"product_id": scene.chosen})]
    return scene.to_task(question, calls, "remove")


def _change(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    old, new = w.random.sample(range(2, 6), 2)
    scene.basket = {scene.chosen: old, scene.other: w.random.randint(1, 4)}
    question = w.request(
        (
            "change the number of the {name} in my basket to {new}",
            "I want {new} of the {name} instead of {old}; update the basket",
            "set the quantity of the {name} in the basket to {new}",
            "make it {new} pieces of the {name} in my basket",
        ),
        name=scene.name,
        old=old,
        new=new,
    )
    calls = [("view_basket", {}), ("set_quantity", {"product_id": scene.chosen, "quantity": new})]
    return scene.to_task(question, calls, "change")


def _order(w: Writer) -> TaskSpec:
    scene, quantity, code = _Scene(w), w.random.randint(1, 3), ""
    calls: list[tuple[str, dict[str, Any]]] = [scene.lookup()]
    calls.append(("add_to_basket", {"product_id": scene.chosen, "quantity": quantity}))
    if w.random.random() < 0.5:
        code = w.random.choice(list(scene.coupons))
        calls.append(("apply_coupon", {"code": code}))
    question = w.request(
        (
            "order {what}{coupon}",
            "buy {what}{coupon}",
            "purchase {what} for me{coupon}",
            "I want to have {what} sent to me; place the order{coupon}",
        ),
        what=_count_of(scene.name, quantity),
        coupon=f", with the coupon {code}" if code else "",
    )
    return scene.to_task(question, [*calls, ("check_out", {})], "order")


def _cancel(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    order_id = scene.order_chosen(w, w.random.choice(("processing", "packed")))
    question = w.request(
        (
            "cancel my order of the {name}",
            "call off the order with the {name}",
            "stop the order of the {name} before it is shipped",
            "I ordered a {name} by mistake; cancel that order",
        ),
        name=scene.name,
    )
    return scene.to_task(question, [("list_orders", {}), ("cancel_order", {"order_id": order_id})], "cancel")


def _return(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    order_id = scene.order_chosen(w, "delivered")
    question = w.request(
        (
            "the {name} that came is broken; send it back",
            "return the order with the {name}",
            "I do not like the {name} that was delivered. Start a return",
            "announce that I send the {name} back",
        ),
        name=scene.name,
    )
    return scene.to_task(question, [("list_orders", {}), ("return_order", {"order_id": order_id})], "return")


def _price(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    question = w.ask(
        (
            "How much is the {name}?",
            "What does the {name} cost?",
            "Tell me the price of the {name}.",
            "What would I pay for one {name}?",
        ),
        name=scene.name,
    )
    return scene.to_task(question, [scene.lookup()], "price", (f"{scene.products[scene.chosen]['price']:g}",))


def _stock(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    question = w.ask(
        (
            "How many pieces of the {name} are in stock?",
            "What is the stock of the {name}?",
            "Is the {name} in stock, and how many do you have?",
            "I may need many of the {name}. How many are there?",
        ),
        name=scene.name,
    )
    calls = [scene.lookup(), ("get_product", {"product_id": scene.chosen})]
    return scene.to_task(question, calls, "stock", (str(scene.products[scene.chosen]["stock"]),))


def _status(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    status = w.pick(_STATES)
    scene.order_chosen(w, status)
    question = w.ask(
        (
            "What is the status of my order of the {name}?",
            "How far is the order with the {name}?",
            "I ordered a {name}. What state is that order in?",
            "Tell me the state of the order that has the {name} in it.",
        ),
        name=scene.name,
    )
    return scene.to_task(question, [("list_orders", {})], "status", (status,))


def _carrier(w: Writer) -> TaskSpec:
    scene = _Scene(w)
    order_id = scene.order_chosen(w, "shipped")
    question = w.ask(
        (
            "Which carrier brings the {name} that I ordered?",
            "Who delivers my order of the {name}?",
            "By which parcel service does the {name} come?",
            "What is the carrier of the order with the {name}?",
        ),
        name=scene.name,
    )
    carrier = str(scene.orders[order_id]["carrier"])
    return scene.to_task(question, [("list_orders", {})], "carrier", (carrier,))


def _swap(w: Writer) -> TaskSpec:
    scene, quantity = _Scene(w), w.random.randint(1, 4)
    scene.basket = {scene.other: quantity}
    question = w.request(
        (
            "replace the {other} in my basket by {what}",
            "take the {other} out of the basket and put {what} in instead",
            "I prefer the {name} to the {other}: my basket should have {what} and nothing else",
            "empty the basket of the {other}, then add {what}",
        ),
        other=scene.other_name,
        name=scene.name,
        what=_count_of(scene.name, quantity),
    )
    calls = [
        ("view_basket", {}),
        ("remove_from_basket", {"product_id": scene.other}),
        scene.lookup(),
        ("add_to_basket", {"product_id": scene.chosen, "quantity": quantity}),
    ]
    return scene.to_task(question, calls, "replace")


TASKS = (_add, _cheapest, _remove, _change, _order, _cancel, _return, _price, _stock, _status, _carrier, _swap)
"""Functions that make a task, one for each category."""
