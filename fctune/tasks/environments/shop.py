"""The ``shop`` environment: products, a basket and orders."""

from __future__ import annotations

import copy
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
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


_PRODUCT = "Id of the product, such as p3"
_ORDER = "Id of the order, such as o101"
_QUANTITY = {"type": "integer", "minimum": 1, "maximum": 99, "description": "Number of pieces"}


class Shop(ToolEnvironment):
    """Products, a basket, coupons and orders."""

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self.add_tool(
            self.search_products,
            "List products by words of their names, cheapest first.",
            "max_price",
            text="Words of the name",
            max_price={"type": "number", "description": "Only products that cost at most this much"},
        )
        self.add_tool(self.get_product, "Show a product with its price and stock.", product_id=_PRODUCT)
        self.add_tool(
            self.add_to_basket, "Put pieces of a product into the basket.", product_id=_PRODUCT, quantity=_QUANTITY
        )
        self.add_tool(
            self.set_quantity, "Change the pieces of a product in the basket.", product_id=_PRODUCT, quantity=_QUANTITY
        )
        self.add_tool(self.remove_from_basket, "Take a product out of the basket.", product_id=_PRODUCT)
        self.add_tool(self.view_basket, "Show the basket, its coupon and its total.")
        self.add_tool(self.apply_coupon, "Use a coupon for the basket.", code="The coupon's code")
        self.add_tool(self.check_out, "Order what is in the basket.")
        self.add_tool(self.list_orders, "List all orders with their state and products.")
        self.add_tool(self.cancel_order, "Cancel an order that has not been shipped.", order_id=_ORDER)
        self.add_tool(self.return_order, "Send a delivered order back.", order_id=_ORDER)

    def make_task(self, seed: int, split: Split) -> TaskSpec:
        """Return the task of a seed."""
        writer = Writer(seed, split, "shop")
        return writer.random.choice(TASKS)(writer)

    def reset(self, state: dict[str, Any]) -> None:
        """Set products, basket, coupons and orders."""
        self._state = copy.deepcopy(state)

    def state(self) -> dict[str, Any]:
        """Return basket, coupon and orders; products in the order of their ids."""
        state = copy.deepcopy(self._state)
        state["basket"] = dict(sorted(state["basket"].items()))
        return state

    def search_products(self, text: str, max_price: float | None = None) -> list[dict[str, Any]]:
        """Return products by name, cheapest first."""
        words = text.lower().split()
        found = [
            {"product_id": key, "name": product["name"], "price": product["price"]}
            for key, product in self._state["products"].items()
            if all(word in product["name"] for word in words) and (max_price is None or product["price"] <= max_price)
        ]
        return sorted(found, key=lambda product: (product["price"], product["product_id"]))

    def get_product(self, product_id: str) -> dict[str, Any]:
        """Return one product's details."""
        return {"product_id": product_id, **self._find_product(product_id)}

    def add_to_basket(self, product_id: str, quantity: int) -> dict[str, Any]:
        """Add a quantity of a product to the basket."""
        in_basket = self._state["basket"].get(product_id, 0)
        self._require_stock(product_id, in_basket + int(quantity))
        self._state["basket"][product_id] = in_basket + int(quantity)
        return self.view_basket()

    def set_quantity(self, product_id: str, quantity: int) -> dict[str, Any]:
        """Set the quantity of a product in the basket."""
        self._require_in_basket(product_id)
        self._require_stock(product_id, int(quantity))
        self._state["basket"][product_id] = int(quantity)
        return self.view_basket()

    def remove_from_basket(self, product_id: str) -> dict[str, Any]:
        """Take a product out of the basket."""
        self._require_in_basket(product_id)
        del self._state["basket"][product_id]
        return self.view_basket()

    def view_basket(self) -> dict[str, Any]:
        """Return the basket, with prices in cents added up and divided at the end."""
        items = [
            {"product_id": key, "name": self._find_product(key)["name"], "quantity": quantity}
            for key, quantity in sorted(self._state["basket"].items())
        ]
        return {"items": items, "coupon": self._state["coupon"], "total": self._total()}

    def apply_coupon(self, code: str) -> dict[str, Any]:
        """Apply a coupon to the basket."""
        if code.strip().upper() not in self._state["coupons"]:
            raise ToolError(f"there is no coupon {code}")
        self._state["coupon"] = code.strip().upper()
        return self.view_basket()

    def check_out(self) -> dict[str, Any]:
        """Turn the basket into an order."""
        if not self._state["basket"]:
            raise ToolError("the basket is empty")
        order_id, total = f"o{self._state['next_order']}", self._total()
        for key, quantity in self._state["basket"].items():
            self._state["products"][key]["stock"] -= quantity
        items = dict(sorted(self._state["basket"].items()))
        order = {"items": items, "coupon": self._state["coupon"], "total": total, "status": "processing"}
        self._state["orders"][order_id] = {**order, "carrier": None}
        self._state |= {"basket": {}, "coupon": None, "next_order": self._state["next_order"] + 1}
        return {"order_id": order_id, "total": total}

    def list_orders(self) -> list[dict[str, Any]]:
        """Return the orders, with the names of their products."""
        return [
            {
                "order_id": key,
                **{name: value for name, value in order.items() if name != "items"},
                "items": [
                    {"name": self._find_product(product)["name"], "quantity": quantity}
                    for product, quantity in order["items"].items()
                ],
            }
            for key, order in self._state["orders"].items()
        ]

    def cancel_order(self, order_id: str) -> str:
        """Cancel an order, whose pieces return to the stock."""
        order = self._find_order(order_id)
        if order["status"] not in ("processing", "packed"):
            raise ToolError(f"{order_id} is {order['status']} and cannot be cancelled")
        order["status"] = "cancelled"
        for key, quantity in order["items"].items():
            self._state["products"][key]["stock"] += quantity
        return f"cancelled {order_id}"

    def return_order(self, order_id: str) -> str:
        """Return a delivered order."""
        order = self._find_order(order_id)
        if order["status"] != "delivered":
            raise ToolError(f"{order_id} is {order['status']}; only a delivered order can be sent back")
        order["status"] = "return announced"
        return f"{order_id} can be sent back"

    def _find_product(self, product_id: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self._state["products"].get(product_id)
        if found is None:
            raise ToolError(f"there is no product {product_id}")
        return found

    def _find_order(self, order_id: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self._state["orders"].get(order_id)
        if found is None:
            raise ToolError(f"there is no order {order_id}")
        return found

    def _require_in_basket(self, product_id: str) -> None:
        if product_id not in self._state["basket"]:
            raise ToolError(f"{product_id} is not in the basket")

    def _require_stock(self, product_id: str, quantity: int) -> None:
        if (stock := self._find_product(product_id)["stock"]) < quantity:
            raise ToolError(f"only {stock} pieces of {product_id} are in stock")

    def _total(self) -> float:
        products, basket = self._state["products"], self._state["basket"]
        cents: int = sum(round(100 * products[key]["price"]) * quantity for key, quantity in basket.items())
        percent: int = self._state["coupons"].get(self._state["coupon"], 0)
        return round(cents * (100 - percent) / 10_000, 2)
