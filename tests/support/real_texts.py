"""Three texts of some 400 tokens each, written for the tests."""

PROSE = """\
The lighthouse at the end of the bay was built in 1868, after three ships had been lost on the \
rocks in a single winter. Its tower is twenty-nine metres high and made of granite that was \
brought by boat from a quarry on the mainland. For more than a hundred years a keeper lived \
there with his family. Every evening, half an hour before sunset, he climbed the stairs, trimmed \
the wick of the lamp, and wound up the clockwork that turned the lens. On clear nights the light \
could be seen from a distance of forty kilometres; in fog, a bell was rung by hand every two \
minutes until the weather changed.

The last keeper, a quiet woman named Margaret Hale, wrote down everything that she saw. Her \
notebooks tell of storms and of birds, of the price of oil, and of a whale that stayed near the \
island for most of the summer of 1931. When electricity came to the island, the lamp was \
replaced by a bulb no larger than a fist, and in 1974 the light was made automatic. Nobody lives \
in the tower today. The house beside it has become a small museum, which is open from May to \
September. Visitors can look at the old lens, read copies of the notebooks, and, if the wind is \
not too strong, walk around the gallery at the top. On the wall of the kitchen hangs a list of \
all the ships that passed the bay without harm because somebody had stayed awake. It has more \
than eleven thousand names.
"""

CODE = '''\
"""A small shop: what is in stock, what is in the basket, and what it costs."""

from dataclasses import dataclass, field


@dataclass
class Product:
    name: str
    price: float
    quantity: int = 0


@dataclass
class Basket:
    items: dict[str, int] = field(default_factory=dict)

    def add(self, product: Product, count: int = 1) -> None:
        """Add a number of pieces of a product to the basket."""
        if count <= 0:
            raise ValueError("count must be positive")
        if count > product.quantity:
            raise ValueError(f"only {product.quantity} pieces of {product.name} are left")
        self.items[product.name] = self.items.get(product.name, 0) + count
        product.quantity -= count

    def remove(self, product: Product, count: int = 1) -> None:
        """Remove a number of pieces of a product from the basket."""
        if self.items.get(product.name, 0) < count:
            raise ValueError(f"there are not so many pieces of {product.name} in the basket")
        self.items[product.name] -= count
        product.quantity += count

    def total(self, products: dict[str, Product]) -> float:
        """Return the price of everything in the basket."""
        return sum(products[name].price * count for name, count in self.items.items())


if __name__ == "__main__":
    apple = Product("apple", 0.5, 10)
    bread = Product("bread", 2.25, 3)
    basket = Basket()
    basket.add(apple, 4)
    basket.add(bread)
    print(basket.total({"apple": apple, "bread": bread}))
'''

CONVERSATION = """\
<|im_start|>system
You are a helpful assistant who answers in the language of the question.<|im_end|>
<|im_start|>user
Bonjour ! Je voudrais passer trois jours à Lyon au mois d'octobre. Que faut-il visiter ?<|im_end|>
<|im_start|>assistant
Bonjour ! Lyon est une belle ville au bord du Rhône et de la Saône. Je vous propose de commencer \
par la vieille ville, où il y a de petites rues et des maisons anciennes. Le deuxième jour, vous \
pouvez visiter le musée des Beaux-Arts et le parc de la Tête d'Or. Le soir, il faut dîner dans \
un « bouchon », un petit restaurant traditionnel.<|im_end|>
<|im_start|>user
Merci beaucoup. Quel temps fait-il en octobre ? Et combien coûte un billet de métro ?<|im_end|>
<|im_start|>assistant
En octobre, il fait souvent entre 10 et 17 degrés, et il pleut parfois : prenez un parapluie. Un \
billet de métro coûte environ deux euros et il est valable une heure.<|im_end|>
<|im_start|>user
Could you say that again in English, please? My friend does not speak French.<|im_end|>
<|im_start|>assistant
Of course! In October it is often between 10 and 17 degrees, and it sometimes rains, so take an \
umbrella. A ticket for the metro costs about two euros and it is valid for one hour. If you stay \
for three days, a pass for the whole time is cheaper than single tickets.<|im_end|>
"""

TEXTS = {"prose": PROSE, "code": CODE, "conversation": CONVERSATION}
