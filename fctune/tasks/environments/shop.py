"""The ``shop`` environment: products, a basket and orders."""

from __future__ import annotations

import copy
from typing import Any

from fctune.tasks.environments.base import Split, TaskSpec, ToolEnvironment, ToolError
from fctune.tasks.environments.shop_tasks import TASKS
from fctune.tasks.environments.writing import Writer

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
